"""Tokenizers: SmolLM2's out of its GGUF file, and tokenizer.json in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from trtllm_tokenweave.checkpoint import RandomCheckpoint, Tokenizer, open_checkpoint, require_tokenizer, smollm2_gguf
from trtllm_tokenweave.checkpoint.tokenizer import ChatTokens, HubTokenizer, gguf_tokenizer, load_folder_tokenizer
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.model_config import PRESETS

METADATA: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<s>", "</s>", "a", "b", "1", "ab", "11", "<tool>"],
    "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1, 1, 4],
    "tokenizer.ggml.merges": ["a b", "1 1"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
}


def tiny(**changes: Any) -> HubTokenizer:
    values = METADATA | {f"tokenizer.{name}": value for name, value in changes.items()}
    tokenizer = gguf_tokenizer(values, "tiny.gguf")
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return require_tokenizer(open_checkpoint(smollm2_gguf()))


def test_smollm2_ids(smollm2: Tokenizer) -> None:
    assert smollm2.eos_ids == {2}
    assert smollm2.encode("<|im_start|>user\nThe capital of France is") == [1, 4093, 198, 504, 3575, 282, 4649, 314]
    # Digits stay apart, and the model wants no first token.
    assert [smollm2.decode([index]) for index in smollm2.encode(" 2024", add_bos=True)] == [" ", "2", "0", "2", "4"]


@pytest.mark.parametrize("text", ["", "Hello, world!", "naïve café — 日本語 🙂", "tabs\tand\n\nlines  x", "a 12 b3"])
def test_smollm2_round_trip(smollm2: Tokenizer, text: str) -> None:
    assert smollm2.decode(smollm2.encode(text)) == text


def test_smollm2_chat_template(smollm2: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = smollm2.apply_chat_template(messages)
    assert text == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert not smollm2.apply_chat_template(messages, add_generation_prompt=False).endswith("assistant\n")
    assert smollm2.decode(smollm2.encode(text)).startswith("system\nBe brief.")


def test_gguf_metadata() -> None:
    tokenizer = tiny()
    assert tokenizer.encode("<s>ab11<tool>") == [0, 5, 4, 4, 7]
    assert tiny(**{"ggml.pre": "gpt-2"}).encode("ab11") == [5, 6]
    assert tokenizer.decode([0, 5, 4, 7]) == "ab1<tool>"
    assert tokenizer.encode("ab", add_bos=True) == [5]
    assert tiny(**{"ggml.add_bos_token": True}).encode("ab", add_bos=True) == [0, 5]
    assert tiny(**{"ggml.eot_token_id": 7}).eos_ids == {1, 7}


def test_without_a_template_the_text_stands_alone() -> None:
    assert tiny().apply_chat_template([{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]) == (
        "one\ntwo"
    )


def test_the_template_sees_tokens_and_is_kept_in_its_sandbox() -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    assert tiny(chat_template=template).apply_chat_template([{"role": "user", "content": "x"}]) == "<s>x</s>"
    for bad, message in (
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{% for %}", "the chat template fails"),
        ("{{ messages[0]['content'] / 0 }}", "the chat template fails"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "the chat template fails"),
        ("{{ messages.append(1) }}", "the chat template fails"),
    ):
        with pytest.raises(UserError, match=message):
            tiny(chat_template=bad).apply_chat_template([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ggml.model": "llama"}, r"field tokenizer.ggml.model: 'llama' is not served.*tokenizer.json"),
        ({"ggml.pre": "chatglm"}, r"field tokenizer.ggml.pre: 'chatglm' is not served"),
        ({"ggml.token_type": [1]}, r"field tokenizer.ggml.token_type: has 1 entries for 8 tokens"),
        ({"ggml.merges": ["a zzz"]}, r"field tokenizer.ggml.merges: is inconsistent"),
        ({"ggml.eos_token_id": 8}, r"field tokenizer.ggml.eos_token_id: is 8, outside 0..7"),
        ({"ggml.model": None}, r"field tokenizer.ggml.model: is missing"),
    ],
)
def test_gguf_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny(**changes)


def test_more_tokens_than_the_embedding_has_rows(tmp_path: Path) -> None:
    assert gguf_tokenizer(METADATA, "tiny.gguf", 8) is not None
    with pytest.raises(UserError, match=r"tiny.gguf: the tokenizer has ids up to 7, but the model's vocab_size is 7"):
        gguf_tokenizer(METADATA, "tiny.gguf", 7)
    write_folder(tmp_path, bos=False)
    assert load_folder_tokenizer(tmp_path, 4) is not None
    with pytest.raises(UserError, match="ids up to 3"):
        load_folder_tokenizer(tmp_path, 3)


def test_absent_tokenizer(tmp_path: Path) -> None:
    assert gguf_tokenizer({"general.architecture": "llama"}, "x.gguf") is None
    assert load_folder_tokenizer(tmp_path) is None
    with pytest.raises(UserError, match=r"random weights .*: has no tokenizer.*tokenizer.json"):
        require_tokenizer(RandomCheckpoint(PRESETS["smollm2-135m"]))


def write_folder(folder: Path, bos: bool) -> None:
    backend = Backend(models.WordLevel({"<s>": 0, "</s>": 1, "hello": 2, "[UNK]": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>", "</s>"])
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("bos", [False, True])
def test_folder(tmp_path: Path, bos: bool) -> None:
    write_folder(tmp_path, bos)
    settings: dict[str, Any] = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "chat_template": "{{ bos_token }}config",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3]}))
    tokenizer = load_folder_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.eos_ids == {1, 3}
    assert tokenizer.encode("hello") == [2]
    assert tokenizer.encode("hello", add_bos=True) == ([0, 2] if bos else [2])
    assert tokenizer.decode([0, 2, 1]) == "hello"
    assert tokenizer.apply_chat_template([]) == "<s>config"
    settings["chat_template"] = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "named"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    named = load_folder_tokenizer(tmp_path)
    assert named is not None
    assert named.apply_chat_template([]) == "named"
    (tmp_path / "chat_template.jinja").write_text("file{{ eos_token }}")
    again = load_folder_tokenizer(tmp_path)
    assert again is not None
    assert again.apply_chat_template([]) == "file</s>"


def test_folder_with_only_the_tokenizer_and_with_a_damaged_one(tmp_path: Path) -> None:
    write_folder(tmp_path, bos=True)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    tokenizer = load_folder_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.eos_ids == {1}
    assert tokenizer.encode("hello", add_bos=True) == [2]
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer.json: is no tokenizer file .*Fix: copy the model's own file"):
        load_folder_tokenizer(tmp_path)


def test_chat_tokens_default_to_no_template() -> None:
    assert ChatTokens().template is None
