"""A stand-in for tritonserver, for machines without Triton; with that for mpirun `triton launch` starts it for real."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from support.fake_mpirun import fake_mpirun

# Rank 0 listens as Triton does; all end when they are told to, with shared memory left behind.
TRITONSERVER = f"""#!{sys.executable}
import http.server, os, pathlib, signal, subprocess, sys, threading, time
words = dict(word.partition("=")[::2] for word in sys.argv[1:])
region = words["--backend-config"].rpartition("name=")[2]
signal.signal(signal.SIGTERM, lambda *_: os._exit(int(os.environ.get("STOP_CODE", "0"))))
(pathlib.Path(os.environ["SHM"]) / (region + "x")).touch()
# One write: the ranks' stderr is one pipe, and a print of lines writes the last end of line by itself.
os.write(2, (os.environ.get("SAYS", "") + "\\n").encode())
if "STUB" in os.environ and "--http-port" not in words:
    # Later than the launcher looks for it; the server notices later still.
    script = f"sleep 2; {{os.environ['STUB']}}"
    subprocess.Popen(["/opt/backends/python/triton_python_backend_stub", "-c", script], executable="/bin/bash")
    time.sleep(3)
    os._exit(1)
if "EARLY" in os.environ:
    sys.exit(int(os.environ["EARLY"]))
if "--http-port" in words and "DEAF" not in os.environ:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/v2/health/ready" else 404)
            self.end_headers()
        def log_message(self, *words):
            pass
    server = http.server.HTTPServer((words["--http-address"], int(words["--http-port"])), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
time.sleep(float(os.environ.get("LASTS", "600")))
"""


def server_words(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Words of `triton launch` that start the stand-ins on ports that nothing listens on, and for /dev/shm a folder."""
    shm = tmp_path / "shm"
    shm.mkdir()
    monkeypatch.setenv("SHM", str(shm))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    for module in ("trtllm_tokenweave.launch", "trtllm_tokenweave.triton.launch"):
        monkeypatch.setattr(f"{module}.SHARED_MEMORY", shm)
    server = tmp_path / "tritonserver"
    server.write_text(TRITONSERVER, encoding="utf-8")
    server.chmod(0o755)
    words = ["triton", "launch", str(repository), "-n", "2", "--mpirun", fake_mpirun(tmp_path)]
    words += ["--tritonserver", str(server)]
    probes = [socket.socket() for _ in range(3)]
    for name, probe in zip(("http", "grpc", "metrics"), probes, strict=True):
        probe.bind(("127.0.0.1", 0))
        words += [f"--{name}-port", str(probe.getsockname()[1])]
    for probe in probes:
        probe.close()
    return words
