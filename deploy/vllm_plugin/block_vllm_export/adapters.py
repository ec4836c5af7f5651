"""The LoRA adapters in the memory of a vLLM's workers, as its scheduler's steps show them.

Mirrors `LRUCacheWorkerLoRAManager` of vLLM 0.32: adapters are in host memory, the most recently used ones in GPU slots.
Adapters that are loaded by a request to the server, without a step that uses them, are not seen.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .writer import adapter_number


class AdapterMemory:
    """The adapters in host memory, the least recently used one first, and whether each is in a GPU slot."""

    def __init__(self, max_loras: int, max_cpu_loras: int) -> None:
        """Start without an adapter."""
        self._max_loras, self._max_cpu_loras = max_loras, max_cpu_loras
        self._is_active: dict[str, bool] = {}

    def use(self, names: Iterable[str]) -> tuple[int, int]:
        """Note the adapters of a step; return how many of them are loaded, and how many get a GPU slot."""
        num_loads = num_activations = 0
        for name in names:
            was_active = self._is_active.pop(name, None)
            if was_active is None:
                num_loads += 1
                if len(self._is_active) >= self._max_cpu_loras:
                    del self._is_active[next(iter(self._is_active))]
            if not was_active:
                num_activations += 1
                active = [one for one, is_active in self._is_active.items() if is_active]
                if len(active) >= self._max_loras:
                    self._is_active[active[0]] = False
            self._is_active[name] = True
        return num_loads, num_activations

    def rows(self) -> list[tuple[int, int]]:
        """Return the rows of the state file's section `adapters`."""
        return [(adapter_number(name), int(is_active)) for name, is_active in self._is_active.items()]

    def write(self, into: np.ndarray) -> int:
        """Write the rows into an array; return their number."""
        rows = self.rows()
        into[: len(rows)] = np.array(rows, into.dtype) if rows else into[:0]
        return len(rows)
