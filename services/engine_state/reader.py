"""Reads an engine's state file again and again, also when the engine restarts or its file grows."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from services.engine_state import layout
from services.engine_state.file import StateFile
from services.engine_state.view import UnreadableError, View


class Reader:
    """Reads one engine's state; continues with larger files and after restarts of the engine.

    It waits for a publication that is being written, at most `patience_s`. Whatever is wrong with a file, the reader
    raises an UnreadableError.
    """

    def __init__(self, path: str, *, patience_s: float = 0.02) -> None:
        """Initialise it with the path where an engine's file is, or will be."""
        self.path = Path(path).absolute()
        self._patience_s = patience_s
        self._file: StateFile | None = None
        self._last_read = (0, 0, 0)  # life, generation and sequence of the last view
        self._seen: dict[str, tuple[int, int]] = {}  # by ring: the engine's life, and the rows returned

    def read(self, *, contents: bool = False) -> View:
        """Return the newest publication, on demand with the `contents` of KV blocks, where they are exported."""
        file = self._current()
        try:
            view = file.read(self._patience_s, contents=contents)
        except UnreadableError:
            if (newer := self._newer()) is None:  # it may have been replaced since
                raise
            view = newer.read(self._patience_s, contents=contents)
        self._last_read = (view.life, view.generation, view.sequence)
        return view

    def has_news(self) -> bool:
        """Return whether `read` would return another view than the last one, or fail; this is cheap."""
        file = self._file
        return file is None or file.is_closed() or self._last_read != (file.life, file.generation, file.sequence())

    def new_steps(self) -> np.ndarray:
        """Return the records of steps (`layout.STEP`) that were added since the last call and are still there."""
        return self._new("steps", "num_steps", layout.STEP)

    def new_outcomes(self) -> np.ndarray:
        """Return the outcomes of requests (`layout.OUTCOME`) that were added since the last call, where still there."""
        return self._new("outcomes", "num_outcomes", layout.OUTCOME)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _new(self, name: str, counter: str, dtype: np.dtype[Any]) -> np.ndarray:
        def take(file: StateFile) -> np.ndarray:
            life, count = self._seen.get(name, (0, 0))
            rows, total = file.ring(name, counter, dtype, count if life == file.life else 0, self._patience_s)
            self._seen[name] = (file.life, total)
            return rows

        file = self._current()
        try:
            rows = take(file)
        except UnreadableError:
            if (newer := self._newer()) is None:
                raise
            return take(newer)
        if file.is_ended() and (newer := self._newer()) is not None:
            return np.concatenate((rows, take(newer)))
        return rows

    def _current(self) -> StateFile:
        """Return the file at the path, or the last one that was there where the new one cannot be read."""
        if self._file is None:
            self._file = StateFile(self.path)
        else:
            with suppress(UnreadableError):
                self._newer()
        return self._file

    def _newer(self) -> StateFile | None:
        """Open the file at the path where it is another one than the current; None where it is not."""
        assert self._file is not None
        with suppress(OSError):
            if self._file.is_at(self.path):
                return None
            newer = StateFile(self.path)
            self._file.close()
            self._file = newer
            return newer
        return None
