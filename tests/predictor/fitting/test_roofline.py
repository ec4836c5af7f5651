"""The roofline model is usable without measurements, close to them, and states its error."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from predictor.fitting.gpus import GPUS, gpu_named
from predictor.fitting.measured_steps import fit_measured_steps
from predictor.fitting.model_config import model_shape
from predictor.fitting.regression import Steps, predict
from predictor.fitting.roofline import Parallelism, Roofline, RooflineConstants
from predictor.fitting.roofline_profile import fitted_roofline, roofline_profile
from predictor.profile import ROOFLINE, load_profile, profile_from_json, profile_to_json
from predictor.step_time import StepTime
from tests.predictor.fitting.model_configs import DEEPSEEK_V3, GPT_OSS_120B, LLAMA_31_8B, QWEN3_30B_A3B, QWEN3_NEXT_80B

# Everything at its peak, and nothing that a data sheet does not have.
IDEAL = RooflineConstants(
    bandwidth_share=1,
    kv_bandwidth_share=1,
    flops16_share=1,
    flops8_share=1,
    flops4_share=1,
    attention_flops_share=1,
    link_share=1,
    hidden_passes=0,
    layer_s=0,
    all_reduce_s=0,
    step_s=0,
    prefill_s=0,
    sequence_s=0,
    overlap=100,  # the longer of both
)
H100 = GPUS["H100"]


def ideal(config: dict[str, Any], *, tensor: int = 1, data: int = 1) -> StepTime:
    """Return the step time of a model on H100s without losses."""
    parallel = Parallelism(tensor=tensor, data=data)
    return Roofline(model=model_shape(config), gpu=H100, constants=IDEAL, parallel=parallel).step_time()


def batches() -> Steps:
    """Return typical batches: decodes of 256 to 4096 tokens, chunks up to 8192, and both."""
    rows = [
        (n, n * c, q) for n in (0, 1, 8, 64, 256) for c in (256, 1024, 4096) for q in (0, 256, 2048, 8192) if n or q
    ]
    decodes, context, chunk = np.array([row for row in rows if row[1] <= 300_000], dtype=float).T
    return Steps(
        num_tokens=decodes + chunk,
        num_sampled=decodes + (chunk > 0),
        num_decodes=decodes,
        decode_context=context,
        num_prefills=(chunk > 0).astype(float),
        prefill_qq=chunk**2,
        prefill_qkv=np.zeros(len(chunk)),
        decode_longest=np.zeros(len(chunk)),
        seconds=np.ones(len(chunk)),
    )


@pytest.mark.parametrize("gpu", ["A100", "H100", "H200"])
def test_is_close_to_the_fitted_profiles(gpu: str) -> None:
    """Llama-3.1-8B's kernels are within a factor of 1.5 of the fitted profile for every batch, and 1.25 for most.

    The fitted profiles hold kernels only, and the estimate the time between them, so that is left out here.
    """
    fitted = predict(load_profile(f"llama-3.1-8b-{gpu.lower()}").step_time, batches())
    profile = roofline_profile(LLAMA_31_8B, gpu)
    constants = fitted_roofline().constants
    between_s = constants.step_s + constants.sequence_s * batches().num_sampled
    between_s += constants.prefill_s * (batches().num_prefills > 0)
    estimated = predict(profile.step_time, batches()) - between_s
    ratio = np.maximum(estimated / fitted, fitted / estimated)
    assert ratio.max() < 1.5
    assert np.median(ratio) < 1.25


def test_is_marked_as_a_roofline_and_states_its_error() -> None:
    """The profile shows that it is an estimate, and how far off such estimates were; it can be written and read."""
    profile = roofline_profile(LLAMA_31_8B, "H100")
    assert profile.kind == ROOFLINE
    assert profile.error is None
    assert "was not measured" in profile.source
    assert profile.estimate is not None
    assert (profile.estimate.gpu, profile.estimate.family) == ("known", "known")
    assert 0 < profile.estimate.tpot_p50 < profile.estimate.tpot_p90 < 1
    assert profile_from_json(profile_to_json(profile)) == profile
    assert profile.transfer.kv_bytes_per_token == 128 * 1024
    text = json.loads(profile_to_json(profile))
    text["estimate"]["gpu"] = "guessed"
    with pytest.raises(ValueError, match=r"^estimate\.gpu: must be known or unknown"):
        profile_from_json(json.dumps(text))


@pytest.mark.parametrize(
    ("config", "gpu", "known"),
    [
        (LLAMA_31_8B, "A100", ("unknown", "known")),
        (QWEN3_30B_A3B, "H100", ("known", "unknown")),
        (QWEN3_30B_A3B, "L40S", ("unknown", "unknown")),
    ],
)
def test_the_error_is_that_of_what_is_known(config: dict[str, Any], gpu: str, known: tuple[str, str]) -> None:
    """A GPU or a family that the constants were not fitted to has the error of those that were held out."""
    found = roofline_profile(config, gpu, tensor_parallel=2).estimate
    assert found is not None
    assert (found.gpu, found.family) == known


def test_a_dense_step_is_bytes_or_operations() -> None:
    """One token reads all weights of the layers; many compute with them; the head and contexts come on top."""
    model, table = model_shape(LLAMA_31_8B), ideal(LLAMA_31_8B).by_tokens.table(8192)
    weights = 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336)
    assert table[1] == pytest.approx(2 * weights / 3350e9, rel=1e-4)
    assert table[8192] == pytest.approx(2 * weights * 8192 / 989e12, rel=1e-4)
    step_time = ideal(LLAMA_31_8B)
    assert step_time.by_sequences.table(1)[1] == pytest.approx(2 * model.head_weights / 3350e9, rel=1e-4)
    assert step_time.decode_slope.y[0] == pytest.approx(128 * 1024 / 3350e9, rel=1e-4)
    assert step_time.prefill_qkv_s == pytest.approx(32 * 4 * 4096 / 989e12, rel=1e-4)


def test_experts_are_read_where_touched_and_computed_where_used() -> None:
    """One token reads 8 of 128 experts, many tokens all; each token computes with 8."""
    table = ideal(QWEN3_30B_A3B).by_tokens.table(16384)
    attention, expert = 2048 * (2 * 4096 + 2 * 512), 3 * 2048 * 768
    router_s = 48 * 2 * 2048 * 128 / 3350e9
    assert table[1] == pytest.approx(48 * 2 * (attention + 8 * expert) / 3350e9 + router_s, rel=1e-3)
    assert table[16384] == pytest.approx(48 * 2 * (attention + 8 * expert) * 16384 / 989e12 + router_s, rel=0.02)
    touched = 128 * (1 - (1 - 8 / 128) ** 64)
    assert table[64] == pytest.approx(48 * 2 * (attention + touched * expert) / 3350e9 + router_s, rel=1e-2)


def test_data_parallel_ranks_share_experts() -> None:
    """Eight ranks with one token each read an eighth of the experts that eight tokens touch."""
    alone, together = (ideal(DEEPSEEK_V3, data=ranks).by_tokens for ranks in (1, 8))
    touched = 256 * (1 - (1 - 8 / 256) ** 8)
    expert_s = 58 * 3 * 7168 * 2048 / 3350e9
    assert alone.table(1)[1] - together.table(1)[1] == pytest.approx((8 - touched / 8) * expert_s, rel=1e-3)
    assert ideal(DEEPSEEK_V3, data=8).token_s > 0


def test_latents_are_read_by_every_rank() -> None:
    """A token of context is 1152 bytes a layer, also with eight devices; alone its 128 heads compute for as long."""
    read_s = 61 * 1152 / 3350e9
    computed_s = 61 * 2 * 128 * (2 * 512 + 64) / 989e12
    one, eight = (ideal(DEEPSEEK_V3, tensor=ranks).decode_slope.y[0] for ranks in (1, 8))
    assert one == pytest.approx(max(read_s, computed_s), rel=0.01)
    assert eight == pytest.approx(read_s, rel=1e-4)


def test_windows_and_states_cost_the_same_in_every_context() -> None:
    """gpt-oss reads whole contexts in half of its layers; Qwen3-Next reads and writes a state per sequence."""
    oss = ideal(GPT_OSS_120B)
    layer_s = 2 * 8 * 64 * 2 / 3350e9
    assert oss.decode_slope.y[0] == pytest.approx(18 * layer_s, rel=0.01)
    assert oss.decode_base.table(1)[1] == pytest.approx(18 * 128 * layer_s, rel=0.05)
    following = ideal(QWEN3_NEXT_80B)
    assert following.decode_base.table(1)[1] == pytest.approx(2 * model_shape(QWEN3_NEXT_80B).state_bytes / 3350e9)


def test_more_gpus_are_faster_and_communicate() -> None:
    """Two GPUs halve a large step, except for communication."""
    one, two = (roofline_profile(LLAMA_31_8B, "H100", tensor_parallel=count).step_time for count in (1, 2))
    assert 0.5 * one.by_tokens.y[-1] < two.by_tokens.y[-1] < 0.6 * one.by_tokens.y[-1]
    assert one.token_s == 0.0
    assert two.token_s > 0.0
    with pytest.raises(ValueError, match=r"^tensor_parallel: 3 devices cannot share num_attention_heads"):
        roofline_profile(LLAMA_31_8B, "H100", tensor_parallel=3)


def test_quantized_weights_are_read_faster() -> None:
    """8-bit weights take half the time to read, and are multiplied in the GPU's 8-bit units if it has some."""
    fp8 = LLAMA_31_8B | {"quantization_config": {"quant_method": "fp8"}}
    plain, half = (ideal(config).by_tokens.table(8192) for config in (LLAMA_31_8B, fp8))
    assert half[1] == pytest.approx(plain[1] / 2, rel=1e-3)
    assert half[8192] == pytest.approx(plain[8192] * 989 / 1979, rel=1e-3)
    assert GPUS["A100"].peak(8) == GPUS["A100"].flops
    assert (GPUS["A100"].unit_bits(8), GPUS["H100"].unit_bits(4), GPUS["B200"].unit_bits(4)) == (16, 8, 4)


@pytest.mark.parametrize("name", ["H100", "h100-sxm", "NVIDIA H100 80GB", "h100_sxm5", "RTX PRO 6000", "rtxpro6000"])
def test_names_of_gpus(name: str) -> None:
    """A GPU is found by all usual spellings of its name."""
    assert gpu_named(name) in (GPUS["H100"], GPUS["RTX-PRO-6000"])


def test_an_unknown_gpu_gets_a_suggestion() -> None:
    """The error for an unknown GPU suggests the closest name, or lists all."""
    with pytest.raises(ValueError, match=r"^gpu: 'H300' is not known; did you mean H[12]00\?$"):
        gpu_named("H300")
    with pytest.raises(ValueError, match="^gpu: 'abacus' is not known; there are .*H100"):
        gpu_named("abacus")


def test_measured_steps_of_experts_are_fitted() -> None:
    """Steps whose cost per token falls, as more tokens touch the same experts, are fitted as well as those of others."""
    generator = np.random.default_rng(0)
    num = 400
    decodes = np.round(np.exp(generator.uniform(0, np.log(256), num)))
    chunk = np.where(generator.random(num) < 0.3, np.round(np.exp(generator.uniform(2, 7.6, num))), 0)
    context = decodes * np.round(generator.uniform(100, 3000, num))
    steps = Steps(
        num_tokens=decodes + chunk,
        num_sampled=decodes + (chunk > 0),
        num_decodes=decodes,
        decode_context=context,
        num_prefills=(chunk > 0).astype(float),
        prefill_qq=chunk**2,
        prefill_qkv=np.zeros(num),
        decode_longest=np.zeros(num),
        seconds=np.ones(num),
    )
    steps = replace(steps, seconds=predict(ideal(QWEN3_30B_A3B), steps))
    _, error, _ = fit_measured_steps(steps)
    assert error.p50 < 0.02
    assert error.p90 < 0.06
