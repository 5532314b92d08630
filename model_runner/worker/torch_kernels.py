"""What the fused modules ask of kernels, in torch's own operations: for machines without a C++ compiler.

There are fewer and larger operations in it than in transformers' modules, and that is all the gain.
"""

from __future__ import annotations

import torch
from torch import Tensor


class TorchKernels:
    """The part of native.Kernels that fused modules use. Rounds as torch does, operation by operation."""

    def __init__(self, *, has_linear: bool) -> None:
        self.has_linear = has_linear  # whether there is a packed product: oneDNN's

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, round_first: bool) -> Tensor:
        """x [..., W] over its last dimension; weight [W] is float32."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        if round_first:
            normed = normed.to(x.dtype)
        return (normed * weight).to(x.dtype)

    def rotate(self, x: Tensor, cosine: Tensor, sine: Tensor, heads: int, head_dim: int) -> None:
        """Rotary embedding of the first `heads` · `head_dim` columns of x [T, C], in place.

        cosine and sine are [T, head_dim], of x's dtype.
        """
        rotated = x[:, : heads * head_dim].view(len(x), heads, head_dim)
        first, second = rotated.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        rotated.mul_(cosine[:, None]).add_(turned.mul_(sine[:, None]))
