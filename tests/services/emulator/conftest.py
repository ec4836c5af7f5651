"""An emulated engine that several tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.services.emulator.running import Emulated, emulated


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulated]:
    """A fast engine; each test leaves it idle and without faults."""
    with emulated(tmp_path_factory.mktemp("engine")) as running:
        yield running
