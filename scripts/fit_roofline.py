"""Fits the constants of the roofline estimate to published benchmarks, and finds their errors on those held out.

Rows of vLLM count in full; those of other engines count little, and have processor times of their own. Rows whose
sequences do not fit into memory are left out: their TTFT is that of a queue. All errors are relative, of means.

- `unseen_configuration`: vLLM's rows of configurations (model, GPU, precision, devices) held out in five parts.
- `unseen_gpu`, `unseen_family`: all rows of one GPU, or of one model family, held out.
- `unseen_both`: rows of a GPU and a family, with neither in the fit.
- `fitted`, `naive`: rows by engine, model, GPU and precision, by the constants and by the data sheet's formula.
- `kernels`: steps without processor time, against those composed of Llama-3.1-8B's kernels; no benchmark ran on A100
  and L40S.

`--write` puts constants and errors into `predictor/fitting/roofline.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))

from predictor.fitting.gpus import GPUS
from predictor.fitting.iteration_table import read_iteration_table
from predictor.fitting.model_config import model_shape
from predictor.fitting.regression import predict
from predictor.fitting.roofline import Roofline, RooflineConstants
from predictor.profile import EstimateError
from scripts.report import report, row
from simulator.published_benchmarks import MODELS, POINTS, Benchmark, naive_s, predicted_s, read_benchmarks
from simulator.reference_data import data_folder

Array = NDArray[np.float64]
Chosen = NDArray[np.bool_]

ENGINES = ("vllm", "trtllm", "sglang")
OUTPUT = Path(__file__).parents[1] / "predictor" / "fitting" / "roofline.json"
# Where the fit starts, and how far (as a factor's logarithm) it expects to go: it keeps what the rows do not show.
PRIOR = {
    "bandwidth_share": (0.8, 0.15), "kv_bandwidth_share": (0.7, 0.3), "flops16_share": (0.7, 0.2),
    "flops8_share": (0.6, 0.2), "flops4_share": (0.45, 0.3), "attention_flops_share": (0.4, 0.4),
    "link_share": (0.5, 0.5), "hidden_passes": (15.0, 0.5), "layer_s": (4e-5, 0.5), "all_reduce_s": (3e-6, 0.7),
}  # fmt: skip
PRIOR_BY_ENGINE = {
    "step_s": (1e-3, 0.7), "prefill_s": (1e-3, 1.0), "sequence_s": (1e-5, 0.7), "request_s": (1.5e-2, 0.7)
}  # fmt: skip
# The time of a request outside the steps depends on the machines of a GPU, as a factor of all GPUs' time.
PRIOR_BY_GPU = {f"request_{gpu}": (1.0, 0.5) for gpu in ("B200", "H100", "H200")}
OVERLAP = 4.0
PRIOR_WEIGHT = 0.02
PARAMETERS = [("", name) for name in PRIOR] + [(engine, name) for engine in ENGINES for name in PRIOR_BY_ENGINE]
PARAMETERS += [("vllm", name) for name in PRIOR_BY_GPU]
WEIGHTS = {"vllm": (0.5, 1.0), "trtllm": (0.05, 0.3), "sglang": (0.02, 0.3)}  # of TTFT and TPOT
HUBER_ERROR = 0.15
STEP = 0.15  # of finite differences, in logarithms
FARTHEST = 0.6  # a parameter's change in one round
NUM_PARTS = 5
METRICS = ("ttft", "tpot", "e2e")
KERNEL_STEPS = {"a100_sxm": "A100", "l40s": "L40S", "h100_sxm": "H100", "h200_sxm": "H200"}


class Fit:
    """The rows, and what the fit needs of them: predictions and their derivatives by the logarithm of a parameter."""

    def __init__(self, rows: Sequence[Benchmark]) -> None:
        """Fit to all rows."""
        self.rows = rows
        self.measured = np.array([row.measured_s for row in rows])
        self.start = np.log([_prior(name)[0] for _, name in PARAMETERS])
        self.everything = np.ones(len(rows), np.bool_)
        self.found = self.start
        for _ in range(2):
            self.predicted = self.predict(self.found, self.everything)
            self.slopes = self._slopes(self.found, self.predicted)
            self.found = self.improve(self.everything, rounds=2)
        self.predicted = self.predict(self.found, self.everything)

    def predict(self, logs: Array, chosen: Chosen) -> Array:
        """Return the logarithms of TTFT, TPOT and e2e of the chosen rows; others are zero."""
        result = np.zeros((len(self.rows), len(METRICS)))
        for index in np.flatnonzero(chosen).tolist():
            row = self.rows[index]
            constants, request_s = constants_of(logs, row.engine, row.gpu)
            result[index] = np.log(predicted_s(row, constants, request_s))
        return result

    def improve(self, chosen: Chosen, *, rounds: int) -> Array:
        """Move to the least robust error of the chosen rows, by the slopes that were found last."""
        logs, predicted = self.found, self.predicted
        widths = np.array([_prior(name)[1] for _, name in PARAMETERS])
        held = np.diag(PRIOR_WEIGHT / widths**2)
        slopes = self.slopes[chosen].reshape(-1, len(PARAMETERS))
        weights = np.array([WEIGHTS[row.engine] for row, used in zip(self.rows, chosen, strict=True) if used]).ravel()
        for number in range(rounds):
            if number > 0:
                predicted = self.predict(logs, chosen)
            errors = (np.log(self.measured) - predicted)[chosen, :2].ravel()
            change = np.zeros(len(logs))
            for _ in range(20):
                left = np.abs(errors - slopes @ change)
                robust = weights * np.minimum(1.0, HUBER_ERROR / np.maximum(left, 1e-9))
                normal = slopes.T @ (slopes * robust[:, None]) + held
                change = np.linalg.solve(normal, slopes.T @ (errors * robust) + held @ (self.start - logs))
            logs = logs + np.clip(change, -FARTHEST, FARTHEST)
        return logs

    def errors(self, logs: Array, chosen: Chosen) -> Array:
        """Return the relative errors of the chosen rows."""
        ratios: Array = np.exp(self.predict(logs, chosen)) / self.measured
        return ratios[chosen] - 1

    def held_out(self, gone: Chosen, tested: Chosen) -> Array:
        """Return the errors of rows by constants that were fitted without others."""
        return self.errors(self.improve(~gone, rounds=2), tested)

    def _slopes(self, logs: Array, predicted: Array) -> Array:
        slopes = np.zeros((len(self.rows), 2, len(PARAMETERS)))
        for index, (engine, name) in enumerate(PARAMETERS):
            chosen = np.array([engine in ("", row.engine) for row in self.rows])
            if name in PRIOR_BY_GPU:
                chosen &= np.array([name.endswith(row.gpu) for row in self.rows])
            moved = logs.copy()
            moved[index] += STEP
            slopes[chosen, :, index] = (self.predict(moved, chosen) - predicted)[chosen, :2] / STEP
        return slopes


def main() -> None:
    """Fit, and print the errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help=f"write {OUTPUT.name}")
    arguments = parser.parse_args()
    try:
        rows = [row for row in read_benchmarks(data_folder()) if row.fits]
    except (ValueError, OSError) as error:
        sys.exit(f"fit_roofline: {error}")
    fit = Fit(rows)
    stated, results = errors_held_out(fit)
    results += errors_by_group(fit)
    results += errors_of_kernels(fit)
    if arguments.write:
        OUTPUT.write_text(json.dumps(_written(fit, stated), indent=1) + "\n", encoding="utf-8")
    report("fit_roofline", results, as_json=arguments.json)


def constants_of(logs: Array, engine: str, gpu: str = "") -> tuple[RooflineConstants, float]:
    """Return an engine's constants, and the time of a request outside its steps, on one kind of GPU or on any."""
    values = {
        name: float(f"{np.exp(value):.4g}")
        for (by, name), value in zip(PARAMETERS, logs, strict=True)
        if by in ("", engine)
    }
    factors = {name: values.pop(name, 1.0) for name in PRIOR_BY_GPU}
    request_s = values.pop("request_s") * factors.get(f"request_{gpu}", 1.0)
    return RooflineConstants(**values, overlap=OVERLAP), float(f"{request_s:.4g}")


def errors_held_out(fit: Fit) -> tuple[list[EstimateError], list[dict[str, Any]]]:
    """Return the errors by what the fit has seen of a row's GPU and family, and results for each of them."""
    ours = where(fit.rows, lambda row: row.engine == "vllm")
    results, stated = [], []
    for kind, folds in left_out(fit.rows, ours).items():
        found = []
        for name, gone, tested in folds:
            if (tested & ours).any() and (ours & ~gone).any():
                found.append(fit.held_out(gone, tested & ours))
                if kind in ("gpu", "family"):
                    results += _results(f"unseen_{kind}.{name}", found[-1])
        together = np.concatenate(found)
        results += _results(f"unseen_{kind}", together)
        stated.append(_stated(kind, together))
    return stated, results


def left_out(rows: Sequence[Benchmark], ours: Chosen) -> dict[str, list[tuple[str, Chosen, Chosen]]]:
    """Return what is left out by kind: a name, the rows without which to fit, and those to test."""
    configurations = sorted({row.configuration[1:] for row in rows})
    part_of = {one: number % NUM_PARTS for number, one in enumerate(configurations)}
    parts = np.array([part_of[row.configuration[1:]] for row in rows])
    gpu, family = (np.array([getattr(row, name) for row in rows]) for name in ("gpu", "family"))
    gpus, families = sorted(set(gpu[ours])), sorted(set(family[ours]))
    return {
        "configuration": [(str(number), parts == number, parts == number) for number in range(NUM_PARTS)],
        "gpu": [(one, gpu == one, gpu == one) for one in gpus],
        "family": [(one, family == one, family == one) for one in families],
        "both": [
            (f"{one}.{other}", (gpu == one) | (family == other), (gpu == one) & (family == other))
            for one in gpus
            for other in families
        ],
    }


def errors_by_group(fit: Fit) -> list[dict[str, Any]]:
    """Return the errors of all rows by engine, model and GPU, beside those of the naive formula."""
    rows, results = fit.rows, []
    errors = np.exp(fit.predicted) / fit.measured - 1
    naive = np.array([naive_s(one) for one in rows]) / fit.measured - 1
    for group in sorted({(one.engine, one.model, one.gpu, one.precision or "bf16") for one in rows}):
        chosen = where(rows, lambda one: (one.engine, one.model, one.gpu, one.precision or "bf16") == group)  # noqa: B023
        results += _results("fitted." + ".".join(group), errors[chosen])
        results += _results("naive." + ".".join(group), naive[chosen])
    ours = where(rows, lambda row: row.engine == "vllm")
    return [*results, *_results("fitted.vllm", errors[ours]), *_results("naive.vllm", naive[ours])]


def errors_of_kernels(fit: Fit) -> list[dict[str, Any]]:
    """Return the errors of steps without processor time, on steps that are composed of a model's kernels."""
    constants = replace(constants_of(fit.found, "vllm")[0], step_s=0.0, prefill_s=0.0, sequence_s=0.0)
    model = model_shape(MODELS["Llama-3.1-8B-Instruct"])
    results = []
    for system, gpu in KERNEL_STEPS.items():
        steps = read_iteration_table(data_folder() / "derived/iter_ms_llama31_8b_bf16_tp1.csv", system)
        predicted = predict(Roofline(model=model, gpu=GPUS[gpu], constants=constants).step_time(), steps)
        errors = predicted / steps.seconds - 1
        for figure, value in figures_of(errors):
            results.append(row(f"kernels.{gpu}.step_error.{figure}", value, "ratio", len(errors)))
    return results


def figures_of(errors: Array) -> list[tuple[str, float]]:
    """Return the median and 90th percentile of absolute errors, and the median of signed ones."""
    sizes = np.abs(errors)
    return [
        ("median", float(np.median(sizes))),
        ("p90", float(np.percentile(sizes, 90))),
        ("bias", float(np.median(errors))),
    ]


def where(rows: Sequence[Benchmark], has: Callable[[Benchmark], bool]) -> Chosen:
    """Return which rows have a property."""
    return np.array([has(row) for row in rows])


def _prior(name: str) -> tuple[float, float]:
    return (PRIOR | PRIOR_BY_ENGINE | PRIOR_BY_GPU)[name]


def _stated(kind: str, errors: Array) -> EstimateError:
    known = {False: "known", True: "unknown"}
    figures = {
        f"{metric}_p{percent}": round(float(np.percentile(np.abs(errors[:, column]), percent)), 3)
        for column, metric in enumerate(METRICS)
        for percent in (50, 90)
    }
    return EstimateError(
        gpu=known[kind in ("gpu", "both")], family=known[kind in ("family", "both")], n=len(errors), **figures
    )


def _written(fit: Fit, stated: Sequence[EstimateError]) -> dict[str, Any]:
    constants, request_s = constants_of(fit.found, "vllm")
    seen = [row for row in fit.rows if row.engine == "vllm"]
    return {
        "source": (
            f"constants fitted by scripts/fit_roofline.py to {len(fit.rows)} published benchmarks ({POINTS},"
            f" {len(seen)} of vLLM), and to the GPU's data sheet"
        ),
        "constants": {spec.name: getattr(constants, spec.name) for spec in fields(constants)},
        "request_s": request_s,
        "request_s_by_gpu": {gpu: constants_of(fit.found, "vllm", gpu)[1] for gpu in sorted({row.gpu for row in seen})},
        "families": sorted({row.family for row in seen}),
        "errors": [asdict(error) for error in stated],
    }


def _results(name: str, errors: Array) -> list[dict[str, Any]]:
    found = []
    for column, metric in enumerate(METRICS):
        for figure, value in figures_of(errors[:, column]):
            found.append(row(f"{name}.{metric}_error.{figure}", value, "ratio", len(errors)))
    return found


if __name__ == "__main__":
    main()
