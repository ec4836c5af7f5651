"""What all `block serve` commands can be told: by flags, by BLOCK_* in the environment, by a table of a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from predictor.suggestions import require_known
from services.logs import FORMATS, LEVELS, configure
from services.settings_tables import TABLES
from simulator.codec import read_text

if TYPE_CHECKING:
    from services.rpc.server import ServerSettings

F = TypeVar("F", bound=Callable[..., Any])

NOT_IN_FILES = ("--config", "--help")
SETTINGS = ("host", "port", "metrics_port", "max_concurrency", "max_message_mib", "drain_s")


def server_flag(server: str, flag: str, **attributes: Any) -> Callable[[F], F]:
    """Make a flag that is also BLOCK_{SERVER}_{FLAG}, or else BLOCK_{FLAG}, in the environment."""
    name = flag.partition("/")[0].removeprefix("--").replace("-", "_").upper()
    return click.option(
        flag, envvar=[f"BLOCK_{server.upper()}_{name}", f"BLOCK_{name}"], show_default=True, **attributes
    )


def server_options(server: str, *, port: int) -> Callable[[F], F]:
    """Give a command what every server has, and a TOML file whose table of the server's name sets any of its flags."""
    options: list[Callable[[Any], Any]] = [
        click.option(
            "--config",
            "-c",
            metavar="TOML",
            envvar=[f"BLOCK_{server.upper()}_CONFIG", "BLOCK_CONFIG"],
            is_eager=True,
            expose_value=False,
            callback=lambda context, _, path: use_file(context, path, server) if path else None,
            help=f"Settings: flags' names as keys, in a table [{server}]. Flags and environment go first.",
        ),
        server_flag(server, "--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 is everywhere."),
        server_flag(server, "--port", type=int, default=port, help="Port to listen on; 0 is any free one."),
        server_flag(server, "--metrics-port", type=int, default=None, help="Port for Prometheus' /metrics."),
        server_flag(
            server, "--max-concurrency", type=int, default=1024, help="Most calls under way; more are refused."
        ),
        server_flag(server, "--max-message-mib", type=int, default=16, help="Largest message in mebibytes."),
        server_flag(server, "--drain-s", type=float, default=30.0, help="Longest wait for calls under way at the end."),
        server_flag(server, "--log-level", type=click.Choice(LEVELS), default="info"),
        server_flag(server, "--log-format", type=click.Choice(FORMATS), default="text"),
    ]

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def server_settings(flags: dict[str, Any]) -> ServerSettings:
    """Take a server's own settings out of a command's flags, and set up its log."""
    from services.rpc.server import ServerSettings

    configure(flags.pop("log_level"), flags.pop("log_format"))
    return ServerSettings(**{name: flags.pop(name) for name in SETTINGS})


def use_file(context: click.Context, path: str, server: str) -> None:
    """Take a command's defaults from its table in a TOML file; what it does not know there is refused by name."""
    try:
        data = tomllib.loads(read_text(path))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: is not TOML: {error}") from None
    try:
        require_known(data, TABLES, "table")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    table = data.get(server, {})
    if not isinstance(table, Mapping):
        raise ValueError(f"{path}: {server}: must be a table")
    try:
        context.default_map = _defaults(context.command, table)
    except ValueError as error:
        raise ValueError(f"{path}: {server}.{error}") from None


def _defaults(command: click.Command, table: Mapping[str, Any]) -> dict[str, Any]:
    """Give flags, by the names of their parameters, the values that a table has under the flags' own names."""
    flags = {
        flag.removeprefix("--").replace("-", "_"): parameter
        for parameter in command.params
        for flag in parameter.opts
        if flag.startswith("--") and flag not in NOT_IN_FILES
    }
    spelled = {name: name.replace("-", "_") for name in table}
    require_known(spelled.values(), flags, "setting")
    defaults: dict[str, Any] = {}
    for name, value in table.items():
        parameter = flags[spelled[name]]
        if parameter.name in defaults:
            raise ValueError(f"{name}: is there twice, under another name too")
        defaults[str(parameter.name)] = (_as_list if parameter.multiple else _as_flag)(name, value)
    return defaults


def _as_list(name: str, value: Any) -> list[str]:
    """Spell the values of a flag that may be there several times."""
    return [_as_flag(name, item) for item in (value if isinstance(value, list) else [value])]


def _as_flag(name: str, value: Any) -> str:
    """Spell a TOML value as it would be on the command line, where its type is checked."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ",".join(value)
    if isinstance(value, str | int | float):
        return str(value)
    raise ValueError(f"{name}: must be a text, a number, true, false or a list of texts")
