"""The oracle of SGLang's rules beside SGLang's own `PrefillAdder`, where its source is at hand."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.conformance.vllm_side import ROOT, interpreter

NUM_LOADS = 200


@pytest.mark.vllm
def test_admission_is_sglangs() -> None:
    """Batches are equal at every step in random configurations, with chunks, pages, mixed batches and retractions."""
    source = os.environ.get("BLOCK_SGLANG_SOURCE", "")
    if not (Path(source) / "sglang" / "srt").is_dir():
        pytest.skip("no source of SGLang: unpack its wheel (0.5.23), and set BLOCK_SGLANG_SOURCE to the folder")
    if not interpreter().exists():
        pytest.skip(f"no torch at {interpreter()}: `make vllm`, or set BLOCK_VLLM_PYTHON")
    command = [str(interpreter()), "-m", "tests.conformance.sglang_side", str(NUM_LOADS), source]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert run.returncode == 0, run.stdout[-3000:] or run.stderr[-3000:]
    counts = json.loads(run.stdout.splitlines()[-1])
    assert counts["loads"] == NUM_LOADS
    assert counts["retractions"] > 50
    assert counts["failures"] < NUM_LOADS / 10
