"""Sends requests to a gateway with the official client, and records their outcomes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import openai

from tests.deploy.engines import MODEL


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The outcome of a request sent to the gateway: its instance, forecast, tokens and error."""

    instance: str
    predicted_e2e_ms: float
    text: str
    num_tokens: int | None  # None where the stream did not end
    failure: str | None = None


async def stream(
    client: openai.AsyncOpenAI,
    prompt: str,
    max_tokens: int,
    began: Callable[[str], None] = lambda _: None,
    *,
    model: str = MODEL,
) -> Placed:
    """Stream a response of this length from the gateway; `began` receives the instance of its first piece."""
    raw = await client.completions.with_raw_response.create(
        model=model, prompt=prompt, max_tokens=max_tokens, temperature=0, stream=True,
        stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
    )  # fmt: skip
    text, num_tokens, failure = "", None, None
    try:
        async for chunk in raw.parse():
            if not text:
                began(raw.headers["x-block-instance"])
            text += "".join(choice.text for choice in chunk.choices)
            num_tokens = chunk.usage.completion_tokens if chunk.usage else num_tokens
    except openai.APIError as error:
        failure = str(error)
    return Placed(
        instance=raw.headers["x-block-instance"],
        predicted_e2e_ms=float(raw.headers.get("x-block-predicted-e2e-ms", "nan")),
        text=text,
        num_tokens=num_tokens,
        failure=failure,
    )
