"""Windows as JSON lines: written, read back, and refused by line and field."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.request import Slo
from predictor.snapshot import VERSION
from predictor.snapshot_of_engine import snapshot_of
from simulator.accuracy.window import ObservedWindow
from simulator.accuracy.window_file import window_from_lines, window_lines
from simulator.replay import loaded_engine
from tests.simulator.accuracy.model_windows import A30, CONFIG, requests, window_of
from tests.simulator.test_codec import JSON, paths, replaced

SERVED = [
    replace(one, slo=Slo(ttft_s=0.5), priority=2, client_id="t", prefix_hashes=(7, 8)) for one in requests(6, 2.0)
]
WINDOW = window_of(A30.step_time, SERVED)
ENGINE = loaded_engine(CONFIG, A30.step_time, SERVED)
ENGINE.next_step()
WHOLE = replace(WINDOW, state=replace(snapshot_of(ENGINE, 1.0), reserved=()))
LINES = list(window_lines(WHOLE))
HUGE = 10**400  # which no floating-point number holds
HEADER, STATE, REQUEST, STEP = 0, 1, 2, 2 + len(SERVED)


def read(lines: list[str]) -> ObservedWindow:
    """Read a window from lines."""
    return window_from_lines("w", lines)


def test_a_window_is_read_as_it_was_written() -> None:
    """Header, profile, state, requests and steps."""
    again = read(LINES)
    assert again.header == WHOLE.header
    assert again.profile == A30
    assert again.state == WHOLE.state
    assert again.state is not None
    assert again.state.version == VERSION
    assert again.requests == WHOLE.requests
    assert list(window_lines(again)) == LINES


def test_a_window_by_hand_needs_few_fields() -> None:
    """A client that knows nothing but its own requests can write one."""
    window = read([
        '{"kind": "window", "engine": {"max_num_seqs": 8}, "begin_s": 0, "end_s": 9, "clock": "client"}',
        "",
        (
            '{"kind": "request", "request_id": "a", "arrival_s": 1.5, "prompt_tokens": 10, "output_tokens": 3, '
            '"ended": "stop", "first_token_s": 1.6, "last_token_s": 1.9}'
        ),
    ])  # fmt: skip
    assert window.header.engine.max_num_seqs == 8
    assert (window.num_complete, len(window.steps), window.profile) == (1, 0, None)


def changed(line: int, **fields: Any) -> Callable[[], list[str]]:
    """Return the lines with one of them changed; a field of None is left out."""

    def make() -> list[str]:
        data = json.loads(LINES[line]) | fields
        left = {name: value for name, value in data.items() if value is not None}
        return [*LINES[:line], json.dumps(left), *LINES[line + 1 :]]

    return make


REFUSED: list[tuple[Callable[[], list[str]], str]] = [
    (list, "w: is empty"),
    (lambda: ["nothing"], "w:1: is not JSON"),
    (lambda: ["[1]"], "w:1: must be an object"),
    (lambda: LINES[1:], "w:1: kind: a 'state' comes before the header"),
    (lambda: [LINES[0], LINES[0]], "w:2: kind: a 'window' must be the first line"),
    (lambda: [*LINES[:2], LINES[1]], "w:3: kind: a second 'state'"),
    (lambda: [*LINES, LINES[REQUEST]], f"w:{len(LINES) + 1}: request_id: 'r000' is a duplicate"),
    (lambda: [*LINES, LINES[STEP]], "w: steps.number: 0 is a duplicate"),
    (changed(HEADER, kind="header"), "w:1: kind: must be one of window, state, request, step"),
    (changed(HEADER, version=2), "w:1: version: 2 is not 1"),
    (changed(HEADER, engine=None), "w:1: engine: is missing"),
    (changed(HEADER, engine={"max_num_seqs": 0}), "w:1: engine.max_num_seqs: must be at least 1"),
    (changed(HEADER, engine={"max_seqs": 1}), "w:1: engine.max_seqs: is unknown"),
    (changed(HEADER, profile={"version": 1}), "w:1: profile.name: missing"),
    (changed(HEADER, clock="server"), "w:1: clock: 'server' is neither engine nor client"),
    (changed(HEADER, end_s=-1.0), "w:1: end_s: must be a time from begin_s"),
    (changed(HEADER, clock_rate=0), "w:1: clock_rate: must be above 0"),
    (changed(STATE, snapshot={"version": VERSION}), "w:2: snapshot.taken_s: is missing"),
    (changed(STATE, extra=1), "w:2: extra: is no known field"),
    (changed(REQUEST, request_id=None), "w:3: request_id: is missing"),
    (changed(REQUEST, prompt_tokens=0), "w:3: prompt_tokens: must be at least 1"),
    (changed(REQUEST, prompt_tokens="9"), "w:3: prompt_tokens: Input should be a valid integer"),
    (changed(REQUEST, first_token_s=-5.0), "w:3: first_token_s: -5.0 is before scheduled_s"),
    (changed(REQUEST, last_token_s="late"), "w:3: last_token_s: must be a time or null"),  # noqa: S106 - no password
    (changed(REQUEST, ended="done"), "w:3: ended: must be one of stop, length, abort, error, or empty, not 'done'"),
    (changed(REQUEST, output_tokens=None), "w:3: output_tokens: is missing from a request that ended by 'length'"),
    (changed(REQUEST, cached_tokens=10**6), "w:3: cached_tokens: 1000000 are more than its prompt_tokens"),
    (changed(REQUEST, colour="red"), "w:3: colour: is no known field"),
    (changed(STEP, seconds=0), f"w:{STEP + 1}: seconds: must be above 0"),
    (changed(STEP, seconds=None), f"w:{STEP + 1}: seconds: is missing"),
    (changed(STEP, start_s=-1), f"w:{STEP + 1}: start_s: must be a number from 0 on"),
    (changed(STEP, num_tokens=1.5), f"w:{STEP + 1}: num_tokens: must be a whole number"),
    (changed(STEP, num_decodes=10**6), f"w:{STEP + 1}: num_tokens: are fewer than"),
    (changed(STEP, num_decodes=True), f"w:{STEP + 1}: num_decodes: must be a number"),
    (changed(STEP, number=HUGE), f"w:{STEP + 1}: number: must be a number from 0 on, at most 1e+15"),
    (changed(STEP, seconds=HUGE), f"w:{STEP + 1}: seconds: must be a number from 0 on, at most 1e+15"),
    (changed(REQUEST, last_token_s=HUGE), "w:3: last_token_s: must be a time or null"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_wrong_is_named_by_line_and_field(make: Callable[[], list[str]], message: str) -> None:
    """In one line."""
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        read(make())
    text = str(refused.value)
    assert text.startswith(message)
    assert "\n" not in text


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data(), line=st.sampled_from([HEADER, REQUEST, STEP]), new=JSON)
def test_a_line_changed_anywhere_is_read_or_refused(data: st.DataObject, line: int, new: Any) -> None:
    """No change crashes the reader."""
    document = json.loads(LINES[line])
    path = data.draw(st.sampled_from([path for path in paths(document) if path[0] != "profile"]))
    lines = [*LINES[:line], json.dumps(replaced(document, path, new)), *LINES[line + 1 :]]
    try:
        read(lines)
    except ValueError as error:
        assert str(error).startswith("w")
