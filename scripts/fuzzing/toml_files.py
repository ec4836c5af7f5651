"""The target that reads TOML: policies, objectives, tiers, mixes, scenarios, experiments and settings."""

from __future__ import annotations

import json
import tomllib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

from scheduler.objectives import objectives_in
from scheduler.policy import policy_from
from scheduler.provisioning.tiers import tiers_in
from scripts.fuzzing.inputs import NUMBERS, TEXTS, mutated
from scripts.fuzzing.parsers import Parser
from services.cli.settings_options import document_from
from services.cluster.settings import vllm_from_file
from services.instances.instance import instances_from_file
from simulator.codec import settings_from_toml
from simulator.experiments.experiment_file import experiment_from, experiment_names
from simulator.mix import mix_from_file
from simulator.scenario import scenario_from

# The first line of an input says what reads it.

OBJECTIVES = b"""[[objective]]
name = "chat"
class = "real-time"
ttft_slo_s = 0.5
tpot_slo_s = 0.05
priority = -1
weight = 2.0
when_late = "demote"
[[objective]]
name = "batch"
class = "best-effort"
"""
TIERS = b'[[tier]]\nname = "fast"\ntpot_slo_s = 0.03\nmin_instances = 1\n[[tier]]\nname = "slow"\ntpot_slo_s = 0.1\n'
MIX = b'[[mix]]\nname = "a"\nshare = 0.5\nclass = "real-time"\npriority = 1\n[[mix]]\nname = "b"\nshare = 0.5\n'
SETTINGS = b'[gateway]\nport = 8000\nscheduler = ["a:1"]\n[scheduler]\npolicy = "block"\n[vllm]\narguments = ["--x"]\n'
POLICIES = (
    "block", "jsq", "block: k = 8", 'linear: score = "ttft_s + 2 * num_waiting"', "lmetric", "polyserve", "slo",
    'block: score = "max(ttft_s, 0.1) if num_running > 3 else e2e_s"', 'filter: keep = "num_waiting < 4"',
)  # fmt: skip
EXPRESSIONS = (
    "ttft_s", "e2e_s", "num_waiting", "num_running", "1", "0", "1e308", "9" * 400, "(", ")", "+", "-", "*", "/", "//",
    "%", "**", "<", "<=", "==", "!=", " and ", " or ", " not ", " if ", " else ", "max(", "min(", "log(", "exp(", ",",
    "nan", "inf", "__import__('os')", "lambda: 0", "x.y", "[0]", "'a'", ":=", "(" * 300, "-" * 3000,
)  # fmt: skip


def policy_of(data: bytes) -> object:
    """Read a policy as a flag has it."""
    return policy_from(data.decode())


def scenario_of(data: bytes) -> object:
    """Read a scenario."""
    try:
        table = tomllib.loads(data.decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return scenario_from(table)


@asynccontextmanager
async def open_toml(folder: Path) -> AsyncIterator[Parser]:
    """Read policies, objectives, tiers, mixes, scenarios, experiments and settings."""
    path = folder / "file.toml"

    def in_file(read: Callable[[str], object]) -> Callable[[bytes], object]:
        def write_and_read(data: bytes) -> object:
            path.write_bytes(data)
            return read(str(path))

        return write_and_read

    readers: dict[bytes, Callable[[bytes], object]] = {
        b"policy": policy_of,
        b"objectives": lambda data: objectives_in(data.decode(), "file"),
        b"tiers": lambda data: tiers_in(data.decode(), "file"),
        b"mix": in_file(mix_from_file),
        b"scenario": scenario_of,
        b"experiment": lambda data: experiment_from("one", data.decode()),
        b"engine": in_file(settings_from_toml),
        b"settings": in_file(document_from),
        b"vllm": in_file(vllm_from_file),
        b"instances": in_file(instances_from_file),
    }
    experiments = [
        (Path(experiment_from.__code__.co_filename).parent / f"{name}.toml").read_bytes() for name in experiment_names()
    ]
    samples: dict[bytes, list[bytes]] = {
        b"objectives": [OBJECTIVES],
        b"tiers": [TIERS],
        b"mix": [MIX],
        b"scenario": [b"[instances]\ncount = 2\n[traffic]\nrate = 3.0\n[conditions]\nseed = 1\n" + MIX],
        b"experiment": experiments,
        b"engine": [b"[engine]\nmax_num_seqs = 8\nblock_size = 16\nbatcher = 'sarathi'\n"],
        b"settings": [SETTINGS],
        b"vllm": [SETTINGS],
        b"instances": [b'[[instances]]\ninstance_id = "a"\nengine_url = "http://a:1"\nsidecar_address = "a:2"\n'],
    }

    def draw_one(draw: Random) -> bytes:
        kind = draw.choice(list(readers))
        if kind == b"policy":
            text = draw.choice(POLICIES)
            if draw.random() < 0.6:
                score = "".join(draw.choice(EXPRESSIONS) for _ in range(draw.randrange(1, 8)))
                text = f'block: score = "{score}"'
            return kind + b"\n" + (mutated(draw, text.encode()) if draw.random() < 0.5 else text.encode())
        return kind + b"\n" + changed_toml(draw, draw.choice(samples[kind]))

    def read(data: bytes) -> None:
        kind, _, rest = data.partition(b"\n")
        readers.get(kind, policy_of)(rest)

    yield Parser(name="toml", draw=draw_one, read=read, valid=b"objectives\n" + OBJECTIVES)


def changed_toml(draw: Random, text: bytes) -> bytes:
    """Replace, repeat or remove lines, or what stands behind their equals signs."""
    lines = text.split(b"\n")
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(len(lines))
        key, equals, _ = lines[at].partition(b"=")
        kind = draw.randrange(6)
        if kind == 0:
            del lines[at]
            lines = lines or [b""]
        elif kind == 1:
            lines.insert(at, draw.choice(lines))
        elif kind == 2:
            lines.insert(
                at, draw.choice((b"[a]", b"[[a]]", b"a = 1", b"[engine]", b"x" * 300, b"a" + b".a" * 100 + b"=1"))
            )
        elif equals:
            lines[at] = key + b"=" + toml_value(draw)
        else:
            lines[at] = mutated(draw, lines[at])
    return b"\n".join(lines)


def toml_value(draw: Random) -> bytes:
    """Draw a value as TOML writes it."""
    kind = draw.randrange(8)
    if kind < 2:
        return str(draw.choice(NUMBERS)).encode()
    if kind < 4:
        return json.dumps(draw.choice(TEXTS)).encode()
    return draw.choice(
        (b"nan", b"inf", b"-inf", b"true", b"[]", b"{}", b"[[]]", b"2026-01-01T00:00:00Z", b"07:30:00", b"[1, 'a']",
         b"{a = {b = 1}}", b"[" * 500 + b"]" * 500, b"'''" + b"a" * 5000 + b"'''", b"[1]", b"['a', 'b']", b"[{a = 1}]")
    )  # fmt: skip
