"""LoRA adapters and encoder inputs in the engine model: limits of a step, loading, forecasts, snapshots."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from predictor.adapter_times import AdapterTimes
from predictor.batching import settled
from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.engine_from_snapshot import engine_from
from predictor.forecast import Forecaster
from predictor.indicators import adapter_counts, adapters_of
from predictor.request import EncoderInput, RequestFacts, adapter_number
from predictor.snapshot import LoadedAdapter
from predictor.snapshot_of_engine import snapshot_of
from predictor.step_time import StepTime
from tests.conformance.compare import first_difference
from tests.conformance.input_workloads import adapter_workload, image_workload, with_contents
from tests.conformance.ours import our_config, our_requests, our_steps
from tests.inspecting import counts_of, times_of
from tests.oracle import vllm_v1
from tests.strategies import ONE_SECOND

TWO_SECONDS = EngineConfig(max_loras=1, max_cpu_loras=2, lora_load_s=2.0, lora_activate_s=0.5, num_gpu_blocks=64)
VISION = EngineConfig(max_num_encoder_input_tokens=40, encoder_cache_size=40, encoder_token_s=0.25, num_gpu_blocks=64)


def asking(name: str, adapter: str = "", **more: Any) -> RequestFacts:
    """Return a request of 16 tokens for an answer of three."""
    return RequestFacts(**{"request_id": name, "prompt_tokens": 16, "output_tokens": 3, "adapter": adapter, **more})


def run(config: EngineConfig, *requests: RequestFacts) -> Engine:
    """Run an engine to the end."""
    engine = Engine(config, ONE_SECOND)
    for request in requests:
        engine.add(request)
    engine.advance()
    return engine


@pytest.mark.parametrize("kind", [adapter_workload, image_workload])
@pytest.mark.parametrize("seed", range(1000, 1012))
def test_the_engine_model_agrees_with_a_plain_one(kind: Any, seed: int) -> None:
    """Each step of a random workload is that of the plain model, which is compared with vLLM itself."""
    load = with_contents(kind(seed))
    theirs = islice(vllm_v1.replay_steps(load["engine"], load["requests"]), load["max_steps"])
    difference = first_difference(load, theirs, our_steps(load))
    assert difference is None, difference


@pytest.mark.parametrize("kind", [adapter_workload, image_workload])
@pytest.mark.parametrize("seed", range(2000, 2012))
def test_from_event_to_event_is_step_by_step(kind: Any, seed: int) -> None:
    """Skipping repeated steps changes no outcome, and not which adapters and images are in memory."""
    load = with_contents(kind(seed))
    engines = []
    for _ in range(2):
        engine = Engine(our_config(load), ONE_SECOND)
        for rank, request in enumerate(our_requests(load)):
            engine.add(request, tie_break=rank)
        engines.append(engine)
    stepped, fast = engines
    if len(list(islice(iter(stepped.next_step, None), 1000))) == 1000:
        return  # it may be an endless run
    fast.advance()
    assert counts_of(fast) == counts_of(stepped)
    assert times_of(fast) == pytest.approx(times_of(stepped))
    assert fast.adapters() == stepped.adapters()
    assert snapshot_of(fast, 1e6).encoder_outputs == snapshot_of(stepped, 1e6).encoder_outputs


def test_a_request_is_passed_over_while_its_adapter_would_be_one_too_many() -> None:
    """With one adapter in a step, b waits for a; the base model and another request of a do not."""
    engine = Engine(TWO_SECONDS, ONE_SECOND)
    for name, adapter in (("1", "a"), ("2", "b"), ("3", ""), ("4", "a")):
        engine.add(asking(name, adapter))
    first = engine.next_step()
    assert first is not None
    assert (first.running, first.waiting) == (["1", "3", "4"], ["2"])


def test_loading_an_adapter_prolongs_the_step_in_which_it_becomes_active() -> None:
    """From disk it takes 2.5 s; from host memory half a second; in a GPU slot nothing."""
    again = run(TWO_SECONDS, asking("1", "a"), asking("2", "b", arrival_s=100.0), asking("3", "a", arrival_s=200.0))
    assert [again.outcome(name).ttft_s for name in "123"] == [3.5, 3.5, 1.5]
    assert run(TWO_SECONDS, asking("1", "a"), asking("2", "a", arrival_s=100.0)).outcome("2").ttft_s == 1.0
    numbers = [adapter_number(name) for name in "ba"]
    assert again.adapters() == (
        LoadedAdapter(number=numbers[0], is_active=False),
        LoadedAdapter(number=numbers[1], is_active=True),
    )


def test_forecasts_heed_where_the_adapter_is() -> None:
    """The forecast of a request is its later outcome, with and without its adapter in memory."""
    engine = run(TWO_SECONDS, asking("1", "a"))
    forecaster = Forecaster(engine)
    known, new = forecaster.forecast([asking("x", "a"), asking("y", "b")], engine.now_s)
    assert (known.ttft_s, new.ttft_s) == (1.0, 3.5)
    engine.add(asking("y", "b", arrival_s=engine.now_s))
    arrival_s = engine.now_s
    engine.advance()
    assert engine.outcome("y").ttft_s == new.ttft_s == pytest.approx(3.5)
    assert arrival_s > 0


def test_an_engine_says_which_adapters_it_has_and_will_have() -> None:
    """Those that requests there ask for count as active."""
    engine = run(TWO_SECONDS, asking("1", "a"), asking("2", "b", arrival_s=50.0))
    engine.add(asking("3", "c", arrival_s=1e6))
    active, cached = adapters_of(engine)
    assert sorted(active) == sorted(adapter_number(name) for name in "bc")
    assert cached == [adapter_number("a")]
    assert adapter_counts(engine) == {"num_adapters": 1.0, "max_loras": 1.0}


def test_a_snapshot_keeps_adapters_and_images() -> None:
    """An engine from a snapshot continues as the one from which it was taken."""
    config = EngineConfig(
        max_loras=2, lora_load_s=2.0, max_num_encoder_input_tokens=8, encoder_cache_size=12, encoder_token_s=0.25,
        max_num_batched_tokens=256, num_gpu_blocks=64, enable_prefix_caching=False,
    )  # fmt: skip
    images = tuple(EncoderInput(position=place, tokens=6, identity=f"i{place % 4}") for place in (0, 7, 14))
    engine = Engine(config, ONE_SECOND)
    for number, adapter in enumerate("abca"):
        engine.add(asking(str(number), adapter, prompt_tokens=24, encoder_inputs=images[: number + 1]))
    for _ in range(2):
        assert engine.next_step() is not None
    copy = engine_from(snapshot_of(engine, engine.now_s), ONE_SECOND)
    assert copy.adapters() == engine.adapters()
    while (step := engine.next_step()) is not None:
        again = copy.next_step()
        assert again is not None
        assert (again.scheduled, again.end_s, again.waiting) == (step.scheduled, step.end_s, step.waiting)
    assert copy.next_step() is None


def test_an_image_waits_for_the_budget_and_the_encoder_takes_time() -> None:
    """Of two images with a budget for one, the prompt stops before the second; a known image takes no time."""
    images = tuple(EncoderInput(position=place, tokens=30, identity=name) for place, name in ((0, "x"), (35, "y")))
    engine = Engine(VISION, ONE_SECOND)
    engine.add(asking("1", prompt_tokens=70, encoder_inputs=images))
    first, second = engine.next_step(), engine.next_step()
    assert first is not None
    assert second is not None
    assert (first.scheduled, second.scheduled) == ({"1": 35}, {"1": 35})
    assert first.end_s - first.start_s == second.end_s - second.start_s == 1.0 + 30 * 0.25
    engine.advance()
    engine.add(asking("2", prompt_tokens=40, encoder_inputs=(EncoderInput(position=2, tokens=30, identity="y"),)))
    third = engine.next_step()
    assert third is not None
    assert third.end_s - third.start_s == 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_loras": 2, "max_cpu_loras": 1}, "max_cpu_loras: 1 is below max_loras 2"),
        ({"max_cpu_loras": 1}, "max_cpu_loras: needs max_loras above 0"),
        ({"max_loras": 1, "max_cpu_loras": 5000}, "max_cpu_loras: must be at most 4096, not 5000"),
        ({"lora_load_s": -1.0}, "lora_load_s: must be at least 0, not -1.0"),
        (
            {"encoder_cache_size": 5},
            "encoder_cache_size: must be above 0 where max_num_encoder_input_tokens is, else 0",
        ),
        ({"encoder_token_s": float("nan")}, "encoder_token_s: must be at least 0, not nan"),
        ({"max_loras": 1, "batcher": "vllm_v0"}, "max_loras: vllm_v0 does not limit it, so it must be 0"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    """The error names the field."""
    with pytest.raises(ValueError, match=f"^{message}$"):
        settled(EngineConfig(**settings))


def test_impossible_inputs_are_refused() -> None:
    """Images overlap, or are outside of the prompt."""
    with pytest.raises(ValueError, match=r"encoder_inputs\[1\].position: 3 is before the end of the one before it"):
        asking("1", encoder_inputs=(EncoderInput(position=0, tokens=4), EncoderInput(position=3, tokens=4)))
    with pytest.raises(ValueError, match="encoder_inputs: end at token 20, after the 16 of the prompt"):
        asking("1", encoder_inputs=(EncoderInput(position=10, tokens=10),))
    with pytest.raises(ValueError, match="max_loras: must be above 0"):
        Engine(VISION, StepTime()).load_adapter("a")


def test_an_image_is_never_larger_than_the_encoder_can_compute() -> None:
    """An estimate beyond the budget counts as the budget, and the request is served."""
    engine = run(VISION, asking("1", prompt_tokens=60, encoder_inputs=(EncoderInput(position=0, tokens=55),)))
    assert engine.outcome("1").ttft_s == 1.0 + 40 * 0.25


def test_loading_times_are_learnt_from_steps() -> None:
    """A step that only activates says how long that takes; the rest of one that loads is the loading."""
    times = AdapterTimes().observe(num_loads=0, num_activations=2, extra_s=0.2)
    assert (times.activate_s, times.load_s) == (0.1, 0.0)
    times = times.observe(num_loads=1, num_activations=1, extra_s=2.1)
    assert times.load_s == pytest.approx(2.0)
    times = times.observe(num_loads=1, num_activations=1, extra_s=4.1)
    assert 2.0 < times.load_s < 4.0
    assert times.observe(num_loads=0, num_activations=0, extra_s=9.0) == times
    assert times.observe(num_loads=1, num_activations=1, extra_s=-3.0).load_s < times.load_s
