"""An encoder in ONNX form with 8-bit weights: exported by torch, run by ONNX Runtime without torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Run = Callable[[Ids, Ids, Array], tuple[Array, Array]]

AUTO, ONNX, TORCH = "auto", "onnx", "torch"
RUNTIMES = (AUTO, ONNX, TORCH)
FILE = "model.onnx"
INPUTS, OUTPUTS = ("ids", "mask", "counts"), ("medians", "log_spreads")
OPSET = 17


def run_from(path: Path, threads: int) -> Run:
    """Load an ONNX model; return the function that computes log medians and log spreads of a batch."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # other processes use the cores, too
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001 - its errors have no other common base
        raise ValueError(f"{path}: is not an ONNX model: {str(error).splitlines()[0]}") from None
    if [one.name for one in session.get_inputs()] != list(INPUTS):
        raise ValueError(f"{path}: its inputs are not {', '.join(INPUTS)}")

    def run(ids: Ids, mask: Ids, counts: Array) -> tuple[Array, Array]:
        medians, log_spreads = session.run(list(OUTPUTS), dict(zip(INPUTS, (ids, mask, counts), strict=True)))
        return medians, log_spreads

    return run


def write(network: Any, num_counts: int, path: Path) -> bool:
    """Export a torch network; return whether the packages for it are installed."""
    import torch

    try:
        import onnx  # noqa: F401 - torch needs it during the export
        from onnxruntime.quantization import QuantType, quantize_dynamic
        from onnxruntime.quantization.shape_inference import quant_pre_process
    except ImportError:
        return False
    ids = torch.tensor([[0, 1, 2], [1, 2, 0]])
    example = (ids, torch.tensor([[1, 1, 1], [1, 1, 0]]), torch.zeros(2, num_counts))
    whole, smoothed = path.with_suffix(".whole"), path.with_suffix(".smoothed")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tracing warns of constant shapes; the caller compares the results
            torch.onnx.export(
                network, example, str(whole), dynamo=False, opset_version=OPSET, input_names=list(INPUTS),
                output_names=list(OUTPUTS),
                dynamic_axes={
                    "ids": {0: "prompts", 1: "tokens"}, "mask": {0: "prompts", 1: "tokens"},
                    "counts": {0: "prompts"}, "medians": {0: "prompts"}, "log_spreads": {0: "prompts"},
                },
            )  # fmt: skip
            quant_pre_process(str(whole), str(smoothed), skip_symbolic_shape=True)
            # seven bits: with eight, processors without VNNI overflow
            quantize_dynamic(str(smoothed), str(path), weight_type=QuantType.QInt8, reduce_range=True)
    finally:
        whole.unlink(missing_ok=True)
        smoothed.unlink(missing_ok=True)
    return True
