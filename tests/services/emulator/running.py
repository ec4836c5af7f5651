"""Emulated engines for tests: within this process, on a thread of their own, or as processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import uvloop

from predictor.config import EngineConfig
from predictor.profile import Profile, load_profile
from services.emulator.app import Emulator
from services.emulator.driver import Driver
from services.emulator.server import RunningEmulator, serving
from services.emulator.settings import EmulatorSettings
from services.http.server import listening

ROOT = Path(__file__).parents[3]
MODEL = "tiny"
PATIENCE_S = 60.0
A30 = load_profile("llama-2-7b-a30")
CONFIG = EngineConfig(max_num_seqs=16, num_gpu_blocks=257, max_model_len=1024, block_size=16)

COMMAND = (sys.executable, "-c", "from services.cli import main; main()", "serve", "engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulated:
    """A running emulated engine, and a client of it."""

    app: Emulator
    driver: Driver
    state_file: Path
    client: httpx.Client

    def complete(self, **fields: Any) -> dict[str, Any]:
        """Request a completion in one piece."""
        answer = self.client.post("/v1/completions", json={"prompt": "Hello", "ignore_eos": True, **fields})
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body

    def request_and_disconnect(self, **fields: Any) -> None:
        """Request an answer in one piece, and disconnect as soon as the engine has the request."""
        num_jobs = self.driver.num_jobs
        content = json.dumps({"prompt": "Hello", "ignore_eos": True, **fields}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n"
        with socket.create_connection((self.client.base_url.host, self.client.base_url.port)) as asking:
            asking.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + content)
            self.until(lambda: self.driver.num_jobs > num_jobs)

    def set_faults(self, **faults: Any) -> None:
        """Set faults; without any, all are switched off."""
        assert self.client.post("/admin/fault", json=faults).status_code == 200

    def metric(self, name: str) -> float:
        """One sample of /metrics, by its name and the labels that not all samples have."""
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.plain_metrics(), re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    def plain_metrics(self) -> str:
        """/metrics without the labels that all have."""
        text = self.client.get("/metrics").text
        return re.sub(r"\{\}", "", re.sub(r'engine="0",?|model_name="tiny",?', "", text)).replace(",}", "}")

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait for a condition, with a request between two checks."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline_s, "the condition did not hold in time"
            self.client.get("/load")

    def is_idle(self) -> bool:
        """Tell whether nothing runs or waits, and all blocks are free."""
        gauges = self.driver.gauges()
        return (gauges.num_running, gauges.num_waiting, gauges.kv_cache_usage) == (0, 0, 0.0)


@contextmanager
def emulated(
    folder: Path, config: EngineConfig = CONFIG, profile: Profile = A30, **settings: Any
) -> Iterator[Emulated]:
    """Run an emulated engine on a thread of its own while the block runs."""
    state_file = folder / "engine.state"
    values = EmulatorSettings(**{"model": MODEL, "state_file": str(state_file), "port": 0, "speed": 200.0, **settings})
    started: Future[RunningEmulator] = Future()
    stopping: list[Callable[[], object]] = []

    async def run() -> None:
        stop = asyncio.Event()
        stopping.append(partial(asyncio.get_running_loop().call_soon_threadsafe, stop.set))
        with listening(values.host, values.port) as own:
            async with serving(values, config, profile, own) as here:
                started.set_result(here)
                await stop.wait()

    def run_and_report() -> None:
        try:
            uvloop.run(run())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=run_and_report)
    thread.start()
    try:
        here = started.result()
        url = f"http://127.0.0.1:{here.port}"
        with httpx.Client(base_url=url, timeout=PATIENCE_S, limits=httpx.Limits()) as client:
            yield Emulated(app=here.app, driver=here.app.driver, state_file=state_file, client=client)
    finally:
        if started.exception() is None:
            stopping[0]()
        thread.join()


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """An emulated engine as a process."""

    process: subprocess.Popen[str]
    url: str


@contextmanager
def process(*arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[Started]:
    """Start `block serve engine` on a free port, and wait until it serves."""
    command = [*COMMAND, "--port", "0", "--log-format", "json", *arguments]
    told = {**os.environ, **(environment or {})}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=told) as child:
        assert child.stderr is not None
        try:
            for line in child.stderr:
                assert line.startswith("{"), line
                said = json.loads(line)
                if said["event"] == "serving":
                    yield Started(process=child, url=f"http://127.0.0.1:{said['port']}")
                    break
        finally:
            child.kill()
            child.stderr.read()


def events(text: str) -> list[Any]:
    """The events of a stream; the last one must be [DONE]."""
    *data, last, end = text.split("\n\n")
    assert (last, end) == ("data: [DONE]", "")
    assert all(event.startswith("data: ") for event in data)
    return [json.loads(event.removeprefix("data: ")) for event in data]
