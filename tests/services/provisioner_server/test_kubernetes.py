"""The `kubernetes` hook and lease against a local API server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes_asyncio", reason="the extra `kubernetes` is not installed")

from kubernetes_asyncio import client

from protos.block.v1 import provisioner_pb2 as pb
from services.provisioner_server.hooks import HookError
from services.provisioner_server.hooks.kubernetes import Scale
from services.provisioner_server.lease import KubernetesLease
from tests.services.provisioner_server.acting import leader
from tests.services.provisioner_server.api_server import Cluster, api_server
from tests.services.waiting import run, until

PATIENCE_S = 60.0


@asynccontextmanager
async def scaling(cluster: Cluster) -> AsyncIterator[tuple[Scale, Any]]:
    """A hook on a cluster, and the configuration of its client."""
    cluster.settle()
    with api_server(cluster) as url:
        configuration = client.Configuration(host=url)
        hook = Scale(configuration, namespace="llm", kind=cluster.kind, name="engines")
        try:
            yield hook, configuration
        finally:
            await hook.close()


async def names(hook: Scale) -> list[str]:
    """The ids of the instances that the hook reports."""
    return [one.instance_id for one in await hook.instances() or []]


async def until_names(hook: Scale, *expected: str) -> None:
    """Wait until the hook reports these instances."""
    deadline_s = asyncio.get_running_loop().time() + PATIENCE_S
    while await names(hook) != list(expected):
        assert asyncio.get_running_loop().time() < deadline_s
        await asyncio.sleep(0.02)


def engines(num: int) -> list[str]:
    """The names of the first pods."""
    return [f"engines-{number}" for number in range(num)]


def start(num_desired: int) -> pb.Action:
    """An action that adds an instance."""
    return pb.Action(action_id="p-1", kind=pb.ACTION_KIND_START, num_instances=1, num_desired=num_desired)


def drain(num_desired: int, *instance_ids: str) -> pb.Action:
    """An action that removes instances."""
    return pb.Action(action_id="p-2", kind=pb.ACTION_KIND_DRAIN, instance_ids=instance_ids, num_desired=num_desired)


@pytest.mark.parametrize("kind", ["deployment", "statefulset"])
def test_a_scale_is_set_once_for_a_repeated_action(kind: str) -> None:
    """The number is absolute: the same action twice writes once."""

    async def test() -> None:
        cluster = Cluster(kind=kind)
        async with scaling(cluster) as (hook, _):
            for _repetition in range(2):
                assert (await hook.act(start(4))).action_id == "p-1"
            assert cluster.writes == [4]
            await until_names(hook, *engines(4))

    run(test)


def test_a_conflict_reads_the_scale_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale that another client changes between read and write costs another turn, not the action."""

    async def test() -> None:
        cluster = Cluster(intruders=3)
        async with scaling(cluster) as (hook, _):
            await hook.act(start(3))
            assert cluster.writes == [3]
            cluster.intruders = 1000
            monkeypatch.setattr("services.provisioner_server.hooks.kubernetes.CONFLICT_PAUSE_S", 0.0)
            with pytest.raises(HookError, match="conflicts"):
                await hook.act(start(5))
            assert cluster.writes == [3]

    run(test)


def test_the_role_of_a_pod_is_that_of_its_label() -> None:
    """With llm-d's words, as schedulers read it; one that is none is passed on, and the pool refuses it."""

    async def test() -> None:
        cluster = Cluster(replicas=4)
        cluster.settle()
        for name, label in zip(engines(4), ("decode", "encode-prefill-decode", "cook", None), strict=True):
            if label is not None:
                cluster.pods[name]["metadata"]["labels"]["llm-d.ai/role"] = label
        async with scaling(cluster) as (hook, _):
            await until_names(hook, *engines(4))
            assert [one.role for one in await hook.instances() or []] == ["decode", "both", "cook", ""]

    run(test)


def test_the_marked_pod_is_removed() -> None:
    """A Deployment's controller removes the pod with the lowest deletion cost first."""

    async def test() -> None:
        cluster = Cluster(replicas=4)
        async with scaling(cluster) as (hook, _):
            await until_names(hook, *engines(4))
            await hook.act(drain(3, "engines-1"))
            await until_names(hook, "engines-0", "engines-2", "engines-3")
            await hook.act(drain(3, "engines-1"))  # again, though it is gone
            assert cluster.writes == [3]
            assert hook.fixed_choice(["engines-0", "engines-2"], 1) is None

    run(test)


def test_a_stopped_pod_is_deleted_and_replaced() -> None:
    """The scale stays; a pod that is gone already is no error."""

    async def test() -> None:
        cluster = Cluster(replicas=2)
        action = pb.Action(action_id="p-3", kind=pb.ACTION_KIND_STOP, instance_ids=["engines-1"], num_desired=2)
        async with scaling(cluster) as (hook, _):
            await until_names(hook, *engines(2))
            for _repetition in range(2):
                await hook.act(action)
            await until_names(hook, "engines-0")
            cluster.settle()
            await until_names(hook, *engines(2))
            assert cluster.writes == []

    run(test)


def test_a_stateful_set_removes_the_highest_ordinals() -> None:
    """The controller offers no choice, so the pods that it will remove are drained."""

    async def test() -> None:
        async with scaling(Cluster(kind="statefulset", replicas=12)) as (hook, _):
            assert hook.fixed_choice(engines(12), 2) == ["engines-10", "engines-11"]

    run(test)


def test_watches_are_resumed() -> None:
    """A broken watch continues where it was; one that is too old lists again; an outage is waited out."""

    async def test() -> None:
        cluster = Cluster()
        async with scaling(cluster) as (hook, _):
            await until_names(hook, *engines(2))
            await until(lambda: cluster.watches >= 3)
            assert cluster.lists == 1
            cluster.forget_history()
            cluster.replicas = 5
            cluster.settle()
            await until_names(hook, *engines(5))
            await until(lambda: cluster.lists >= 2)
            cluster.outage = 2
            cluster.replicas = 1
            cluster.settle()
            await until_names(hook, "engines-4")

    run(test)


def test_an_unavailable_api_server_is_a_failure_that_is_worth_a_retry() -> None:
    """Its status is the reason; a server that refuses connections is a failure too."""

    async def test() -> None:
        cluster = Cluster()
        async with scaling(cluster) as (hook, _):
            await until_names(hook, *engines(2))
            cluster.outage = 1_000
            with pytest.raises(HookError, match="500") as caught:
                await hook.act(start(3))
            assert not caught.value.permanent
            cluster.outage = 0
        absent = Scale(client.Configuration(host="http://127.0.0.1:1"), namespace="llm", kind="deployment", name="e")
        with pytest.raises(HookError, match="127.0.0.1:1") as caught:
            await absent.act(start(3))
        assert not caught.value.permanent
        assert await absent.instances() is None
        await absent.close()

    run(test)


def test_a_leader_scales_a_deployment_up(tmp_path: Path) -> None:
    """Pods that exist are adopted, new ones join when they are ready; nothing is scaled twice."""

    async def test() -> None:
        cluster = Cluster(replicas=1)
        async with scaling(cluster) as (hook, _):
            await until_names(hook, "engines-0")
            one = leader(tmp_path, hook)
            deadline_s = asyncio.get_running_loop().time() + PATIENCE_S
            while len(one.roster().in_state("ready")) != 2:
                await one.tick()
                assert asyncio.get_running_loop().time() < deadline_s
                await asyncio.sleep(0.05)
            assert [member.instance_id for member in one.roster()] == engines(2)
            assert one.roster().find("engines-1").engine_url == "http://10.0.0.2:8000"
            assert cluster.writes == [2]

    run(test)


def lease(configuration: Any, own_id: str, **values: Any) -> KubernetesLease:
    """A provisioner's view of the lease."""
    return KubernetesLease(configuration, namespace="llm", name="block", own_id=own_id, **values)


def test_a_lease_is_held_by_one_and_acquired_by_another_when_it_expires() -> None:
    """The next provisioner waits until the lease has not changed for its duration."""

    async def test() -> None:
        cluster = Cluster()
        async with scaling(cluster) as (_, configuration):
            one, other = (lease(configuration, own_id, duration_s=2.0) for own_id in ("a", "b"))
            assert await one.held()
            assert not await other.held()
            assert await other.holder() == "a"
            deadline_s = asyncio.get_running_loop().time() + PATIENCE_S
            while not await other.held():  # the first one no longer renews it
                assert asyncio.get_running_loop().time() < deadline_s
                await asyncio.sleep(0.1)
            one._renewed_s = -1e9
            assert not await one.held()
            assert cluster.leases["block"]["spec"]["leaseTransitions"] == 1
            await other.release()
            assert await one.held()
            await one.release()

    run(test)


def test_a_lease_survives_a_short_outage_of_the_api_server() -> None:
    """It counts as held for two thirds of its duration; one that was never held does not."""

    async def test() -> None:
        cluster = Cluster()
        async with scaling(cluster) as (_, configuration):
            one, other = (lease(configuration, own_id, duration_s=1800.0) for own_id in ("a", "b"))
            assert await one.held()
            renewed_s = one._renewed_s
            cluster.outage = 1_000
            one._renewed_s = renewed_s - 900.0  # due for renewal
            assert await one.held()
            assert not await other.held()
            one._renewed_s = renewed_s - 1500.0
            assert not await one.held()
            cluster.outage = 0
            await asyncio.gather(one.release(), other.release())

    run(test)


def test_two_that_acquire_a_lease_at_once_get_one() -> None:
    """The API server's versions decide."""

    async def test() -> None:
        async with scaling(Cluster()) as (_, configuration):
            leases = [lease(configuration, str(number)) for number in range(6)]
            held = await asyncio.gather(*(one.held() for one in leases))
            assert sum(held) == 1
            assert await leases[held.index(True)].held()
            await asyncio.gather(*(one.release() for one in leases))

    run(test)
