"""Flags, environment variables and TOML keys of commands, generated from their settings dataclasses."""

from __future__ import annotations

import functools
import logging
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from predictor.suggestions import require_known
from services.logs import LogSettings
from services.rpc.settings import ServerSettings
from services.security.certificates import use_tls
from services.security.settings import ANY_ENGINE, EngineAccessSettings, TlsSettings
from services.settings import TABLES, CommandSettings, Setting

if TYPE_CHECKING:
    from click.types import OptionHelpExtra

T = TypeVar("T")

NOT_IN_FILES = ("--config", "--help")
FORMER = "former_"  # begins the parameters of flags that have been renamed

log = logging.getLogger(__name__)


class SettingValues:
    """What the command line, the environment and the file set, and the settings values made from it."""

    def __init__(
        self,
        command: CommandSettings,
        given: Mapping[str, Any],
        were_set: Collection[str],
        renamed: Iterable[tuple[str, str]],
    ) -> None:
        """Take the values by the names of the settings; `renamed` are pairs of former and present names in use."""
        self._command = command
        self._given = given
        self._set = were_set
        self._renamed = list(renamed)

    def __getitem__(self, name: str) -> Any:
        """Give one value, in the unit of its field; None where it was not set."""
        return self._command.settings[name].value_of(self._given[name])

    def was_set(self, name: str) -> bool:
        """Return whether a value was set at all, or is the default."""
        return name in self._set

    def make(self, values: type[T], **extra: Any) -> T:
        """Make one of the command's settings values; `extra` are fields that the command knows itself."""
        return self._command.make(values, self._given, extra)

    def has(self, values: type) -> bool:
        """Return whether the command has the settings of a dataclass."""
        return self._command.has(values)

    def given(self, values: type) -> dict[str, Any]:
        """Give the fields of a deferred settings value that were set."""
        names = self._command.names_of(values)
        return {path[-1]: self[name] for path, name in names.items() if self._given[name] not in (None, ())}

    def warn_of_former_names(self) -> None:
        """Log each name in use that has been replaced."""
        for former, present in self._renamed:
            log.warning("--%s is deprecated: use --%s", former.replace("_", "-"), present.replace("_", "-"))
        self._renamed.clear()


class SettingOption(click.Option):
    """A flag that is generated from a field."""

    def __init__(self, command: CommandSettings, name: str, former: str = "") -> None:
        """Make the flag of a setting, or the hidden one of its former name."""
        setting = command.settings[name]
        super().__init__(
            _declarations(setting, name, former),
            type=None if setting.kind is bool else _type_of(setting),
            multiple=setting.repeated,
            default=None if former else command.default_of(name),
            metavar=setting.option.metavar or None,
            envvar=command.variables(name, former),
            help=setting.option.help,
            hidden=bool(former),
            allow_from_autoenv=False,
        )
        self.setting = setting
        self.settings = command
        self.keys = (former,) if former else (name, *setting.option.aliases)

    def get_help_extra(self, ctx: click.Context) -> OptionHelpExtra:
        """Show the default as the reference does."""
        extra = super().get_help_extra(ctx)
        if text := self.setting.default_text:
            extra["default"] = text
        return extra


class LazyChoice(click.Choice[str]):
    """A choice whose list is made when it is needed: it costs an import."""

    def __init__(self, choices: Callable[[], Iterable[str]]) -> None:
        """Make no list yet."""
        super().__init__([])
        self._listed = choices

    @property
    def choices(self) -> tuple[str, ...]:
        """The list."""
        return tuple(self._listed())

    @choices.setter
    def choices(self, _: object) -> None:
        """Ignore what the base class sets."""


def _type_of(setting: Setting) -> Any:
    if setting.option.unit:
        return float if setting.option.unit == "ms" else str
    if callable(setting.option.choices):
        return LazyChoice(setting.option.choices)
    return click.Choice(list(setting.choices)) if setting.option.choices else setting.kind


def _declarations(setting: Setting, name: str, former: str) -> list[str]:
    flag = f"--{former.replace('_', '-')}" if former else setting.flag
    assert flag is not None
    if setting.kind is bool:
        other = setting.option.negative or f"--no-{flag.removeprefix('--')}"
        return [f"{flag}/{other}", FORMER + former if former else name]
    if former:
        return [flag, FORMER + former]
    aliases = [f"--{alias.replace('_', '-')}" for alias in setting.option.aliases]
    return [flag, *aliases, *([setting.option.short] if setting.option.short else []), name]


def settings_options(command: CommandSettings) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the flags of its settings; it is called with their `SettingValues` as `given`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(**parameters: Any) -> Any:
            return function(given=_values(command, parameters), **parameters)

        options: list[click.Option] = [
            SettingOption(command, name, former)
            for name, setting in command.settings.items()
            if setting.flag is not None
            for former in ("", *setting.option.deprecated)
        ]
        shorts = {setting.option.short for setting in command.settings.values()}
        if command.file == "flag":
            options.insert(0, _config_option(command, short="-c" not in shorts))
        known: list[click.Parameter] = call.__dict__.setdefault("__click_params__", [])
        known.extend(reversed(options))
        return call

    return decorate


def server_of(given: SettingValues, *, cert_path: str = "") -> ServerSettings:
    """Set up the log of a server's process, and make the settings of its socket.

    `cert_path` is a folder with tls.crt and tls.key, in place of a certificate and a key of their own.
    """
    given.make(LogSettings).apply()
    given.warn_of_former_names()
    return given.make(ServerSettings, tls=tls_of(given, cert_path=cert_path))


def tls_of(given: SettingValues, *, cert_path: str = "") -> TlsSettings:
    """Make the settings of TLS, and have all clients of this process use them."""
    tls = given.make(TlsSettings)
    if cert_path:
        if tls.tls_cert:
            raise ValueError("cert_path: goes without tls_cert and tls_key")
        pair = Path(cert_path, "tls.crt"), Path(cert_path, "tls.key")
        if not all(path.is_file() for path in pair):
            raise ValueError(f"cert_path: {cert_path} must have the files tls.crt and tls.key")
        tls = replace(tls, tls_cert=str(pair[0]), tls_key=str(pair[1]))
    engines = given.make(EngineAccessSettings) if given.has(EngineAccessSettings) else ANY_ENGINE
    use_tls(tls, engines)
    return tls


def _values(command: CommandSettings, parameters: dict[str, Any]) -> SettingValues:
    """Take the settings out of a command's parameters; a former name counts where the present one is not given."""
    context = click.get_current_context()
    given: dict[str, Any] = {}
    were_set: set[str] = set()
    renamed: list[tuple[str, str]] = []
    for name, setting in command.settings.items():
        given[name] = None if setting.flag is None else parameters.pop(name)
        if setting.flag is None:
            continue
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            were_set.add(name)
        for former in setting.option.deprecated:
            value = parameters.pop(FORMER + former)
            if context.get_parameter_source(FORMER + former) is ParameterSource.DEFAULT:
                continue
            renamed.append((former, name))
            if name not in were_set:
                given[name] = value
    return SettingValues(command, given, were_set, renamed)


def _config_option(command: CommandSettings, *, short: bool) -> click.Option:
    return click.Option(
        ["--config", *(["-c"] if short else [])],
        metavar="TOML",
        envvar=[f"{prefix}_CONFIG" for prefix in command.environment],
        is_eager=True,
        expose_value=False,
        callback=lambda context, _, path: use_file(context, path, command) if path else None,
        help=f"Settings file; its table [{command.name}] has the flags' names as keys. Flags and environment variables "
        "take precedence.",
    )


def use_file(context: click.Context, path: str, command: CommandSettings) -> None:
    """Take a command's defaults from its table in a TOML file; an unknown table or key is refused by name."""
    document = document_from(path)
    defaults: dict[str, Any] = {}
    for reader in (*command.lenders, command):
        table = document.get(reader.name, {})
        if not isinstance(table, Mapping):
            raise ValueError(f"{path}: {reader.name}: must be a table")
        known = _keys_of(context.command.params) if reader is command else _keys_of_lender(command, reader)
        try:
            defaults |= _defaults(known, table)
        except ValueError as error:
            raise ValueError(f"{path}: {reader.name}.{error}") from None
    context.default_map = defaults


def document_from(path: str) -> dict[str, Any]:
    """Read a settings file; one that is no TOML or has an unknown table is refused."""
    from simulator.codec import read_text

    try:
        document = tomllib.loads(read_text(path))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: is not TOML: {error}") from None
    try:
        require_known(document, TABLES, "table")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return document


Keys = dict[str, tuple[str, bool]]  # the parameter of a key, "" where it is ignored, and whether it is a list


def _keys_of(parameters: Iterable[click.Parameter]) -> Keys:
    keys: Keys = {}
    for parameter in parameters:
        flags = [flag for flag in parameter.opts if flag.startswith("--") and flag not in NOT_IN_FILES]
        names = [flag.removeprefix("--").replace("-", "_") for flag in flags]
        for name in parameter.keys if isinstance(parameter, SettingOption) else names:
            keys[name] = (str(parameter.name), bool(getattr(parameter, "multiple", False)))
    return keys


def _keys_of_lender(command: CommandSettings, lender: CommandSettings) -> Keys:
    """List the keys of another command's table; those that are no settings of this command are ignored."""
    lent = {
        setting.option.name or setting.path[-1]: name
        for name, setting in command.settings.items()
        if command.lender_of.get(name) is lender
    }
    keys: Keys = {}
    for name, setting in lender.settings.items():
        for key in (name, *setting.option.aliases, *setting.option.deprecated):
            former = FORMER if key in setting.option.deprecated and name in lent else ""
            keys[key] = (former + key if former else lent.get(name, ""), setting.repeated)
    return keys


def _defaults(known: Keys, table: Mapping[str, Any]) -> dict[str, Any]:
    """Give parameters the values that a table has under the names of their flags."""
    spelled = {name: name.replace("-", "_") for name in table}
    require_known(spelled.values(), known, "setting")
    defaults: dict[str, Any] = {}
    for name, value in table.items():
        parameter, repeated = known[spelled[name]]
        if not parameter:
            continue
        if parameter in defaults:
            raise ValueError(f"{name}: is a duplicate of the same setting under another name")
        defaults[parameter] = (_as_list if repeated else _as_flag)(name, value)
    return defaults


def _as_list(name: str, value: Any) -> list[str]:
    """Write the values of a flag that may be repeated."""
    if isinstance(value, Mapping):
        return [f"{key}={_as_flag(name, item)}" for key, item in value.items()]
    return [_as_flag(name, item) for item in (value if isinstance(value, list) else [value])]


def _as_flag(name: str, value: Any) -> str:
    """Write a TOML value as on the command line, where its type is checked."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ",".join(value)
    if isinstance(value, str | int | float):
        return str(value)
    raise ValueError(f"{name}: must be a text, a number, true, false or a list of texts")
