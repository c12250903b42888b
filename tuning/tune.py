#!/usr/bin/env python3
"""`trtllm-tokenweave tune` as a script: mpirun -n 2 python tuning/tune.py -o TABLE (options: --help)."""

from __future__ import annotations

import sys

from trtllm_tokenweave.cli.app import main

if __name__ == "__main__":
    sys.exit(main(["tune", *sys.argv[1:]]))
