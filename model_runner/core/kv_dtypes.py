"""What an element of the cache is kept as, and what its scales cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVDtype:
    """An element format. A vector is one head's key or value of one token, or one token's latent."""

    name: str
    bits: int
    group: int | None = None  # elements that share a scale; None where there are none, 0 for the whole vector
    group_bytes: int = 0  # of a group's scale, and zero point where it has one

    @property
    def quantised(self) -> bool:
        return self.bits < 16

    def vector_bytes(self, elements: int) -> int:
        """Bytes of a vector of so many elements with its scales: ceil(elements · bits / 8) + groups ·
        group_bytes."""
        if elements == 0:
            return 0
        packed = -(-elements * self.bits // 8)
        if self.group is None:
            return packed
        return packed + (1 if self.group == 0 else -(-elements // self.group)) * self.group_bytes


# Sources of the scales: fp8 is scaled per tensor (vLLM, TensorRT-LLM), which costs nothing per token. int8
# keeps one float32 scale for each vector (vLLM's per-token-and-head scales). int4 keeps a 16-bit scale and a
# 16-bit zero point for each 64 elements (transformers' QuantizedCache, q_group_size 64). q8_0 and q4_0 are
# llama.cpp's blocks of 32 elements with one float16 scale.
KV_DTYPES: dict[str, KVDtype] = {
    dtype.name: dtype
    for dtype in (
        KVDtype("float32", 32),
        KVDtype("bfloat16", 16),
        KVDtype("float16", 16),
        KVDtype("fp8", 8),
        KVDtype("int8", 8, group=0, group_bytes=4),
        KVDtype("int4", 4, group=64, group_bytes=4),
        KVDtype("q8_0", 8, group=32, group_bytes=2),
        KVDtype("q4_0", 4, group=32, group_bytes=2),
    )
}
