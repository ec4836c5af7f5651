"""API keys: stored as digests, compared without a hint by the time it takes, never logged."""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from hashlib import sha256
from typing import Any

from predictor.suggestions import require_known
from scheduler.toml_tables import entries_from, require_fields, require_positive, require_text
from services.security.roles import Role

LONGEST_KEY = 512  # characters
MAX_KEYS = 10_000
MAX_NAME = 128  # characters; names travel in headers and are values of labels
PREFIX = "blk-"  # of keys that `block keys new` makes, for people and for scanners of leaked keys
KEY_BYTES = 32
DIGEST = re.compile(r"[0-9a-f]{64}")

RATES = ("requests_per_minute", "tokens_per_minute")
COUNTS = ("max_requests", "max_tokens_in_flight")
LIMITS = (*RATES, *COUNTS)
ROLES = (Role.CLIENT, Role.PART, Role.OPERATOR)
KEY_FIELDS = ("name", "sha256", "role", "tenant", "objective", "models", "expires", *LIMITS)
TENANT_FIELDS = ("name", "weight", *LIMITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageLimits:
    """What a key or a tenant may use of one gateway; None is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_requests: int | None = None
    max_tokens_in_flight: int | None = None

    def __bool__(self) -> bool:
        """Return whether there is any limit."""
        return any(getattr(self, name) is not None for name in LIMITS)


UNLIMITED = UsageLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyHolder:
    """Who has a key, and what it allows."""

    name: str = ""
    role: Role = Role.CLIENT
    tenant: str = ""
    objective: str = ""  # of requests that name none
    models: frozenset[str] = frozenset()  # all models where it is empty
    expires_unix_s: float | None = None
    limits: UsageLimits = UNLIMITED

    def may_use(self, model: str) -> bool:
        """Return whether requests with this key may name a model."""
        return not self.models or model in self.models

    def is_expired(self, now_unix_s: float) -> bool:
        """Return whether the key's time is over."""
        return self.expires_unix_s is not None and now_unix_s >= self.expires_unix_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredKey:
    """One table of a key file."""

    holder: KeyHolder
    digest: bytes

    @property
    def name(self) -> str:
        """The holder's name."""
        return self.holder.name


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """What all keys of a tenant may use together, and how large its share is where tenants take turns."""

    name: str
    limits: UsageLimits
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """The accepted keys, each with its holder, and the limits of tenants.

    Keys are found by a hash with a secret of this process, so the time of a search tells nothing about the digests.
    """

    keys: tuple[StoredKey, ...] = ()
    tenants: Mapping[str, UsageLimits] = field(default_factory=dict)
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    _found: dict[bytes, StoredKey] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Index the keys; no two of them are the same."""
        for one in self.keys:
            place = self._place(one.digest)
            if place in self._found:
                raise ValueError(f"key: {self._found[place].name!r} and {one.name!r} have the same sha256")
            self._found[place] = one

    def __len__(self) -> int:
        """Return the number of keys; without any, no key is asked for."""
        return len(self.keys)

    @property
    def objectives(self) -> tuple[str, ...]:
        """The names of objectives that keys have."""
        return tuple(dict.fromkeys(one.holder.objective for one in self.keys if one.holder.objective))

    def holder(self, key: bytes) -> KeyHolder | None:
        """Return the holder of a key; None where it is not known."""
        digest = sha256(key).digest()
        found = self._found.get(self._place(digest))
        return found.holder if found is not None and hmac.compare_digest(found.digest, digest) else None

    def limits_of(self, tenant: str) -> UsageLimits:
        """Return the limits of a tenant."""
        return self.tenants.get(tenant, UNLIMITED)

    def _place(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


NO_KEYS = ApiKeys()


def plain_keys(keys: Iterable[str]) -> ApiKeys:
    """Accept keys of clients that are given as they are, as in an environment variable."""
    stored = []
    for number, key in enumerate(keys, 1):
        name = f"key-{number}"
        stored.append(StoredKey(holder=KeyHolder(name=name, tenant=name), digest=sha256(key.encode()).digest()))
    return ApiKeys(tuple(stored))


def keys_from(document: Any) -> ApiKeys:
    """Read the tables [[key]] and [[tenant]] of a document; errors name table and field, and never show a value."""
    require_known(document, ("key", "tenant"), "table")
    tables = document.get("key")
    if isinstance(tables, list) and len(tables) > MAX_KEYS:
        raise ValueError(f"key: must be at most {MAX_KEYS} tables, not {len(tables)}")
    keys = entries_from(tables, "key", _key_from)
    tenants = entries_from(document["tenant"], "tenant", _tenant_from) if "tenant" in document else ()
    known = {one.holder.tenant for one in keys}
    for index, tenant in enumerate(tenants):
        if tenant.name not in known:
            raise ValueError(f"tenant[{index}].name: no key has the tenant {tenant.name!r}")
    return ApiKeys(keys, {tenant.name: tenant.limits for tenant in tenants})


def tenant_weights_from(document: Any) -> dict[str, float]:
    """Read the weights of the tables [[tenant]] of a document, which may be a key file; its keys are not read."""
    require_known(document, ("key", "tenant"), "table")
    if "key" in document and "tenant" not in document:
        return {}
    tenants = entries_from(document.get("tenant"), "tenant", _tenant_from)
    return {tenant.name: tenant.weight for tenant in tenants}


def new_key() -> str:
    """Make a key of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def digest_of(key: str) -> str:
    """Return what a key file stores of a key."""
    return sha256(key.encode()).hexdigest()


def require_name(name: Any) -> None:
    """Refuse a name that cannot be a header or a label."""
    require_text("name", name)
    if len(name) > MAX_NAME or not (name.isascii() and name.isprintable()) or name != name.strip():
        raise ValueError(f"name: must be at most {MAX_NAME} printable ASCII characters, without spaces around")


def _key_from(table: Mapping[str, Any]) -> StoredKey:
    require_fields(table, KEY_FIELDS, ("name", "sha256"))
    name, digest, role = table["name"], table["sha256"], table.get("role", Role.CLIENT.value)
    require_name(name)
    if not isinstance(digest, str) or DIGEST.fullmatch(digest) is None:
        raise ValueError("sha256: must be 64 hexadecimal digits in lower case, as `block keys hash` writes them")
    if role not in ROLES:
        raise ValueError(f"role: must be one of {', '.join(ROLES)}")
    for text in ("tenant", "objective"):
        if text in table:
            require_text(text, table[text])
    models = table.get("models", [])
    if not isinstance(models, list) or not all(isinstance(model, str) and model for model in models):
        raise ValueError("models: must be a list of names")
    if "models" in table and not models:
        raise ValueError("models: must name at least one model; without the field all are allowed")
    tenant = table.get("tenant", name)
    if len(tenant) > MAX_NAME or not (tenant.isascii() and tenant.isprintable()):
        raise ValueError(f"tenant: must be at most {MAX_NAME} printable ASCII characters")
    holder = KeyHolder(
        name=name,
        role=Role(role),
        tenant=tenant,
        objective=table.get("objective", ""),
        models=frozenset(models),
        expires_unix_s=_expiry(table["expires"]) if "expires" in table else None,
        limits=_limits_from(table),
    )
    return StoredKey(holder=holder, digest=bytes.fromhex(digest))


def _tenant_from(table: Mapping[str, Any]) -> TenantLimits:
    require_fields(table, TENANT_FIELDS, ("name",))
    require_name(table["name"])
    limits = _limits_from(table)
    if not limits and "weight" not in table:
        raise ValueError(f"name: the tenant needs a weight, or a limit, one of {', '.join(LIMITS)}")
    if "weight" in table:
        require_positive("weight", table["weight"])
    return TenantLimits(name=table["name"], limits=limits, weight=float(table.get("weight", 1.0)))


def _limits_from(table: Mapping[str, Any]) -> UsageLimits:
    given = {name: table[name] for name in LIMITS if name in table}
    for name, value in given.items():
        require_positive(name, value)
        if type(value) is not int:
            raise ValueError(f"{name}: must be a whole number")
    return UsageLimits(**given)


def _expiry(value: Any) -> float:
    """Read a date of RFC 3339, through whose end (in UTC) the key is valid, or a moment with its time zone."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value) if "T" in value else date.fromisoformat(value)
        except ValueError:
            raise ValueError("expires: must be a date such as 2027-01-31") from None
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ValueError("expires: a time of day needs a time zone, as in 2027-01-31T12:00:00Z")
        return value.timestamp()
    if isinstance(value, date):
        return (datetime(value.year, value.month, value.day, tzinfo=UTC) + timedelta(days=1)).timestamp()
    raise ValueError("expires: must be a date such as 2027-01-31")
