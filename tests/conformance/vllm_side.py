"""Runs `vllm_trace.py` with the interpreter that has vLLM."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("vllm_trace.py")
SPEC_SCRIPT = Path(__file__).with_name("spec_trace.py")
LEGS_SCRIPT = Path(__file__).with_name("legs_trace.py")
SAMPLING_SCRIPT = Path(__file__).with_name("sampling_trace.py")
INPUTS_SCRIPT = Path(__file__).with_name("inputs_trace.py")
PLUGIN_SCRIPT = Path(__file__).with_name("plugin_trace.py")
LOCKSTEP_SCRIPT = Path(__file__).with_name("lockstep_trace.py")


def interpreter() -> Path:
    """Return the Python interpreter that has vLLM; it may not exist."""
    return Path(os.environ.get("BLOCK_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))


def older_interpreter() -> Path:
    """Return the interpreter that has the oldest version of vLLM, from which engines are upgraded; it may not exist."""
    return Path(os.environ.get("BLOCK_VLLM_UPGRADE_FROM", ROOT / ".venv-vllm-0.28" / "bin" / "python"))


@cache
def version(python: Path | None = None) -> str:
    """Return the version of vLLM that an interpreter has."""
    code = "from vllm.version import __version__; print(__version__)"
    run = subprocess.run([python or interpreter(), "-I", "-c", code], capture_output=True, text=True, check=True)
    return run.stdout.split()[-1]


def traces(workloads: Iterable[dict[str, Any]]) -> list[str]:
    """Trace the workloads in one process; the traces stay JSON, because together they are large."""
    return _answers(workloads, SCRIPT)


def spec_traces(workloads: Iterable[dict[str, Any]]) -> list[str]:
    """Trace workloads of engines with speculative decoding."""
    return _answers(workloads, SPEC_SCRIPT)


def leg_traces(workloads: Iterable[dict[str, Any]]) -> list[str]:
    """Trace workloads of engines with a KV connector."""
    return _answers(workloads, LEGS_SCRIPT)


def sampling_traces(workloads: Iterable[dict[str, Any]]) -> list[str]:
    """Trace workloads of requests with several prompts and responses."""
    return _answers(workloads, SAMPLING_SCRIPT)


def lockstep_traces(workloads: Iterable[dict[str, Any]]) -> list[str]:
    """Trace workloads of engines with several ranks in lockstep."""
    return _answers(workloads, LOCKSTEP_SCRIPT)


def plugin_traces(workloads: Iterable[dict[str, Any]], installed: Path) -> list[str]:
    """Trace the workloads with the plug-in that is installed in a folder."""
    return _answers(workloads, PLUGIN_SCRIPT, str(installed))


def input_answers(asked: dict[str, Any]) -> str:
    """Return vLLM's memory of adapters after steps, and the tokens of images, as JSON."""
    return _answers([asked], INPUTS_SCRIPT)[0]


def _answers(workloads: Iterable[dict[str, Any]], script: Path, *arguments: str) -> list[str]:
    run = subprocess.run(
        [interpreter(), "-I", script, *arguments],  # isolated: nothing of this project can be imported there
        input="".join(json.dumps(workload) + "\n" for workload in workloads),
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode != 0:
        raise RuntimeError(f"{script.name} ended with {run.returncode}:\n{run.stderr[-4000:]}")
    return run.stdout.splitlines()
