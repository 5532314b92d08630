"""The file of `--tenants`: who shares the server, by which keys, and how much of it each may have."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.sizes import parse_size
from app.values import did_you_mean
from model_runner.core.tenants import TenantPolicy

OTHER = "other"  # what metrics call those for whom there is no label left
_NAME = re.compile(r"[!-~]{1,64}")  # printable ASCII without the space: it goes into labels and log lines
_SHA256 = re.compile(r"[0-9a-f]{64}", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class DescribedTenant:
    policy: TenantPolicy
    key_digests: tuple[bytes, ...] = field(repr=False)  # SHA-256


def digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def key_name(number: int) -> str:
    """What the holder of the n-th key of `--api-key` is called, unless the file says whose it is."""
    return f"key-{number}"


def is_tenant_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def read_tenants(value: str) -> tuple[DescribedTenant, ...]:
    """From a path. Raises ValueError with what to write instead; never echoes a key: it ends up in logs."""
    path = Path(value).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the file of tenants can't be read: {error}") from None
    try:
        is_json = path.suffix == ".json" or text.lstrip().startswith("{")
        content: Any = json.loads(text) if is_json else tomllib.loads(text)
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{value} is neither TOML nor JSON: {error}") from None
    return parse_tenants(content)


def parse_tenants(content: Any) -> tuple[DescribedTenant, ...]:
    """Raises ValueError."""
    entries = content.get("tenants") if isinstance(content, dict) and len(content) == 1 else None
    if not isinstance(entries, list):
        raise ValueError("a file of tenants is a list named `tenants`: in TOML, one [[tenants]] for each")
    described: list[DescribedTenant] = []
    owners: dict[bytes, str] = {}
    for number, entry in enumerate(entries, start=1):
        tenant = _parse_tenant(entry, f"tenant {number}")
        name = tenant.policy.name
        if any(name == other.policy.name for other in described):
            raise ValueError(f"there are two tenants named {name!r}")
        for key in tenant.key_digests:
            if owners.setdefault(key, name) != name:
                raise ValueError(f"tenants {owners[key]!r} and {name!r} have a key in common")
        described.append(tenant)
    if not described:
        raise ValueError("the file describes no tenant; leave the option out to have one")
    return tuple(described)


def _parse_tenant(entry: Any, where: str) -> DescribedTenant:
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be a table of fields, like name and weight")
    name = entry.get("name")
    if not isinstance(name, str) or not is_tenant_name(name):
        raise ValueError(f"{where} needs a `name` of 1 to 64 printable ASCII characters without a space")
    if name == OTHER:
        raise ValueError(f"a tenant can't be named {OTHER!r}: metrics call those so that have no label left")
    where = f"tenant {name!r}"
    found: dict[str, Any] = {}
    for each, value in entry.items():
        if each not in _FIELDS:
            raise ValueError(f"{where} has an unknown field `{each}`{did_you_mean(each, _FIELDS)}")
        argument, parse, allowed = _FIELDS[each]
        try:
            found[argument] = parse(value)
        except (TypeError, ValueError):
            raise ValueError(f"`{each}` of {where} must be {allowed}") from None
    key_digests = (*found.pop("keys", ()), *found.pop("keys_sha256", ()))
    policy = TenantPolicy(**found)
    try:
        policy.in_blocks(1)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return DescribedTenant(policy, tuple(dict.fromkeys(key_digests)))


# What a value may be: they raise TypeError or ValueError, whose words are not shown (they may quote a key).


def _name(value: Any) -> str:
    return str(value)  # has been looked at


def _keys(value: Any) -> tuple[bytes, ...]:
    keys = _strings(value)
    if not all(key and key == key.strip() for key in keys):
        raise ValueError
    return tuple(digest(key.encode()) for key in keys)


def _digests(value: Any) -> tuple[bytes, ...]:
    digests = _strings(value)
    if not all(map(_SHA256.fullmatch, digests)):
        raise ValueError
    return tuple(map(bytes.fromhex, digests))


def _strings(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise TypeError
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise TypeError
    return float(value)


def _whole(least: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise TypeError
        return value

    return parse


def _size(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError
    size = parse_size(str(value))
    if size < 1:
        raise ValueError
    return size


_FIELDS: Mapping[str, tuple[str, Callable[[Any], Any], str]] = {
    "name": ("name", _name, "a name"),
    "keys": ("keys", _keys, "a list of keys, none of them empty or with spaces around it"),
    "keys_sha256": ("keys_sha256", _digests, "a list of SHA-256 digests of keys, of 64 hexadecimal digits"),
    "weight": ("weight", _number, "a number above 0"),
    "max_reserved": ("max_reserved_bytes", _size, "a size like 512MiB or 8GiB"),
    "max_queued": ("max_queued_requests", _whole(0), "a whole number of at least 0"),
    "requests_per_second": ("requests_per_second", _number, "a number above 0"),
    "burst": ("burst_requests", _whole(1), "a whole number of at least 1"),
}
