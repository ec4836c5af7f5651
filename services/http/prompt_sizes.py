"""How many tokens a prompt has, without a tokenizer."""

from __future__ import annotations

from services.http.openai_body import MESSAGE_TOKENS, OpenAIRequest

PRIOR_BYTES = 4096.0  # of prompts seen, as much as the ratio from the settings weighs
FORGETTING = 0.99  # per prompt
MOST_MODELS = 1024


class PromptSizes:
    """Bytes over a ratio per model: given at first (4 bytes a token fits English), then learnt from engines' counts.

    Exact where the client sent token ids. A chat template adds four tokens a message or so.
    """

    def __init__(self, bytes_per_token: float) -> None:
        """Start from a ratio."""
        self._first = bytes_per_token
        self._seen: dict[str, tuple[float, float]] = {}

    def tokens(self, ask: OpenAIRequest) -> int:
        """Estimate a prompt's size."""
        if ask.prompt_tokens is not None:
            return ask.prompt_tokens
        return max(1, round(ask.prompt_bytes / self.ratio(ask.model)) + MESSAGE_TOKENS * ask.num_messages)

    def ratio(self, model: str) -> float:
        """Bytes a token, as known by now."""
        num_bytes, num_tokens = self._seen.get(model, (PRIOR_BYTES, PRIOR_BYTES / self._first))
        return num_bytes / num_tokens

    def learn(self, ask: OpenAIRequest, prompt_tokens: int) -> None:
        """Hear an engine's count."""
        text_tokens = prompt_tokens - MESSAGE_TOKENS * ask.num_messages
        if ask.prompt_tokens is not None or ask.prompt_bytes == 0 or text_tokens <= 0:
            return
        if ask.model not in self._seen and len(self._seen) >= MOST_MODELS:
            return
        num_bytes, num_tokens = self._seen.get(ask.model, (PRIOR_BYTES, PRIOR_BYTES / self._first))
        self._seen[ask.model] = (FORGETTING * num_bytes + ask.prompt_bytes, FORGETTING * num_tokens + text_tokens)
