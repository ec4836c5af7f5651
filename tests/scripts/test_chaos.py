"""A short plan of faults: every request is answered, as one engine would have answered it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from scripts.chaos import MODEL, SERVED, judged
from services.emulator.openai import COMPLETION, request_from
from services.emulator.replies import CompletionReply

ASKED = {"model": MODEL, "prompt": "tide", "max_tokens": 5, "ignore_eos": True, "stream": True}
ASKED["stream_options"] = {"include_usage": True}


def stream() -> bytes:
    """The stream of one engine."""
    request = request_from(COMPLETION, ASKED, {}, "one", SERVED)
    return CompletionReply(request, 0).events(0, request.answer.num_tokens)


def usage_in(received: bytes) -> bytes:
    """The event with the usage."""
    return next(event for event in received.split(b"\n\n") if b'"usage"' in event)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda received: received, "complete"),
        (lambda received: received.partition(b"\n\n")[2], "other text"),
        (lambda received: received.partition(b"\n\n")[0] + b"\n\n" + received, "other text"),
        (lambda received: received.replace(b'"completion_tokens":5', b'"completion_tokens":6'), "other usage"),
        (lambda received: received.replace(b"data: [DONE]\n\n", b""), "cut short"),
        (lambda received: received[:9] + b'data: {"error": {}}\n\n', "error event"),
        (lambda _: b"", "cut short"),
        (lambda _: b": a comment\n\n", "cut short"),
        (lambda received: received.replace(b'"usage":', b'"other":'), "other usage"),
        (lambda received: received.replace(b"data: [DONE]", usage_in(received) + b"\n\ndata: [DONE]"), "other usage"),
    ],
)
def test_an_answer_that_differs_is_found(change: Callable[[bytes], bytes], expected: str) -> None:
    """A token that is missing or there twice, a wrong usage, and a stream that is cut."""
    assert judged(change(stream()), ASKED) == expected


@pytest.mark.slow
@pytest.mark.xdist_group("cluster")
def test_a_short_plan() -> None:
    """Engines, sidecars and schedulers are killed, stopped and slowed; nothing is lost, and nothing stays reserved."""
    command = [sys.executable, "-m", "scripts.chaos", "--json", "--minutes", "0.5", "--every", "2", "--engines", "3"]
    command += ["--rate", "4", "--tokens", "200", "--seed", "4"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    rows = {row["name"]: row["value"] for row in json.loads(done.stdout)["results"]}
    assert rows["requests.complete"] > 20
    assert sum(value for name, value in rows.items() if name.startswith("faults.")) >= 5
