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
    default="client,cached,linear|history,constant",
    help="Which to ask, in this order, until one has an answer: client, cached, linear, roberta, history, constant. "
    "Of those joined by | the one that was closest lately is believed.",
)
@server_flag("tagger", "--linear-model", default="", help="A model for `linear` instead of the package's own (.npz).")
@server_flag(
    "tagger",
    "--encoder",
    default="",
    help="Checkpoint for `roberta`: a folder, or small, the package's own; needs the extra `encoder`.",
)
@server_flag("tagger", "--encoder-threads", type=int, default=1, help="Threads that read a batch.")
@server_flag(
    "tagger",
    "--encoder-runtime",
    default="auto",
    help="What reads: onnx, torch, or auto: onnx where it is installed and the checkpoint has that form.",
)
@server_flag("tagger", "--encoder-deadline-s", type=float, default=0.04, help="Longest wait for `roberta`.")
@server_flag("tagger", "--record", default="", help="Append outcomes to this file, for `block tagger evaluate`.")
@server_flag(
    "tagger",
    "--cached-prompts",
    type=int,
    default=DEFAULTS.cached_prompts,
    help="Most prompts whose answers' lengths `cached` remembers.",
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
def tagger(estimator: str, encoder: str, record: str, **flags: Any) -> None:
    """Tell how long answers will be: gRPC, block.v1.LengthTagger."""
    from length_tagger import TAGGERS, UnknownEstimatorError, chained
    from predictor.suggestions import did_you_mean
    from services.tagger_server.batches import ENCODER, Encoder
    from services.tagger_server.server import serve

    server = server_settings(flags)
    order = [place.strip() for place in estimator.split(",") if place.strip()]
    reads = any(ENCODER in place.split("|") for place in order)
    if reads and not encoder:
        raise ValueError(f"encoder: {ENCODER} needs the folder of a checkpoint")
    if encoder and not reads:
        raise ValueError(f"estimator: with an encoder {ENCODER} must be there, as in client,cached,{ENCODER}|linear")
    reading = {name: flags.pop(f"encoder_{name}") for name in ("threads", "runtime", "deadline_s")}
    settings = TaggerSettings(**flags)
    try:
        chain = chained(order, settings)
    except UnknownEstimatorError as error:
        raise ValueError(f"{error}{did_you_mean(error.name, TAGGERS)}") from None
    serve(
        chain,
        server,
        linear_model=settings.linear_model,
        encoder=Encoder(folder=encoder, **reading) if encoder else None,
        record=record,
    )
