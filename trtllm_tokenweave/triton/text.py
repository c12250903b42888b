"""Text of tokens that come one after another."""

from __future__ import annotations

from collections.abc import Sequence

from trtllm_tokenweave.checkpoint import Tokenizer

#: What decoders write for bytes that are no whole character yet.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"

#: Tokens that are decoded again with those that follow: they decide spaces and characters that begin in them.
_CONTEXT = 16


class TextStream:
    """Turns the tokens of one sequence into pieces of text, which joined are the text of all its tokens.

    A character may be made of several tokens: it is held back until it is whole, or the sequence has ended. What a call
    costs does not grow with the sequence: of what was said the newest tokens alone are kept.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._said = ""

    def push(self, tokens: Sequence[int], *, last: bool) -> str:
        """Take the next tokens and return the text that can be said now.

        Args:
            tokens: Ids.
            last: Nothing follows.
        """
        self._tokens += tokens
        text = self._tokenizer.decode(self._tokens)
        if not last:
            text = text.rstrip(_INCOMPLETE)
        if not text.startswith(self._said):
            return ""
        piece, self._said = text[len(self._said) :], text
        if len(self._tokens) > 2 * _CONTEXT:
            self._forget(text)
        return piece

    def _forget(self, text: str) -> None:
        """Keep the newest tokens, from the beginning of a character on (of four bytes at most), where one ends."""
        for count in range(_CONTEXT, _CONTEXT + 4):
            said = self._tokenizer.decode(self._tokens[-count:])
            if said and text.endswith(said):
                self._tokens, self._said = self._tokens[-count:], said
                return
