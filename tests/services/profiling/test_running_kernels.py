"""`block profile kernels` on a machine without an accelerator."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from predictor.fitting.kernel_profile import UntimedCosts
from predictor.fitting.model_shard import share_of
from predictor.profile import profile_from_json
from services.profiling.kernels_command import notes_of
from services.profiling.torch_device import device_named
from tests.services.cli.running import block, refusal
from tests.services.profiling.test_kernel_timing import CONFIG, one_thread

SMALL = (
    "--device", "cpu", "--budget", "10m", "--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--max-model-len", "64",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder that has only its config.json."""
    return model_at(tmp_path)


def model_at(place: Path, **changed: Any) -> Path:
    """Create a model's folder."""
    folder = place / "Tiny-3"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changed}))
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The profile that the command writes, with its report beside it."""
    folder = model_at(tmp_path_factory.mktemp("model"))
    made = folder / "made.json"
    with one_thread():
        done = block("profile", "kernels", str(folder), *SMALL, "--cpu-overhead-ms", "1.5", "-o", str(made), "--json")
    assert done.returncode == 0, done.stderr
    (folder / "report.json").write_text(done.stdout)
    return made


def test_a_config_becomes_a_profile_that_replays(made: Path) -> None:
    """The profile is valid, and has its source, its error, and step times."""
    profile = profile_from_json(made.read_text())
    assert (profile.name, profile.model, profile.gpu, profile.dtype) == ("tiny-3-cpu", "Tiny-3", "CPU", "bfloat16")
    assert "1.5 ms of processor time a step, as given" in profile.source
    assert profile.step_time.constant_s >= 1.5e-3
    assert profile.valid.max_tokens == 32
    assert profile.error is not None
    assert "held-out rows" in block("profile", "show", str(made)).stdout
    line = '{"prompt_tokens": 20, "output_tokens": 10}'
    replayed = block("replay", "-", "--profile", str(made), "--json", stdin=line)
    assert json.loads(replayed.stdout)["summary"]["tpot_s"]["p50"] > 1.5e-3


def test_all_that_was_timed_is_told(made: Path) -> None:
    """A row for each kernel and count, for the head, and for each batch of attention, beside the profile."""
    told = json.loads((made.parent / "report.json").read_text())
    assert told["device"] == "CPU"
    assert told["kv_tokens"] is None
    assert {row["kernel"] for row in told["dense"]} >= {"qkv", "o", "gate_up", "down", "norm", "rotary", "activation"}
    assert {row["tokens"] for row in told["dense"]} >= {1, 2, 4, 8, 16, 32}
    assert {row["sequences"] for row in told["head"]} == {1, 2, 4}
    assert {row["num_decodes"] for row in told["attention"]} == {0, 1, 2, 4}
    assert all(row["seconds"] > 0 for kind in ("dense", "head", "attention") for row in told[kind])
    assert told["profile"] == json.loads(made.read_text())


@pytest.mark.parametrize(
    ("changed", "flags", "complaint"),
    [
        ({"model_type": "bert"}, (), "model_type"),
        ({"quantization_config": {"bits": 4}}, (), "quantization_config"),
        ({"vocab_size": -5}, (), "vocab_size"),
        ({}, ("--budget", "soon"), "budget"),
        ({}, ("--budget", "1s"), "budget"),
        ({}, ("--tensor-parallel", "3"), "tensor_parallel"),
        ({}, ("--all-reduce-us", "10"), "tensor_parallel"),
        ({}, ("--cpu-overhead-ms", "-1"), "cpu_overhead_ms"),
        ({}, ("--max-num-seqs", "0"), "max_num_seqs"),
        ({}, ("--max-model-len", "1"), "max_model_len"),
        ({}, ("--device", "abacus"), "--device"),
        ({}, ("--dtype", "int3"), "--dtype"),
        ({}, ("-o", "/nowhere/profile.json"), "output"),
    ],
)
def test_what_cannot_be_timed_is_refused_in_one_line(
    tmp_path: Path, changed: dict[str, Any], flags: tuple[str, ...], complaint: str
) -> None:
    """The line names the field."""
    assert complaint in refusal("profile", "kernels", str(model_at(tmp_path, **changed)), *flags)


def test_files_that_are_no_models_are_named(tmp_path: Path) -> None:
    """A folder without a config.json, and an invalid config.json, are refused."""
    assert "config.json: cannot be read" in refusal("profile", "kernels", str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    assert "must be an object" in refusal("profile", "kernels", str(tmp_path))


def test_without_torch_the_error_says_what_to_install(folder: Path) -> None:
    """The error names the extra."""
    loaded = [
        name for name in sys.modules if name in ("services.profiling.torch_device", "services.profiling.kernel_timing")
    ]
    with patch.dict(sys.modules, {"torch": None}):
        for name in loaded:
            del sys.modules[name]
        assert "block-serving[tagger]" in refusal("profile", "kernels", str(folder))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu(folder: Path) -> None:
    """`--device cuda` is refused; `auto` uses the CPU."""
    assert "device: torch sees no CUDA device" in refusal("profile", "kernels", str(folder), "--device", "cuda")
    assert device_named("auto").name == "CPU"


def test_costs_that_are_not_timed_are_described() -> None:
    """A profile's source names processor time and all-reduces that were given, or that they are missing."""
    one, two = share_of(CONFIG), share_of(CONFIG, tensor_parallel=2)
    assert notes_of(one, UntimedCosts()) == "No processor time."
    assert "no all-reduces" in notes_of(two, UntimedCosts())
    notes = notes_of(two, UntimedCosts(cpu_s=2e-3, all_reduce_s=1.2e-5, link_bytes_per_s=3e11))
    assert notes == "2 ms of processor time a step, as given; all-reduces of 12 us and 300 GB/s, as given."
