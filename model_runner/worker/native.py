"""The C++ kernels: built once with the machine's own compiler, kept in the cache folder.

Nothing here is required. Where there is no compiler, `load_kernels` gives None and torch does the same
work slower. The library shares torch's OpenMP runtime, so that there is one pool of threads, and has no
other dependency.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from ctypes import Structure, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from model_runner.worker.attention import AttentionMetadata

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "kernels"
_COMPILERS = ("g++", "c++")
_COMPILE_SECONDS = 300.0
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-mcpu=native" if platform.machine() in {"aarch64", "arm64"} else "-march=native",
    # No errno and no floating-point traps: needed to vectorise, and they change no result.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-fopenmp",
)
_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

PANEL_OUTPUTS = 32  # kPanel in kernels/linear.cpp


def load_kernels(cache_dir: str | os.PathLike[str]) -> Kernels | None:
    """The compiled kernels, from `cache_dir` when they were built before from the same for the same.

    None, with the reason logged, where no C++ compiler works.
    """
    compiler = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    target = Path(cache_dir) / "kernels" / f"plimsoll-{_fingerprint()}.so"
    if not target.exists():
        if compiler is None:
            logger.info("no C++ compiler found (looked for %s)", ", ".join(_COMPILERS))
            return None
        try:
            _compile(compiler, target)
        except (OSError, subprocess.SubprocessError) as error:
            logger.warning("the C++ kernels could not be compiled, torch takes their place: %s", _why(error))
            return None
    try:
        return Kernels(ctypes.CDLL(str(target)))
    except OSError as error:
        logger.warning("the compiled kernels could not be loaded, torch takes their place: %s", error)
        return None


def _compile(compiler: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        sources = [str(path) for path in sorted(_SOURCES.glob("*.cpp"))]
        subprocess.run(
            [compiler, *_FLAGS, *sources, "-o", str(built)],
            check=True,
            capture_output=True,
            text=True,
            timeout=_COMPILE_SECONDS,
        )
        built.replace(target)  # atomic: another process never loads half a file


def _fingerprint() -> str:
    """Of everything that the compiled file depends on and that may change under a cache folder."""
    digest = hashlib.sha256(" ".join((platform.machine(), *_FLAGS)).encode())
    for path in sorted(_SOURCES.glob("*.[ch]*")):
        digest.update(path.read_bytes())
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(errors="replace").splitlines()
        digest.update(
            "".join(sorted({line for line in lines if line.startswith(("flags", "Features"))})).encode()
        )
    return digest.hexdigest()[:20]


def _why(error: Exception) -> str:
    stderr = getattr(error, "stderr", None)
    return stderr.strip().splitlines()[0] if stderr else str(error)


class AttentionArguments(Structure):
    """AttentionArguments in kernels/kernels.h, field by field."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("query", "key_cache", "value_cache", "output")),
        *((name, c_void_p) for name in ("query_start_loc", "seq_lens", "block_tables", "sinks")),
        *((name, c_int64) for name in ("query_token_stride", "query_head_stride")),
        *((name, c_int64) for name in ("block_stride", "head_stride", "table_stride")),
        *((name, c_int64) for name in ("sequences", "query_heads", "kv_heads", "head_dim", "block_size")),
        ("window", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
    ]


class WriteArguments(Structure):
    """WriteArguments in kernels/kernels.h, field by field."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("key", "value", "key_cache", "value_cache", "slots")),
        *((name, c_int64) for name in ("key_token_stride", "key_head_stride")),
        *((name, c_int64) for name in ("value_token_stride", "value_head_stride")),
        *((name, c_int64) for name in ("block_stride", "head_stride")),
        *((name, c_int64) for name in ("tokens", "kv_heads", "head_dim", "block_size")),
    ]


class LinearArguments(Structure):
    """LinearArguments in kernels/kernels.h, field by field."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("x", "panels", "bias", "y")),
        *((name, c_int64) for name in ("x_stride", "rows", "inputs", "outputs", "gated")),
    ]


class LayerArguments(Structure):
    """LayerArguments in kernels/layer.cpp, field by field. Holds pointers: who fills it keeps the tensors."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("x", "y", "cosine", "sine", "input_norm", "post_norm")),
        *((name, c_float) for name in ("input_eps", "post_eps")),
        *((name, c_int64) for name in ("input_round_first", "post_round_first", "tokens", "hidden")),
        *((name, LinearArguments) for name in ("qkv", "out", "gate_up", "down")),
        ("write", WriteArguments),
        ("attention", AttentionArguments),
    ]


class Kernels:
    """The kernels as functions of tensors. All tensors are on the CPU; sums are float32."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.dtypes = frozenset(_SUFFIXES)
        self.has_linear = bool(library.plimsoll_linear_supported())
        self.wide = False  # whether products of many rows are left to oneDNN, whose weights are then kept too
        self._write_kv = _by_dtype(library, "plimsoll_write_kv", c_void_p)
        self._linear = _function(library, "plimsoll_linear", *[c_void_p] * 4, *[c_int64] * 5)
        self._decoder_layer = _function(library, "plimsoll_decoder_layer", c_void_p)
        self._attention = _by_dtype(library, "plimsoll_paged_attention", c_void_p)
        self._rms_norm = _by_dtype(
            library, "plimsoll_rms_norm", c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float, c_int32
        )
        self._rotate = _by_dtype(
            library, "plimsoll_rotate", c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64
        )

    def paged_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        group: int,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """worker.attention.PagedAttention, for float32 and bfloat16.

        Within a block of the cache, keys are kept transposed: only this function can read what it wrote.
        """
        query, key, value = (_dense_rows(tensor) for tensor in (query, key, value))
        dtype = query.dtype
        assert {key.dtype, value.dtype, key_cache.dtype, value_cache.dtype} == {dtype}
        write, attention = WriteArguments(), AttentionArguments()
        set_cache(write, attention, key_cache, value_cache, metadata, group)
        write.tokens = len(key)
        write.key, write.value = key.data_ptr(), value.data_ptr()
        write.key_token_stride, write.key_head_stride = key.stride()[:2]
        write.value_token_stride, write.value_head_stride = value.stride()[:2]
        self._write_kv[dtype](ctypes.byref(write))
        output = query.new_empty(query.shape)
        sinks = None if sinks is None else sinks.float().contiguous()
        attention.query, attention.output = query.data_ptr(), output.data_ptr()
        attention.query_token_stride, attention.query_head_stride = query.stride()[:2]
        attention.query_heads = query.shape[1]
        attention.sinks = None if sinks is None else sinks.data_ptr()
        attention.window, attention.scale, attention.softcap = window or 0, scale, softcap or 0.0
        self._attention[dtype](ctypes.byref(attention))
        return output

    def linear(self, x: Tensor, panels: Tensor, bias: Tensor | None, outputs: int, *, gated: bool) -> Tensor:
        """x [..., K] bfloat16 by `pack_panels`' weights -> [..., outputs], half of them with `gated`.

        `bias` is float32, padded to whole panels.
        """
        flat = x.reshape(-1, x.shape[-1])
        if flat.stride(1) != 1:
            flat = flat.contiguous()
        width = outputs // 2 if gated else outputs
        y = x.new_empty(*x.shape[:-1], width)
        bias_pointer = None if bias is None else bias.data_ptr()
        rows, inputs = flat.shape
        pointers = flat.data_ptr(), panels.data_ptr(), bias_pointer, y.data_ptr()
        self._linear(*pointers, flat.stride(0), rows, inputs, outputs, gated)
        return y

    def decoder_layer(self, arguments: LayerArguments) -> None:
        """One whole layer in bfloat16, as kernels/layer.cpp has it. Needs `has_linear`."""
        self._decoder_layer(ctypes.byref(arguments))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, round_first: bool) -> Tensor:
        """x [..., W] over its last dimension; weight [W] is float32."""
        x = x.contiguous()
        y = torch.empty_like(x)
        width = x.shape[-1]
        self._rms_norm[x.dtype](
            x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.numel() // width, width, eps, round_first
        )
        return y

    def rotate(self, x: Tensor, cosine: Tensor, sine: Tensor, heads: int, head_dim: int) -> None:
        """Rotary embedding of the first `heads` · `head_dim` columns of x [T, C], in place.

        cosine and sine are [T, head_dim], contiguous, of x's dtype.
        """
        for tensor in (cosine, sine):
            assert tensor.shape == (len(x), head_dim)
            assert tensor.dtype == x.dtype
            assert tensor.is_contiguous()
        self._rotate[x.dtype](
            *(tensor.data_ptr() for tensor in (x, cosine, sine)),
            *(x.shape[0], heads, head_dim // 2, x.stride(0)),
        )


def set_cache(
    write: WriteArguments,
    attention: AttentionArguments,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    group: int,
) -> None:
    """Point the arguments at one layer's part of the cache and at a step's tables."""
    _, kv_heads, block_size, head_dim = key_cache.shape
    block_stride, head_stride, *inner = key_cache.stride()
    slots, tables = metadata.slot_mapping[group], metadata.block_tables[group]
    assert key_cache.stride() == value_cache.stride()
    assert inner == [head_dim, 1]
    assert slots.is_contiguous()
    assert tables.stride(1) == 1
    for arguments in (write, attention):
        arguments.key_cache, arguments.value_cache = key_cache.data_ptr(), value_cache.data_ptr()
        arguments.block_stride, arguments.head_stride = block_stride, head_stride
        arguments.kv_heads, arguments.head_dim, arguments.block_size = kv_heads, head_dim, block_size
    write.slots = slots.data_ptr()
    attention.query_start_loc = metadata.query_start_loc.data_ptr()
    attention.seq_lens = metadata.seq_lens.data_ptr()
    attention.block_tables, attention.table_stride = tables.data_ptr(), tables.stride(0)
    attention.sequences = metadata.seq_lens.shape[0]


def pack_panels(weight: Tensor) -> Tensor:
    """[N, K] bfloat16, K even -> [ceil(N / 32), K / 2, 32, 2], zero-padded, as `Kernels.linear` reads it."""
    outputs, inputs = weight.shape
    assert inputs % 2 == 0
    panels = -(-outputs // PANEL_OUTPUTS)
    padded = torch.nn.functional.pad(weight, (0, 0, 0, panels * PANEL_OUTPUTS - outputs))
    return padded.view(panels, PANEL_OUTPUTS, inputs // 2, 2).transpose(1, 2).contiguous()


def _dense_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _function(library: ctypes.CDLL, name: str, *arguments: Any) -> Callable[..., Any]:
    function = library[name]
    function.argtypes = arguments
    function.restype = c_int if name.endswith("_supported") else None
    return function


def _by_dtype(library: ctypes.CDLL, name: str, *arguments: Any) -> dict[torch.dtype, Callable[..., Any]]:
    return {dtype: _function(library, f"{name}_{suffix}", *arguments) for dtype, suffix in _SUFFIXES.items()}
