"""Outcomes on file, for `block tagger evaluate`: lengths and what had been said of them; of prompts nothing."""

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

MOST_BYTES = 256 * 2**20  # of the file; then no more is written


@contextmanager
def recording(path: str) -> Iterator[Callable[[common_pb2.Outcome], None]]:
    """Give what appends each outcome to a file, a JSON line each; without a path, what does nothing."""
    if not path:
        yield lambda _: None
        return
    try:
        file = Path(path).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115 - closed below
    except OSError as error:
        raise ValueError(f"record: {path} cannot be written: {error.strerror}") from None
    with file:
        yield _recorder(file, MOST_BYTES - file.tell())


def _recorder(file: TextIO, left: int) -> Callable[[common_pb2.Outcome], None]:

    def record(outcome: common_pb2.Outcome) -> None:
        nonlocal left
        if not outcome.HasField("tag") or left <= 0:
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
        left -= len(line) + 1
        try:
            file.write(line + "\n")
        except OSError as error:
            left = 0
            log_event(log, logging.WARNING, "outcomes no longer recorded", reason=error.strerror)

    return record
