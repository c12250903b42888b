"""Fits the parameters and checks the predictions: `python -m trtllm_tokenweave.predict`.

Writes fitted.json into the data beside this module and predict_check.json into the folder of results, and prints the
table of docs/prediction.md. The same input gives the same files; after a new measurement run it and commit all three.
Errors are one line and exit code 2, with neither file touched.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from trtllm_tokenweave.atomic import replace_files
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.predict.check import check_document, check_markdown, errors
from trtllm_tokenweave.predict.data import FOLDER, Fitted
from trtllm_tokenweave.predict.fit import fit_all
from trtllm_tokenweave.predict.sources import check_rows, read_results


def main(
    results: Annotated[Path, typer.Option(metavar="DIR", help="Where bench's results lie.")] = Path("docs/results"),
) -> None:
    """Fit, check, write both files and print the table of errors."""
    try:
        _run(results)
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise typer.Exit(2) from None


def _run(results: Path) -> None:
    documents = read_results(results)
    machines = fit_all()
    rows = check_rows(machines, documents)
    fitted, document = Fitted(machines=machines, errors=errors(rows)), check_document(rows)
    files = (FOLDER / "fitted.json", _text(fitted.model_dump(mode="json")))
    _write_both(files, (results / "predict_check.json", _text(document)))
    print(f"\n{check_markdown(document)}")


def _text(document: Any) -> str:
    return json.dumps(document, indent=1) + "\n"


def _write_both(first: tuple[Path, str], second: tuple[Path, str]) -> None:
    """Replace both files, or neither."""
    replace_files([(path, partial(Path.write_text, data=text)) for path, text in (first, second)])
    for path, _ in (first, second):
        print(f"wrote {path}")


if __name__ == "__main__":
    typer.run(main)
