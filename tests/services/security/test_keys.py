"""Key files: what they accept, what they refuse, how they are followed; and the commands that make them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from services.cli import block
from services.placement.settings import SchedulerSettings
from services.security.access_metrics import AccessMetrics
from services.security.key_file import KeyFile, keys_from_file, keys_in, tenant_weights_from_file
from services.security.keys import KeyHolder, UsageLimits, digest_of, new_key, plain_keys
from services.security.own_key import OwnKey
from services.security.roles import Role
from tests.services.cli.running import refusal
from tests.services.security.key_files import key, table, tenant, write_keys
from tests.services.waiting import run

DAY_S = 86400


def test_a_file_of_keys(tmp_path: Path) -> None:
    """Each key has its holder; others have none."""
    path = write_keys(
        tmp_path / "keys.toml",
        key("secret-a", "alice", tenant="team", objective="chat", models=["m1", "m2"], requests_per_minute=60),
        key("secret-b", "bob", role="operator"),
        tenant("team", max_requests=4, max_tokens_in_flight=1000),
    )
    keys = keys_from_file(path)
    assert len(keys) == 2
    assert keys.holder(b"secret-a") == KeyHolder(
        name="alice",
        role=Role.CLIENT,
        tenant="team",
        objective="chat",
        models=frozenset(("m1", "m2")),
        limits=UsageLimits(requests_per_minute=60),
    )
    bob = keys.holder(b"secret-b")
    assert bob is not None
    assert (bob.role, bob.tenant, bob.may_use("anything"), bool(bob.limits)) == (Role.OPERATOR, "bob", True, False)
    for wrong in (b"", b"secret", b"secret-a ", digest_of("secret-a").encode(), b"\xff" * 600):
        assert keys.holder(wrong) is None
    assert keys.limits_of("team") == UsageLimits(max_requests=4, max_tokens_in_flight=1000)
    assert not keys.limits_of("bob")
    assert keys.objectives == ("chat",)
    assert b"secret" not in Path(path).read_bytes()
    assert "secret-a" not in repr(keys)


GOOD = digest_of("x")
BAD_FILES = (
    ("alice sk-secret objective=chat", "is not TOML: write a table [[key]]"),
    ("", "key: must be a list of tables"),
    ("key = 5", "key: must be a list of tables"),
    ("[[keys]]", "keys: is no known table; did you mean key?"),
    (table("key", name="a"), "key[0].sha256: is missing"),
    (table("key", sha256=GOOD), "key[0].name: is missing"),
    (table("key", name="a", sha256="sk-secret"), "key[0].sha256: must be 64 hexadecimal digits"),
    (table("key", name="a", sha256=GOOD.upper()), "key[0].sha256: must be 64 hexadecimal digits"),
    (table("key", name="a b\n", sha256=GOOD), "key[0].name: must be at most 128 printable"),
    (table("key", name="a", sha256=GOOD, rolle="client"), "key[0].rolle: is no known field; did you mean role?"),
    (table("key", name="a", sha256=GOOD, role="admin"), "key[0].role: must be one of client, part, operator"),
    (table("key", name="a", sha256=GOOD, role="anyone"), "key[0].role: must be one of client, part, operator"),
    (table("key", name="a", sha256=GOOD, models=[]), "key[0].models: must name at least one model"),
    (table("key", name="a", sha256=GOOD, models="m"), "key[0].models: must be a list of names"),
    (table("key", name="a", sha256=GOOD, tenant=""), "key[0].tenant: must be a text"),
    (table("key", name="a", sha256=GOOD, requests_per_minute=0), "key[0].requests_per_minute: must be a number above"),
    (table("key", name="a", sha256=GOOD, max_requests=1.5), "key[0].max_requests: must be a whole number"),
    (table("key", name="a", sha256=GOOD, expires="soon"), "key[0].expires: must be a date"),
    (table("key", name="a", sha256=GOOD, expires="2027-01-01T10:00:00"), "key[0].expires: a time of day needs a time"),
    (table("key", name="a", sha256=GOOD, expires=5), "key[0].expires: must be a date"),
    (key("x", "a") + key("y", "a"), "key[1].name: 'a' is a duplicate"),
    (key("x", "a") + key("x", "b"), "key: 'a' and 'b' have the same sha256"),
    (key("x", "a") + tenant("b", max_requests=1), "tenant[0].name: no key has the tenant 'b'"),
    (key("x", "a") + tenant("a"), "tenant[0].name: the tenant needs a weight, or a limit"),
    (key("x", "a") + tenant("a", weight=0), "tenant[0].weight: must be a number above 0"),
    (key("x", "a") + tenant("a", models=3), "tenant[0].models: is no known field"),
)


def test_tenants_have_weights(tmp_path: Path) -> None:
    """A key file has them, or a file without keys; a tenant without a weight has that of all others."""
    tables = (tenant("team", weight=2.5), tenant("other", max_requests=3))
    for more in ((), (key("secret-a", "alice", tenant="team"), key("secret-b", "other"))):
        path = write_keys(tmp_path / "keys.toml", *more, *tables)
        assert tenant_weights_from_file(path) == {"team": 2.5, "other": 1.0}
        rules = SchedulerSettings(admission_turn="fair", tenants=path).rules()
        assert rules.tenant_weights == {"team": 2.5, "other": 1.0}
    assert tenant_weights_from_file(write_keys(tmp_path / "keys.toml", key("x", "a"))) == {}
    assert SchedulerSettings().rules().tenant_weights == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (tenant("a", weight=-1), "tenant[0].weight: must be a number above 0"),
        (tenant("a", weihgt=1), "tenant[0].weihgt: is no known field; did you mean weight?"),
        ("", "tenant: must be a list of tables"),
        ("a = secret", "is not TOML: write a table [[tenant]] with name and weight"),
    ],
)
def test_bad_files_of_tenants(text: str, message: str, tmp_path: Path) -> None:
    """The error is one line that names the setting, the file and the field."""
    path = write_keys(tmp_path / "tenants.toml", text)
    with pytest.raises(ValueError, match="^tenants: /") as refused:
        SchedulerSettings(tenants=path)
    assert message in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(("text", "message"), BAD_FILES)
def test_bad_files(text: str, message: str) -> None:
    """The error is one line that names table and field, and shows no key."""
    with pytest.raises(ValueError, match="^api_key_file: keys.toml: ") as refused:
        keys_in(text, "api_key_file: keys.toml")
    assert message in str(refused.value)
    assert "secret" not in str(refused.value)
    assert "\n" not in str(refused.value)


@settings(deadline=None)
@given(st.text(max_size=300))
def test_any_text_is_keys_or_a_value_error(text: str) -> None:
    """No file ends a server in any other way."""
    with pytest.raises(ValueError, match="^f: "):
        keys_in(text, "f")


@pytest.mark.parametrize(
    ("expires", "last_s"),
    [
        ("2027-01-31", 1801440000),  # the end of this day
        ("2027-01-31T12:00:00Z", 1801396800),
        ("2027-01-31T13:00:00+01:00", 1801396800),
    ],
)
def test_keys_expire(expires: str, last_s: int) -> None:
    """A date counts through its end in UTC; TOML's own dates and times are read as texts are."""
    for text in (key("x", "a", expires=expires), key("x", "a") + f"expires = {expires}\n"):
        holder = keys_in(text, "f").holder(b"x")
        assert holder is not None
        assert [holder.is_expired(last_s - 0.001), holder.is_expired(last_s)] == [False, True]
    forever = keys_in(key("x", "a"), "f").holder(b"x")
    assert forever is not None
    assert not forever.is_expired(1e12)


def test_plain_keys() -> None:
    """Keys of an environment variable are clients'."""
    keys = plain_keys(["k1", "k2"])
    assert keys.holder(b"k2") == KeyHolder(name="key-2", tenant="key-2")
    assert keys.holder(b"k3") is None


def test_the_file_is_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A new version counts at once; a broken or missing one is logged once, shown, and changes nothing."""
    path = tmp_path / "keys.toml"
    write_keys(path, key("one"))
    registry = CollectorRegistry()
    file = KeyFile(str(path), AccessMetrics(registry))

    def valid() -> float | None:
        return registry.get_sample_value("block_api_key_file_valid")

    async def test() -> None:
        caplog.set_level(logging.INFO)
        await file.look()
        assert caplog.records == []
        write_keys(path, key("two"))
        await file.look()
        assert (file.keys.holder(b"one"), file.problem, valid()) == (None, "", 1)
        path.write_text("two sk-secret\n")
        for _ in range(3):
            await file.look()
        assert file.keys.holder(b"two") is not None
        assert valid() == 0
        assert "is not TOML" in file.problem
        path.unlink()
        for _ in range(3):
            await file.look()
        assert "cannot be read" in file.problem
        write_keys(path, key("three"))
        await file.look()
        assert file.keys.holder(b"three") is not None
        assert (file.problem, valid()) == ("", 1)

    run(test)
    events = [record.getMessage() for record in caplog.records]
    assert events == [
        "API keys changed", "API keys are invalid, keeping the last ones", "API keys are invalid, keeping the last ones",
        "API keys changed",
    ]  # fmt: skip
    assert "secret" not in caplog.text


def test_a_file_that_others_can_read_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The warning names file and mode; a file of its owner and group needs none."""
    path = tmp_path / "keys.toml"
    for mode, warns in ((0o600, False), (0o640, False), (0o644, True)):
        caplog.clear()
        write_keys(path, key("one"))
        path.chmod(mode)
        KeyFile(str(path))
        assert [record.getMessage() for record in caplog.records] == ["API keys can be read by other users"] * warns


def test_the_own_key_is_followed(tmp_path: Path) -> None:
    """A new key is used within a second; a bad one is refused at the start, and later the last one stays."""
    path, now = tmp_path / "key", [0.0]
    for bad in ("", "two words", "ä", "x" * 600):
        path.write_text(bad)
        with pytest.raises(ValueError, match="must hold one API key") as refused:
            OwnKey(str(path))
        assert "two words" not in str(refused.value)
    path.write_text("one\n")
    own = OwnKey(str(path), clock=lambda: now[0])
    assert own.metadata() == (("authorization", "Bearer one"),)
    path.write_text("second\n")
    assert own.metadata() == (("authorization", "Bearer one"),)
    now[0] = 2.0
    assert own.metadata() == (("authorization", "Bearer second"),)
    path.unlink()
    now[0] = 4.0
    assert own.metadata() == (("authorization", "Bearer second"),)
    assert not OwnKey()
    assert OwnKey().metadata() == ()


# block keys


def keys_command(*words: str, text: str = "") -> str:
    """Run `block keys`, which succeeds; return what it prints."""
    done = CliRunner().invoke(block, ["keys", *words], input=text, standalone_mode=False)
    assert done.exception is None, done.exception
    return done.output


def test_new_keys_are_printed_once_with_their_table() -> None:
    """The table has the digest; the key is nowhere in it."""
    made, _, text = keys_command(
        "new", "team-a", "--role", "operator", "--model", "m1", "--model", "m2", "--tokens-per-minute", "9", "--expires",
        "2027-01-31",
    ).partition("\n\n")  # fmt: skip
    assert made.startswith("blk-")
    assert len(made) > 40
    assert made not in text
    holder = keys_in(text, "f").holder(made.encode())
    assert holder is not None
    assert (holder.name, holder.role, holder.models) == ("team-a", Role.OPERATOR, {"m1", "m2"})
    assert (holder.limits.tokens_per_minute, holder.expires_unix_s) == (9, 1801440000)
    assert new_key() != new_key()


def test_keys_are_appended(tmp_path: Path) -> None:
    """The file is readable by its owner only, stays valid, and keeps what it has."""
    path = tmp_path / "keys.toml"
    first = keys_command("new", "a", "--append", str(path)).strip()
    path.write_text("# our keys\n" + path.read_text())
    second = keys_command("new", "b", "--role", "part", "--append", str(path)).strip()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    keys = keys_from_file(str(path))
    assert [getattr(keys.holder(one.encode()), "name", "") for one in (first, second)] == ["a", "b"]
    assert path.read_text().startswith("# our keys\n")
    before = path.read_bytes()
    assert "name: 'b' is a duplicate" in refusal("keys", "new", "b", "--append", str(path))
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["keys.toml"]
    assert keys_command("list", str(path)) == "a  client\nb  part\n"
    assert "append" in refusal("keys", "new", "b", "--append", str(tmp_path / "nowhere" / "keys"))
    assert "name: must be" in refusal("keys", "new", " ")


def test_a_key_is_hashed_from_standard_input() -> None:
    """A line end does not count."""
    expected = hashlib.sha256(b"sk-mine").hexdigest() + "\n"
    assert keys_command("hash", text="sk-mine\n") == expected
    assert keys_command("hash", text="sk-mine") == expected


def test_following_ends_when_it_is_cancelled(tmp_path: Path) -> None:
    """The background task takes changes, and is stopped."""
    path = tmp_path / "keys.toml"
    write_keys(path, key("one"))

    async def test() -> None:
        file = KeyFile(str(path))
        task = asyncio.create_task(file.follow(every_s=0.01))
        write_keys(path, key("two"))
        while file.keys.holder(b"two") is None:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    run(test)
