"""`block profile fit`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.services.cli.running import block, refusal

CONFIG = {
    "_name_or_path": "example/Small-1B",
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}


def test_a_model_without_measurements_gets_a_roofline_estimate(tmp_path: Path) -> None:
    """A profile from config.json and the name of a GPU can be replayed, and is marked as an estimate."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    made = tmp_path / "made.json"
    done = block("profile", "fit", "roofline", str(tmp_path / "config.json"), "--gpu", "H100", "-o", str(made))
    assert done.returncode == 0
    assert "estimated, not measured: on" in done.stdout
    line = '{"prompt_tokens": 100, "output_tokens": 10}'
    replayed = block("replay", "-", "--profile", str(made), "--json", stdin=line)
    assert 0.001 < json.loads(replayed.stdout)["summary"]["tpot_s"]["p50"] < 0.1


def test_measured_steps_make_a_profile(tmp_path: Path) -> None:
    """Steps of a linear law are fitted with a small error."""
    rows = [
        f"{n},{n * context},0,0,0,0,{0.005 + 1e-4 * n + 1e-7 * n * context}"
        for n in range(1, 65)
        for context in (64, 256, 1024)
    ]
    header = "num_decodes,decode_context,num_prefills,prefill_tokens,prefill_qq,prefill_qkv,seconds"
    (tmp_path / "steps.csv").write_text("\n".join([header, *rows]))
    done = block(
        "profile", "fit", "steps", str(tmp_path / "steps.csv"), "--name", "mine", "--model", "M", "--gpu", "H100"
    )
    assert json.loads(done.stdout)["error"]["mape"] < 0.02


@pytest.mark.parametrize(
    ("config", "arguments", "named"),
    [
        (CONFIG, ("--gpu", "Abacus"), "gpu"),
        (CONFIG, ("--gpu", "H100", "--tensor-parallel", "0"), "tensor_parallel"),
        ({**CONFIG, "hidden_size": -1}, ("--gpu", "H100"), "hidden_size"),
        ({}, ("--gpu", "H100"), "num_attention_heads: missing"),
        ({**CONFIG, "model_type": "qwen3_moe"}, ("--gpu", "H100"), "num_experts: missing"),
        ({**CONFIG, "num_experts": 8}, ("--gpu", "H100"), "num_experts_per_tok: missing"),
        ({**CONFIG, "quantization_config": {"quant_method": "awq"}}, ("--gpu", "H100"), "quantization_config.bits"),
        (CONFIG, ("--gpu", "H100", "--kv-cache-dtype", "int2"), "kv_cache_dtype"),
        (CONFIG, ("--gpu", "H100", "--data-parallel", "0"), "data_parallel"),
        ([], ("--gpu", "H100"), "must be an object"),
    ],
)
def test_bad_models_and_gpus_are_named(tmp_path: Path, config: object, arguments: tuple[str, ...], named: str) -> None:
    """What a profile cannot be made from is refused by name."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert named in refusal("profile", "fit", "roofline", str(tmp_path / "config.json"), *arguments)


def test_a_profile_file_that_is_none_is_named(tmp_path: Path) -> None:
    """A broken profile is refused by its field."""
    (tmp_path / "broken.json").write_text('{"version": 99}')
    assert "version" in refusal("profile", "show", str(tmp_path / "broken.json"))
    assert "cannot be read" in refusal("profile", "show", str(tmp_path / "absent.json"))
