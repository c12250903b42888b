"""What the config.pbtxt of the model `tokenweave` says, checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trtllm_tokenweave.errors import UserError

_Count = Annotated[int, Field(ge=1)]
_Seconds = Annotated[float, Field(gt=0)]


class Settings(BaseModel):
    """Parameters of the model, by their names in config.pbtxt.

    Attributes:
        engine_dir: Folder of TensorRT engines, one a rank (`trtllm-tokenweave build`). The limits of steps are its own.
        checkpoint: Without engines: a checkpoint for the CPU interpreter; None: SmolLM2-135M, as the demo.
        tokenizer_dir: Folder of a Hugging Face tokenizer; None: the engine's, or the checkpoint's.
        max_batch_size: Sequences in flight (interpreter).
        max_num_tokens: Tokens of a step (interpreter).
        max_seq_len: Tokens of a sequence, prompt included (interpreter).
        max_tokens: Tokens generated for requests that do not say it.
        chat_template: Take ``text_input`` as a user's message, and put the model's chat template around it.
        max_queue_size: Requests that wait or run; more are refused.
        cancellation_check_period_ms: How often it is looked whether clients have given up.
        rank_timeout_seconds: How long a rank waits for another one before it takes the server down.
        load_timeout_seconds: How long a rank that has loaded the model waits for the others.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine_dir: Path | None = None
    checkpoint: Path | None = None
    tokenizer_dir: Path | None = None
    max_batch_size: _Count = 8
    max_num_tokens: _Count = 256
    max_seq_len: _Count = 512
    max_tokens: _Count = 64
    chat_template: bool = False
    max_queue_size: _Count = 1000
    cancellation_check_period_ms: _Count = 100
    rank_timeout_seconds: _Seconds = 60.0
    load_timeout_seconds: _Seconds = 900.0


def read_settings(parameters: Mapping[str, Any]) -> Settings:
    """The settings in the ``parameters`` of a model's configuration, as Triton hands them to its backend.

    Empty values count as not given. Names in capitals are the Python backend's own.

    Raises:
        UserError: a parameter is unknown or wrong; names it.
    """
    texts = {name: str(value.get("string_value", "")).strip() for name, value in parameters.items()}
    try:
        return Settings.model_validate({n: text for n, text in texts.items() if text and not n.isupper()})
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        what = "is not known" if first["type"] == "extra_forbidden" else f"{texts[name]!r}: {first['msg']}"
        known = ", ".join(Settings.model_fields)
        raise UserError(what, where=f"config.pbtxt, parameter {name}", fix=f"the parameters are {known}") from error
