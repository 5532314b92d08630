from __future__ import annotations

import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model_runner.core.output import ScheduledSequence
from model_runner.worker import native
from model_runner.worker.attention import torch_paged_attention
from model_runner.worker.batch import pack
from model_runner.worker.native import Kernels, load_kernels, pack_panels

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    loaded = load_kernels(tmp_path_factory.mktemp("cache"))
    if loaded is None:
        pytest.skip("no C++ compiler on this machine")
    return loaded


def naive_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """One sequence, in float64: query [R, Hq, D] are the last R of the L tokens of keys and values [L,
    Hkv, D]."""
    rows, heads, _ = query.shape
    length, kv_heads, _ = keys.shape
    keys = keys.double().repeat_interleave(heads // kv_heads, dim=1)
    values = values.double().repeat_interleave(heads // kv_heads, dim=1)
    scores = torch.einsum("rhd,lhd->hrl", query.double(), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(length - rows, length)[:, None] - torch.arange(length)
    hidden = (distance < 0) | (distance >= (window or length))
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, rows, 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., :length]
    return torch.einsum("hrl,lhd->rhd", weights, values)


class Scene:
    """Sequences of (tokens cached before, new tokens) in a shuffled cache full of noise."""

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        *,
        dtype: torch.dtype,
        heads: int = 6,
        kv_heads: int = 2,
        head_dim: int = 64,
        block_size: int = 16,
    ) -> None:
        generator = torch.Generator().manual_seed(11)
        count = sum(-(-(old + new) // block_size) for old, new in lengths)
        blocks = iter(torch.randperm(count + 3, generator=generator).tolist())
        # Layer 1 of 2 of a cache laid out as the runner's: the views are strided.
        cache = torch.randn(count + 3, 2, 2, kv_heads, block_size, head_dim, generator=generator).to(dtype)
        self.key_cache, self.value_cache = cache[:, 1, 0], cache[:, 1, 1]
        self.lengths = lengths
        self.tables = [[next(blocks) for _ in range(-(-(o + n) // block_size))] for o, n in lengths]
        tokens = sum(new for _, new in lengths)
        # Query, key and value are slices of one matrix, as a fused projection gives them.
        mixed = torch.randn(tokens, heads + 2 * kv_heads, head_dim, generator=generator).to(dtype)
        self.query, self.key, self.value = mixed.split([heads, kv_heads, kv_heads], dim=1)
        scheduled = [
            ScheduledSequence(i, [0] * new, old, (table,))
            for i, ((old, new), table) in enumerate(zip(lengths, self.tables, strict=True))
        ]
        self.metadata = pack(scheduled, block_size, torch.device("cpu")).metadata

    def keys_by_token(self) -> Tensor:
        """The key cache as [blocks, Hkv, block_size, D]: the kernels keep each block of it transposed."""
        blocks, kv_heads, block_size, head_dim = self.key_cache.shape
        return self.key_cache.reshape(blocks, kv_heads, head_dim, block_size).transpose(2, 3)

    def expected(self, **options: Any) -> Tensor:
        """By way of the cache as it is after the call under test."""
        parts = []
        row = 0
        for (old, new), table in zip(self.lengths, self.tables, strict=True):
            keys = self.keys_by_token()[table].transpose(1, 2).flatten(0, 1)[: old + new]
            values = self.value_cache[table].transpose(1, 2).flatten(0, 1)[: old + new]
            parts.append(naive_attention(self.query[row : row + new], keys, values, **options))
            row += new
        return torch.cat(parts)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 20},
    "window of one": {"window": 1},
    "window longer than a chunk": {"window": 100},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": torch.linspace(-2, 4, 6)},
    "all": {"window": 37, "softcap": 5.0, "sinks": torch.linspace(-2, 4, 6)},
}
MIXED = [(0, 1), (150, 1), (0, 70), (33, 5), (128, 17), (15, 1), (16, 1)]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_attention_equals_the_definition(
    kernels: Kernels, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    options = {"scale": 0.125, "window": None, "softcap": None, "sinks": None, **options}
    scene = Scene(MIXED, dtype=dtype)
    arguments = (scene.query, scene.key, scene.value, scene.key_cache, scene.value_cache, scene.metadata, 0)
    output = kernels.paged_attention(*arguments, **options)
    torch.testing.assert_close(output.double(), scene.expected(**options), rtol=0, atol=TOLERANCE[dtype])
    # The same scene by way of torch, whose cache has its keys untransposed.
    keys = scene.keys_by_token().contiguous()
    reference = torch_paged_attention(*arguments[:3], keys, *arguments[4:], **options)
    torch.testing.assert_close(output.float(), reference.float(), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("block_size", [1, 8, 16, 24, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 1), (9, 3), (32, 2)])
def test_attention_of_every_shape(
    kernels: Kernels, head_dim: int, heads: int, kv_heads: int, block_size: int
) -> None:
    scene = Scene(
        [(90, 1), (0, 33), (70, 20)],
        dtype=torch.float32,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
    )
    options: dict[str, Any] = {"scale": head_dim**-0.5, "window": None, "softcap": None, "sinks": None}
    output = kernels.paged_attention(
        scene.query, scene.key, scene.value, scene.key_cache, scene.value_cache, scene.metadata, 0, **options
    )
    torch.testing.assert_close(output.double(), scene.expected(**options), rtol=0, atol=1e-5)


def test_attention_writes_keys_and_values_where_they_belong_and_nowhere_else(kernels: Kernels) -> None:
    scene = Scene([(17, 3), (0, 16)], dtype=torch.float32)
    keys_before, values_before = scene.keys_by_token().clone(), scene.value_cache.clone()
    kernels.paged_attention(
        scene.query,
        scene.key,
        scene.value,
        scene.key_cache,
        scene.value_cache,
        scene.metadata,
        0,
        scale=1.0,
        window=None,
        softcap=None,
        sinks=None,
    )
    for cache, before, written in (
        (scene.keys_by_token(), keys_before, scene.key),
        (scene.value_cache, values_before, scene.value),
    ):
        for row, slot in enumerate(scene.metadata.slot_mapping[0].tolist()):
            before[slot // 16, :, slot % 16] = written[row]
        assert torch.equal(cache, before)


def test_a_sequence_attends_the_same_whatever_else_is_in_the_batch(kernels: Kernels) -> None:
    scene = Scene(MIXED, dtype=torch.float32)
    options: dict[str, Any] = {"scale": 0.125, "window": None, "softcap": None, "sinks": None}
    together = kernels.paged_attention(
        scene.query, scene.key, scene.value, scene.key_cache, scene.value_cache, scene.metadata, 0, **options
    )
    row = 0
    for (old, new), table in zip(scene.lengths, scene.tables, strict=True):
        rows = slice(row, row + new)
        metadata = pack([ScheduledSequence(0, [0] * new, old, (table,))], 16, torch.device("cpu")).metadata
        alone = kernels.paged_attention(
            *(scene.query[rows], scene.key[rows], scene.value[rows]),
            *(scene.key_cache, scene.value_cache, metadata, 0),
            **options,
        )
        assert torch.equal(alone, together[rows])
        row += new


@pytest.mark.parametrize("rows", [1, 2, 11, 12, 13, 33, 200])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 2), (96, 64), (75, 130), (7, 6)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_equals_torch(kernels: Kernels, rows: int, outputs: int, inputs: int, bias: bool) -> None:
    if not kernels.has_linear:
        pytest.skip("this CPU has no AVX512-BF16")
    torch.manual_seed(0)
    weight = torch.randn(outputs, inputs).bfloat16()
    x = torch.randn(rows, 2 * inputs).bfloat16()[:, :inputs]
    offset = torch.randn(outputs) if bias else None
    padded = None if offset is None else torch.nn.functional.pad(offset, (0, -outputs % 32)).contiguous()
    y = kernels.linear(x, pack_panels(weight), padded, outputs, gated=False)
    expected = torch.nn.functional.linear(x.float(), weight.float(), offset)
    torch.testing.assert_close(y, expected.bfloat16(), rtol=1.6e-2, atol=1e-3 * inputs**0.5)


@pytest.mark.parametrize("round_first", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rms_norm_equals_its_definition(kernels: Kernels, dtype: torch.dtype, round_first: bool) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(3, 70, 50) * 4).to(dtype), torch.rand(50)
    normal = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    if round_first:
        normal = normal.to(dtype).double()
    y = kernels.rms_norm(x, weight, 1e-5, round_first=round_first)
    torch.testing.assert_close(y.double(), normal * weight, rtol=TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rotate_turns_the_named_columns_and_no_others(kernels: Kernels, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 5 * 32).to(dtype)
    angle = torch.rand(9, 32) * 6
    cosine, sine = angle.cos().to(dtype), angle.sin().to(dtype)
    expected = x.double().view(9, 5, 32).clone()
    first, second = x.double().view(9, 5, 32).chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    expected = expected * cosine.double()[:, None] + turned * sine.double()[:, None]
    expected[:, 3:] = x.double().view(9, 5, 32)[:, 3:]
    kernels.rotate(x, cosine, sine, heads=3, head_dim=32)
    torch.testing.assert_close(x.double().view(9, 5, 32), expected, rtol=0, atol=TOLERANCE[dtype])


def test_a_second_load_compiles_nothing(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_kernels(tmp_path) is not None
    monkeypatch.setattr(native, "_compile", lambda *_: pytest.fail("compiled again"))
    assert load_kernels(tmp_path) is not None


def test_without_a_compiler_there_are_no_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.shutil, "which", lambda _: None)
    assert load_kernels(tmp_path) is None


def test_a_compiler_that_fails_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise subprocess.CalledProcessError(1, "g++", stderr="fatal error: no space left\nmore")

    monkeypatch.setattr(native.shutil, "which", lambda _: "/usr/bin/g++")
    monkeypatch.setattr(native, "_compile", refuse)
    assert load_kernels(tmp_path) is None
    assert "no space left" in caplog.text


def test_there_is_one_openmp_runtime(kernels: Kernels) -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc on this system")
    runtimes = {
        line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line or "libomp" in line
    }
    assert len(runtimes) <= 1
