"""One trace of requests with two legs: simulator, emulated engines and what sidecars see of them agree."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from predictor.engine_replica import EngineReplica
from predictor.forecast import Forecaster
from predictor.request import DECODE, PREFILL, SERVE, RequestFacts
from services.emulator.app import version_of
from services.emulator.driver import Driver
from services.emulator.kv_transfers import EmulatedConnector
from services.emulator.openai import ParsedRequest, Served, request_from
from services.emulator.request_bodies import COMPLETION
from services.emulator.server import application
from services.emulator.settings import EmulatorSettings
from services.emulator.side_channel import BlocksOfPrefill
from services.emulator.transfer_params import RemoteBlocks
from services.engine_state.identity import client_id
from services.engine_state.reader import Reader
from services.engine_state.snapshot import config_of, reported_state
from services.engine_state.view import View
from services.http.kv_transfer import REMOTE_DECODE
from simulator.fleet import InstanceSpec
from simulator.workload import Workload
from tests.services.emulator.running import A30, MODEL
from tests.services.placement.scripted_connection import until, virtual_clock
from tests.simulator.small_clusters import poisson
from tests.simulator.test_coupled import HOP_S, Legs, Times, pools, run_coupled

SPEED = 1e-6  # engine seconds per second: the resolution of timers is nothing on the engines' clock
RESOLUTION_S = 1e-6  # of the event loop's clock, which reaches 1e8 seconds
LEASE_S = 1.0  # which heartbeats extend
CLOSE_S = 1e-6
ORDER_S = 1e-9  # between two hand-overs of legs that ended together, as the simulator has the first one first
LONG_S = 1e6
NUM = 40
P = 0  # the instance that prefills; the others decode
MAX_ROUNDS = 50


class Neighbour:
    """A side channel without a network, to engines in this process."""

    def __init__(self, held: Mapping[str, BlocksOfPrefill]) -> None:
        """Reach engines by their ids."""
        self._held = held

    async def watch(self, remote: RemoteBlocks) -> OpenWatch:
        """Watch blocks that are held."""
        ending = self._held[remote.engine_id].ending(remote.request_id)
        assert ending is not None
        return OpenWatch(ending)

    async def heartbeat(self, remote: RemoteBlocks, request_ids: Iterable[str]) -> None:
        """Extend leases."""
        for request_id in request_ids:
            self._held[remote.engine_id].extend(request_id)

    async def done(self, remote: RemoteBlocks) -> None:
        """Free blocks."""
        self._held[remote.engine_id].release(remote.request_id)

    def close(self) -> None:
        """There is no connection to close."""


class OpenWatch:
    """A watch of blocks in this process."""

    def __init__(self, ending: asyncio.Event) -> None:
        """Wait for their end."""
        self._ending = ending

    async def lost(self) -> None:
        """Return when they are not held any more."""
        await self._ending.wait()

    def close(self) -> None:
        """There is no connection to close."""


@dataclass(slots=True)
class Continued:
    """What happens, by sidecars, to the requests under way at a moment, and to the next one on each decode instance."""

    now_s: float
    times: dict[int, Times]
    next_times: dict[int, Times]
    num_rounds: int


@dataclass(slots=True)
class EmulatedCluster:
    """Emulated engines that serve a workload on a virtual clock, each request on given instances."""

    specs: list[InstanceSpec]
    work: Workload
    legs: list[Legs]
    folder: Path
    drivers: list[Driver] = field(default_factory=list)
    times: dict[int, Times] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)  # prefill legs
    seen: dict[int, Continued] = field(default_factory=dict)

    def run(self, moments: Iterable[int] = ()) -> None:
        """Serve all requests; look at the state files just before some of them."""
        held: dict[str, BlocksOfPrefill] = {}
        client = "services.emulator.kv_transfers.SideChannelClient"
        with virtual_clock() as loop, mock.patch(client, return_value=Neighbour(held)):
            loop._clock_resolution = RESOLUTION_S
            loop.run_until_complete(self._serve_all(held, set(moments)))

    async def _serve_all(self, held: dict[str, BlocksOfPrefill], moments: set[int]) -> None:
        with ExitStack() as stack:
            tasks = []
            for index, spec in enumerate(self.specs):
                config = replace(spec.config, kv_lease_s=LEASE_S / SPEED)
                connector = EmulatedConnector(config, MODEL, version_of(config), host="127.0.0.1", port=index + 1)
                held[connector.leases.engine_id] = connector.side_channel._held
                settings = EmulatorSettings(model=MODEL, state_file=str(self.file_of(index)), speed=SPEED)
                driver = application(settings, config, A30, connector).driver
                stack.callback(driver.close)
                self.drivers.append(driver)
                tasks.append(asyncio.create_task(driver.run()))
            async with asyncio.TaskGroup() as group:
                for number in range(len(self.legs)):
                    group.create_task(self._serve(number, looks=number in moments))
            self.check_idle()
            for task in tasks:
                task.cancel()

    def check_idle(self) -> None:
        """Nothing is left on any engine, and no block is held."""
        for driver in self.drivers:
            assert driver.failure is None
            gauges = driver.gauges()
            assert (gauges.num_running, gauges.num_waiting, gauges.num_held, gauges.kv_cache_usage) == (0, 0, 0, 0.0)

    def file_of(self, index: int) -> Path:
        """Return the state file of an instance."""
        return self.folder / f"{index}.state"

    async def _serve(self, number: int, *, looks: bool) -> None:
        legs = self.legs[number]
        await until(float(self.work.arrival_s[number]) / SPEED)
        if looks:
            self.seen[number] = self.continued(number)
        prefilled_s, params = -1.0, None
        if legs.prefill is not None:
            first = self.drivers[legs.prefill]
            job = first.submit(self.parsed(number, max_tokens=1, kv_transfer_params=REMOTE_DECODE))
            slot = job.slot
            while await job.more():
                job.num_sent = job.num_ready
            self.ended[number] = prefilled_s = float(first.engine.state.requests[slot].finished_s)
            params = job.kv_transfer_params
            await asyncio.sleep((HOP_S + ORDER_S * number) / SPEED)
        last = self.drivers[legs.decode]
        request = self.parsed(number, kv_transfer_params=params)
        assert last.connector is not None
        fetch = None if request.remote is None else await last.connector.fetches.open(request.remote)
        job = last.submit(request, fetch)
        while await job.more():
            job.num_sent = job.num_ready
        row = last.engine.state.requests[job.slot]
        fetched_s = -1.0 if fetch is None else float(row.transfer_s)
        self.times[number] = Times(prefilled_s, fetched_s, float(row.first_token_s), float(row.finished_s))

    def parsed(self, number: int, **fields: Any) -> ParsedRequest:
        """Return a request as its engine reads it."""
        body = {
            "prompt": [number + 1] * int(self.work.lengths.prompt_tokens[number]),
            "max_tokens": int(self.work.lengths.output_tokens[number]),
            "ignore_eos": True,
            **fields,
        }
        longest = self.specs[P].config.max_model_len
        served = Served(model=MODEL, max_model_len=longest, lengths=mock.Mock(seed=0), has_connector=True)
        return request_from(COMPLETION, body, {}, str(number), served)

    # What sidecars know.

    def continued(self, number: int) -> Continued:
        """Let replicas of the engines, set to their state files, go on together until nothing is left to do.

        Each gets what the others did in the last round, until a round changes nothing.
        """
        views = [Reader(str(self.file_of(index))).read() for index in range(len(self.specs))]
        now_s = views[P].now_s
        on_prefill = [one for one in range(number) if self.legs[one].prefill == P and one not in self.times]
        ends, fetched = dict(self.ended), dict.fromkeys(on_prefill, math.inf)
        for num_rounds in range(1, MAX_ROUNDS):
            before = dict(ends), dict(fetched)
            prefill = self.replica_at(P, views[P], number, ends, fetched)
            prefill.engine.advance(LONG_S)
            ends = self.ended | {one: float(row.first_token_s) for one, row in self.rows(prefill, views[P])}
            ends = {one: end_s for one, end_s in ends.items() if end_s >= 0}  # others wait for blocks that are held
            times = {}
            for index in range(1, len(self.specs)):
                decode = self.replica_at(index, views[index], number, ends, fetched)
                decode.engine.advance(LONG_S)
                for one, row in self.rows(decode, views[index]):
                    is_whole = self.legs[one].prefill is None
                    ended_s = -1.0 if is_whole else ends[one]
                    fetched_s = -1.0 if is_whole else float(row.transfer_s)
                    times[one] = Times(ended_s, fetched_s, float(row.first_token_s), float(row.finished_s))
            fetched = {one: times[one].fetched_s if one in times else math.inf for one in fetched}
            if (ends, fetched) == before:
                next_times = self.forecasts(number, views, ends, fetched)
                return Continued(now_s, times, next_times, num_rounds)
        raise AssertionError("the rounds do not end")

    def forecasts(
        self, number: int, views: list[View], ends: Mapping[int, float], fetched: Mapping[int, float]
    ) -> dict[int, Times]:
        """Forecast the legs of a request that arrives now, with its decode leg on each instance."""
        now_s, found = views[P].now_s, {}
        prefill = self.replica_at(P, views[P], number, ends, fetched)
        (first,) = Forecaster(prefill.engine).forecast([self.facts(number, PREFILL)], now_s)
        for index in range(1, len(self.specs)):
            decode = self.replica_at(index, views[index], number, ends, fetched)
            leg = self.facts(number, DECODE, in_s=first.e2e_s + HOP_S)
            (last,) = Forecaster(decode.engine).forecast([leg], now_s)
            assert last.fetched_s is not None
            spans = first.e2e_s, last.fetched_s, last.ttft_s, last.e2e_s
            found[index] = Times(*(now_s + seconds for seconds in spans))
        return found

    def replica_at(
        self, index: int, view: View, number: int, ends: Mapping[int, float], fetched: Mapping[int, float]
    ) -> EngineReplica:
        """Return a replica of an engine, with the requests before one that the engine does not show yet."""
        num_slots = len(view.live)
        held_s = np.full(num_slots, np.nan)
        shown = {int(client_id(view.requests["request_id"][slot].decode())): slot for slot in view.slots.tolist()}
        for one, slot in shown.items():
            if one in fetched:
                held_s[slot] = held_for_s(one, ends, fetched)
        replica = EngineReplica(config_of(view), A30.step_time, num_slots=num_slots, track_blocks=False)
        replica.update(
            reported_state(
                view, known_tokens=np.zeros(num_slots, np.int64), tag_median=np.full(num_slots, np.nan),
                tag_spread=np.zeros(num_slots), remembers=False, held_s=held_s,
            )
        )  # fmt: skip
        for one in range(number):
            leg, arrival_s = self.leg_at(index, one, ends)
            if one not in shown and one not in self.times and arrival_s < math.inf and self.is_due(index, one):
                held = held_for_s(one, ends, fetched) if leg == PREFILL else None
                replica.engine.add(self.facts(one, leg, arrival_s=arrival_s, held_s=held))
        return replica

    def is_due(self, index: int, one: int) -> bool:
        """Return whether a request has yet to come to an engine, or has just come."""
        return self.legs[one].decode == index or (index == P and self.legs[one].prefill == P and one not in self.ended)

    def leg_at(self, index: int, one: int, ends: Mapping[int, float]) -> tuple[str, float]:
        """Return which leg of a request an engine serves, and when that arrives."""
        if index == P:
            return PREFILL, float(self.work.arrival_s[one])
        if self.legs[one].prefill is None:
            return SERVE, float(self.work.arrival_s[one])
        return DECODE, ends.get(one, math.inf) + HOP_S

    def facts(self, number: int, leg: str, **fields: Any) -> RequestFacts:
        """Return a request as a sidecar receives it."""
        return RequestFacts(
            request_id=str(number),
            prompt_tokens=int(self.work.lengths.prompt_tokens[number]),
            output_tokens=int(self.work.lengths.output_tokens[number]),
            leg=leg,
            **fields,
        )

    def rows(self, replica: EngineReplica, view: View) -> Iterator[tuple[int, Any]]:
        """Return the requests of a replica, and what has become of them."""
        rows = replica.engine.state.requests
        for slot in view.slots.tolist():
            yield int(client_id(view.requests["request_id"][slot].decode())), rows[slot]
        for name, slot in replica.engine.slots.items():
            yield int(name), rows[slot]


def held_for_s(one: int, ends: Mapping[int, float], fetched: Mapping[int, float]) -> float:
    """Return how long the blocks of a prefill leg are held, as far as is known."""
    return min(LONG_S, max(0.0, fetched[one] - ends[one])) if one in ends else LONG_S


CASES = {
    "little memory": {"num_gpu_blocks": 34},
    "slow link": {"kv_transfer_bytes_per_s": 2e8},
    "slow link, little memory": {"kv_transfer_bytes_per_s": 3e8, "num_gpu_blocks": 34},
    "links of their own": {"kv_transfer_shared": False, "kv_transfer_base_s": 0.05, "num_gpu_blocks": 40},
    "sync": {"async_scheduling": False, "max_num_seqs": 4, "kv_transfer_bytes_per_s": 5e8},
}
QUICK = ("slow link, little memory", "sync")
MOMENTS = range(1, NUM, 3)


@pytest.mark.parametrize("case", [pytest.param(one, marks=[pytest.mark.slow] * (one not in QUICK)) for one in CASES])
def test_simulator_emulated_engines_and_sidecars_agree(tmp_path: Path, case: str) -> None:
    """On each request's prefill end, fetch end, first and last token; sidecars at any moment, if nothing else comes."""
    generator = np.random.default_rng(7)
    specs, work = pools(1, 2, **CASES[case]), poisson(NUM, 25.0, 5, max_tokens=300)
    work.lengths.output_tokens[:] += 1
    legs = [Legs(None if generator.random() < 0.15 else P, int(generator.integers(1, 3))) for _ in range(NUM)]
    cluster = EmulatedCluster(specs, work, legs, tmp_path)
    cluster.run(MOMENTS)
    simulated = run_coupled(specs, work, legs)
    emulated = [cluster.times[number] for number in range(NUM)]
    assert np.array(emulated) == pytest.approx(np.array(simulated), abs=CLOSE_S)
    if "little memory" in case:  # prefills wait for blocks that decode engines have to fetch
        assert any(seen.num_rounds > 2 for seen in cluster.seen.values())
    for number, seen in cluster.seen.items():
        expected = run_coupled(specs, work, legs[:number])
        under_way = {one for one in range(number) if expected[one].finished_s > seen.now_s + CLOSE_S}
        assert seen.times.keys() == under_way
        for one, times in seen.times.items():
            assert to_come(times, seen.now_s) == pytest.approx(to_come(expected[one], seen.now_s), abs=CLOSE_S), one
        for decode, times in seen.next_times.items():
            alone = run_coupled(specs, work, [*legs[:number], Legs(P, decode)])[number]
            assert tuple(times) == pytest.approx(tuple(alone), abs=CLOSE_S), (number, decode)


def to_come(times: Times, now_s: float) -> tuple[float, ...]:
    """Leave out what has happened."""
    return tuple(time_s if time_s > now_s else 0.0 for time_s in times)
