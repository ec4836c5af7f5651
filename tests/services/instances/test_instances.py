"""Sources of the list of instances: flags, a watched file, DNS."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import socket
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from services.instances.instance import (
    Instance,
    Instances,
    instance_from_flag,
    instance_from_table,
    instances_from_file,
    table_of,
)
from services.instances.sources import FromFile, FromName, Listed, source_from_name, watch
from tests.services.files import replace_file
from tests.services.waiting import run

A = {"instance_id": "a", "engine_url": "http://10.0.0.7:8000", "sidecar_address": "10.0.0.7:50052", "models": ["m"]}
B = {**A, "instance_id": "b", "state": "draining"}


def names(instances: Instances | None) -> list[str] | None:
    """Return the ids of instances."""
    return None if instances is None else [instance.instance_id for instance in instances]


def test_a_flag_names_an_engine_and_its_sidecar() -> None:
    """The form is ID=URL,ADDRESS, with models if they are known."""
    assert instance_from_flag("a=http://h:1,h:2") == Instance(
        instance_id="a", engine_url="http://h:1", sidecar_address="h:2"
    )
    assert instance_from_flag(" a = https://h/x , [::1]:2 , m/1,m2").models == ("m/1", "m2")


def test_a_flag_may_name_models_a_role_and_a_tier() -> None:
    """In any order; llm-d's word for both is understood."""
    instance = instance_from_flag("a=http://h:1,h:2,m,role=prefill,tier_tpot_ms=20,tier=fast")
    assert (instance.models, instance.role) == (("m",), "prefill")
    assert (instance.tier, instance.tier_tpot_s) == ("fast", 0.02)
    assert instance_from_flag("a=http://h:1,h:2,role=prefill-decode").role == "both"


def test_a_file_may_give_tiers(tmp_path: Path) -> None:
    """A bound of the time per token, and whether the instance is closed; invalid values are refused by name."""
    path = tmp_path / "i.json"
    path.write_text(json.dumps([{**A, "tier": "fast", "tier_tpot_s": 0.02, "tier_closed": True}, B]))
    told = [(one.tier, one.tier_tpot_s, one.tier_closed) for one in instances_from_file(str(path))]
    assert told == [("fast", 0.02, True), ("", math.inf, False)]
    for field, value in (("tier_tpot_s", 0), ("tier_tpot_s", "fast"), ("tier_closed", 1), ("tier_closed", "yes")):
        path.write_text(json.dumps([{**A, field: value}]))
        with pytest.raises(ValueError, match=rf"instances\[0\]\.{field}: must be"):
            instances_from_file(str(path))
    path.write_text(json.dumps([{**A, "tier_closed": True}]))  # as a provisioner writes it for its closed pool
    assert [one.tier_closed for one in instances_from_file(str(path))] == [True]


@pytest.mark.parametrize(
    ("tables", "named"),
    [
        ([{"tier": "fast"}], r"instances\[0\]\.tier_tpot_s: is missing; the tier 'fast' needs its bound"),
        ([{"tier": "fast", "tier_closed": True}], r"instances\[0\]\.tier_tpot_s: is missing"),
        ([{"tier": "fast", "tier_tpot_s": math.inf}], r"instances\[0\]\.tier_tpot_s: is missing"),
        ([{"tier_tpot_s": 0.02}], r"instances\[0\]\.tier: is missing; tier_tpot_s needs the name of the tier"),
        (
            [{"tier": "fast", "tier_tpot_s": 0.02}, {"tier": "fast", "tier_tpot_s": 0.05}],
            r"instances\[1\]\.tier_tpot_s: 0.05 of 'b' is not the 0.02 of 'a'; a tier has one bound",
        ),
    ],
)
def test_half_a_tier_and_a_tier_with_two_bounds_are_refused(
    tmp_path: Path, tables: list[dict[str, Any]], named: str
) -> None:
    """A name without a bound would be a label without effect; the error names the field."""
    path = tmp_path / "i.json"
    path.write_text(json.dumps([{**facts, **table} for facts, table in zip((A, B), tables, strict=False)]))
    with pytest.raises(ValueError, match=named):
        instances_from_file(str(path))


def test_a_file_may_name_roles(tmp_path: Path) -> None:
    """With the same words."""
    path = tmp_path / "i.json"
    path.write_text(json.dumps([{**A, "role": "decode"}, {**B, "role": "prefill-decode"}]))
    assert [one.role for one in instances_from_file(str(path))] == ["decode", "both"]
    path.write_text(json.dumps([{**A, "role": "encode"}]))
    with pytest.raises(ValueError, match=r"instances\[0\]\.role: must be one of both, prefill, decode"):
        instances_from_file(str(path))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a", "must be ID="),
        ("a=http://h:1", "must be ID="),
        ("=http://h:1,h:2", "instance_id"),
        ("a=h:1,h:2", "engine_url"),
        ("a=ftp://h:1,h:2", "engine_url"),
        ("a=http://h:1,h", "sidecar_address"),
        ("a=http://h:1,h:99999", "sidecar_address"),
        ("a=http://h:1,:2", "sidecar_address"),
        ("a=http://h:1,h:2,,m", "models"),
        ("a=http://h:1,h:2,role=encode", "role: must be one of both, prefill, decode, prefill-decode"),
        ("a=http://h:1,h:2,tier=fast", "tier_tpot_ms: is missing; the tier 'fast' needs its bound"),
        ("a=http://h:1,h:2,tier_tpot_ms=20", "tier: is missing; tier_tpot_ms needs the name of the tier"),
        ("a=http://h:1,h:2,tier=fast,tier_tpot_ms=0", "tier_tpot_ms: must be a time above 0, in milliseconds, not '0'"),
        ("a=http://h:1,h:2,tier=fast,tier_tpot_ms=x", "tier_tpot_ms: must be a time above 0, in milliseconds, not 'x'"),
    ],
)
def test_a_bad_flag_is_named(text: str, named: str) -> None:
    """The error has the flag and the reason."""
    with pytest.raises(ValueError, match=named) as caught:
        instance_from_flag(text)
    assert text in str(caught.value)


def test_duplicate_ids_are_refused() -> None:
    """An id identifies one instance."""
    with pytest.raises(ValueError, match=r"instances\[1\]\.instance_id: 'a' is a duplicate"):
        Listed([instance_from_flag("a=http://h:1,h:2")] * 2)


def test_toml_and_json_are_equivalent(tmp_path: Path) -> None:
    """They have a table per instance; JSON may omit the outer object."""
    for name, text in {
        "i.json": json.dumps({"instances": [A, B]}),
        "bare.json": json.dumps([A, B]),
        "i.toml": "".join(
            "[[instances]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in one.items())
            for one in (A, B)
        ),
    }.items():
        (tmp_path / name).write_text(text)
        first, second = instances_from_file(str(tmp_path / name))
        assert (first.instance_id, first.models, first.state) == ("a", ("m",), "ready")
        assert (second.instance_id, second.state) == ("b", "draining")


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"instance": []}, "did you mean instances"),
        ({"instances": {}}, "instances: must be a list"),
        ([1], r"instances\[0\]\.must be a table"),
        ([A, {**A, "engine_ulr": "x"}], r"instances\[1\]\.engine_ulr: .*did you mean engine_url"),
        ([{"instance_id": "a", "engine_url": "http://h:1"}], r"instances\[0\]\.sidecar_address: is missing"),
        ([{**A, "engine_url": "h"}], r"instances\[0\]\.engine_url"),
        ([{**A, "engine_url": 3}], r"instances\[0\]\.engine_url: must be a string"),
        ([{**A, "models": "m"}], r"instances\[0\]\.models: must be a list"),
        ([{**A, "state": "gone"}], r"instances\[0\]\.state"),
        ([A, A], r"instances\[1\]\.instance_id: 'a' is a duplicate"),
    ],
)
def test_a_bad_entry_is_named(data: Any, named: str, tmp_path: Path) -> None:
    """The error has the file, the index and the field."""
    path = tmp_path / "i.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=named) as caught:
        instances_from_file(str(path))
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"), [("i.json", "{"), ("i.json", "[" * 100_000), ("i.toml", "= 3"), ("i.toml", "")]
)
def test_a_file_without_a_list(name: str, text: str, tmp_path: Path) -> None:
    """Malformed files are refused; an empty one is a list without instances."""
    path = tmp_path / name
    path.write_text(text)
    if not text:
        assert instances_from_file(str(path)) == ()
        return
    with pytest.raises(ValueError, match=f"{name}: is not"):
        instances_from_file(str(path))


def test_a_file_is_read_again_when_it_changes_and_only_then(tmp_path: Path) -> None:
    """A new list, changed in place or replaced, is returned once; a bad one is reported once."""
    path = tmp_path / "i.json"

    async def test() -> None:
        source = FromFile(str(path))
        with pytest.raises(ValueError, match="cannot be read"):
            await source.poll()
        path.write_text(json.dumps([A]))
        assert names(await source.poll()) == ["a"]
        assert await source.poll() is None
        path.write_text(json.dumps([A, B]))
        assert names(await source.poll()) == ["a", "b"]
        path.write_text("[")
        with pytest.raises(ValueError, match="is not JSON"):
            await source.poll()
        assert await source.poll() is None
        other = tmp_path / "other.json"
        other.write_text(json.dumps([B]))
        other.rename(path)
        assert names(await source.poll()) == ["b"]

    run(test)


def test_watching_keeps_the_last_good_list(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An error is logged once; the next good list is returned."""
    path = tmp_path / "i.json"
    path.write_text(json.dumps([A]))
    caplog.set_level(logging.INFO)

    async def test() -> None:
        lists: asyncio.Queue[list[str] | None] = asyncio.Queue()
        watching = asyncio.create_task(watch(FromFile(str(path)), 0.001, lambda found: lists.put_nowait(names(found))))
        assert await lists.get() == ["a"]
        replace_file(path, json.dumps([{**A, "sidecar_address": "nowhere"}]))
        while "sidecar_address" not in caplog.text + "".join(str(vars(record)) for record in caplog.records):
            await asyncio.sleep(0)
        replace_file(path, json.dumps([A, B]))
        assert await lists.get() == ["a", "b"]
        assert lists.empty()
        watching.cancel()

    run(test)
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "instances[0].sidecar_address" in str(vars(warning))


def test_a_dns_name_has_an_instance_for_each_address() -> None:
    """A name that cannot be resolved is an error."""

    async def test() -> None:
        source = source_from_name("engines.example:8000:50052")
        loop = asyncio.get_running_loop()
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in ("10.0.0.2", "10.0.0.1")]
        found.append((socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", 0, 0, 0)))  # type: ignore[arg-type]

        async def resolved(*_: Any, **__: Any) -> Any:
            return found

        with patch.object(loop, "getaddrinfo", resolved):
            instances = await source.poll()
            assert instances is not None
            assert names(instances) == ["10.0.0.1:8000", "10.0.0.2:8000", "[fd00::1]:8000"]
            assert instances[2].sidecar_address == "[fd00::1]:50052"
            assert instances[0].engine_url == "http://10.0.0.1:8000"
            assert await source.poll() is None
            found.pop(0)
            assert names(await source.poll()) == ["10.0.0.1:8000", "[fd00::1]:8000"]

        async def unresolved(*_: Any, **__: Any) -> Any:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

        with patch.object(loop, "getaddrinfo", unresolved), pytest.raises(ValueError, match="engines.example"):
            await source.poll()

    run(test)


@pytest.mark.parametrize("text", ["", "name", "name:1", "name:1:x", ":1:2", "name:0:2", "name:1:99999"])
def test_a_bad_name_is_refused(text: str) -> None:
    """The name and both ports are required."""
    with pytest.raises(ValueError, match="NAME:ENGINE_PORT:SIDECAR_PORT"):
        source_from_name(text)


def test_localhost_is_resolved() -> None:
    """This uses the resolver of the system."""

    async def test() -> None:
        found = await FromName("localhost", engine_port=1, sidecar_port=2).poll()
        assert found

    run(test)


def test_ranks_of_one_url_are_instances(tmp_path: Path) -> None:
    """By a flag, and by a file; a list writes and reads them alike."""
    instance = instance_from_flag("a=http://h:1,h:2,m,rank=3")
    assert (instance.models, instance.data_parallel_rank) == (("m",), 3)
    assert instance_from_table(table_of(instance)) == instance
    assert "data_parallel_rank" not in table_of(instance_from_flag("a=http://h:1,h:2"))
    path = tmp_path / "i.json"
    path.write_text(json.dumps([{**A, "data_parallel_rank": 0}, {**B, "data_parallel_rank": 1}]))
    assert [one.data_parallel_rank for one in instances_from_file(str(path))] == [0, 1]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"data_parallel_rank": -1}, {}, r"instances\[0\]\.data_parallel_rank: must be a whole number from 0"),
        ({"data_parallel_rank": "1"}, {}, r"instances\[0\]\.data_parallel_rank: must be a whole number from 0"),
        ({"data_parallel_rank": True}, {}, r"instances\[0\]\.data_parallel_rank: must be a whole number from 0"),
        (
            {"data_parallel_rank": 1}, {"data_parallel_rank": 1},
            r"instances\[1\]\.data_parallel_rank: 1 at http://10.0.0.7:8000 is 'a' already",
        ),
        ({"data_parallel_rank": 1}, {}, r"instances\[1\]\.data_parallel_rank: is missing from 'b' or 'a': both are at"),
        ({}, {"data_parallel_rank": 1}, r"instances\[1\]\.data_parallel_rank: is missing from 'b' or 'a': both are at"),
    ],
)  # fmt: skip
def test_bad_ranks_are_refused(first: Any, second: Any, message: str, tmp_path: Path) -> None:
    """With the field, and the instances that contradict each other."""
    path = tmp_path / "i.json"
    path.write_text(json.dumps([{**A, **first}, {**B, **second}]))
    with pytest.raises(ValueError, match=message):
        instances_from_file(str(path))


def test_a_rank_in_a_flag_is_a_number() -> None:
    """The error has the flag."""
    with pytest.raises(ValueError, match=r"instance: 'a=http://h:1,h:2,rank=x': rank: must be a whole number from 0"):
        instance_from_flag("a=http://h:1,h:2,rank=x")
