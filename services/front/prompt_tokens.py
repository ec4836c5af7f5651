"""A prompt's tokens, where they are known: the client sent them, or there is the model's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.block_names import block_names
from services.front.asking import MESSAGE_TOKENS, MOST_TOKEN_IDS, Ask
from services.front.prompt_sizes import PromptSizes

MOST_BYTES = 32 * 1024  # of a text that are cut into tokens


class PromptTokens:
    """Sizes prompts, and names their blocks as engines do; without a tokenizer only those that came as token ids.

    The tokenizer is the `tokenizer.json` beside a model's weights. Of a conversation it gives the size, but no names:
    the chat template is the engine's. Of long prompts the beginning is named.
    """

    def __init__(self, sizes: PromptSizes, *, tokenizer: str = "", block_tokens: int = 16, seed: str = "") -> None:
        """Load the tokenizer; ValueError where there is none."""
        self._sizes = sizes
        self._block_tokens = block_tokens
        self._seed = seed
        self._tokenizer = _loaded(tokenizer) if tokenizer else None

    def read(self, ask: Ask) -> tuple[int, list[bytes]]:
        """Tell how many tokens a prompt has, about or exactly, and the names of its first blocks."""
        if ask.token_ids:
            return self._sizes.tokens(ask), self._names(ask.token_ids)
        if self._tokenizer is None or not ask.prompt:
            return self._sizes.tokens(ask), []
        text = ask.prompt[:MOST_BYTES].decode("utf-8", "ignore")
        ids: Sequence[int] = self._tokenizer.encode(text).ids
        whole = ask.prompt_bytes <= MOST_BYTES
        num_tokens = len(ids) if whole else round(len(ids) * ask.prompt_bytes / MOST_BYTES)
        if ask.num_messages or ask.num_prompts > 1:
            return num_tokens + MESSAGE_TOKENS * ask.num_messages, []
        return max(1, num_tokens), self._names(ids if whole else ids[: -self._block_tokens])  # the cut moves tokens

    def _names(self, ids: Sequence[int]) -> list[bytes]:
        return block_names(ids[:MOST_TOKEN_IDS], self._block_tokens, self._seed)


def _loaded(path: str) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError("tokenizer: needs the package 'tokenizers', which is not installed") from None
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # noqa: BLE001 - the library raises no other
        raise ValueError(f"tokenizer: {path} cannot be read: {error}") from None
