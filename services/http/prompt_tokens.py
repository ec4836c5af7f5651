"""Prompts in tokens: estimated from their bytes, or counted and named by KV block with the model's tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from scheduler.prefix.kv_block_hash import kv_block_hashes
from services.http.chat_template import template_beside
from services.http.media_parts import media_tokens
from services.http.openai_body import MAX_TOKEN_IDS, MESSAGE_TOKENS, OpenAIRequest
from services.settings import Option

PRIOR_BYTES = 4096.0  # of observed prompts, which the ratio from the settings weighs as much as
DECAY = 0.99  # per prompt
MAX_MODELS = 1024
MAX_BYTES = 32 * 1024  # of a text that are tokenised
LONG_BYTES = 2 * 1024  # a longer text is tokenised in a thread

# The settings of every component that reads prompts.
TokenizerFile = Annotated[
    str,
    Option(
        "The model's tokenizer.json: counts prompt tokens and finds prompts in the engines' prefix caches.",
        metavar="FILE",
    ),
]
ChatTemplateFile = Annotated[
    str, Option("Chat template that the engines use.", metavar="FILE", unset="the one beside the tokenizer")
]
BlockTokens = Annotated[int, "Tokens per KV block of the engines."]
HashSeed = Annotated[str, "PYTHONHASHSEED of the engines, if they have one."]


class PromptSizes:
    """Estimates tokens as bytes over a ratio per model, which is learnt from the engines' counts.

    Exact where the client sent token ids. A chat template adds about four tokens to a message.
    """

    def __init__(self, bytes_per_token: float) -> None:
        """Start from a ratio; 4 bytes a token fits English."""
        self._first = bytes_per_token
        self._observed: dict[str, tuple[float, float]] = {}

    def tokens(self, request: OpenAIRequest) -> int:
        """Estimate the size of a prompt."""
        if request.prompt_tokens is not None:
            return request.prompt_tokens
        text_tokens = round(request.prompt_bytes / self.ratio(request.model))
        return max(1, text_tokens + MESSAGE_TOKENS * request.num_messages + media_tokens(request.media, request.model))

    def ratio(self, model: str) -> float:
        """Return the present estimate of bytes per token."""
        num_bytes, num_tokens = self._observed.get(model, (PRIOR_BYTES, PRIOR_BYTES / self._first))
        return num_bytes / num_tokens

    def learn(self, request: OpenAIRequest, prompt_tokens: int) -> None:
        """Take an engine's count of a prompt."""
        text_tokens = prompt_tokens - MESSAGE_TOKENS * request.num_messages
        if any(not part.tokens(request.model).is_exact for part in request.media):
            return
        text_tokens -= media_tokens(request.media, request.model)
        if request.prompt_tokens is not None or request.prompt_bytes == 0 or text_tokens <= 0 or request.response_id:
            return
        if request.model not in self._observed and len(self._observed) >= MAX_MODELS:
            return
        num_bytes, num_tokens = self._observed.get(request.model, (PRIOR_BYTES, PRIOR_BYTES / self._first))
        self._observed[request.model] = DECAY * num_bytes + request.prompt_bytes, DECAY * num_tokens + text_tokens


class PromptTokens:
    """Counts the tokens of prompts, and names their KV blocks as engines do.

    The tokenizer is the `tokenizer.json` beside a model's weights; conversations need the chat template beside it too.
    Without a tokenizer only prompts that are sent as token ids have blocks. Of long prompts the start is named.
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
        """Load the tokenizer and the chat template; ValueError where a named one cannot be read."""
        if chat_template and not tokenizer:
            raise ValueError("chat_template: has no effect without a tokenizer; set tokenizer as well")
        self.sizes = sizes
        self._block_tokens = block_tokens
        self._seed = seed
        self._tokenizer: Any = _load(tokenizer) if tokenizer else None
        self._template = template_beside(tokenizer, chat_template) if tokenizer else None

    async def read_aside(self, request: OpenAIRequest) -> tuple[int, list[bytes]]:
        """Read a prompt; a long one in a thread, as tokenising it takes milliseconds."""
        if self._tokenizer is None or request.token_ids or request.prompt_bytes < LONG_BYTES:
            return self.read(request)
        return await asyncio.to_thread(self.read, request)

    def read(self, request: OpenAIRequest) -> tuple[int, list[bytes]]:
        """Return the number of tokens, counted or estimated, and the names of the first blocks."""
        if request.token_ids:
            return self.sizes.tokens(request), self._block_names(request.token_ids)
        if self._tokenizer is None or request.prompt_tokens is not None:
            return self.sizes.tokens(request), []
        text = None
        if request.conversation is not None and self._template is not None and not request.media:
            text = self._template.text_of(request.conversation)
        if text is not None:
            data = text.encode("utf-8", "replace")
            return self._tokenise(data, len(data), is_chat=True)
        if not request.prompt:
            return self.sizes.tokens(request), []
        num_tokens, names = self._tokenise(request.prompt, request.prompt_bytes, is_chat=False)
        is_as_sent = not request.num_messages and request.num_prompts == 1
        num_tokens += MESSAGE_TOKENS * request.num_messages + media_tokens(request.media, request.model)
        return num_tokens, names if is_as_sent else []

    def _tokenise(self, data: bytes, num_bytes: int, *, is_chat: bool) -> tuple[int, list[bytes]]:
        """Tokenise the start of a text; a chat template contains the special tokens already."""
        text = data[:MAX_BYTES].decode("utf-8", "ignore")
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=not is_chat)  # releases the GIL
        ids: Sequence[int] = encoding.ids
        if num_bytes <= MAX_BYTES:
            return max(1, len(ids)), self._block_names(ids)
        # the end of the text is cut within a token
        return round(len(ids) * num_bytes / MAX_BYTES), self._block_names(ids[: -self._block_tokens])

    def _block_names(self, ids: Sequence[int]) -> list[bytes]:
        return kv_block_hashes(ids[:MAX_TOKEN_IDS], self._block_tokens, self._seed)


def _load(path: str) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError("tokenizer: needs the package 'tokenizers', which is not installed") from None
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # noqa: BLE001 - the library raises no other
        raise ValueError(f"tokenizer: {path} cannot be read: {error}") from None
