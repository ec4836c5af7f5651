"""What `block up` passes on of its objectives."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from services import cluster
from services.cluster import Cluster, ClusterSettings


@pytest.mark.parametrize("num_schedulers", [0, 2])
@pytest.mark.parametrize("objectives", ["", "o.toml"])
def test_gateways_and_schedulers_have_the_table(num_schedulers: int, objectives: str, tmp_path: Path) -> None:
    """Each of them reads the file itself."""
    running = Cluster(settings=ClusterSettings(schedulers=num_schedulers, objectives=objectives), folder=tmp_path)
    with (
        mock.patch.object(Cluster, "address_of", return_value="127.0.0.1:1"),
        mock.patch.object(cluster, "write_instances"),
        mock.patch.object(cluster, "Child") as child,
    ):
        cluster._schedulers(running)
        cluster._gateways(running)
    assert child.call_count == num_schedulers + 1
    for call in child.call_args_list:
        words = list(call.args)
        flags = [words[place + 1] for place, word in enumerate(words) if word == "--objectives"]
        assert flags == ([objectives] if objectives else [])
