"""Requests from a file, in the project's own format or in that of a published trace; errors name row and column."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from predictor.request import RequestFacts
from simulator.codec import read_text, requests_from_file
from simulator.progress import followed

T = TypeVar("T")

MAX_TOKENS = 1_000_000
OWN_BLOCK_TOKENS = 16

Row = tuple[int, Mapping[str, Any]]  # line number and columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests, and whether the file has their arrival times; each prefix hash stands for `block_tokens` tokens.

    For a published format, `rows` are the requests' line numbers, and `arrival_column` is the column of arrival times.
    """

    requests: list[RequestFacts]
    has_arrivals: bool = True
    block_tokens: int = OWN_BLOCK_TOKENS
    rows: tuple[int, ...] = ()
    arrival_column: str | None = None


def seconds(cell: Any) -> float:
    """Parse a time in seconds."""
    return float(cell)


def milliseconds(cell: Any) -> float:
    """Parse a time in milliseconds."""
    return float(cell) / 1e3


def nanoseconds(cell: Any) -> float:
    """Parse a time in nanoseconds."""
    return float(cell) / 1e9


def moment(cell: Any) -> float:
    """Parse a date with a time of day."""
    return datetime.fromisoformat(cell).replace(tzinfo=UTC).timestamp()


def count(cell: Any) -> int:
    """Parse a number of tokens, which must be whole."""
    if not 1 <= (number := int(cell)) <= MAX_TOKENS or isinstance(cell, float | bool):
        raise ValueError
    return number


def hashes(cell: Any) -> tuple[int, ...]:
    """Parse the hashes of a prompt's blocks."""
    if not isinstance(cell, list) or not all(type(name) is int for name in cell):
        raise ValueError
    return tuple(cell)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The columns of a published trace format."""

    prompt: str
    output: str
    arrival: str | None = None
    time: Callable[[Any], float] = seconds
    hashes: str | None = None
    block_tokens: int = OWN_BLOCK_TOKENS

    def matches(self, row: Mapping[str, Any]) -> bool:
        """Whether a row has all columns of the format."""
        return all(name in row for name in (self.prompt, self.output, self.arrival, self.hashes) if name is not None)


FORMATS = (
    # Azure LLM inference traces, 2023 and 2024
    Format(prompt="ContextTokens", output="GeneratedTokens", arrival="TIMESTAMP", time=moment),
    # Mooncake: a hash for every 512 tokens of a prompt
    Format(
        prompt="input_length", output="output_length", arrival="timestamp", time=milliseconds, hashes="hash_ids",
        block_tokens=512,
    ),
    # BurstGPT, without its failures
    Format(prompt="Request tokens", output="Response tokens", arrival="Timestamp"),
    # LLMServingSim
    Format(prompt="input_toks", output="output_toks", arrival="arrival_time_ns", time=nanoseconds),
    # lengths of ShareGPT, arXiv and so on, as Vidur and Block have them
    Format(prompt="num_prefill_tokens", output="num_decode_tokens"),
)  # fmt: skip


def trace_from(path: str) -> Trace:
    """Read a trace; its columns determine the format."""
    text = read_text(path)
    first_row, first = next(iter(_rows(path, text)), (0, {}))
    if "prompt_tokens" in first or "prompt_token_ids" in first or not first_row:
        return _own(path)
    for form in FORMATS:
        if form.matches(first):
            rows = followed(_rows(path, text), "reading requests", text.count("\n"))
            read = [(row[0], _request(path, row, form)) for row in rows]
            return Trace(
                requests=[request for _, request in read],
                has_arrivals=form.arrival is not None,
                block_tokens=form.block_tokens,
                rows=tuple(number for number, _ in read),
                arrival_column=form.arrival,
            )
    columns = ", ".join(list(first)[:8]) or "nothing"
    raise ValueError(
        f"{path}: row {first_row}: has neither prompt_tokens nor the columns of a known trace, but {columns}"
    )


def _own(path: str) -> Trace:
    requests = requests_from_file(path, block_size=OWN_BLOCK_TOKENS)
    for index, request in enumerate(requests):
        if request.output_tokens is None:
            raise ValueError(f"{path}: requests[{index}].output_tokens: is missing")
    return Trace(requests=requests)


def _rows(path: str, text: str) -> Iterator[Row]:
    if not text.lstrip().startswith(("{", "[")):
        reader = csv.DictReader(text.splitlines())
        for row in reader:
            yield reader.line_num, row
    elif text.lstrip().startswith("["):
        yield 1, {"prompt_tokens": None}  # only the project's own format is an array; `_own` reads it
    else:
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                yield number, _object(path, number, line)


def _object(path: str, number: int, line: str) -> Mapping[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: row {number}: is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: row {number}: is not an object")
    return value


def _request(path: str, row: Row, form: Format) -> RequestFacts:
    def cell(column: str, read: Callable[[Any], T], what: str) -> T:
        found = row[1].get(column)
        try:
            value = read(found)
            if isinstance(value, float) and not (math.isfinite(value) and value >= 0):
                raise ValueError
        except (ValueError, TypeError, OverflowError):
            problem = "is missing" if found in (None, "") else f"must be {what}, not {str(found)[:40]!r}"
            raise ValueError(f"{path}: row {row[0]}: {column}: {problem}") from None
        return value

    tokens = f"a whole number of tokens from 1 to {MAX_TOKENS}"
    return RequestFacts(
        request_id=str(row[0]),
        prompt_tokens=cell(form.prompt, count, tokens),
        output_tokens=cell(form.output, count, tokens),
        arrival_s=cell(form.arrival, form.time, "a time from 0 on") if form.arrival else 0.0,
        prefix_hashes=cell(form.hashes, hashes, "a list of whole numbers") if form.hashes else (),
    )
