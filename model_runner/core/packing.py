"""How quantised checkpoints keep their weights: bytes of a matrix by what a configuration says of it.

    fp8                 a byte a weight; a float32 scale for each block of `weight_block_size`, or one for all
    fbgemm_fp8          a byte a weight and a float32 scale a row
    mxfp4               4 bits a weight and a byte of scale for each 32 of them; the experts alone
                        (OCP Microscaling Formats, version 1.0)
    gptq, awq           `bits` a weight; a 16-bit scale and a zero point of `bits` for each `group_size`
                        inputs of an output (gptq also numbers each input's group in 32 bits)
    bitsandbytes        8 bits and a float32 scale a row; or 4 bits and a float32 scale for each 64 weights,
                        which is itself quantised to a byte where scales are nested
    compressed-tensors  what its one group of `Linear` says: `num_bits`, and scales by its `strategy`

Only matrices of linear layers and of experts are packed; embeddings, norms, routers and, unless it is said,
the output are kept as they were. Methods that are not here pack in ways that a configuration does not tell.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any, NoReturn

from model_runner.errors import ModelNotServable

Bytes = Callable[[int, int], int]  # of a matrix of so many rows (outputs) and columns (inputs)

_ROUTER = re.compile(r"(^|\.)(gate|router|shared_expert_gate)$")
_OUTPUT = re.compile(r"(^|\.)(lm_head|embed_out|output)$")
_EXPERTS = re.compile(r"(^|\.)experts\.")


@dataclass(frozen=True, slots=True)
class Packing:
    """One method, as a configuration has it."""

    method: str
    words: str  # what a packed weight takes
    matrix_bytes: Bytes
    left_alone: tuple[str, ...] = ()  # names of modules, parts of names, or `re:` and an expression
    experts_only: bool = False
    output_too: bool = False
    decoder_only: bool = False  # towers for pictures and sound are kept as they were

    def size(self, module: str, shape: Sequence[int]) -> int | None:
        """Bytes of a linear layer's weight, or of a stack of experts'; None where it is not packed."""
        if len(shape) < 2 or _ROUTER.search(module) or self._is_left_alone(module):
            return None
        if self.experts_only and not _EXPERTS.search(module):
            return None
        if _OUTPUT.search(module) and not self.output_too:
            return None
        return prod(shape[:-2]) * self.matrix_bytes(shape[-2], shape[-1])

    def _is_left_alone(self, module: str) -> bool:
        return any(_names(pattern.replace("language_model.", ""), module) for pattern in self.left_alone)


def _names(pattern: str, module: str) -> bool:
    """Whether the pattern names the module or one that it is in."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return fnmatchcase(f".{module.replace('language_model.', '')}.", f"*.{pattern.strip('.')}.*")


def find_packing(quantisation: Mapping[str, Any]) -> Packing | None:
    """None for a method that is not known here. Raises ModelNotServable for a field that can't be read."""
    reader = _READERS.get(method_of(quantisation))
    return reader(quantisation) if reader else None


def method_of(quantisation: Mapping[str, Any]) -> str:
    return str(quantisation.get("quant_method") or "unknown")


def _fp8(fields: Mapping[str, Any]) -> Packing:
    block = fields.get("weight_block_size")
    left = _module_names(fields, "modules_to_not_convert", "ignored_layers")
    if block is None:
        return Packing("fp8", "1 byte a weight", lambda rows, columns: rows * columns + 4, left)
    if not isinstance(block, list) or len(block) != 2:
        _refuse("weight_block_size", block, "two positive numbers")
    high, wide = (_positive({"weight_block_size": side}, "weight_block_size") for side in block)
    words = f"1 byte a weight and 4 for each block of {high} × {wide}"
    return Packing(
        "fp8",
        words,
        lambda rows, columns: rows * columns + 4 * _ceil(rows, high) * _ceil(columns, wide),
        left,
    )


def _fbgemm(fields: Mapping[str, Any]) -> Packing:
    left = _module_names(fields, "modules_to_not_convert")
    words = "1 byte a weight and 4 a row"
    return Packing("fbgemm_fp8", words, lambda rows, columns: rows * (columns + 4), left)


def _mxfp4(fields: Mapping[str, Any]) -> Packing:
    return Packing(
        "mxfp4",
        "4 bits an expert's weight and 1 byte for each 32",
        lambda rows, columns: _ceil(rows * columns, 2) + _ceil(rows * columns, 32),
        _module_names(fields, "modules_to_not_convert"),
        experts_only=True,
    )


def _grouped(fields: Mapping[str, Any]) -> Packing:
    """GPTQ and AWQ."""
    method, bits = method_of(fields), _positive(fields, "bits", "w_bit")
    group = fields.get("group_size", fields.get("q_group_size"))
    if group not in (-1, None):
        group = _positive({"group_size": group}, "group_size")
    numbers = 4 if method == "gptq" else 0  # each input's group

    def matrix(rows: int, columns: int) -> int:
        groups = 1 if group in (-1, None) else _ceil(columns, group)
        return (
            _ceil(rows * columns * bits, 8) + groups * (2 * rows + _ceil(rows * bits, 8)) + numbers * columns
        )

    each = "an output" if group in (-1, None) else f"{group}"
    return Packing(
        method,
        f"{bits} bits a weight, and a 16-bit scale and {bits} bits of zero point for each {each}",
        matrix,
        _module_names(fields, "modules_to_not_convert"),
        output_too=fields.get("lm_head") is True,
        decoder_only=True,
    )


def _bitsandbytes(fields: Mapping[str, Any]) -> Packing:
    left = _module_names(fields, "llm_int8_skip_modules")
    if not (fields.get("load_in_4bit") or fields.get("_load_in_4bit")):
        words = "1 byte a weight and 4 a row"
        return Packing("bitsandbytes", words, lambda rows, columns: rows * (columns + 4), left)
    if fields.get("bnb_4bit_use_double_quant"):
        # The scales' own scales: a float32 for each 256 of them.
        words = "4 bits a weight and 1 byte for each 64"

        def matrix(rows: int, columns: int) -> int:
            scales = _ceil(rows * columns, 64)
            return _ceil(rows * columns, 2) + scales + 4 * _ceil(scales, 256)
    else:
        words = "4 bits a weight and 4 bytes for each 64"

        def matrix(rows: int, columns: int) -> int:
            return _ceil(rows * columns, 2) + 4 * _ceil(rows * columns, 64)

    return Packing("bitsandbytes", words, matrix, left)


def _compressed_tensors(fields: Mapping[str, Any]) -> Packing | None:
    """None where its groups differ, or are sparse."""
    groups = fields.get("config_groups")
    sparsity = fields.get("sparsity_config")
    if not isinstance(groups, Mapping) or len(groups) != 1 or _says_sparse(sparsity):
        return None
    (scheme,) = groups.values()
    weights = scheme.get("weights") if isinstance(scheme, Mapping) else None
    if not isinstance(weights, Mapping) or scheme.get("targets") != ["Linear"]:
        return None
    bits, strategy = _positive(weights, "num_bits"), weights.get("strategy")
    tiny = weights.get("type") == "float" and bits == 4  # NVFP4: scales of a byte
    scale = 1 if tiny else 2
    zero = 0 if weights.get("symmetric") is not False else bits
    if strategy not in ("group", "tensor_group", "channel", "tensor"):
        return None
    group = _positive(weights, "group_size") if "group" in strategy else None
    each = {"channel": "row", "tensor": "matrix"}.get(strategy, str(group))

    def matrix(rows: int, columns: int) -> int:
        scales = 1 if strategy == "tensor" else rows * (_ceil(columns, group) if group else 1)
        return _ceil(rows * columns * bits, 8) + scale * scales + _ceil(scales * zero, 8)

    return Packing(
        "compressed-tensors",
        f"{bits} bits a weight and {scale} {'byte' if scale == 1 else 'bytes'} for each {each}",
        matrix,
        _module_names(fields, "ignore"),
        output_too=True,  # `ignore` says whether it is
    )


def _says_sparse(sparsity: Any) -> bool:
    return isinstance(sparsity, Mapping) and sparsity.get("format") not in (None, "dense")


_READERS: dict[str, Callable[[Mapping[str, Any]], Packing | None]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "mxfp4": _mxfp4,
    "gptq": _grouped,
    "awq": _grouped,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
}


def _module_names(fields: Mapping[str, Any], *names: str) -> tuple[str, ...]:
    found: Any = next((fields[name] for name in names if fields.get(name) is not None), [])
    if not isinstance(found, list) or not all(isinstance(each, str) and each for each in found):
        _refuse(names[0], found, "a list of names of modules")
    return tuple(found)


def _positive(fields: Mapping[str, Any], *names: str) -> int:
    value = next((fields[name] for name in names if fields.get(name) is not None), None)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        _refuse(names[0], value, "one positive number")
    return value


def _refuse(field: str, value: Any, allowed: str) -> NoReturn:
    raise ModelNotServable(
        f"The weights can't be counted by the field {field} of quantization_config: it is {value!r}, and "
        f"must be {allowed}."
    )


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
