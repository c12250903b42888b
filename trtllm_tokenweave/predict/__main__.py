"""Fits the parameters and checks the predictions: `python -m trtllm_tokenweave.predict`.

Writes fitted.json into the data beside this module and predict_check.json into the folder of results, and prints the
table of docs/prediction.md. The same input gives the same files; after a new measurement run it and commit all three.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from trtllm_tokenweave.atomic import check_folder, replace_file
from trtllm_tokenweave.predict.check import check_document, check_markdown, check_rows, errors
from trtllm_tokenweave.predict.data import FOLDER, Fitted
from trtllm_tokenweave.predict.fit import fit_all


def main(
    results: Annotated[Path, typer.Option(metavar="DIR", help="Where bench's results lie.")] = Path("docs/results"),
) -> None:
    """Fit, check, write both files and print the table of errors."""
    check_folder(results)
    machines = fit_all()
    rows = check_rows(machines, results)
    fitted = Fitted(machines=machines, errors=errors(rows))
    _write(FOLDER / "fitted.json", fitted.model_dump(mode="json"))
    document = check_document(rows)
    _write(results / "predict_check.json", document)
    print(f"\n{check_markdown(document)}")


def _write(path: Path, document: Any) -> None:
    text = json.dumps(document, indent=1) + "\n"
    replace_file(path, lambda aside: aside.write_text(text))
    print(f"wrote {path}")


if __name__ == "__main__":
    typer.run(main)
