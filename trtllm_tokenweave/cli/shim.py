"""`trtllm-tokenweave shim`: a `trtllm-build` on PATH that also knows `--plugin tokenweave`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from trtllm_tokenweave import shim
from trtllm_tokenweave.cli.console import make_console
from trtllm_tokenweave.errors import UserError

app = typer.Typer(help="Put a trtllm-build that knows --plugin tokenweave on PATH, or take it away.")

# No Path: an empty one would be the working folder.
Folder = Annotated[
    str | None, typer.Option(metavar="DIR", help="Folder of the shim; default: one of this package's own.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@app.command("install")
def install(folder: Folder = None, as_json: Json = False) -> None:
    """Write the shim; TensorRT-LLM's own file stays as it is."""
    found = shim.install(_folder(folder))
    if not as_json:
        make_console().print(f"wrote {found.path}", markup=False, soft_wrap=True)
    _show(found, as_json)


@app.command("remove")
def remove(folder: Folder = None, as_json: Json = False) -> None:
    """Remove the shim."""
    path = _folder(folder)
    removed = shim.remove(path)
    if as_json:
        print(json.dumps({"path": str(path / shim.NAME), "removed": removed}))
    else:
        make_console().print(f"{path / shim.NAME} {'is removed' if removed else 'was not there'}", markup=False)


@app.command("status")
def status(folder: Folder = None, as_json: Json = False) -> None:
    """Say whether the shim is there and found, and what is behind it."""
    _show(shim.status(_folder(folder)), as_json)


def _folder(given: str | None) -> Path:
    if given == "":
        raise UserError("is empty", where="--folder", fix="name a folder, or leave it out for this package's own")
    return (shim.default_folder() if given is None else Path(given)).absolute()


def _show(found: shim.Shim, as_json: bool) -> None:
    if as_json:
        places = {name: None if path is None else str(path) for name, path in vars(found).items() if name != "state"}
        print(json.dumps({**places, "state": found.state}))
        return
    console = make_console()
    meaning = {
        "missing": "there is no shim; trtllm-tokenweave shim install",
        "foreign": "is not a shim of this package, and stays as it is; name another folder (--folder)",
        "active": "the shell finds it first",
        "shadowed": f"the shell finds {found.first} first",
        "not on PATH": "the shell does not find it",
    }[found.state]
    console.print(f"{found.path}: {meaning}", markup=False, soft_wrap=True)
    if found.state in ("shadowed", "not on PATH"):
        first = f'export PATH={shlex.quote(str(found.path.parent))}:"$PATH"'
        console.print(f"put it first: {first}", markup=False, soft_wrap=True)
    behind = "none on PATH" if found.original is None else str(found.original)
    console.print(f"TensorRT-LLM's own: {behind}", markup=False, soft_wrap=True)
