"""The key-value header of a GGUF file.

The `gguf` package's own reader makes two numpy views for every string of an array: for a vocabulary of 128k
tokens and 280k merges that is seconds and hundreds of megabytes, in a process that is to stay small. The
format is short (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), so the header alone is read here.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from model_runner.errors import ModelNotServable

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9


def read_metadata(path: Path) -> dict[str, Any]:
    """Every key of the header: numbers, booleans, strings, and lists of them.

    Raises ModelNotServable for a file that is not GGUF, is cut short, or is of another version or byte order.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(data).read()
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        raise ModelNotServable(f"{path} is not a GGUF file that can be read: {error}") from error


class _Header:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._offset = 0

    def read(self) -> dict[str, Any]:
        if self._take(len(_MAGIC)) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} (of the other byte order, if that is a huge number)")
        self._scalar("Q")  # how many tensors
        count = self._scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        return metadata

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        return self._scalar(_format(kind))

    def _array(self) -> list[Any]:
        kind = self._scalar("I")
        count = self._scalar("Q")
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        if kind == _ARRAY:
            return [self._array() for _ in range(count)]
        size = struct.calcsize("<" + _format(kind))
        return list(struct.unpack(f"<{count}{_format(kind)}", self._take(count * size)))

    def _string(self) -> str:
        return self._take(self._scalar("Q")).decode("utf-8")

    def _scalar(self, format: str) -> Any:
        value = struct.unpack_from("<" + format, self._data, self._offset)[0]
        self._offset += struct.calcsize("<" + format)
        return value

    def _take(self, size: int) -> bytes:
        end = self._offset + size
        if end > len(self._data):
            raise ValueError("it is cut short")
        taken = self._data[self._offset : end]
        self._offset = end
        return taken


def _format(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"unknown value type {kind}")
    return _SCALARS[kind]
