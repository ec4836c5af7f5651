"""Wrong settings of KV events, and endpoints where nothing useful answers: one clear line, and nothing crashes."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq.asyncio
from prometheus_client import CollectorRegistry

from predictor.kv_events.events import BlocksRemoved, BlocksStored, KvEventBatch
from predictor.kv_events.stream import UNSURE, KvEventStream
from services.emulator.settings import EmulatorSettings
from services.kv_events.metrics import KvEventCollectors, KvEventMetrics
from services.kv_events.publisher import KvEventPublisher, kv_events_config
from services.kv_events.settings import KvEventSettings
from services.predictor_server.settings import MirrorSettings
from tests.predictor.kv_events.making import SIZE, new_index
from tests.services.cli.running import refusal
from tests.services.kv_events.test_following import following, until
from tests.services.predictor_server.running_sidecars import run

URL = ("--engine-url", "http://127.0.0.1:1", "--profile", "llama-2-7b-a30")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ((*URL, "--kv-events", "5557"), "kv_events: '5557' must be ipc://PATH or tcp://HOST:PORT"),
        ((*URL, "--kv-events", "tcp://*:5557"), "kv_events: 'tcp://*:5557' must be ipc://PATH or tcp://HOST:PORT"),
        ((*URL, "--kv-events", "tcp://127.0.0.1:99999"), "kv_events: 'tcp://127.0.0.1:99999' must be"),
        ((*URL, "--kv-events-replay", "ipc:///r"), "kv_events_replay: goes with kv_events only"),
        ((*URL, "--kv-events", "ipc:///e", "--kv-events-replay", "ipc:///e"), "kv_events_replay: is the same"),
        ((*URL, "--kv-events", "tcp://10.0.0.1:5557"), "kv_events: tcp://10.0.0.1:5557 is on another machine"),
        (("--state-file", "/s", "--kv-events", "ipc:///e"), "kv_events: goes without state_file"),
        (("--engine", "a=/s", "--kv-events", "ipc:///e"), "kv_events: goes with one mirrored engine"),
    ],
)
def test_a_sidecar_refuses_wrong_endpoints(flags: tuple[str, ...], line: str) -> None:
    """With the flag's name."""
    assert line in refusal("serve", "predictor", *flags)


def test_other_machines_are_followed_where_the_network_is_trusted() -> None:
    """With --insecure."""
    from services.security.settings import TlsSettings

    MirrorSettings(
        engine_url="http://10.0.0.1:1",
        kv_events=KvEventSettings(endpoint="tcp://10.0.0.1:5557"),
        tls=TlsSettings(insecure=True),
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{", "kv_events_config: is no JSON"),
        ("[]", "kv_events_config: must be an object"),
        ('{"endpoints": "x"}', "kv_events_config.endpoints: "),
        ('{"publisher": "kafka"}', "kv_events_config.publisher: 'kafka' is neither zmq nor null"),
        ('{"buffer_steps": -1}', "kv_events_config.buffer_steps: must be a number from 0"),
        ('{"enable_kv_cache_events": 1}', "kv_events_config.enable_kv_cache_events: must be true or false"),
        ('{"endpoint": 5}', "kv_events_config.endpoint: must be a text"),
    ],
)
def test_an_emulated_engine_refuses_a_wrong_configuration(text: str, line: str) -> None:
    """As one line that names the key."""
    with pytest.raises(ValueError, match="kv_events_config") as caught:
        EmulatorSettings(model="m", kv_events_config=text)
    assert line in str(caught.value).replace("unknown key ", "")


def test_an_endpoint_that_is_taken_is_named(tmp_path: Path) -> None:
    """And so is one that several ranks cannot share."""

    async def test() -> None:
        with socket.socket() as taken:
            taken.bind(("0.0.0.0", 0))  # noqa: S104 - as the publisher
            taken.listen()
            config = kv_events_config(f'{{"endpoint": "tcp://*:{taken.getsockname()[1]}"}}')
            with pytest.raises(ValueError, match=r"^kv_events_config\.endpoint: tcp://\*:\d+: Address already in use"):
                KvEventPublisher(config)
        with pytest.raises(ValueError, match="for several ranks"):
            KvEventPublisher(kv_events_config(f'{{"endpoint": "ipc://{tmp_path}/e"}}'), 1)

    run(test())


def test_endpoints_where_nothing_publishes_are_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process listens at one, and an HTTP server at the other; replays are tried again, more and more rarely."""
    monkeypatch.setattr("services.kv_events.subscriber.ABSENT_S", 0.1)
    monkeypatch.setattr("services.kv_events.subscriber.REPLAY_TIMEOUT_S", 0.1)

    async def reply(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    def lines(text: str) -> list[Any]:
        return [one for one in caplog.records if one.getMessage() == text]

    async def test() -> None:
        server = await asyncio.start_server(reply, "127.0.0.1", 0)
        http = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        nowhere = KvEventSettings(endpoint=f"ipc://{tmp_path}/none", replay_endpoint=f"ipc://{tmp_path}/neither")
        async with following(nowhere) as one, following(KvEventSettings(endpoint=http)) as two:
            await until(lambda: len(lines("no KV events: nothing publishes at this endpoint")) == 2)
            await until(lambda: bool(lines("KV events cannot be replayed")))
            await asyncio.sleep(0.5)
            assert (one.stream.certainty, two.stream.certainty) == (UNSURE, UNSURE)
        server.close()
        await server.wait_closed()

    run(test())
    assert len(lines("no KV events: nothing publishes at this endpoint")) == 2
    assert len(lines("KV events cannot be replayed")) == 1


def test_a_replay_without_an_end_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its batches nor the time that they take have another limit."""
    monkeypatch.setattr("services.kv_events.subscriber.MAX_REPLAYED", 50)
    number, batch = bytes(8), msgpack.packb([1.0, [], 0])

    async def repeat(socket: zmq.asyncio.Socket) -> None:
        asker, *_ = await socket.recv_multipart()
        while True:
            await socket.send_multipart([asker, b"", b"", number, batch])
            await asyncio.sleep(0)

    async def test() -> None:
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.ROUTER)
        socket.bind(f"ipc://{tmp_path}/replay")
        repeating = asyncio.create_task(repeat(socket))
        endless = KvEventSettings(endpoint=f"ipc://{tmp_path}/none", replay_endpoint=f"ipc://{tmp_path}/replay")
        try:
            async with following(endless) as here:
                await until(lambda: any("replayed" in one.getMessage() for one in caplog.records))
                assert here.stream.certainty == UNSURE
        finally:
            repeating.cancel()
            context.destroy(linger=0)

    run(test())
    (line,) = [one for one in caplog.records if one.getMessage() == "KV events cannot be replayed"]
    assert "the reply has more than 50 batches" in str(line.__dict__)


def test_a_medium_without_blocks_is_shown_as_empty() -> None:
    """The metric of an off-loading tier falls to zero with its last block."""
    index = new_index()
    stream, registry = KvEventStream(index, can_replay=False), CollectorRegistry()
    metrics = KvEventMetrics(KvEventCollectors(registry), "one", stream)
    stored = BlocksStored(hashes=(1,), parent=None, token_ids=tuple(range(SIZE)), block_size=SIZE)
    events = [stored, replace(stored, medium="CPU"), BlocksRemoved(hashes=(1,), medium="CPU")]
    shown = []
    for number, event in enumerate(events):
        stream.receive(number, KvEventBatch(published_s=1.0 + number, events=(event,)))
        metrics.update()
        shown.append(registry.get_sample_value("block_kv_cached_blocks", {"instance": "one", "medium": "CPU"}))
    assert shown == [None, 1.0, 0.0]
