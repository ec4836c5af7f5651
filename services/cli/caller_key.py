"""The option of commands that call servers with an API key."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import click

from services.security.own_key import OwnKey

VARIABLE = "BLOCK_API_KEY"


def api_key_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the option --api-key-file; it is called with the key as `key`."""

    @click.option(
        "--api-key-file",
        metavar="FILE",
        default="",
        help=f"File with the API key to call with; without it, the variable {VARIABLE} may hold the key.",
    )
    @functools.wraps(function)
    def call(*arguments: Any, api_key_file: str, **parameters: Any) -> Any:
        key = OwnKey(api_key_file) if api_key_file else OwnKey(key=os.environ.get(VARIABLE, "").strip())
        return function(*arguments, key=key, **parameters)

    return call
