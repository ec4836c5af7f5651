"""`block serve gateway`: the OpenAI front of the system."""

from __future__ import annotations

import os
from typing import Any

import click

from scheduler.prefix.kv_block_hash import SEED
from services.cli import serve_scheduler
from services.cli.server_options import server_flag, server_options, server_settings

PORT = 8000
SCHEDULER = f"127.0.0.1:{serve_scheduler.PORT}"
MEBIBYTE = 2**20
KEY_VARIABLE = "BLOCK_GATEWAY_API_KEY"


def parts(values: tuple[str, ...]) -> tuple[str, ...]:
    """Take a list given by repeating a flag, by commas, or both."""
    return tuple(part.strip() for value in values for part in value.split(",") if part.strip())


@click.command()
@server_options("gateway", port=PORT)
@server_flag(
    "gateway", "--scheduler", multiple=True, default=(SCHEDULER,), help="host:port of a scheduler; repeat for more."
)
@server_flag(
    "gateway",
    "--engine-url",
    multiple=True,
    help="An engine for the last resort, while no scheduler answers: these in turn. Repeat for more.",
)
@server_flag(
    "gateway", "--model", multiple=True, help="A model that is served; repeat for more. Else: what the instances say."
)
@server_flag("gateway", "--api-key-file", default=None, help="Keys that are let in, a line each: [NAME] KEY.")
@server_flag("gateway", "--schedule-s", type=float, default=1.0, help="Longest wait for one scheduler's decision.")
@server_flag("gateway", "--connect-s", type=float, default=2.0, help="Longest wait for a connection to an engine.")
@server_flag("gateway", "--first-byte-s", type=float, default=60.0, help="Longest wait for a stream to begin.")
@server_flag("gateway", "--idle-s", type=float, default=60.0, help="Longest pause in a stream.")
@server_flag("gateway", "--answer-s", type=float, default=600.0, help="Longest wait for an answer in one piece.")
@server_flag("gateway", "--attempts", type=int, default=4, help="Engines tried for one request, before its first byte.")
@server_flag(
    "gateway", "--retry-ratio", type=float, default=0.2, help="Retries per request that there may be in the long run."
)
@server_flag(
    "gateway",
    "--bytes-per-token",
    type=float,
    default=4.0,
    help="Of prompts, until engines' own counts have told better.",
)
@server_flag(
    "gateway",
    "--tokenizer",
    metavar="FILE",
    default="",
    help="The model's tokenizer.json: sizes prompts exactly, and finds their blocks in engines' prefix caches.",
)
@server_flag(
    "gateway",
    "--chat-template",
    metavar="FILE",
    default="",
    help="Of conversations, as engines were told; without, the one beside the tokenizer.",
)
@server_flag("gateway", "--block-tokens", type=int, default=16, help="Of the engines' KV blocks.")
@server_flag("gateway", "--hash-seed", default=SEED, help="The engines' PYTHONHASHSEED, where they have one.")
def gateway(
    scheduler: tuple[str, ...],
    engine_url: tuple[str, ...],
    model: tuple[str, ...],
    api_key_file: str | None,
    **flags: Any,
) -> None:
    """Serve OpenAI's HTTP endpoints: each request goes where the scheduler says.

    The variable BLOCK_GATEWAY_API_KEY may hold a key (or several, with commas) instead of a file.
    """
    from services.gateway.keys import ApiKeys
    from services.gateway.server import serve
    from services.gateway.settings import GatewaySettings

    server = server_settings(flags)
    settings = GatewaySettings(
        schedulers=parts(scheduler),
        engine_urls=parts(engine_url),
        models=parts(model),
        max_body_bytes=server.max_message_mib * MEBIBYTE,
        max_concurrency=server.max_concurrency,
        **flags,
    )
    keys = ApiKeys(parts((os.environ.get(KEY_VARIABLE, ""),)))
    if api_key_file is not None:
        keys = ApiKeys.from_file(api_key_file)
    serve(settings, server, keys)
