"""What the engine is asked to be. Made once, by app.settings, and never changed."""

from __future__ import annotations

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Handed whole to the engine process. Sizes are bytes, times are seconds.

    `None` means "decide it from the model and the machine"; what was decided comes back in `ModelInfo`.
    """

    model: str  # a Hugging Face directory, a hub id, or a .gguf file; "" is the embedded default model
    cache_dir: str  # where derived files (dequantised weights, tokenizer, compiled kernels) are kept
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16
    device: str = "auto"  # auto | cpu | cuda | cuda:N
    block_size: int = 16  # tokens
    kv_cache_memory_bytes: int | None = None
    # The cache's share of the memory that is available, when it is not given in bytes.
    cpu_memory_utilization: float = 0.4
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None  # None: the model's own context
    max_model_len_auto: bool = False  # choose the largest that fits instead of failing
    grows: bool = False  # requests are granted blocks as they grow, not their lifetime's from the start
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    target_itl_seconds: float | None = None  # that steps which decode should not take longer than
    num_threads: int | None = None
    log_level: str = "info"
    log_format: str = "text"  # text | json
    compile: str = "auto"  # auto | off : native kernels and torch.compile where a C++ compiler is found
