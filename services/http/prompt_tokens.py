"""A prompt's tokens, where they are known: the client sent them, or there is the model's tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from scheduler.prefix.kv_block_hash import kv_block_hashes
from services.http.chat_template import template_beside
from services.http.openai_body import MESSAGE_TOKENS, MOST_TOKEN_IDS, OpenAIRequest
from services.http.prompt_sizes import PromptSizes

MOST_BYTES = 32 * 1024  # of a text that are cut into tokens
LONG_BYTES = 2 * 1024


class PromptTokens:
    """Sizes prompts, and names their blocks as engines do; without a tokenizer only those that came as token ids.

    The tokenizer is the `tokenizer.json` beside a model's weights; conversations need the chat template beside it too,
    and are only sized without. Of long prompts the beginning is named.
    """

    def __init__(
        self,
        sizes: PromptSizes,
        *,
        tokenizer: str = "",
        chat_template: str = "",
        block_tokens: int = 16,
        seed: str = "",
    ) -> None:
        """Load the tokenizer and the chat template; ValueError where one is named that cannot be read."""
        if chat_template and not tokenizer:
            raise ValueError("chat_template: is of no use without a tokenizer")
        self.sizes = sizes
        self._block_tokens = block_tokens
        self._seed = seed
        self._tokenizer: Any = _loaded(tokenizer) if tokenizer else None
        self._template = template_beside(tokenizer, chat_template) if tokenizer else None

    async def read_aside(self, ask: OpenAIRequest) -> tuple[int, list[bytes]]:
        """Read a prompt; a long one in a thread, as cutting it into tokens takes milliseconds."""
        if self._tokenizer is None or ask.token_ids or ask.prompt_bytes < LONG_BYTES:
            return self.read(ask)
        return await asyncio.to_thread(self.read, ask)

    def read(self, ask: OpenAIRequest) -> tuple[int, list[bytes]]:
        """Tell how many tokens a prompt has, about or exactly, and the names of its first blocks."""
        if ask.token_ids:
            return self.sizes.tokens(ask), self._names(ask.token_ids)
        if self._tokenizer is None or ask.prompt_tokens is not None:
            return self.sizes.tokens(ask), []
        text = None
        if ask.conversation is not None and self._template is not None:
            text = self._template.text_of(ask.conversation)
        if text is not None:
            data = text.encode("utf-8", "replace")
            return self._cut(data, len(data), is_chat=True)
        if not ask.prompt:
            return self.sizes.tokens(ask), []
        num_tokens, names = self._cut(ask.prompt, ask.prompt_bytes, is_chat=False)
        is_as_sent = ask.conversation is None and ask.num_prompts == 1
        return num_tokens + MESSAGE_TOKENS * ask.num_messages, names if is_as_sent else []

    def _cut(self, data: bytes, num_bytes: int, *, is_chat: bool) -> tuple[int, list[bytes]]:
        """Cut the beginning of a text into tokens; a chat template writes the special ones itself."""
        text = data[:MOST_BYTES].decode("utf-8", "ignore")
        (cut,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=not is_chat)  # which lets threads go on
        ids: Sequence[int] = cut.ids
        if num_bytes <= MOST_BYTES:
            return max(1, len(ids)), self._names(ids)
        return round(len(ids) * num_bytes / MOST_BYTES), self._names(ids[: -self._block_tokens])  # the cut moves tokens

    def _names(self, ids: Sequence[int]) -> list[bytes]:
        return kv_block_hashes(ids[:MOST_TOKEN_IDS], self._block_tokens, self._seed)


def _loaded(path: str) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError("tokenizer: needs the package 'tokenizers', which is not installed") from None
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # noqa: BLE001 - the library raises no other
        raise ValueError(f"tokenizer: {path} cannot be read: {error}") from None
