"""The warm-up compiles what a sidecar needs when its engine appears."""

from __future__ import annotations

from pathlib import Path

from tests.python_process import run_python

SCRIPT = """
import sys
from pathlib import Path

from predictor import replica_kernels, reported_transfers
from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.request import RequestFacts
from services.warmup import warm_up
from tests.services.emulator.test_exporter import replica_at, viewed
from tests.strategies import AFFINE

def compiled():
    kernels = (replica_kernels.put_requests, replica_kernels.put_step, replica_kernels.put_blocks)
    return [len(one.overloads) for one in (*kernels, reported_transfers.put_transfers)]

warm_up()
before = compiled()
engine = Engine(EngineConfig(num_gpu_blocks=64, enable_prefix_caching=False, kv_role="kv_both"), AFFINE)
engine.add(RequestFacts(request_id="one", prompt_tokens=40, output_tokens=4))
engine.next_step()
replica_at(viewed(Path(sys.argv[1]) / "state", engine), engine)
print(before, compiled())
"""


def test_a_replica_of_an_exported_state_needs_no_further_kernels(tmp_path: Path) -> None:
    """Otherwise a sidecar would compile for ten seconds when its engine starts."""
    assert run_python("-c", SCRIPT, str(tmp_path)).split("\n")[-2] == "[1, 1, 1, 1] [1, 1, 1, 1]"
