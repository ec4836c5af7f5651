"""How long the gateways of `block up` wait for their schedulers."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from services import cluster
from services.cluster import Cluster, ClusterSettings


@pytest.mark.parametrize(
    ("policy", "num_schedulers", "with_tables", "expected"),
    [
        ("slo", 2, False, ["75"]),
        ("hold", 1, False, ["12.5"]),
        ("block", 1, False, []),
        ("slo", 0, False, []),  # the gateway knows its own policy
        ("slo", 1, True, []),  # the file may set it
    ],
)
def test_gateways_wait_as_long_as_schedulers_hold_requests(
    policy: str, num_schedulers: int, with_tables: bool, expected: list[str], tmp_path: Path
) -> None:
    """They do not know the policy of their schedulers, and `block up` does."""
    tables = tmp_path / "block.toml" if with_tables else None
    settings = ClusterSettings(schedulers=num_schedulers, policies=(policy,), tables_file=tables)
    with (
        mock.patch.object(Cluster, "address_of", return_value="127.0.0.1:1"),
        mock.patch.object(cluster, "Child") as child,
    ):
        cluster._gateways(Cluster(settings=settings, folder=tmp_path))
    words = list(child.call_args.args)
    assert [words[place + 1] for place, word in enumerate(words) if word == "--schedule-s"] == expected
