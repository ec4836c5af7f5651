"""Which LoRA adapters each instance has in memory, as it reported last."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from predictor.request import NO_ADAPTER
from scheduler.columns import Column


@dataclass(frozen=True, slots=True)
class ReportedAdapters:
    """The adapters of an instance by number: in GPU memory or asked for by a request there, and in host memory."""

    active: frozenset[int] = frozenset()
    cached: frozenset[int] = frozenset()

    @property
    def loaded(self) -> frozenset[int]:
        """Those in any memory."""
        return self.active | self.cached


class AdapterIndex:
    """Finds the instances that have an adapter; all of it may be lost without harm."""

    def __init__(self) -> None:
        """Start without knowing anything."""
        self._of: dict[str, ReportedAdapters] = {}
        self._active: dict[int, set[str]] = {}  # instances by adapter
        self._loaded: dict[int, set[str]] = {}
        self._row_of: dict[str, int] = {}
        self._rows_of: tuple[str, ...] | None = None

    def replace(self, instance_id: str, adapters: ReportedAdapters) -> None:
        """Take what an instance reports."""
        before = self._of.get(instance_id)
        if adapters == before:
            return
        self.forget(instance_id)
        if adapters.loaded:
            self._of[instance_id] = adapters
            _add(self._active, adapters.active, instance_id)
            _add(self._loaded, adapters.loaded, instance_id)

    def forget(self, instance_id: str) -> None:
        """Forget an instance."""
        before = self._of.pop(instance_id, None)
        if before is not None:
            _remove(self._active, before.active, instance_id)
            _remove(self._loaded, before.loaded, instance_id)

    def keep(self, instance_ids: Iterable[str]) -> None:
        """Forget all instances but these."""
        for name in self._of.keys() - set(instance_ids):
            self.forget(name)

    def active(self, number: int, instance_ids: tuple[str, ...]) -> Column:
        """Return 1 for instances that have an adapter in GPU memory, or where a request asks for it, else 0."""
        return self._column(self._active, number, instance_ids)

    def loaded(self, number: int, instance_ids: tuple[str, ...]) -> Column:
        """Return 1 for instances that have an adapter in GPU or host memory, else 0."""
        return self._column(self._loaded, number, instance_ids)

    def _column(self, holders: dict[int, set[str]], number: int, instance_ids: tuple[str, ...]) -> Column:
        if number == NO_ADAPTER:
            return np.ones(len(instance_ids))
        if instance_ids is not self._rows_of:
            self._row_of = {name: row for row, name in enumerate(instance_ids)}
            self._rows_of = instance_ids
        column = np.zeros(len(instance_ids))
        for name in holders.get(number, ()):
            if name in self._row_of:
                column[self._row_of[name]] = 1.0
        return column


def _add(holders: dict[int, set[str]], numbers: Iterable[int], instance_id: str) -> None:
    for number in numbers:
        holders.setdefault(number, set()).add(instance_id)


def _remove(holders: dict[int, set[str]], numbers: Iterable[int], instance_id: str) -> None:
    for number in numbers:
        holders[number].discard(instance_id)
        if not holders[number]:
            del holders[number]
