"""The faults of a plan, carried out on a running cluster."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from scripts.chaos.cluster import ChaosCluster
from scripts.chaos.links import HEALTHY, LinkCondition
from scripts.chaos.plan import PlannedFault
from services.cluster.child import Child

GARBAGE = b"\xff" * 4096
SLICE_S = 0.05  # a process that crawls runs for half of the time
RESTART_S = 90.0
CLOCK_OFFSETS_S = {True: 3600, False: -3600}
DELAY_S, NARROW_BYTES_PER_S = 0.25, 20_000.0


class SkippedFaultError(Exception):
    """A fault that cannot happen here; the message is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultWindow:
    """A fault that happened, and the time for which it could be noticed."""

    kind: str
    part: str
    start_s: float  # monotonic
    end_s: float


@dataclass(slots=True, kw_only=True)
class FaultInjector:
    """Carries out a plan; `windows` and `skipped` say what has happened."""

    cluster: ChaosCluster
    client: httpx.AsyncClient
    windows: list[FaultWindow] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)

    async def run(self, plan: Sequence[PlannedFault], done: asyncio.Event) -> None:
        """Let each fault happen at its time, until the load has ended; return when all of them are over."""
        start_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for fault in plan:
                with suppress(TimeoutError):
                    await asyncio.wait_for(done.wait(), max(0.0, start_s + fault.at_s - time.monotonic()))
                if done.is_set():
                    return
                tasks.create_task(self._carried_out(fault))

    async def _carried_out(self, fault: PlannedFault) -> None:
        start_s = time.monotonic()
        try:
            await FAULTS[fault.kind](self, fault)
        except SkippedFaultError as why:
            self.skipped[f"{fault.kind}: {why}"] += 1
        else:
            window = FaultWindow(kind=fault.kind, part=fault.part, start_s=start_s, end_s=time.monotonic())
            self.windows.append(window)

    def _running(self, part: str) -> Child:
        """Return a process; SkippedFaultError while it is being restarted."""
        child = self.cluster.children.get(part)
        if child is None:
            raise SkippedFaultError("there is no such part")
        if not child.serves:
            raise SkippedFaultError("the part is being restarted")
        return child

    # Processes.

    async def kill(self, fault: PlannedFault) -> None:
        """Kill a process; it is restarted."""
        await self._end(self._running(fault.part), signal.SIGKILL)

    async def restart(self, fault: PlannedFault) -> None:
        """Let a process finish its requests and end; it is restarted."""
        await self._end(self._running(fault.part), signal.SIGTERM)

    async def _end(self, child: Child, number: signal.Signals) -> None:
        before = child.num_restarts
        with suppress(ProcessLookupError):
            os.kill(child.pid, number)
        with suppress(TimeoutError):
            async with asyncio.timeout(RESTART_S):
                while child.num_restarts == before or not child.serves:  # noqa: ASYNC110 - a child has no event
                    await asyncio.sleep(0.1)

    async def stop(self, fault: PlannedFault) -> None:
        """Stop a process for a while: it accepts connections, and does nothing."""
        pid = self._running(fault.part).pid
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(fault.for_s)
            finally:
                os.kill(pid, signal.SIGCONT)

    async def crawl(self, fault: PlannedFault) -> None:
        """Let a process run for half of the time only."""
        pid = self._running(fault.part).pid
        end_s = time.monotonic() + fault.for_s
        with suppress(ProcessLookupError):
            try:
                while time.monotonic() < end_s:
                    for number in (signal.SIGSTOP, signal.SIGCONT):
                        os.kill(pid, number)
                        await asyncio.sleep(SLICE_S)
            finally:
                os.kill(pid, signal.SIGCONT)

    # Engines.

    async def hang(self, fault: PlannedFault) -> None:
        """Let an engine do no steps for a while."""
        await self._order(fault, hang=True)

    async def slow(self, fault: PlannedFault) -> None:
        """Let an engine take ten times as long for a while."""
        await self._order(fault, slow=10.0)

    async def _order(self, fault: PlannedFault, **faults: Any) -> None:
        self._running(fault.part)
        url = f"{self.cluster.url_of(fault.part)}/admin/fault"
        with suppress(httpx.HTTPError):
            await self.client.post(url, json=faults)
            await asyncio.sleep(fault.for_s)
        with suppress(httpx.HTTPError):  # one that was killed meanwhile has no faults
            await self.client.post(url, json={})

    # Files.

    async def garble_state(self, fault: PlannedFault) -> None:
        """Overwrite the state file of an engine, which writes it again at its next steps."""
        path = self.cluster.state_file(fault.part)
        with suppress(OSError), path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            file.write(GARBAGE[: path.stat().st_size // 4])

    async def garble_instances(self, fault: PlannedFault) -> None:
        """Put garbage into the list of instances for a while."""
        self.cluster.instances_file.write_bytes(GARBAGE)
        await asyncio.sleep(fault.for_s)
        self.cluster.write_instances()

    async def torn_journal(self, fault: PlannedFault) -> None:
        """Kill the provisioner in the middle of a line of its journal."""
        child = self._running(fault.part)
        journal = self.cluster.pool_folder / "journal.jsonl"
        os.kill(child.pid, signal.SIGSTOP)
        with suppress(OSError), journal.open("ab") as file:
            file.write(b'{"at_unix_s": 17')
        await self._end(child, signal.SIGKILL)

    async def full_disk(self, fault: PlannedFault) -> None:
        """Leave no room for a while on the disk of state files, recordings and the provisioner's folder."""
        why = await asyncio.to_thread(self.cluster.disk.fill)
        if why:
            raise SkippedFaultError(why)
        try:
            await asyncio.sleep(fault.for_s)
        finally:
            self.cluster.disk.free()

    async def clock_jump(self, fault: PlannedFault) -> None:
        """Set the wall clock of a process an hour forward or back for a while."""
        if self.cluster.clocks.why_not:
            raise SkippedFaultError(self.cluster.clocks.why_not)
        self.cluster.clocks.set(fault.part, CLOCK_OFFSETS_S[round(fault.for_s * 10) % 2 == 0])
        await asyncio.sleep(fault.for_s)
        self.cluster.clocks.set(fault.part, 0)

    # Links.

    async def delay_link(self, fault: PlannedFault) -> None:
        """Delay what passes a link."""
        await self._with_link(fault, LinkCondition(delay_s=DELAY_S))

    async def narrow_link(self, fault: PlannedFault) -> None:
        """Limit the bandwidth of a link."""
        await self._with_link(fault, LinkCondition(bytes_per_s=NARROW_BYTES_PER_S))

    async def stall_link(self, fault: PlannedFault) -> None:
        """Let nothing pass a link."""
        await self._with_link(fault, LinkCondition(stalled=True))

    async def reset_link(self, fault: PlannedFault) -> None:
        """Reset all connections of a link."""
        if fault.part not in self.cluster.links:
            raise SkippedFaultError("there is no such link")
        self.cluster.links[fault.part].reset()

    async def _with_link(self, fault: PlannedFault, condition: LinkCondition) -> None:
        link = self.cluster.links.get(fault.part)
        if link is None:
            raise SkippedFaultError("there is no such link")
        link.set(condition)
        await asyncio.sleep(fault.for_s)
        link.set(HEALTHY)


Carry = Callable[[FaultInjector, PlannedFault], Awaitable[None]]

FAULTS: dict[str, Carry] = {
    name: getattr(FaultInjector, name)
    for name in (
        "kill", "stop", "crawl", "restart", "hang", "slow", "garble_state", "garble_instances", "torn_journal",
        "full_disk", "clock_jump", "delay_link", "narrow_link", "stall_link", "reset_link",
    )
}  # fmt: skip
