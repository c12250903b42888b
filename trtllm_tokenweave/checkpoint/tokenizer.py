"""Tokenizers of a GGUF file and of a Hugging Face folder, on top of the ``tokenizers`` library."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trtllm_tokenweave.atomic import replace_file
from trtllm_tokenweave.checkpoint.base import Message
from trtllm_tokenweave.checkpoint.fields import Fields, read_json
from trtllm_tokenweave.errors import UserError

# Token types of GGUF's tokenizer.ggml.token_type.
_CONTROL, _USER_DEFINED = 3, 4


@dataclass(frozen=True)
class ChatTokens:
    """Special tokens that a chat template may write, and its text (None: the model has no template)."""

    template: str | None = None
    bos_token: str = ""
    eos_token: str = ""


class HubTokenizer:
    """A ``tokenizers.Tokenizer`` with the model's end tokens and chat template (see ``base.Tokenizer``)."""

    def __init__(
        self, tokenizer: Any, *, source: str, eos_ids: frozenset[int], chat: ChatTokens, bos_id: int | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._source = source
        self._eos_ids = eos_ids
        self._chat = chat
        self._bos_id = bos_id

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end generation."""
        return self._eos_ids

    def encode(self, text: str, *, add_bos: bool = False) -> list[int]:
        """See ``base.Tokenizer.encode``."""
        ids = list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        return [self._bos_id, *ids] if add_bos and self._bos_id is not None else ids

    def decode(self, ids: Sequence[int]) -> str:
        """See ``base.Tokenizer.decode``."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def apply_chat_template(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """See ``base.Tokenizer.apply_chat_template``. Raises UserError when the template refuses the messages."""
        if self._chat.template is None:
            return "\n".join(message["content"] for message in messages)
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        # The template comes with the model and is not trusted: the sandbox keeps it to its arguments.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = self._refuse
        try:
            return environment.from_string(self._chat.template).render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                bos_token=self._chat.bos_token,
                eos_token=self._chat.eos_token,
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise UserError(f"the chat template fails: {error}", where=self._source) from error

    def save(self, folder: Path) -> None:
        """See ``base.Tokenizer.save``."""
        from tokenizers import Tokenizer as Backend
        from tokenizers.processors import TemplateProcessing

        backend = Backend.from_str(self._tokenizer.to_str())
        if self._bos_id is not None:
            # What load_folder_tokenizer looks for.
            bos = self._chat.bos_token
            backend.post_processor = TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, self._bos_id)])
        settings = {"bos_token": self._chat.bos_token, "eos_token": self._chat.eos_token}
        if self._chat.template is not None:
            settings["chat_template"] = self._chat.template
        ends = {"eos_token_id": sorted(self._eos_ids)}
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / "tokenizer.json", lambda aside: backend.save(str(aside)))
        for name, document in (("tokenizer_config.json", settings), ("generation_config.json", ends)):
            text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
            replace_file(folder / name, partial(Path.write_text, data=text, encoding="utf-8"))

    def _refuse(self, message: str) -> None:
        raise UserError(f"the chat template refuses these messages: {message}", where=self._source)


def gguf_tokenizer(metadata: Mapping[str, Any], source: str, vocab_size: int | None = None) -> HubTokenizer | None:
    """The byte-level BPE tokenizer that a GGUF file's metadata describes, or None where it describes none.

    Raises UserError for a kind of tokenizer that is not served, lists that do not fit together, or ids that reach
    ``vocab_size`` (None: not checked).
    """
    fields = Fields(metadata, source)
    if fields.get("tokenizer.ggml.tokens") is None:
        return None
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    model, pre = fields.text("tokenizer.ggml.model"), fields.text("tokenizer.ggml.pre", default="gpt-2")
    fix = "use the Hugging Face folder with its tokenizer.json"
    if model != "gpt2":
        raise UserError(f"{model!r} is not served", where=fields.where("tokenizer.ggml.model"), fix=fix)
    # "smollm" splits digits one by one before the byte-level split of GPT-2.
    splits = {"gpt-2": [], "default": [], "smollm": [pre_tokenizers.Digits(individual_digits=True)]}
    if pre not in splits:
        raise UserError(f"{pre!r} is not served", where=fields.where("tokenizer.ggml.pre"), fix=fix)
    tokens: list[str] = list(metadata["tokenizer.ggml.tokens"])
    _check_ids(len(tokens) - 1, vocab_size, source)
    types: list[int] = list(metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens))
    if len(types) != len(tokens):
        raise UserError(
            f"has {len(types)} entries for {len(tokens)} tokens",
            where=fields.where("tokenizer.ggml.token_type"),
            fix=fix,
        )
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges") or []]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        backend = Backend(models.BPE(vocab=vocabulary, merges=merges))
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"is inconsistent ({error})", where=fields.where("tokenizer.ggml.merges"), fix=fix) from error
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits[pre], pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    plain = [token for token, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    backend.add_tokens([AddedToken(token, normalized=False) for token in plain])

    def token_id(name: str) -> int | None:
        value = fields.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(tokens):
            raise UserError(
                f"is {value!r}, outside 0..{len(tokens) - 1}",
                where=fields.where(f"tokenizer.ggml.{name}_token_id"),
                fix=fix,
            )
        return value

    bos, eos, eot = token_id("bos"), token_id("eos"), token_id("eot")
    return HubTokenizer(
        backend,
        source=source,
        eos_ids=frozenset(index for index in (eos, eot) if index is not None),
        chat=ChatTokens(
            template=fields.text("tokenizer.chat_template", default=None),
            bos_token="" if bos is None else tokens[bos],
            eos_token="" if eos is None else tokens[eos],
        ),
        bos_id=bos if fields.flag("tokenizer.ggml.add_bos_token") else None,
    )


def load_folder_tokenizer(folder: Path, vocab_size: int | None = None) -> HubTokenizer | None:
    """The tokenizer of a folder's tokenizer.json, or None where there is none.

    Raises UserError for a damaged one, or one whose ids reach ``vocab_size`` (None: not checked).
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise UserError(
            f"is no tokenizer file ({error})",
            where=str(path),
            fix="copy the model's own file again, or remove it and give token ids",
        ) from error
    if vocab_size is not None:
        _check_ids(max(backend.get_vocab(with_added_tokens=True).values(), default=-1), vocab_size, str(path))
    settings = _optional(folder / "tokenizer_config.json")
    bos, eos = _token_text(settings, "bos_token"), _token_text(settings, "eos_token")
    eos_id: int | None = backend.token_to_id(eos) if eos else None
    eos_ids: set[int] = set() if eos_id is None else {eos_id}
    for name in ("generation_config.json", "config.json"):
        found = _optional(folder / name).get("eos_token_id")
        eos_ids |= {index for index in (found if isinstance(found, list) else [found]) if isinstance(index, int)}
    # Whether the model wants a first token shows in what the tokenizer itself puts before an empty text.
    first = backend.encode("", add_special_tokens=True).ids[:1]
    return HubTokenizer(
        backend,
        source=str(path),
        eos_ids=frozenset(eos_ids),
        chat=ChatTokens(_folder_template(folder, settings), bos, eos),
        bos_id=first[0] if first and bos and first[0] == backend.token_to_id(bos) else None,
    )


def _check_ids(largest: int, vocab_size: int | None, source: str) -> None:
    """Ids beyond the embedding would read rows that are not there."""
    if vocab_size is not None and largest >= vocab_size:
        raise UserError(
            f"the tokenizer has ids up to {largest}, but the model's vocab_size is {vocab_size}",
            where=source,
            fix="use the tokenizer that belongs to these weights",
        )


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _folder_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The template in its own file, else in the settings: a text, or a list of named ones of which "default" counts."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _token_text(settings: Mapping[str, Any], name: str) -> str:
    value = settings.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""
