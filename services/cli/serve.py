"""`block serve`: the components of the system, each a process."""

from __future__ import annotations

import click

from services.cli.lazy_group import LazyCommand, LazyGroup

COMMANDS = {
    "engine": LazyCommand("services.cli.serve_engine:engine", "An emulated engine"),
    "gateway": LazyCommand("services.cli.serve_gateway:gateway", "The OpenAI API in front of the engines"),
    "picker": LazyCommand("services.cli.serve_picker:picker", "Chooses the endpoints of an Envoy's requests"),
    "predictor": LazyCommand("services.cli.serve_predictor:predictor", "The sidecar of one engine or of a node"),
    "provisioner": LazyCommand("services.cli.serve_provisioner:provisioner", "Sizes the pool of instances"),
    "scheduler": LazyCommand("services.cli.serve_scheduler:scheduler", "Decides the instance of each request"),
    "tagger": LazyCommand("services.cli.serve_tagger:tagger", "Predicts response lengths"),
}


@click.group(cls=LazyGroup, lazy=COMMANDS)
def serve() -> None:
    """Run one component of the system until SIGTERM or Ctrl-C; requests in progress are finished first."""
