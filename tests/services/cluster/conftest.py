"""A cluster that the tests of faults share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.services.cluster.living import Living, living


@pytest.fixture(scope="package")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Living]:
    """A cluster that all tests of faults share; each test leaves it healthy and idle."""
    with living(tmp_path_factory.mktemp("cluster")) as here:
        yield here
