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
sys.exit(max(abs(rank.wait()) for rank in ranks))
"""


def fake_mpirun(folder: Path) -> str:
    """Write it and return its path. MPI_SAYS is what it says of its version, JOB the job's id."""
    path = folder / "mpirun"
    path.write_text(_SCRIPT, encoding="utf-8")
    path.chmod(0o755)
    return str(path)
