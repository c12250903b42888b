#!/usr/bin/env python3
"""`trtllm-tokenweave tune` as a script: mpirun -n 2 python tuning/tune.py -o TABLE (options: --help)."""

from __future__ import annotations

import sys

try:
    from trtllm_tokenweave.cli.app import main
except ModuleNotFoundError as error:
    FIX = "run ./build_scripts/demo (or pip install .) first, then `trtllm-tokenweave tune` or this by .venv/bin/python"
    print(f"error: {sys.executable} has no module {error.name}. Fix: {FIX}", file=sys.stderr)
    sys.exit(2)

if __name__ == "__main__":
    sys.exit(main(["tune", *sys.argv[1:]]))
