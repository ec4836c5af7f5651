"""Reading an engine's state again and again, whatever becomes of the engine."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from services.engine_state import layout
from services.engine_state.file import StateFile
from services.engine_state.view import UnreadableError, View


class Reader:
    """Reads one engine's state again and again; follows the engine into larger files and over restarts.

    A file that is being written is waited for, `patience_s` at most. No file can hurt: what is wrong with it is an
    UnreadableError.
    """

    def __init__(self, path: str, *, patience_s: float = 0.02) -> None:
        """Read from a path where an engine's file is, or will be."""
        self.path = Path(path).absolute()
        self._patience_s = patience_s
        self._file: StateFile | None = None
        self._last_read = (0, 0, 0)  # life, generation and sequence of the view given last
        self._seen: dict[str, tuple[int, int]] = {}  # how many rows of each ring, of which engine's life

    def read(self, *, contents: bool = False) -> View:
        """Give the newest publication; `contents` of KV blocks where asked for and told."""
        file = self._current()
        try:
            view = file.read(self._patience_s, contents=contents)
        except UnreadableError:
            if (newer := self._newer()) is None:  # it may have been replaced meanwhile
                raise
            view = newer.read(self._patience_s, contents=contents)
        self._last_read = (view.life, view.generation, view.sequence)
        return view

    def has_news(self) -> bool:
        """Tell whether `read` would give something else than it gave last, if only a refusal; costs next to nothing."""
        file = self._file
        return file is None or file.is_given_up() or self._last_read != (file.life, file.generation, file.sequence())

    def new_steps(self) -> np.ndarray:
        """Give the records of steps (`layout.STEP`) that this reader has not given yet and that are still kept."""
        return self._new("steps", "num_steps", layout.STEP)

    def new_outcomes(self) -> np.ndarray:
        """Give the outcomes of requests (`layout.OUTCOME`) not given yet and still kept."""
        return self._new("outcomes", "num_outcomes", layout.OUTCOME)

    def close(self) -> None:
        """Let the file go."""
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
        if file.is_over() and (newer := self._newer()) is not None:
            return np.concatenate((rows, take(newer)))
        return rows

    def _current(self) -> StateFile:
        """What is at the path, or was while its writer may still live: the newer of the two, if it can be read."""
        if self._file is None:
            self._file = StateFile(self.path)
        else:
            with suppress(UnreadableError):
                self._newer()
        return self._file

    def _newer(self) -> StateFile | None:
        """Open what is at the path now, if that is another file."""
        assert self._file is not None
        with suppress(OSError):
            if self._file.is_at(self.path):
                return None
            newer = StateFile(self.path)
            self._file.close()
            self._file = newer
            return newer
        return None
