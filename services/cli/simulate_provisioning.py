"""Options of `block simulate` for clusters whose size, or whose tiers, change during the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

from scheduler.provisioning import TIERS
from scheduler.provisioning.limits import ScalingLimits, ScalingObjectives
from scheduler.provisioning.tiers import tiers_in
from services.cli.mix_options import refuse_given
from services.cluster.instance_range import InstanceRange, instance_range_from
from services.settings import default_of
from simulator.autoscaling import STATIC, AutoscalingOptions, ProvisionedRun
from simulator.codec import read_text
from simulator.fleet import InstanceSpec

F = TypeVar("F", bound=Callable[..., Any])
HEADROOM = "headroom"


def provisioning_options(command: F) -> F:
    """Give a command tiers, and a range for the number of instances."""
    command = click.option(
        "--cold-start-s",
        type=float,
        default=default_of(AutoscalingOptions, "cold_start_s"),
        show_default=True,
        help="Cold start of an instance, in seconds.",
    )(command)
    command = click.option(
        "--provision",
        metavar="MIN-MAX",
        default=None,
        help="Numbers of instances between which the rule `tiers`, or `headroom` without tiers, chooses; the run "
        "starts with MIN, and --instances are at least MAX.",
    )(command)
    return click.option(
        "--tiers",
        "tiers_file",
        metavar="FILE",
        default=None,
        help="TOML file with a table [[tier]] for each tier, between which instances move.",
    )(command)


def autoscaling_of(
    tiers_file: str | None, provision: str | None, cold_start_s: float, specs: Sequence[InstanceSpec]
) -> AutoscalingOptions | None:
    """Return what changes the cluster; None where nothing does."""
    if provision is None:
        refuse_given("needs --provision", "cold_start_s")
        if tiers_file is None:
            return None
    tiers = () if tiers_file is None else tiers_in(read_text(tiers_file), tiers_file)
    fixed = InstanceRange(minimum=len(specs), maximum=len(specs))
    span = fixed if provision is None else instance_range_from(provision)
    sizing = TIERS if tiers else HEADROOM
    config = specs[0].config
    return AutoscalingOptions(
        rule=STATIC if provision is None else sizing,
        first=span.minimum,
        cold_start_s=cold_start_s,
        objectives=ScalingObjectives(
            cold_start_s=cold_start_s,
            seats=config.max_num_seqs,
            kv_tokens=config.block_size * (config.num_gpu_blocks - 1),
        ),
        limits=ScalingLimits(min_instances=span.minimum, max_instances=span.maximum),
        tiers=tiers,
    )


def provisioning_summary(run: ProvisionedRun) -> dict[str, Any]:
    """Summarise the cost of a run: instance-seconds paid for, and those in tiers."""
    return {
        "instance_s": run.instance_s,
        "serving_instance_s": run.serving_s,
        "tier_instance_s": dict(run.tier_s),
        "num_moves": len(run.moves),
        "num_size_changes": len(run.changes),
    }


def cost_line(summary: Mapping[str, Any]) -> str:
    """Describe the cost of a run in one line."""
    tiers = ", ".join(f"{name} {seconds:.0f}" for name, seconds in summary["tier_instance_s"].items())
    return (
        f"{summary['policy']}: {summary['instance_s']:.0f} instance-seconds paid, "
        f"{summary['serving_instance_s']:.0f} serving{f' ({tiers})' if tiers else ''}, "
        f"{summary['num_size_changes']} changes of size, {summary['num_moves']} moves between tiers"
    )
