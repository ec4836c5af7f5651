"""Settings as frozen dataclasses that describe their own flags, environment variables and TOML keys.

A field is a setting of the command line if its type is `Annotated[T, "help"]` or `Annotated[T, Option("help", ...)]`;
every other field is set by code only. A field of type `Annotated[T, Nested()]` adds the settings of the dataclass T.
From these fields come the flags, the environment variables and the TOML keys (services/cli/settings_options.py), and
the reference in docs/reference (scripts/generate_reference.py). A default is written once, in the dataclass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields, replace
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

# Where each program listens by default.
PORTS = {
    "gateway": 8000,
    "engine": 8000,
    "engine_proxy": 8001,
    "scheduler": 50051,
    "predictor": 50052,
    "tagger": 50053,
    "provisioner": 50054,
    "picker": 9002,
    "operator": 9153,  # of a scheduler, or of a gateway that decides in its own process
}
# The tables of a settings file: one for each kind of process, and those of `block up` and `block bench`.
TABLES = (
    "cluster", "gateway", "scheduler", "picker", "predictor", "tagger", "engine", "vllm", "provisioner", "bench",
)  # fmt: skip

DEFAULT_PROFILE = "llama-3.1-8b-h100"  # latency profile of engines
A30_PROFILE = "llama-2-7b-a30"  # of the papers' clusters, the demo and the examples

DURATION_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
LONGEST_MS = 1e9


@dataclass(frozen=True, slots=True)
class Option:
    """What a flag has beyond the type and the default of its field."""

    help: str
    _: KW_ONLY
    name: str = ""  # of the flag and the TOML key, where it is not the field's
    flag: str | None = ""  # where it is not called like the key; None: there is only a key
    short: str = ""  # such as -n
    negative: str = ""  # the other half of a switch, where it is not --no-NAME
    metavar: str = ""
    choices: Collection[str] | Callable[[], Collection[str]] = ()
    unit: Literal["", "ms", "duration"] = ""  # of the flag; the field is in seconds
    may_be_zero: bool = False  # a time in milliseconds
    separator: str = ""  # also splits each item of a list
    unset: str = ""  # what applies without the flag; the field is then left to the command
    environment: bool = True  # whether there is a variable
    aliases: tuple[str, ...] = ()
    deprecated: tuple[str, ...] = ()  # former names, accepted with a warning


@dataclass(frozen=True, slots=True)
class Nested:
    """Marks a field whose own fields are settings of the same command."""

    only: tuple[str, ...] = ()  # all without


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One flag, environment variable and TOML key, and the field that it sets."""

    name: str  # of the TOML key; the flag has dashes
    path: tuple[str, ...]  # the field, from the settings value down
    kind: type  # bool, int, float or str; of each item where `repeated`
    repeated: bool
    by_name: bool  # each item is NAME=NUMBER
    default: Any  # in the unit of the flag; MISSING where the field has none
    option: Option

    @property
    def flag(self) -> str | None:
        """The flag's long name."""
        name = self.name if self.option.flag == "" else self.option.flag
        return None if name is None else f"--{name.replace('_', '-')}"

    @property
    def choices(self) -> Collection[str]:
        """The values that are allowed, where there is a list."""
        return self.option.choices() if callable(self.option.choices) else self.option.choices

    @property
    def default_text(self) -> str:
        """The default as it is written in help and documents; nothing where there is none."""
        if self.option.unset or self.default in (MISSING, None):
            return self.option.unset
        if isinstance(self.default, bool):
            return str(self.default).lower()
        if isinstance(self.default, float):
            return f"{self.default:g}"
        return ", ".join(self.default) if self.repeated else str(self.default)

    def value_of(self, given: Any) -> Any:
        """Convert what the command line has to what the field has."""
        if given is None:
            return None
        if self.repeated and (separator := self.option.separator):
            return tuple(part.strip() for text in given for part in text.split(separator) if part.strip())
        if self.option.unit == "ms":
            if not (0 < given < LONGEST_MS or (given == 0 and self.option.may_be_zero)):
                least = "from 0 on" if self.option.may_be_zero else "above 0"
                raise ValueError(f"{self.name}: must be a time {least}, not {given}")
            return given / 1e3
        if self.option.unit == "duration":
            return seconds_of(given, self.name)
        if self.by_name:
            return dict(named_number(text, self.name) for text in given)
        return tuple(given) if self.repeated else given


@cache
def settings_of(values: type) -> tuple[Setting, ...]:
    """List the settings of a dataclass in the order of its fields."""
    return tuple(_settings_of(values))


def _settings_of(values: type) -> Iterator[Setting]:
    hints = get_type_hints(values, include_extras=True)
    for spec in fields(values):
        if get_origin(hints[spec.name]) is not Annotated:
            continue
        kind, *notes = get_args(hints[spec.name])
        for note in notes:
            if isinstance(note, Nested):
                for inner in settings_of(kind):
                    if not note.only or inner.path[-1] in note.only:
                        yield replace(inner, path=(spec.name, *inner.path))
            elif isinstance(note, str | Option):
                default = spec.default_factory() if spec.default_factory is not MISSING else spec.default
                yield _setting(spec.name, kind, default, note if isinstance(note, Option) else Option(note))


def _setting(field_name: str, kind: Any, default: Any, option: Option) -> Setting:
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (one for one in get_args(kind) if one is not NoneType)
    by_name = get_origin(kind) is dict
    repeated = by_name or get_origin(kind) is tuple
    if repeated:
        kind = get_args(kind)[0]
    assert kind in (bool, int, float, str), f"{field_name}: no flag can have the type {kind}"
    if isinstance(default, int | float) and option.unit:
        default = default * 1e3 if option.unit == "ms" else duration_text(default)
    return Setting(
        name=option.name or field_name,
        path=(field_name,),
        kind=kind,
        repeated=repeated,
        by_name=by_name,
        default=default,
        option=option,
    )


@dataclass(frozen=True)
class SettingsPart:
    """A dataclass among the settings of a command, and how the command changes its flags."""

    values: type
    _: KW_ONLY
    defaults: Mapping[str, Any] = field(default_factory=dict)  # by field, in place of the dataclass's own
    without: tuple[str, ...] = ()  # fields that are no settings of this command
    deferred: bool = False  # what is not given is left to the command, which finds it elsewhere
    unset: str = ""  # where: shown in place of defaults
    help: str = "{}"  # around the help of each
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # more attributes of `Option`, by field
    table: str = ""  # where the keys are in another table of the file than the command's
    lent_by: CommandSettings | None = None  # the command whose table and environment variables are read as well

    def settings(self) -> Iterator[Setting]:
        """List the settings as this command has them."""
        for setting in settings_of(self.values):
            if setting.path[0] in self.without:
                continue
            changes = {
                "help": self.help.format(setting.option.help),
                "unset": self.unset or setting.option.unset,
                **self.options.get(setting.path[0], {}),
            }
            option = replace(setting.option, **changes)
            default = self.defaults.get(setting.path[0], setting.default)
            yield replace(setting, option=option, default=default)


class CommandSettings:
    """All settings of a command: the table that it reads, and the dataclasses that its flags fill.

    Where two dataclasses have a setting of the same name, there is one flag for both if type and default agree, else
    the second flag has the name of the lending command before its own.
    """

    def __init__(
        self,
        name: str,
        *parts: type | SettingsPart,
        file: Literal["flag", "command", "none"] = "flag",
        environment: tuple[str, ...] | None = None,
    ) -> None:
        """List the settings; the file is read by the flag --config, by the command itself, or there is none.

        `environment` are prefixes of variables, by default BLOCK_{NAME} and BLOCK.
        """
        self.name = name
        self.file = file
        self.environment = (f"BLOCK_{name.upper()}", "BLOCK") if environment is None else environment
        self.settings: dict[str, Setting] = {}
        self.part_of: dict[str, SettingsPart] = {}
        self.lender_of: dict[str, CommandSettings] = {}
        self._names: dict[type, dict[tuple[str, ...], str]] = {}
        for part in parts:
            self._add(part if isinstance(part, SettingsPart) else SettingsPart(part))

    @property
    def lenders(self) -> tuple[CommandSettings, ...]:
        """The commands whose tables are read as well."""
        return tuple(dict.fromkeys(self.lender_of.values()))

    def table_of(self, name: str) -> str:
        """Give the table of a file that has the key of a setting; "" where no file is read."""
        return "" if self.file == "none" else self.part_of[name].table or self.name

    def variables(self, name: str, former: str = "") -> list[str]:
        """List the environment variables of a setting, or of its former name; the first that is set counts."""
        if not self.settings[name].option.environment:
            return []
        if table := self.part_of[name].table:
            return [f"BLOCK_{table.upper()}_{name.upper()}"]
        lent = self.lender_of[name].environment[:1] if name in self.lender_of else ()
        prefixes = (*self.environment[:1], *lent, *self.environment[1:])
        return [f"{prefix}_{(former or name).upper()}" for prefix in prefixes]

    def default_of(self, name: str) -> Any:
        """Give the default of a flag; None where the command finds the value elsewhere."""
        setting, part = self.settings[name], self.part_of[name]
        if part.deferred or setting.option.unset or setting.default is MISSING:
            return () if setting.repeated else None
        return setting.default

    def _add(self, part: SettingsPart) -> None:
        names = self._names[part.values] = {}
        for setting in part.settings():
            name = setting.name
            if name in self.settings and not _agree(self.settings[name], setting):
                if part.lent_by is None:
                    raise TypeError(f"{self.name}: two settings are called {name}")
                name = f"{part.lent_by.name}_{name}"
            if name not in self.settings:
                self.settings[name] = replace(setting, name=name)
                self.part_of[name] = part
            if part.lent_by is not None:
                self.lender_of[name] = part.lent_by
            names[setting.path] = name

    def names_of(self, values: type) -> Mapping[tuple[str, ...], str]:
        """Give the settings of a dataclass by the paths of their fields."""
        return self._names[values]

    def has(self, values: type) -> bool:
        """Return whether the settings of a dataclass are among these."""
        return values in self._names

    def make(self, values: type[T], given: Mapping[str, Any], extra: Mapping[str, Any]) -> T:
        """Make a settings value of what the command line has; `extra` are fields that the command knows itself."""
        tree: dict[str, Any] = {}
        renamed: dict[tuple[str, ...], str] = {}
        for path, name in self._names[values].items():
            if path[0] in extra:
                continue
            value = self.settings[name].value_of(given[name])
            renamed[path] = name
            if value is None or (value == () and self.part_of[name].deferred):
                if self.settings[name].default is MISSING:
                    raise ValueError(f"{name}: is missing")
                if self.default_of(name) is None:
                    continue
            branch = tree
            for step in path[:-1]:
                branch = branch.setdefault(step, {})
            branch[path[-1]] = value
        return _made(values, tree, renamed, extra)


def _agree(one: Setting, other: Setting) -> bool:
    return (one.kind, one.repeated, one.default) == (other.kind, other.repeated, other.default)


def _made(
    values: type[T], tree: Mapping[str, Any], renamed: Mapping[tuple[str, ...], str], extra: Mapping[str, Any]
) -> T:
    """Make a settings value; a field that it refuses is reported by the name of its flag."""
    arguments = dict(extra)
    hints: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            hints = hints or get_type_hints(values)
            inner = {path[1:]: flag for path, flag in renamed.items() if path[0] == name}
            arguments[name] = _made(hints[name], value, inner, {})
        else:
            arguments[name] = value
    try:
        return values(**arguments)
    except ValueError as error:
        name, colon, rest = str(error).partition(":")
        raise ValueError(f"{renamed.get((name,), name)}{colon}{rest}") from None


def default_of(values: type, name: str) -> Any:
    """Give the default of a dataclass's field, for a setting that fills it."""
    (spec,) = (spec for spec in fields(values) if spec.name == name)
    assert spec.default is not MISSING
    return spec.default


def named_number(text: str, name: str) -> tuple[str, float]:
    """Read NAME=NUMBER."""
    key, _, number = text.partition("=")
    try:
        return key.strip(), float(number)
    except ValueError:
        raise ValueError(f"{name}: {text!r} must be NAME=NUMBER") from None


def seconds_of(text: str, name: str) -> float:
    """Read a time such as 90, 90s, 3m or 1h."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if found is None:
        raise ValueError(f"{name}: {text!r} is no time such as 90s or 3m")
    return float(found[1]) * DURATION_UNITS[found[2]]


def duration_text(seconds: float) -> str:
    """Write a time as `seconds_of` reads it."""
    for unit in ("h", "m"):
        if seconds and seconds % DURATION_UNITS[unit] == 0:
            return f"{seconds / DURATION_UNITS[unit]:g}{unit}"
    return f"{seconds:g}s"
