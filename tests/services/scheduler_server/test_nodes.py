"""Several instances whose sidecars share an address: one message for all of them, and its failures."""

from __future__ import annotations

import asyncio
from pathlib import Path

from services.instances.instance import Instance, Instances
from services.instances.sources import InstanceSource, Listed
from tests.services.engine_state.files import busy, writer_at
from tests.services.predictor_server.running_sidecars import NodeClient, node_of
from tests.services.scheduler_server.running import FOR_EVER, run, scheduler, statuses, until
from tests.services.stub_sidecars import sidecars

ENDLESS_S = 1e9
LONG_S = 300.0  # of reservations, which must not expire on a busy machine


def listed(node: NodeClient, *names: str) -> list[Instance]:
    """Return instances with one sidecar address."""
    return [
        Instance(instance_id=name, engine_url="http://127.0.0.1:1", sidecar_address=f"127.0.0.1:{node.port}")
        for name in names
    ]


def test_one_message_requests_all_forecasts_of_a_node(tmp_path: Path) -> None:
    """The less busy instance is reserved; an instance without an engine and an unknown one have different statuses."""
    writers = [busy(writer_at(tmp_path / name)) for name in "ab"]

    async def test() -> None:
        files = {name: tmp_path / name for name in ("a", "b", "late")}
        async with (
            node_of(files, stall_s=ENDLESS_S) as node,
            scheduler(Listed(listed(node, "a", "b", "late", "unknown")), reservation_s=LONG_S) as client,
        ):
            seen = []
            for num in (1, 2):
                decision = await client.decide(explain=True)
                seen.append(decision.instance.instance_id)
                assert statuses(decision) == {"a": "FORECAST", "b": "FORECAST", "late": "DOWN", "unknown": "INVALID"}
                for name in "ab":
                    assert node.registry.get_sample_value("block_predict_seconds_count", {"instance": name}) == num
            assert sorted(seen) == ["a", "b"]  # the first reservation counts in the second decision
            assert [len(sidecar.reservations) for sidecar in node.sidecars] == [1, 1, 0]

    run(test)
    for writer in writers:
        writer.close()


class ChangingList(InstanceSource):
    """A list of instances that a test changes."""

    def __init__(self, instances: Instances) -> None:
        """Start with a list."""
        self._new: Instances | None = instances

    def change(self, instances: Instances) -> None:
        """Replace the list."""
        self._new = instances

    async def poll(self) -> Instances | None:
        """Return a list once."""
        new, self._new = self._new, None
        return new


def test_a_reservation_completes_when_its_instance_is_removed_meanwhile() -> None:
    """A call in progress ends as it would have otherwise."""

    async def test() -> None:
        async with sidecars("a") as (stub,):
            source = ChangingList((stub.instance,))
            async with scheduler(source) as client:
                await client.choose()
                stub.hung_reserving = asyncio.Event()
                reserving = asyncio.create_task(client.decide())
                await until(lambda: stub.num_reserving == 2)
                source.change(())
                while client.count("block_instances"):
                    await asyncio.sleep(0.001)
                stub.hung_reserving.set()
                assert (await reserving).instance.instance_id == "a"
                assert len(stub.held) == 2

    run(test)


def test_a_removed_instance_is_not_reserved() -> None:
    """Its forecast is still received and is the best, but the next best instance is chosen."""

    async def test() -> None:
        async with sidecars("a", "b") as stubs:
            a, b = stubs
            b.e2e_s = 50.0
            source = ChangingList((a.instance, b.instance))
            async with scheduler(source) as client:
                assert await client.choose() == "a"
                a.hung = asyncio.Event()
                asking = asyncio.create_task(client.decide(explain=True))
                while len(a.questions) < 2:
                    await asyncio.sleep(0.001)
                source.change((b.instance,))
                while client.count("block_instances") != 1:
                    await asyncio.sleep(0.001)
                a.hung.set()
                decision = await asking
                assert decision.instance.instance_id == "b"
                assert "without a: when reserving: instance was removed from the list" in decision.why

    run(test)


def test_instances_of_a_node_share_a_circuit() -> None:
    """All of them are skipped after the number of failures that opens one circuit."""

    async def test() -> None:
        async with sidecars("unknown", "c") as (gone, stub):
            await gone.stop()
            there = [
                Instance(instance_id=name, engine_url="http://127.0.0.1:1", sidecar_address=f"127.0.0.1:{gone.port}")
                for name in "ab"
            ]
            async with scheduler(Listed([*there, stub.instance]), **FOR_EVER) as client:
                for _ in range(2):
                    decision = await client.decide(explain=True)
                    assert statuses(decision) == {"a": "DOWN", "b": "DOWN", "c": "FORECAST"}
                assert client.count("block_sidecar_circuits_open") == 1
                assert client.count("block_sidecar_failures_total", instance="b", kind="down") == 2
                assert "circuit open" in (await client.decide(explain=True)).why

    run(test)


def test_an_engine_that_is_down_is_no_failure_of_its_node(tmp_path: Path) -> None:
    """A policy without indicators learns of it when it reserves, tries other instances, and retries it after a pause."""
    writers = [busy(writer_at(tmp_path / name)) for name in "ab"]

    async def test() -> None:
        files = {name: tmp_path / name for name in ("a", "b", "gone")}
        async with (
            node_of(files, stall_s=ENDLESS_S) as node,
            scheduler(
                Listed(listed(node, "a", "b", "gone")), policy="round_robin", reservation_s=LONG_S, **FOR_EVER
            ) as client,
        ):
            seen = [(await client.decide()).instance.instance_id for _ in range(12)]
            assert {"a", "b"} == set(seen)
            assert client.count("block_sidecar_circuits_open") == 0
            assert client.count("block_reservations_total", result="refused") == 2
            assert sum(len(sidecar.reservations) for sidecar in node.sidecars) == 12

    run(test)
    for writer in writers:
        writer.close()
