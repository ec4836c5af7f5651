"""Flags, environment variables and TOML keys that are generated from settings dataclasses."""

from __future__ import annotations

import ast
import importlib.util
import logging
import os
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import click
import pytest

import length_tagger
import predictor
import scheduler
import services.cli
import simulator
from predictor.batching import BATCHERS
from scripts.generate_reference import commands_of, settings_of_commands
from services.cli import block
from services.cli.serve_scheduler import SETTINGS as SCHEDULER
from services.cli.settings_options import SettingOption, SettingValues, settings_options
from services.gateway.settings import GatewaySettings
from services.instances.settings import InstanceSourceSettings
from services.placement.settings import SchedulerSettings
from services.settings import TABLES, CommandSettings, Nested, Option, SettingsPart, duration_text, seconds_of

CLI = Path(services.cli.__file__).parent
# of `block profile fit`, which describes measurements made elsewhere
APART = {("tensor_parallel", "1"), ("data_parallel", "1")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """Settings within others."""

    depth: Annotated[int, "How deep."] = 2
    other: Annotated[int, "Not used."] = 9

    def __post_init__(self) -> None:
        """Refuse a negative depth."""
        if self.depth < 0:
            raise ValueError(f"depth: must be at least 0, not {self.depth}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """Settings of every kind."""

    required: Annotated[str, "A text."]
    deadline_s: Annotated[float, Option("A deadline.", name="deadline_ms", unit="ms")] = 0.05
    margin_s: Annotated[float, Option("A margin.", name="margin_ms", unit="ms", may_be_zero=True)] = 0.01
    budget_s: Annotated[float, Option("A budget.", name="budget", unit="duration")] = 180.0
    names: Annotated[tuple[str, ...], Option("Names.", name="name", separator=",")] = ("a",)
    switch: Annotated[bool, Option("A switch.", negative="--off")] = True
    count: Annotated[int | None, Option("A count.", unset="as many as there are")] = None
    limit: Annotated[int, Option("A limit.", name="max_limit", deprecated=("most_limit",))] = 7
    kind: Annotated[str, Option("A kind.", choices=lambda: ("x", "y"))] = "x"
    shares: Annotated[dict[str, float], Option("Shares.", flag="share")] = field(default_factory=dict)
    inner: Annotated[Inner, Nested(only=("depth",))] = field(default_factory=Inner)
    hidden: int = 3

    def __post_init__(self) -> None:
        """Refuse a long deadline."""
        if self.deadline_s > 1:
            raise ValueError(f"deadline_s: must be at most 1, not {self.deadline_s}")


ENGINE = CommandSettings("engine", Outer)


def made(*arguments: str, settings: CommandSettings = ENGINE, values: Any = Outer, **environment: str) -> Any:
    """Make settings of flags and environment variables."""
    found: list[Any] = []

    @click.command()
    @settings_options(settings)
    def command(given: SettingValues) -> None:
        given.warn_of_former_names()
        found.append(given.make(values))

    with patch.dict(os.environ, environment):
        command.main(list(arguments), standalone_mode=False)
    return found[0]


def test_defaults_are_those_of_the_dataclass() -> None:
    """Without flags the value is the one that the dataclass makes."""
    assert made("--required", "r") == Outer(required="r")


def test_a_time_may_be_zero_where_its_setting_allows_that() -> None:
    """A margin of 0 is none; one of the scheduler's settings is like that."""
    assert made("--required", "r", "--margin-ms", "0").margin_s == 0
    flags = ("--deadline-margin-ms", "0")
    assert made(*flags, settings=SCHEDULER, values=SchedulerSettings).deadline_margin_s == 0


def test_flags_set_fields() -> None:
    """Units, lists, switches, choices and nested values are converted."""
    flags = ("--required", "r", "--deadline-ms", "20", "--budget", "90s", "--name", "b,c", "--name", "d", "--off")
    more = ("--count", "4", "--max-limit", "8", "--kind", "y", "--depth", "5", "--share", "a=1", "--share", "b=.5")
    assert made(*flags, *more) == Outer(
        required="r", deadline_s=0.02, budget_s=90.0, names=("b", "c", "d"), switch=False, count=4, limit=8, kind="y",
        shares={"a": 1.0, "b": 0.5}, inner=Inner(depth=5),
    )  # fmt: skip


def test_a_flag_takes_precedence_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    """The program's own variable counts before the common one; without any the file counts before the default."""
    file = tmp_path / "block.toml"
    file.write_text('[engine]\nrequired = "file"\nmax-limit = 1\nname = ["n", "m"]\nswitch = false\ndepth = 1\n')
    with file.open("a") as more:
        more.write("shares = { a = 2, b = 0.5 }\n")
    assert made("-c", str(file)) == Outer(
        required="file", limit=1, names=("n", "m"), switch=False, shares={"a": 2.0, "b": 0.5}, inner=Inner(depth=1)
    )
    assert made("-c", str(file), BLOCK_SHARES="c=1 d=2").shares == {"c": 1.0, "d": 2.0}
    common = {"BLOCK_MAX_LIMIT": "2", "BLOCK_ENGINE_CONFIG": str(file)}
    assert made(**common).limit == 2
    assert made(**common, BLOCK_ENGINE_MAX_LIMIT="3").limit == 3
    assert made("--max-limit", "4", **common, BLOCK_ENGINE_MAX_LIMIT="3").limit == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "required: is missing"),
        (("--required", "r", "--deadline-ms", "5000"), "deadline_ms: must be at most 1"),
        (("--required", "r", "--deadline-ms", "0"), "deadline_ms: must be a time above 0, not 0.0"),
        (("--required", "r", "--margin-ms", "-1"), "margin_ms: must be a time from 0 on, not -1.0"),
        (("--required", "r", "--budget", "soon"), "budget: 'soon' is no time such as 90s or 3m"),
        (("--required", "r", "--share", "a:1"), "shares: 'a:1' must be NAME=NUMBER"),
        (("--required", "r", "--depth", "-1"), "depth: must be at least 0, not -1"),
    ],
)
def test_a_refused_value_is_named_by_its_flag(arguments: tuple[str, ...], message: str) -> None:
    """The dataclass names its field; the user reads the name that he gave."""
    with pytest.raises(ValueError, match=message):
        made(*arguments)


def test_a_former_name_is_accepted_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As a flag, a variable and a key; the present name takes precedence."""
    file = tmp_path / "block.toml"
    file.write_text("[engine]\nmost_limit = 3\n")
    given = (
        made("--required", "r", "--most-limit", "1"),
        made("--required", "r", BLOCK_MOST_LIMIT="2"),
        made("--required", "r", "-c", str(file)),
        made("--required", "r", "--most-limit", "1", "--max-limit", "4"),
    )
    assert [one.limit for one in given] == [1, 2, 3, 4]
    warnings = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert warnings == [(logging.WARNING, "--most-limit is deprecated: use --max-limit")] * 4


def test_durations_are_written_as_they_are_read() -> None:
    """Help shows a default that can be given as it stands."""
    for text in ("90s", "3m", "1h", "0s", "0.5s"):
        assert duration_text(seconds_of(text, "budget")) == text


DECIDING = CommandSettings(
    "gateway",
    SettingsPart(GatewaySettings, defaults={"schedulers": ("127.0.0.1:50051",)}),
    SettingsPart(InstanceSourceSettings, lent_by=SCHEDULER),
    SettingsPart(SchedulerSettings, lent_by=SCHEDULER),
)


def test_one_command_takes_the_settings_of_two(tmp_path: Path) -> None:
    """Equal flags are there once, unequal ones have the lender's name; both tables and both variables are read."""
    options = [option.name for option in _options(DECIDING)]
    assert len(options) == len(set(options))
    assert {"policy", "instance", "idle_s", "attempts", "scheduler_attempts"} <= set(options)
    file = tmp_path / "block.toml"
    file.write_text(
        '[scheduler]\nport = 1\npolicy = "jsq"\nseed = 1\nattempts = 2\nidle_s = 5\nmost_held = 6\n'
        'instance = ["a=http://h:1,h:2"]\n'
        "[gateway]\nattempts = 7\nseed = 2\n"
    )
    arguments = ("-c", str(file), "--tagger", "t:1")
    environment = {"BLOCK_SCHEDULER_WATCH_S": "0.2", "BLOCK_GATEWAY_RESERVATION_S": "3"}
    gateway = made(*arguments, settings=DECIDING, values=GatewaySettings, **environment)
    decider = made(*arguments, settings=DECIDING, values=SchedulerSettings, **environment)
    assert (gateway.attempts, gateway.idle_s) == (7, 5.0)
    assert (decider.policy, decider.seed, decider.attempts, decider.idle_s) == ("jsq", 2, 2, 5.0)
    assert (decider.watch_s, decider.reservation_s, decider.max_held, decider.tagger) == (0.2, 3.0, 6, "t:1")
    instances = made(*arguments, settings=DECIDING, values=InstanceSourceSettings)
    assert instances.listed == ("a=http://h:1,h:2",)
    file.write_text("[scheduler]\npolcy = 'jsq'\n")
    with pytest.raises(ValueError, match="scheduler.polcy: is no known setting; did you mean policy"):
        made("-c", str(file), settings=DECIDING, values=GatewaySettings)


def test_two_settings_of_one_name_need_a_lender() -> None:
    """Two dataclasses of one command must not disagree about a flag."""
    with pytest.raises(TypeError, match="two settings are called attempts"):
        CommandSettings("gateway", GatewaySettings, SchedulerSettings)


def _options(settings: CommandSettings) -> list[SettingOption]:
    @click.command()
    @settings_options(settings)
    def command(given: SettingValues) -> None:
        """Do nothing."""

    return [one for one in command.params if isinstance(one, SettingOption)]


def _dataclasses() -> Iterator[type]:
    for package in (length_tagger, predictor, scheduler, services, simulator):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            source = Path(str(importlib.util.find_spec(found.name).origin)).read_text()
            if "import torch" in source or found.name.endswith("__main__"):
                continue
            for value in vars(importlib.import_module(found.name)).values():
                if isinstance(value, type) and is_dataclass(value):
                    yield value


def _literal_defaults() -> Iterator[tuple[str, str, Any]]:
    """The flags that are written by hand with a default that is written there."""
    for file in sorted(CLI.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "option":
                flags = [one.value for one in node.args if isinstance(one, ast.Constant)]
                for keyword in node.keywords:
                    if keyword.arg == "default" and isinstance(keyword.value, ast.Constant) and keyword.value.value:
                        yield file.name, flags[0].strip("-").replace("-", "_"), keyword.value.value


def test_no_default_is_written_twice() -> None:
    """A flag that is written by hand writes no default that a dataclass has under the same name."""
    defaults = {(spec.name, repr(spec.default)) for values in set(_dataclasses()) for spec in fields(values)}
    assert ("policy", "'block'") in defaults
    repeated = [
        (file, name, value) for file, name, value in _literal_defaults() if (name, repr(value)) in defaults - APART
    ]
    assert repeated == []


def test_generated_flags_have_the_defaults_of_their_dataclasses() -> None:
    """A default is given by the dataclass, or by the command for the port that it has of its own."""
    own = {"port", "proxy_port", "scheduler"}
    seen = 0
    for path, command in commands_of(block):
        for option in command.params:
            if not isinstance(option, SettingOption) or option.hidden or option.name in own:
                continue
            seen += 1
            if option.default not in (None, ()):
                assert option.default == option.setting.default, (path, option.name)
    assert seen > 150


def test_every_setting_has_a_help_text_of_one_sentence_or_more() -> None:
    """It begins with a capital or the name of a thing, and ends with a full stop."""
    for path, command in commands_of(block):
        for parameter in command.params:
            if isinstance(parameter, SettingOption):
                assert parameter.help, (path, parameter.name)
                assert parameter.help.endswith("."), (path, parameter.name)
        assert command.help, path
        assert command.help.strip(), path


def test_every_table_belongs_to_a_command() -> None:
    """The tables that files may have are those of commands."""
    found = {settings.table_of(name) for settings in settings_of_commands() for name in settings.settings}
    assert found - {""} == set(TABLES)


def test_local_schedulers_are_choices() -> None:
    """Their list is made when it is needed, since it costs an import."""
    serve = block.commands["serve"]
    assert isinstance(serve, click.Group)
    (option,) = (one for one in serve.commands["engine"].params if one.name == "batcher")
    assert isinstance(option.type, click.Choice)
    assert tuple(option.type.choices) == tuple(BATCHERS)
