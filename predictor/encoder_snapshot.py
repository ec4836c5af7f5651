"""The inputs of an encoder, and its cache, in snapshots of engines."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from predictor.encoder_inputs import REFERENCED
from predictor.engine import Engine
from predictor.request import RequestFacts
from predictor.snapshot import EncoderOutput, Snapshot


def with_identities(engine: Engine, slot: int) -> RequestFacts:
    """Return the facts of a request, whose encoder inputs have the identities that the engine knows them by."""
    request = engine.request_in(slot)
    if not engine.config.max_num_encoder_input_tokens or not request.encoder_inputs:
        return request
    rows = engine.state.encoder_inputs[slot]
    inputs = tuple(
        replace(one, identity=int(row.identity)) for one, row in zip(request.encoder_inputs, rows, strict=False)
    )
    return replace(request, encoder_inputs=inputs)


def referenced_inputs(engine: Engine, slot: int) -> tuple[int, ...]:
    """Return the encoder inputs of a request whose outputs it refers to."""
    count = int(engine.state.facts[slot].num_encoder_inputs)
    rows = engine.state.encoder_inputs[slot, :count]
    return tuple(index for index, row in enumerate(rows) if row.stage == REFERENCED)


def encoder_outputs(engine: Engine) -> tuple[EncoderOutput, ...]:
    """Return the outputs in the encoder's cache."""
    rows = engine.state.encoder_cache[: engine.state.engine[0].num_encoder_entries]
    return tuple(
        EncoderOutput(
            identity=int(row.identity),
            tokens=int(row.tokens),
            num_refs=int(row.num_refs),
            unused_since=int(row.unused_since),
        )
        for row in rows
    )


def put_back_encoder(engine: Engine, snapshot: Snapshot) -> None:
    """Set the encoder's cache, and which requests refer to its outputs; both must agree."""
    if not engine.config.max_num_encoder_input_tokens:
        if snapshot.encoder_outputs:
            raise ValueError("encoder_outputs: need max_num_encoder_input_tokens above 0")
        return
    refs: Counter[int] = Counter()
    for item in (*snapshot.running, *snapshot.waiting):
        slot = engine.slots[item.request.request_id]
        for index in item.referenced_inputs:
            engine.state.encoder_inputs[slot, index].stage = REFERENCED
        rows = engine.state.encoder_inputs[slot]
        refs.update({int(rows[index].identity) for index in item.referenced_inputs})
    head, size = engine.state.engine[0], engine.config.encoder_cache_size
    used, reclaimable = 0, 0
    for place, output in enumerate(snapshot.encoder_outputs):
        if refs.pop(output.identity, 0) != output.num_refs:
            raise ValueError(
                f"encoder_outputs[{place}].num_refs: {output.num_refs} are not the requests that refer to it"
            )
        used += output.tokens
        reclaimable += 0 if output.num_refs else output.tokens
        if used > size:
            raise ValueError(f"encoder_outputs: {used} tokens are more than encoder_cache_size {size}")
        entry = (output.identity, output.tokens, output.num_refs, output.unused_since)
        engine.state.encoder_cache[place] = entry
    if refs:
        raise ValueError("referenced_inputs: refer to outputs that encoder_outputs lack")
    head.num_encoder_entries = len(snapshot.encoder_outputs)
    head.encoder_free = size - used
    head.encoder_reclaimable = size - used + reclaimable
    head.encoder_clock = max((output.unused_since for output in snapshot.encoder_outputs), default=0)
