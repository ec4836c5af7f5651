"""The `block` command."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import click

from services.cli.lazy_group import LazyCommand, LazyGroup
from services.cli.progress_bars import loop_bars

BAD_INPUT = 2
COMMANDS = {
    "accuracy": LazyCommand("services.cli.accuracy:accuracy", "Compare an observed window with the engine model"),
    "bench": LazyCommand("services.cli.bench:bench", "Send load to an OpenAI endpoint and report latencies"),
    "capacity": LazyCommand("services.cli.capacity:capacity", "Find the largest rate at which an SLO holds"),
    "certs": LazyCommand("services.cli.certs:certs", "Make a CA and certificates for development"),
    "demo": LazyCommand("services.cli.demo:demo", "Compare policies on an emulated cluster"),
    "drain": LazyCommand("services.cli.drain:drain", "Take an instance out of service, and wait for its requests"),
    "experiment": LazyCommand("services.cli.experiment:experiment", "Run an experiment and write its report"),
    "explain": LazyCommand("services.cli.explain:explain", "Explain the decision about a request"),
    "forecast": LazyCommand("services.cli.forecast:forecast", "Forecast a request on an engine's snapshot"),
    "instances": LazyCommand("services.cli.instances:instances", "List, register and remove instances"),
    "keys": LazyCommand("services.cli.keys:keys", "Make API keys and the file that servers read"),
    "observe": LazyCommand("services.cli.observe:observe", "Record what one engine serves for a while"),
    "policies": LazyCommand("services.cli.policies:policies", "List policies, or switch a running scheduler's"),
    "profile": LazyCommand("services.cli.profile:profile", "Show, measure or fit latency profiles"),
    "provision": LazyCommand("services.cli.provision:provision", "Query a provisioner"),
    "recommend": LazyCommand("services.cli.recommend:recommend_command", "Recommend a policy and a cluster size"),
    "replay": LazyCommand("services.cli.replay:replay", "Replay requests on one simulated engine"),
    "serve": LazyCommand("services.cli.serve:serve", "Run one component of the system"),
    "simulate": LazyCommand("services.cli.simulate:simulate", "Simulate a cluster by several policies"),
    "tagger": LazyCommand("services.cli.tagger:tagger", "Train, evaluate and query estimators of response lengths"),
    "top": LazyCommand("services.cli.top:top", "Show what a running cluster does"),
    "undrain": LazyCommand("services.cli.drain:undrain", "Return an instance that drains to service"),
    "ui": LazyCommand("services.cli.ui:ui", "Open a recording or a simulation's result in the live page"),
    "up": LazyCommand("services.cli.up:up", "Run the whole system on this machine"),
    "warm": LazyCommand("services.cli.warm:warm", "Compile the kernels into the cache"),
}


@click.group(
    cls=LazyGroup,
    lazy=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
@click.version_option(package_name="block-serving")
def block() -> None:
    """Place each LLM request on the instance that will finish it soonest."""


def main() -> NoReturn:
    """Run the command line; bad input ends it with one line and status 2."""
    try:
        with loop_bars():
            status = block.main(standalone_mode=False)
    except click.ClickException as error:
        _fail(error.format_message())
    except click.Abort:
        sys.exit(130)
    except ValueError as error:
        _fail(str(error))
    except BrokenPipeError:  # the reader of the pipe has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    sys.exit(status if isinstance(status, int) else 0)


def _fail(message: str) -> NoReturn:
    print(f"block: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(BAD_INPUT)
