"""Commands, flags, settings, metrics and indicators that the pages name exist in the code."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import click
import pytest

from predictor.snapshot import OLDEST_VERSION, VERSION
from protos.block.v1 import predictor_pb2, provisioner_pb2, scheduler_pb2, tagger_pb2
from scheduler.indicators import INDICATORS
from scheduler.policies import POLICIES
from scheduler.policy import policy_from
from scheduler.provisioning.tiers import tiers_in
from services.cli import block
from services.cluster.settings import settings_from_file, vllm_from_file
from services.instances.instance import instances_from_file
from services.objectives import objectives_from_file
from services.security.key_file import keys_in, tenant_weights_from_file
from simulator.mix import mix_from_file
from tests.docs.pages import IDS, INLINE, PAGES, ROOT, block_commands, blocks_of, commands_in, inline_of, text_of

FLAG = re.compile(r"(?<![\w-])(?:--[a-z][\w-]*|-[a-z]\b)")
# Flags of other programs, which pages name too.
OTHERS = {
    "--dist",  # pytest-xdist
    "--scheduler-cls", "--shutdown-timeout", "--max-num-active-seqs", "--data-parallel-rank", "--dp-sync-interval",
    "--data-parallel-external-lb", "--data-parallel-multi-port-external-lb", "--prefill-schedule-interval", "--mm-processor-kwargs",  # vLLM
    "--enable-mixed-chunk", "--schedule-conservativeness", "--schedule-policy", "--enable-metrics",  # SGLang
    "--build", "--build-arg", "--enable-feature", "--host", "--no-deps",
    "--k8s-label-selector", "--k8s-port", "--k8s-namespace", "--static-backends",  # production-stack's router
}  # fmt: skip
SERVED = ("gateway", "scheduler", "picker", "predictor", "tagger", "engine", "provisioner")
NAME = re.compile(r"block_[a-z0-9_]+")


def option_names(command: click.Command) -> set[str]:
    """All spellings of a command's options."""
    names = {"--help", "-h", "--version"}
    for parameter in command.params:
        names.update(parameter.opts, parameter.secondary_opts)
    return names


def all_commands(command: click.Command = block) -> Iterator[click.Command]:
    """A command and those below it."""
    yield command
    if isinstance(command, click.Group):
        for one in command.commands.values():
            yield from all_commands(one)


def refuse_unknown(words: list[str]) -> None:
    """Fail on a subcommand or an option that does not exist."""
    command: click.Command = block
    rest = list(words)
    while isinstance(command, click.Group) and rest and rest[0] in command.commands:
        command = command.commands[rest.pop(0)]
    named = isinstance(command, click.Group) and rest and re.fullmatch(r"[a-z]+", rest[0])
    assert not named, f"block {' '.join(words)}: {rest[0]} is no command"
    names = option_names(command)
    for word in rest:
        if word == "--":
            return
        if FLAG.match(word):
            assert word.partition("=")[0] in names, f"block {' '.join(words)}: there is no {word}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_take_their_options(page: Path) -> None:
    """Every command line names commands and options that there are."""
    for words in block_commands(page):
        refuse_unknown(words)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_options_that_are_named_alone(page: Path) -> None:
    """A flag in the text belongs to some command."""
    known = OTHERS.union(*(option_names(command) for command in all_commands()))
    for script in sorted((ROOT / "scripts").rglob("*.py")):
        known.update(re.findall(r'"(--[a-z-]+)"', script.read_text(encoding="utf-8")))
    for code in inline_of(page):
        for flag in FLAG.findall(code) if code.startswith("-") else ():
            assert flag in known, f"`{code}`: no command has {flag}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_scripts_take_their_options(page: Path) -> None:
    """Scripts that pages run have the options that pages give them."""
    for one in blocks_of(page):
        for words in commands_in(one.text) if one.language == "bash" else ():
            for place, word in enumerate(words):
                if word.startswith("scripts/") and word.endswith(".py"):
                    source = (ROOT / word).read_text(encoding="utf-8")
                    for flag in filter(FLAG.fullmatch, words[place + 1 :]):
                        assert f'"{flag}"' in source, f"{word} has no {flag}"


def test_what_does_not_exist_would_be_noticed() -> None:
    """The checks above refuse wrong commands and wrong options."""
    with pytest.raises(AssertionError, match="no --instanzes"):
        refuse_unknown(["up", "--instanzes", "2"])
    with pytest.raises(AssertionError, match="is no command"):
        refuse_unknown(["serve", "schedular"])


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_settings_files(page: Path, tmp_path: Path) -> None:
    """Each TOML block is one that its reader accepts, and its keys are options."""
    for one in blocks_of(page):
        if one.language != "toml":
            continue
        file = tmp_path / "settings.toml"
        file.write_text(one.text)
        document = tomllib.loads(one.text)
        if "instances" in document:
            assert instances_from_file(str(file))
            continue
        if "mix" in document:
            assert mix_from_file(str(file))
            continue
        if "objective" in document:
            assert objectives_from_file(str(file))
            continue
        if "key" in document:
            assert keys_in(one.text, page.name)
            continue
        if "tenant" in document:
            assert tenant_weights_from_file(str(file))
            continue
        if "tier" in document:
            assert tiers_in(one.text, page.name)
            continue
        settings_from_file(str(file))
        vllm_from_file(str(file))
        served = block.commands["serve"]
        assert isinstance(served, click.Group)
        for table in document.keys() & set(SERVED):
            names = option_names(served.commands[table])
            for key in document[table]:
                assert f"--{key.replace('_', '-')}" in names, f"[{table}] has no {key}"


def test_metrics_that_pages_name() -> None:
    """The manual names only metrics that the reference lists."""
    listed = set(NAME.findall((ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")))
    others = set(POLICIES) | {"block_tag_tokens", "block_tag_spread"}
    for page in (
        "operate.md",
        "concepts.md",
        "policies.md",
        "profiles.md",
        "tagger.md",
        "provisioning.md",
        "deploy.md",
    ):
        for code in inline_of(ROOT / "docs" / page):
            for name in NAME.findall(code):
                assert name in listed | others, f"{page}: {name} is no metric"


def test_policies_and_indicators_are_all_described() -> None:
    """The page has a row for every policy and for every indicator, and its examples can be read."""
    page = ROOT / "docs/policies.md"
    codes = set(inline_of(page))
    assert set(POLICIES) <= codes
    assert set(INDICATORS) <= codes
    for line in "\n".join(one.text for one in blocks_of(page) if not one.language).splitlines():
        policy_from(line)
    for words in block_commands(page):
        if "--policy" in words:
            policy_from(words[words.index("--policy") + 1])


def test_the_local_scheduler_that_is_shown_is_the_one_that_runs() -> None:
    """Extend shows static batching whole."""
    (shown,) = (one.text for one in blocks_of(ROOT / "docs/extend.md") if "@kernel" in one.text)
    source = (ROOT / "predictor/batching/faster_transformer.py").read_text(encoding="utf-8")

    def code(text: str) -> str:
        (function,) = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
        return ast.unparse(function.body[1:])

    assert code(shown) == code(source)


def test_experiments_that_pages_name() -> None:
    """The table has every experiment that ships, and no other."""
    _, _, table = text_of(ROOT / "docs/simulate.md").partition("| experiment | reproduces |\n|---|---|\n")
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("|")]
    named = {name for row in rows for name in INLINE.findall(row)}
    assert named == {path.stem for path in (ROOT / "simulator/experiments").glob("*.toml")}


def test_the_snapshot_version_that_is_named() -> None:
    """The wire protocol's page has the version that snapshots have."""
    assert f"\n| `version` | {VERSION}; versions from {OLDEST_VERSION} on can be read |\n" in text_of(
        ROOT / "docs/wire.md"
    )


@pytest.mark.parametrize("file", [predictor_pb2, provisioner_pb2, scheduler_pb2, tagger_pb2])
def test_grpc_methods_that_are_named(file: ModuleType) -> None:
    """The wire protocol's page has every service, with its methods and no other."""
    page = text_of(ROOT / "docs/wire.md")
    for service in file.DESCRIPTOR.services_by_name.values():
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{service.full_name}` |"))
        assert INLINE.findall(row.split("|")[2]) == [method.name for method in service.methods]
