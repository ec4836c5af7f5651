"""The `kubernetes` hook and lease, by the official client, against a local API server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes", reason="the extra `kubernetes` is not installed")

from kubernetes import client

from protos.block.v1 import provisioner_pb2 as pb
from services.provisioner_server.hooks import HookError
from services.provisioner_server.hooks.kubernetes import Scale
from services.provisioner_server.kubernetes_lease import KubernetesLease
from tests.services.provisioner_server.acting import leader
from tests.services.provisioner_server.api_server import Cluster, api_server

PATIENCE_S = 60.0

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@contextmanager
def scaling(cluster: Cluster) -> Iterator[tuple[Scale, Any]]:
    """Have a hook on a cluster; also its client."""
    cluster.settle()
    with api_server(cluster) as url:
        own = client.ApiClient(client.Configuration(host=url))
        hook = Scale(own, namespace="llm", kind=cluster.kind, name="engines")
        try:
            yield hook, own
        finally:
            asyncio.run(hook.close())
            hook._thread.join(PATIENCE_S)


def until(holds: Callable[[], bool]) -> None:
    """Wait for a condition."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def names(hook: Scale) -> list[str]:
    """Whom the hook sees."""
    return [one.instance_id for one in asyncio.run(hook.instances()) or []]


def start(num_desired: int) -> pb.Action:
    """Some more."""
    return pb.Action(action_id="p-1", kind=pb.ACTION_KIND_START, num_instances=1, num_desired=num_desired)


def drain(num_desired: int, *instance_ids: str) -> pb.Action:
    """Some less."""
    return pb.Action(action_id="p-2", kind=pb.ACTION_KIND_DRAIN, instance_ids=instance_ids, num_desired=num_desired)


@pytest.mark.parametrize("kind", ["deployment", "statefulset"])
def test_a_scale_is_set_once_however_often_it_is_asked_for(kind: str) -> None:
    """The number is absolute: the same action twice writes once."""
    cluster = Cluster(kind=kind)
    with scaling(cluster) as (hook, _):
        for _ in range(2):
            assert asyncio.run(hook.act(start(4))).action_id == "p-1"
        assert cluster.writes == [4]
        until(lambda: len(names(hook)) == 4)


def test_conflicts_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever else changes the scale between reading and writing costs another turn, not the action."""
    cluster = Cluster(intruders=3)
    with scaling(cluster) as (hook, _):
        asyncio.run(hook.act(start(3)))
        assert cluster.writes == [3]
        cluster.intruders = 1000
        monkeypatch.setattr("services.provisioner_server.hooks.kubernetes.PAUSE_S", 0.0)
        with pytest.raises(HookError, match="conflicts"):
            asyncio.run(hook.act(start(5)))
        assert cluster.writes == [3]


def test_the_pod_that_is_to_go_goes() -> None:
    """A Deployment's controller removes first what costs least to delete."""
    cluster = Cluster(replicas=4)
    with scaling(cluster) as (hook, _):
        until(lambda: len(names(hook)) == 4)
        asyncio.run(hook.act(drain(3, "engines-1")))
        until(lambda: names(hook) == ["engines-0", "engines-2", "engines-3"])
        asyncio.run(hook.act(drain(3, "engines-1")))  # again, though it is gone
        assert cluster.writes == [3]
        assert hook.leavers(["engines-0", "engines-2"], 1) is None


def test_of_a_stateful_set_the_last_one_goes() -> None:
    """No wish changes that, so it is the last one that is drained."""
    with scaling(Cluster(kind="statefulset", replicas=12)) as (hook, _):
        assert hook.leavers([f"engines-{number}" for number in range(12)], 2) == ["engines-10", "engines-11"]


def test_watches_are_taken_up_again() -> None:
    """One that breaks goes on where it was; one that is too old lists anew; an outage is waited out."""
    cluster = Cluster()
    with scaling(cluster) as (hook, _):
        until(lambda: len(names(hook)) == 2)
        until(lambda: cluster.watches >= 3)
        assert cluster.lists == 1
        cluster.forget_history()
        cluster.replicas = 5
        cluster.settle()
        until(lambda: len(names(hook)) == 5)
        until(lambda: cluster.lists >= 2)
        cluster.outage = 2
        cluster.replicas = 1
        cluster.settle()
        until(lambda: len(names(hook)) == 1)


def test_an_api_server_that_is_away_is_a_failure_that_may_be_tried_again() -> None:
    """Its status is the reason."""
    cluster = Cluster()
    with scaling(cluster) as (hook, _):
        until(lambda: len(names(hook)) == 2)
        cluster.outage = 1_000
        with pytest.raises(HookError, match="500") as caught:
            asyncio.run(hook.act(start(3)))
        assert not caught.value.useless
        cluster.outage = 0


def test_a_leader_grows_a_deployment_and_shrinks_it(tmp_path: Path) -> None:
    """Pods that were there are adopted, new ones join when they are ready; nothing is scaled twice."""
    cluster = Cluster(replicas=1)

    async def test(hook: Scale) -> None:
        one = leader(tmp_path, hook)
        deadline_s = time.monotonic() + PATIENCE_S
        while len(one.roster().those("ready")) != 2:
            await one.tick()
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.05)
        assert [member.instance_id for member in one.roster()] == ["engines-0", "engines-1"]
        assert one.roster().named("engines-1").engine_url == "http://10.0.0.2:8000"

    with scaling(cluster) as (hook, _):
        until(lambda: names(hook) == ["engines-0"])
        asyncio.run(test(hook))
        assert cluster.writes == [2]


def test_a_lease_is_held_by_one_and_taken_over_when_it_runs_out() -> None:
    """Renewed while its holder lives; the next one waits until it has seen nothing new for as long as it lasts."""
    cluster = Cluster()

    async def test(own: Any) -> None:
        one, other = (
            KubernetesLease(own, namespace="llm", name="block", own_id=name, lasts_s=2.0) for name in ("a", "b")
        )
        assert await one.held()
        assert not await other.held()
        assert await other.holder() == "a"
        deadline_s = time.monotonic() + PATIENCE_S
        while not await other.held():  # the first one is heard of no more
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.1)
        one._renewed_s = -1e9
        assert not await one.held()
        assert cluster.leases["block"]["spec"]["leaseTransitions"] == 1
        await other.release()
        assert await one.held()

    with scaling(cluster) as (_, own):
        asyncio.run(test(own))


def test_two_that_take_a_lease_at_once_get_one() -> None:
    """The API server's versions decide."""
    cluster = Cluster()

    async def test(own: Any) -> None:
        leases = [KubernetesLease(own, namespace="llm", name="block", own_id=str(number)) for number in range(6)]
        held = await asyncio.gather(*(lease.held() for lease in leases))
        assert sum(held) == 1
        assert await leases[held.index(True)].held()

    with scaling(cluster) as (_, own):
        asyncio.run(test(own))
