"""The `block` command."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import click

from services.cli.bench import bench
from services.cli.capacity import capacity
from services.cli.demo import demo
from services.cli.experiment import experiment
from services.cli.explain import explain
from services.cli.forecast import forecast
from services.cli.policies import policies
from services.cli.profile import profile
from services.cli.provision import provision
from services.cli.recommend import recommend_command
from services.cli.replay import replay
from services.cli.serve import serve
from services.cli.simulate import simulate
from services.cli.tagger import tagger
from services.cli.up import up
from services.cli.warm import warm

BAD_INPUT = 2


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="block-serving")
def block() -> None:
    """Place LLM requests where they will finish soonest."""


for command in (
    bench,
    capacity,
    demo,
    experiment,
    explain,
    forecast,
    policies,
    profile,
    provision,
    recommend_command,
    replay,
    serve,
    simulate,
    tagger,
    up,
    warm,
):
    block.add_command(command)


def main() -> NoReturn:
    """Run the command line; bad input ends it with one line and status 2."""
    try:
        status = block.main(standalone_mode=False)
    except click.ClickException as error:
        _fail(error.format_message())
    except click.Abort:
        sys.exit(130)
    except ValueError as error:
        _fail(str(error))
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    sys.exit(status if isinstance(status, int) else 0)


def _fail(message: str) -> NoReturn:
    print(f"block: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(BAD_INPUT)
