"""What an engine reports of its state, as arrays."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

NO_SLOTS = np.empty(0, np.int64)


class ReportedStep(NamedTuple):
    """A step in flight: its requests' slots in order, their tokens, and whether they will sample.

    `drafts` are the draft tokens among those of each request.
    """

    start_s: float
    slots: np.ndarray
    tokens: np.ndarray
    sampled: np.ndarray
    drafts: np.ndarray


class ReportedContents(NamedTuple):
    """The contents of KV blocks.

    By block: its content (0 for none), and its position in the order of reuse (0 while it is held). By request, the
    running ones before the waiting ones: its blocks, and the contents of its full blocks. An array that is identical
    to that of the last report must be unchanged.
    """

    content: np.ndarray
    reuse: np.ndarray
    tables: tuple[np.ndarray, ...]
    hashes: tuple[np.ndarray, ...]


class ReportedMemory(NamedTuple):
    """What an engine's local scheduler remembers between steps, as in `snapshot.Memory`.

    `numbers` are `state.MEMORY_SIZE`, and `clients` has the first fields of `state.CLIENT`.
    """

    num_steps: int
    correction: float
    numbers: np.ndarray
    clients: np.ndarray


class ReportedState(NamedTuple):
    """An engine's state at `now_s`, in arrays by slot; all of it is checked before use.

    `live` has a record per slot with the counts of `state.REQUEST`, `scheduled_s` and `first_token_s`; `facts` one
    with `arrival_s`, `priority`, `prompt_tokens`, `max_tokens` and the fields of `state.FACTS`. The length of a
    response is `known_tokens` where it is certain (else 0), or is predicted by a tag's median and spread (NaN without a
    tag).

    `facts` has the `leg` of each request, and `live` the `stage` of its transfer, with `fetch_started_s`,
    `fetch_ended_s` and `held_until_s` (negative: not yet). `held` are the slots of requests that have ended, and whose
    blocks are held until they are fetched; `held_s` says for how long that is predicted, by slot, NaN where it is not.
    """

    now_s: float
    num_free_blocks: int
    decodes_since_look: int
    running: np.ndarray
    waiting: np.ndarray
    steps: tuple[ReportedStep, ...]
    live: np.ndarray
    facts: np.ndarray
    known_tokens: np.ndarray
    tag_median: np.ndarray
    tag_spread: np.ndarray
    contents: ReportedContents | None = None
    memory: ReportedMemory | None = None
    held: np.ndarray = NO_SLOTS
    held_s: np.ndarray | None = None
    adapters: np.ndarray | None = (
        None  # the fields of `state.ADAPTER`, the least recently used one first; None: unknown
    )


def require_memory(memory: ReportedMemory) -> None:
    """Refuse what no local scheduler remembers."""
    if not (math.isfinite(memory.correction) and memory.correction > 0):
        raise ValueError(f"memory.correction: must be above 0, not {memory.correction}")
    if not all(map(math.isfinite, memory.numbers.tolist())):
        raise ValueError("memory.numbers: must be finite")
    if len(memory.clients):
        weight, tokens = memory.clients["weight"], memory.clients["tokens"]
        if not (np.isfinite(weight) & (weight > 0)).all():
            raise ValueError("memory.clients.weight: must be above 0")
        if not (np.isfinite(tokens) & (tokens >= 0)).all():
            raise ValueError("memory.clients.tokens: must be at least 0")


def read_only(array: np.ndarray) -> np.ndarray:
    """Return a read-only view: compiled code has one type for it, whether the array can be written or not.

    Interpreted kernels read the fields of rows as attributes, which record arrays alone have.
    """
    view = array.view(np.recarray) if array.dtype.names else array.view()
    view.flags.writeable = False
    return view
