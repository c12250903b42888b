"""A stand-in for mpirun that starts real processes, for machines without MPI."""

from __future__ import annotations

import sys
from pathlib import Path

# Starts every part of the command as mpirun would, and ends with the largest exit code.
_SCRIPT = f"""#!{sys.executable}
import os, subprocess, sys
words = sys.argv[1:]
if words == ["--version"]:
    print(os.environ.get("MPI_SAYS", "mpirun (Open MPI) 4.1.4"))
    sys.exit()
ranks = []
for part in " ".join(words).split(" : "):
    options = part.split(" ")
    count = int(options[options.index("-n") + 1])
    command = options[options.index("-n") + 2 :]
    environ = dict(os.environ)
    while command[0] == "-x":
        name, given, value = command[1].partition("=")
        environ[name] = value if given else os.environ[name]
        command = command[2:]
    for _ in range(count):
        environ |= {{"OMPI_COMM_WORLD_RANK": str(len(ranks)), "PMIX_NAMESPACE": os.environ.get("JOB", "")}}
        ranks.append(subprocess.Popen(command, env=environ))
codes = [rank.wait() for rank in ranks]
failed = next((rank for rank, code in enumerate(codes) if code), None)
if "MPI_TELLS" in os.environ and failed is not None:
    code = codes[failed]
    told = "mpirun detected that one or more processes exited with non-zero status, thus causing\\nthe job to be "
    told += f"terminated. The first process to do so was:\\n\\n  Process name: [[20209,1],{{failed}}]\\n"
    told += f"  Exit code:    {{code}}\\n"
    if code < 0:
        told = f"mpirun noticed that process rank {{failed}} with PID 0 on node vm exited on signal {{-code}} (x).\\n"
    os.write(2, told.encode())
sys.exit(max(map(abs, codes)))
"""


def fake_mpirun(folder: Path) -> str:
    """Write it and return its path.

    MPI_SAYS is what it says of its version, JOB the job's id; with MPI_TELLS it names a rank that failed, in the words
    of Open MPI 4.1.
    """
    path = folder / "mpirun"
    path.write_text(_SCRIPT, encoding="utf-8")
    path.chmod(0o755)
    return str(path)
