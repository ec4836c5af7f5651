"""Recorded outcomes for `block tagger evaluate`: lengths and their tags, without prompts."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from protos.block.v1 import common_pb2
from services.logs import log_event

log = logging.getLogger(__name__)

MAX_BYTES = 256 * 2**20  # of the file; later outcomes are dropped


@contextmanager
def recording(path: str) -> Iterator[Callable[[common_pb2.Outcome], None]]:
    """Yield a function that appends an outcome to a file as a JSON line; without a path, one that does nothing."""
    if not path:
        yield lambda _: None
        return
    try:
        file = Path(path).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115 - closed below
    except OSError as error:
        raise ValueError(f"record: {path} cannot be written: {error.strerror}") from None
    with file:
        yield _recorder(file, MAX_BYTES - file.tell())


def _recorder(file: TextIO, num_bytes_left: int) -> Callable[[common_pb2.Outcome], None]:

    def record(outcome: common_pb2.Outcome) -> None:
        nonlocal num_bytes_left
        if not outcome.HasField("tag") or num_bytes_left <= 0:
            return
        tag = outcome.tag
        line = json.dumps(
            {
                "output_tokens": outcome.output_tokens,
                "model": outcome.model,
                "cut": outcome.finish_reason == common_pb2.FINISH_REASON_LENGTH,
                "tag": {"median_tokens": tag.median_tokens, "spread": tag.spread, "estimator": tag.estimator},
            }
        )
        num_bytes_left -= len(line) + 1
        try:
            file.write(line + "\n")
        except OSError as error:
            num_bytes_left = 0
            log_event(log, logging.WARNING, "outcomes no longer recorded", reason=error.strerror)

    return record
