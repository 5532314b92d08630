"""Which Plimsoll this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def plimsoll_version() -> str:
    try:
        return version("plimsoll")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0+source"
