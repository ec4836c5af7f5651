"""`block serve`: the parts of the system, each a process."""

from __future__ import annotations

import click

from services.cli.serve_engine import engine
from services.cli.serve_gateway import gateway
from services.cli.serve_predictor import predictor
from services.cli.serve_provisioner import provisioner
from services.cli.serve_scheduler import scheduler
from services.cli.serve_tagger import tagger


@click.group()
def serve() -> None:
    """Run one part of the system until SIGTERM or Ctrl-C; then what is under way is finished."""


for command in (engine, gateway, predictor, provisioner, scheduler, tagger):
    serve.add_command(command)
