"""The name of the model in a response: the client's own, where the request was sent to a model of another name."""

from __future__ import annotations

import json
import re

KEY = b'"model"'
MAX_HELD_BYTES = 1024  # of a name that has not come whole

_STARTED = re.compile(rb'"model"\s*(?::\s*(?:"(?:[^"\\]|\\.)*\\?)?)?')


class ModelNames:
    """Replaces the engine's name in a response, part by part; quotation marks within texts are escaped in JSON."""

    def __init__(self, *, of_client: str, of_engine: str) -> None:
        """Take both names."""
        engine_forms = {_written(of_engine, ascii_only=True), _written(of_engine, ascii_only=False)}
        self._pattern = re.compile(rb'("model"\s*:\s*)(?:%s)' % b"|".join(map(re.escape, sorted(engine_forms))))
        self._name = _written(of_client, ascii_only=True)
        self._held = b""

    def replaced(self, piece: bytes, *, end: bool) -> bytes:
        """Take a part of the body; return what can be passed on: all of it, but for a name that is not whole."""
        data = self._pattern.sub(lambda found: found[1] + self._name, self._held + piece)
        start = len(data) if end else _start_of_name(data)
        self._held = data[start:]
        return data[:start]


def _written(name: str, *, ascii_only: bool) -> bytes:
    return json.dumps(name, ensure_ascii=ascii_only).encode("utf-8", "replace")


def _start_of_name(data: bytes) -> int:
    """Return where a name begins that goes on in the next part."""
    found = data.rfind(KEY, max(0, len(data) - MAX_HELD_BYTES))
    if found >= 0 and _STARTED.fullmatch(data, found):
        return found
    for size in range(len(KEY) - 1, 0, -1):
        if data.endswith(KEY[:size]):
            return len(data) - size
    return len(data)
