"""Which version an engine has and what it serves: KV blocks pass only between engines that agree in both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.http.client import HttpClient
from services.http.headers import Headers
from services.http.json_body import reply_json
from services.http.origin import Origin

WITHIN_S = 30.0  # for each of an engine's two replies


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineIdentity:
    """The version of an engine, and its model: the name that clients use, the files, and the longest request."""

    version: str
    model: str
    files: str
    max_model_len: int | None = field(default=None, compare=False)

    def __str__(self) -> str:
        """Write both as a part of a sentence."""
        files = f" ({self.files})" if self.files not in ("", self.model) else ""
        return f"has version {self.version} and model {self.model}{files}"


async def engine_identity(
    client: HttpClient, origin: Origin, headers: Headers | None = None, within_s: float = WITHIN_S
) -> EngineIdentity:
    """Ask an engine; ValueError if it does not answer as vLLM does."""
    version = await _object(client, origin, b"/version", headers, within_s)
    models = (await _object(client, origin, b"/v1/models", headers, within_s)).get("data")
    first = models[0] if isinstance(models, list) and models else None
    if not isinstance(first, Mapping) or "version" not in version:
        raise ValueError("/version and /v1/models do not answer as vLLM's")
    longest = first.get("max_model_len")
    return EngineIdentity(
        version=str(version["version"]),
        model=str(first.get("id")),
        files=str(first.get("root", "")),
        max_model_len=longest if type(longest) is int else None,
    )


def difference(identities: Mapping[str, EngineIdentity]) -> str:
    """Name two engines between which no KV blocks pass, and why; nothing where all are alike."""
    (first, known), *others = identities.items()
    for name, other in others:
        if other != known:
            return f"{first} {known}, {name} {other}: KV blocks pass only between engines of the same version and model"
    return ""


async def _object(
    client: HttpClient, origin: Origin, target: bytes, headers: Headers | None, within_s: float
) -> Mapping[str, Any]:
    try:
        status, body = await client.get(origin, target, within_s=within_s, headers=headers)
        reply = reply_json(body)
    except (OSError, ValueError) as error:
        raise ValueError(f"{target.decode()} is not answered: {error or type(error).__name__}") from None
    if status != 200 or not isinstance(reply, dict):
        raise ValueError(f"{target.decode()} is answered with status {status}")
    return reply
