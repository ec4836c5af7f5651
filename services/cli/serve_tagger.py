"""`block serve tagger`: the length tagger."""

from __future__ import annotations

from typing import Any

import click

from length_tagger.settings import TaggerSettings
from services.cli.server_options import server_flag, server_options, server_settings

DEFAULTS = TaggerSettings()
PORT = 50053


@click.command()
@server_options("tagger", port=PORT)
@server_flag(
    "tagger",
    "--estimator",
    default="client,history,constant",
    help="Which to ask, in this order, until one has an answer: client, history, constant.",
)
@server_flag(
    "tagger", "--constant-tokens", type=float, default=DEFAULTS.constant_tokens, help="The length that `constant` says."
)
@server_flag(
    "tagger",
    "--constant-spread",
    type=float,
    default=DEFAULTS.constant_spread,
    help="Its spread: standard deviation of the logarithm.",
)
@server_flag(
    "tagger",
    "--hint-spread",
    type=float,
    default=DEFAULTS.hint_spread,
    help="Spread of a length that a client expects (nvext.agent_hints.osl).",
)
@server_flag(
    "tagger",
    "--history-window",
    type=int,
    default=DEFAULTS.history_window,
    help="Lengths that `history` keeps of a session, template, client or model.",
)
@server_flag(
    "tagger",
    "--history-enough",
    type=int,
    default=DEFAULTS.history_enough,
    help="Lengths from which on it speaks for one.",
)
@server_flag(
    "tagger",
    "--history-windows",
    type=int,
    default=DEFAULTS.history_windows,
    help="Most sessions, templates, clients and models that it remembers.",
)
def tagger(estimator: str, **flags: Any) -> None:
    """Tell how long answers will be: gRPC, block.v1.LengthTagger."""
    from length_tagger import chained
    from services.tagger_server import serve

    server = server_settings(flags)
    names = [name.strip() for name in estimator.split(",") if name.strip()]
    serve(chained(names, TaggerSettings(**flags)), server)
