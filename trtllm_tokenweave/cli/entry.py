"""Entry point: catches an interrupt also while the rest is being imported."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line; see :func:`trtllm_tokenweave.cli.app.main`."""
    try:
        from trtllm_tokenweave.cli.app import main as run

        return run()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
