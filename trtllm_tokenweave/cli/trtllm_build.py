"""`trtllm-tokenweave trtllm-build`: TensorRT-LLM's command, and the options of ``--plugin tokenweave``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from trtllm_tokenweave.libraries import PACKAGE


def trtllm_build(context: typer.Context) -> None:
    """Run trtllm-build with its own options; --plugin tokenweave weaves the network that it builds."""
    # Here, so that --help of the program need not import pydantic and the rest.
    from trtllm_tokenweave.trtllm.command import run

    raise typer.Exit(run(context.args))


def model_cls_file(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Print the file for `trtllm-build --model_cls_file FILE --model_cls_name AutoModel`."""
    path = str(PACKAGE / "trtllm" / "model_cls.py")
    print(json.dumps({"path": path}) if as_json else path)
