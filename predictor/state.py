"""An engine's whole state as arrays: the form that the compiled loop reads and writes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from predictor.config import KV_LAYOUTS
from predictor.request import LEGS
from predictor.step_time import NUM_REGIONS
from predictor.tabulated_costs import Costs

NONE = -1  # no request, no block, no time

MAX_OPTIONS = 16  # of a local scheduler
MEMORY_SIZE = 8  # numbers that a local scheduler remembers between steps

# An engine's `kv_layout`, as in `config.KV_LAYOUTS`.
PLAIN_LAYOUT, SWAP_LAYOUT, TWO_ENDED_LAYOUT = range(len(KV_LAYOUTS))

# A request's status. PENDING: the engine's clock has not reached its arrival.
PENDING, WAITING, RUNNING, FINISHED = 0, 1, 2, 3

# When the run of a forecast ends early: never, or at the next setback and as soon as certainly none follows.
NEVER, AT_SETBACK = range(2)

# Expected numbers of tokens are summed up and rounded down, so a half at the start rounds to the nearest.
HALF_CREDIT = 0.5

SERVE_LEG, PREFILL_LEG, DECODE_LEG = range(len(LEGS))

# Where a request stands whose KV blocks come from, or go to, another engine. TO_FETCH: it has no blocks yet. FETCHED,
# FETCH_FAILED: the engine knows that the transfer has ended, and has not scheduled the request. HELD: the prefill has
# ended, and its blocks wait to be fetched. ARRIVED, LOST: the transfer has ended; the engine knows it at `transfer_s`.
NO_TRANSFER, TO_FETCH, FETCHING, FETCHED, FETCH_FAILED, HELD, ARRIVED, LOST = range(8)
# Each stage as snapshots and reported states have it: a fetch goes on until the engine knows its end.
SHOWN_STAGES = (NO_TRANSFER, TO_FETCH, FETCHING, FETCHED, FETCH_FAILED, HELD, FETCHING, FETCHING)

# What a KV block holds. Contents that requests can share are numbered from 0 up, contents of one request only from -2
# down. A block that is not full has no content, because no request can hit it.
NO_CONTENT = -1

ENGINE = np.dtype(
    [
        # configuration
        ("batcher", "i8"),
        ("max_num_seqs", "i8"),
        ("max_num_batched_tokens", "i8"),
        ("block_size", "i8"),
        ("num_blocks", "i8"),  # available to requests
        ("max_model_len", "i8"),
        ("by_priority", "i8"),
        ("queue_by_priority", "i8"),  # the waiting queue is sorted by priority
        ("prefix_caching", "i8"),
        ("chunked_prefill", "i8"),
        ("pipeline_depth", "i8"),
        ("long_prefill_token_threshold", "i8"),
        ("adaptive_threshold", "i8"),  # it is at least a fair share of a step's tokens
        # rules in which versions of vLLM differ, see `vllm_versions`
        ("spares_lone_prefill", "i8"),
        ("holding_first", "i8"),  # waiting requests that hold blocks are the first ones, `num_holding` of them
        ("goes_on_after_self_preemption", "i8"),
        ("watermark_blocks", "i8"),
        ("decode_reserve", "i8"),  # blocks that must be free before each decode
        ("reserve_full_isl", "i8"),
        ("kv_layout", "i8"),
        ("swap_token_s", "f8"),  # seconds that a token's KV takes between the GPU and host memory
        ("fetches", "i8"),  # it serves decode legs
        ("drops_stale", "i8"),  # it hands over KV blocks, so output from before a preemption is dropped
        ("defers_frees", "i8"),  # a block is not free before the step ends that may write it
        ("recomputes", "i8"),  # a request whose KV blocks cannot be fetched computes them; otherwise it fails
        ("transfer_base_s", "f8"),
        ("transfer_token_s", "f8"),
        ("transfer_block_s", "f8"),
        ("transfer_pace", "f8"),  # real over predicted duration of transfers
        ("transfer_shared", "i8"),  # transfers that overlap share the link
        ("orders_queue", "i8"),  # the local scheduler orders the waiting requests itself
        # SGLang: each content has one block, from the end of a prefill on; instead of an empty step the engine waits
        # for the one in flight; what a preempted request has in flight is lost
        ("is_sglang", "i8"),
        ("num_speculative_tokens", "i8"),
        ("num_lookahead_tokens", "i8"),  # slots allocated with each step, for the KV of draft tokens
        ("draft_slots", "i8"),  # input tokens that each request in a step uses beside its own
        ("drops_last_hit", "i8"),  # the last block of a prefix hit is computed again
        ("num_prefill_lookahead_tokens", "i8"),
        ("proposed_tokens", "i8"),  # the usual number of tokens of a draft
        ("proposal_share", "f8"),  # of requests and steps with a draft, where not every one has it
        ("draft_step_s", "f8"),  # seconds that proposals add to a step
        ("plans_only", "i8"),  # a real engine carries the plans out: of its blocks only each request's counts are known
        ("options", "f8", (MAX_OPTIONS,)),  # of the local scheduler, in the order in which it declares them
        ("estimator_factor", "f8"),  # estimated over real step time, before any correction
        ("estimator_noise", "f8"),
        ("estimator_momentum", "f8"),
        ("estimator_seed", "i8"),
        # what the local scheduler remembers between steps
        ("belief", "f8"),  # estimated over the profile's step time, in the step that is being planned
        ("correction", "f8"),  # of the estimate, as far as it has adapted
        ("memory", "f8", (MEMORY_SIZE,)),
        ("num_clients", "i8"),
        # the engine thread's clock: the end of the last step whose outputs it has processed
        ("now_s", "f8"),
        ("pace", "f8"),  # real over predicted step time
        ("region_pace", "f8", (NUM_REGIONS,)),  # of the steps of each batch region, over `pace`
        # queues
        ("num_running", "i8"),
        ("num_waiting", "i8"),
        ("waiting_head", "i8"),
        ("num_pending", "i8"),
        ("pending_head", "i8"),
        ("num_holding", "i8"),  # of the waiting requests, the first ones, which hold blocks
        # transfers of KV blocks
        ("num_transfers", "i8"),
        ("num_fetching", "i8"),
        ("next_transfer_s", "f8"),  # when the first of them ends; infinite without one
        ("link_s", "f8"),  # seconds of work that each transfer has got since the link exists, as of `link_at_s`
        ("link_at_s", "f8"),
        # steps in flight, oldest first
        ("num_in_flight", "i8"),
        ("oldest", "i8"),
        ("awaits_step", "i8"),  # it plans nothing before the step in flight ends
        # KV blocks; the free ones are a linked list in the order of reuse
        ("num_free_blocks", "i8"),
        ("free_head", "i8"),
        ("free_tail", "i8"),
        # history
        ("num_steps", "i8"),
        ("num_preemptions", "i8"),
        ("decodes_since_look", "i8"),
        ("unmeasured_s", "f8"),  # in steps whose batches lie outside of what the profile measured
        ("steady", "i8"),  # the last step repeats until a request finishes or arrives, or blocks run out
        ("steady_limit_s", "f8"),  # it repeats only while it takes no longer
        ("fruitless_preemptions", "i8"),  # preemptions since a request last produced a token
        ("least_slack_s", "f8"),  # from a token to its deadline, of requests without a late token
        ("num_setbacks", "i8"),  # first missed deadlines of requests, and preemptions
        ("stops", "i8"),  # of a forecast, when its run ends early: `NEVER` or `AT_SETBACK`
        ("min_slack_s", "f8"),  # of a forecast: a run that ends at a setback also ends where there is less slack
        ("is_kept", "i8"),  # the run ended because certainly no setback follows
        ("stuck", "i8"),  # nothing changes before an arrival: no request fits, or preemptions repeat forever
        # LoRA adapters
        ("max_loras", "i8"),  # in one step, and in GPU slots; 0: adapters are not modelled
        ("max_cpu_loras", "i8"),  # in host memory
        ("lora_load_s", "f8"),  # seconds until an adapter is in host memory
        ("lora_activate_s", "f8"),  # and from there in a GPU slot
        ("num_adapters", "i8"),  # in host memory
        ("num_step_adapters", "i8"),  # in the step that is being planned
        ("num_adapter_loads", "i8"),
        ("num_adapter_activations", "i8"),
        # inputs of an encoder
        ("max_encoder_tokens", "i8"),  # of a step; 0: the model has no encoder
        ("whole_encoder_inputs", "i8"),  # no step ends within an input's tokens, unless it starts there
        ("encoder_token_s", "f8"),  # seconds that the encoder takes for a token
        ("encoder_tokens_left", "i8"),  # of the budget of the step that is being planned
        ("encoder_tokens_left_after", "i8"),  # if the request that is being planned is in it
        ("num_encoder_entries", "i8"),  # outputs in the cache
        ("encoder_free", "i8"),  # tokens of the cache that no output takes
        ("encoder_reclaimable", "i8"),  # the same, and those of outputs that no request refers to
        ("encoder_clock", "i8"),  # counts the outputs that became unused
    ],
    align=True,
)

REQUEST = np.dtype(
    [
        # read by every step, within one cache line
        ("status", "i4"),
        ("prompt_tokens", "i4"),
        ("output_tokens", "i4"),
        ("computed_tokens", "i4"),
        ("placeholders", "i4"),  # async: tokens scheduled whose values are not known yet
        ("in_flight_tokens", "i4"),
        ("stale_tokens", "i4"),  # in flight when it was preempted
        ("final_tokens", "i4"),  # the real length of the response
        ("max_tokens", "i4"),  # the length at which the engine cuts the response
        ("num_blocks", "i4"),
        ("full_blocks", "i4"),  # of them, blocks whose content is registered for prefix hits
        ("num_hashes", "i4"),
        ("prefill_tokens", "i4"),  # tokens that it must compute, as of its admission, before it decodes
        ("tokens_on_time", "i4"),  # tokens that came by their deadlines; NONE where no token has a deadline
        ("scheduled_s", "f8"),
        # read less often
        ("first_token_s", "f8"),
        ("finished_s", "f8"),
        ("arrival_s", "f8"),
        ("serial", "i8"),
        ("tie_break", "i8"),
        ("priority", "i8"),
        ("expected_tokens", "i4"),  # the predicted length, which a local scheduler may use
        ("num_preemptions", "i4"),
        ("leg", "i4"),  # index in `request.LEGS`
        ("stage", "i4"),  # of its transfer
        # Before its transfer starts, the seconds that it takes (NaN: as configured), or for which the blocks are held.
        # From then on its end: a time, or for a fetch over a shared link a value of `link_s`.
        ("transfer_s", "f8"),
        # with an even number of 4-byte fields the record has no padding, whose content would be arbitrary
        ("hit_tokens", "i4"),
        ("draft_tokens", "i4"),  # proposed for its next step
        ("acceptance_credit", "f4"),  # expected accepted tokens that no step has had yet, below 1
        ("proposal_credit", "f4"),  # expected drafts that no step has had yet, below 1
    ],
    align=True,
)


def new_request(
    *,
    prompt_tokens: int,
    final_tokens: int,
    max_tokens: int,
    priority: int,
    tie_break: int,
    arrival_s: float,
    num_hashes: int,
    serial: int,
    status: int = PENDING,
    output_tokens: int = 0,
    computed_tokens: int = 0,
    placeholders: int = 0,
    in_flight_tokens: int = 0,
    stale_tokens: int = 0,
    num_blocks: int = 0,
    full_blocks: int = 0,
    num_preemptions: int = 0,
    prefill_tokens: int = 0,
    tokens_on_time: int = NONE,
    scheduled_s: float = NONE,
    first_token_s: float = NONE,
    leg: int = 0,
    stage: int = NO_TRANSFER,
    transfer_s: float = 0.0,
    draft_tokens: int = 0,
) -> tuple[float, ...]:
    """Make a row of `requests` as a tuple: assigning it at once is much faster than assigning each field."""
    return (
        status, prompt_tokens, output_tokens, computed_tokens, placeholders, in_flight_tokens, stale_tokens,
        final_tokens, max_tokens, num_blocks, full_blocks, num_hashes, prefill_tokens, tokens_on_time, scheduled_s,
        first_token_s, NONE, arrival_s, serial, tie_break, priority, final_tokens, num_preemptions, leg, stage,
        transfer_s, 0, draft_tokens, HALF_CREDIT, HALF_CREDIT,
    )  # fmt: skip


# The facts of a request that a local scheduler may read, beside its priority and arrival. The loop never writes them.
FACTS = np.dtype(
    [
        ("ttft_slo_s", "f8"),  # NaN: no target
        ("tpot_slo_s", "f8"),  # NaN: no target
        ("weight", "f8"),
        ("tenant", "i8"),  # `request.tenant_number` of the client id; 0: unknown
        ("request_class", "i8"),  # index in `request.CLASSES`
        ("adapter", "i8"),  # `request.adapter_number` of its LoRA adapter; 0: none
        ("num_encoder_inputs", "i8"),
    ],
    align=True,
)
# A request's place in the order in which a step is filled; the lower one goes first.
RANK = np.dtype(
    [
        ("group", "i8"),
        ("key", "f8"),
        ("due_s", "f8"),  # of its next token; infinite without a target
        ("cost_s", "f8"),  # estimated seconds until its next token
    ],
    align=True,
)
# A client whose tokens a local scheduler counts: a tenant, with one weight of its requests.
CLIENT = np.dtype(
    [
        ("tenant", "i8"),
        ("weight", "f8"),
        ("tokens", "f8"),  # served so far, by weight
        ("waits", "i8"),  # it had a waiting request when the last step was planned
        ("num_running", "i8"),  # scratch space, as the next two
        ("num_waiting", "i8"),
        ("queued", "f8"),
    ],
    align=True,
)
STEP = np.dtype(
    [
        ("num_scheduled", "i8"),
        ("start_s", "f8"),
        ("end_s", "f8"),
        ("num_tokens", "i8"),
        ("num_sampled", "i8"),
        ("num_decodes", "i8"),
        ("decode_context", "i8"),
        ("decode_longest", "i8"),
        ("num_prefills", "i8"),
        ("prefill_qq", "f8"),
        ("prefill_qkv", "f8"),
        ("num_preempted", "i8"),
        ("pace", "f8"),
        ("num_swapped", "i8"),  # tokens whose KV is copied to host memory, or back
        ("extra_s", "f8"),  # of its duration, what loading adapters and the encoder take
    ],
    align=True,
)

# A request's part in a step. `drafts` of its tokens are draft tokens. What becomes known with the step's output is
# EXPECTED until then: how many of them are `accepted`, and the tokens `proposed` for its next step.
SCHEDULED = np.dtype(
    [("slot", "i4"), ("tokens", "i4"), ("sampled", "i2"), ("drafts", "i2"), ("accepted", "i2"), ("proposed", "i2")],
    align=True,
)
EXPECTED = -1

BLOCK = np.dtype(
    [
        ("content", "i8"),
        ("num_refs", "i4"),
        ("next_free", "i4"),
        ("previous_free", "i4"),
        ("next_same", "i4"),  # the next block with the same shared content, in the order of registration
    ],
    align=True,
)

# A KV block that a real-time request fills from the left and a best-effort request from the right.
TWO_ENDED_BLOCK = np.dtype(
    [
        ("left", "i4"),  # slot of the real-time request, or NONE
        ("left_tokens", "i4"),
        ("right", "i4"),  # slot of the best-effort request, or NONE
        ("right_tokens", "i4"),
        ("checkpointed", "i4"),  # tokens of the right that are in host memory, since the left has their place
        ("unused", "i4"),
    ],
    align=True,
)

# A LoRA adapter in host memory; the least recently used one comes first.
ADAPTER = np.dtype([("number", "i8"), ("is_active", "i8")], align=True)  # active: in a GPU slot

# An image, or another input of an encoder, in a request's prompt.
ENCODER_INPUT = np.dtype(
    [
        ("identity", "i8"),  # equal for equal inputs
        ("position", "i4"),  # of its first token
        ("tokens", "i4"),
        ("stage", "i8"),  # as in `encoder_inputs`
        ("step", "i8"),  # that computes its output
    ],
    align=True,
)
# An output of an encoder in the cache.
ENCODER_OUTPUT = np.dtype(
    [
        ("identity", "i8"),
        ("tokens", "i8"),
        ("num_refs", "i8"),  # requests that refer to it
        ("unused_since", "i8"),  # on `encoder_clock`
    ],
    align=True,
)


class State(NamedTuple):
    """All that the loop reads and writes; a request is identified by its slot, its row in `requests`."""

    engine: np.recarray[Any, Any]  # one ENGINE
    requests: np.recarray[Any, Any]  # REQUEST per slot
    running: np.ndarray  # slots, in vLLM's order
    waiting: np.ndarray  # ring of slots
    pending: np.ndarray  # ring of slots of requests that have not arrived, by arrival
    transfers: np.ndarray  # slots of requests whose KV blocks are being fetched, or are held until they are
    preempted: np.ndarray  # slots preempted by the step that is being planned
    steps: np.recarray[Any, Any]  # STEP per step in flight
    batch: np.recarray[Any, Any]  # SCHEDULED per step in flight and position
    turn_starts: np.ndarray  # scratch space of `repeated_steps.repeat`: the order in which requests take blocks
    turns: np.ndarray  # scratch space of `repeated_steps` and of `batching.ordered_requests`: requests in an order
    ranks: np.recarray[Any, Any]  # scratch space of `batching.ordered_requests`: RANK per slot
    clients: np.recarray[Any, Any]  # CLIENT each, of local schedulers that count the tokens of clients
    two_ended_blocks: np.recarray[Any, Any]  # TWO_ENDED_BLOCK per KV block, with that layout
    blocks: np.recarray[Any, Any]  # BLOCK per KV block
    tables: np.ndarray  # the blocks of each slot
    cached: np.ndarray  # first block that holds each shared content
    adapters: np.recarray[Any, Any]  # ADAPTER each, in host memory
    step_adapters: np.ndarray  # scratch space of `adapters`: numbers of those in the step that is being planned
    encoder_cache: np.recarray[Any, Any]  # ENCODER_OUTPUT each
    encoder_inputs: np.recarray[Any, Any]  # ENCODER_INPUT per slot and position
    facts: np.recarray[Any, Any]  # FACTS per slot
    hashes: np.ndarray  # shared contents of each slot's blocks
    expected_accepted: np.ndarray  # mean number of accepted tokens, by the number of draft tokens
    costs: Costs
