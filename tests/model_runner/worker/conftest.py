"""Tiny models of every family, with random weights that make them talk, and an engine to run them in."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from model_runner.core.block_layout import BlockLayout
from model_runner.core.kv_spec import KVCacheSpec
from model_runner.core.output import SampleRow
from model_runner.engine import EngineCore
from model_runner.messages import Submit
from model_runner.types import ChoiceOutput, SamplingParams, TokenLogprobs
from model_runner.worker.attention import PagedAttention, PagedLayer, torch_paged_attention
from model_runner.worker.kv_cache import allocate_kv_cache
from model_runner.worker.runner import ModelRunner
from model_runner.worker.sampler import Sampler
from model_runner.worker.servable import attention_modules

BLOCK_SIZE = 4
WINDOW = 10
VOCABULARY = 512

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_SLIDING_THEN_FULL = ["sliding_attention", "full_attention"] * 2
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
    "truncate": False,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}

# By name: the model type, and what its config adds to (or leaves out of, with None) the common one.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "qwen2": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {**_EXPERTS, "num_experts": 4, "norm_topk_prob": True}),
    "gemma2": (
        "gemma2",
        {"sliding_window": WINDOW, "query_pre_attn_scalar": 16, "final_logit_softcapping": 30.0},
    ),
    "gemma3_text": (
        "gemma3_text",
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 16,
            "layer_types": [*["sliding_attention"] * 3, "full_attention"],
        },
    ),
    "phi3": ("phi3", {"sliding_window": WINDOW, "partial_rotary_factor": 1.0}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {"logits_scaling": 2.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1, 1, 0]}),
    "gpt_oss": (
        "gpt_oss",
        {
            "sliding_window": WINDOW,
            "rope_parameters": _YARN,
            "num_local_experts": 4,
            "layer_types": _SLIDING_THEN_FULL,
            **_EXPERTS,
        },
    ),
}


def make_config(family: str, **changes: Any) -> PreTrainedConfig:
    model_type, own = FAMILIES[family]
    return AutoConfig.for_model(model_type, **{**_COMMON, **own, **changes})


def make_model(config: PreTrainedConfig, seed: int = 0) -> nn.Module:
    """A model of the family, in float32, with weights that make its output vary.

    Under a family's own initialisation a model repeats one token: its layers add next to nothing to the
    embedding. Here every matrix keeps the size of its input, and attention scores spread over some units.
    """
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "q_norm" in name or "k_norm" in name:
                parameter.add_(1.0 + 0.1 * noise)
            elif "norm" in name or "bias" in name:
                parameter.add_(0.1 * noise)
            elif "embed" in name or parameter.ndim == 1:
                parameter.copy_(noise)
            else:
                gain = 2.0 if "q_proj" in name or "k_proj" in name or "qkv" in name else 1.0
                parameter.copy_(gain * noise * min(parameter.shape[-2:]) ** -0.5)
    return model.requires_grad_(False)


@dataclass
class RecordingSampler:
    """The real sampler, which also keeps the logits of each draw: (prompt, all tokens before it) -> [V]."""

    logits: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    _sampler: Sampler = field(default_factory=Sampler)

    def __call__(
        self, logits: Tensor, samples: Sequence[SampleRow]
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        for row, sample in zip(logits, samples, strict=True):
            self.logits[*sample.prompt_token_ids, *sample.output_token_ids] = row.clone()
        return self._sampler(logits, samples)


@dataclass
class Served:
    """A model as Plimsoll runs it."""

    core: EngineCore
    runner: ModelRunner
    sampler: RecordingSampler
    layout: BlockLayout
    kv_cache: Tensor
    modules: list[nn.Module]

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, **params: Any) -> list[list[int]]:
        """The tokens of each prompt's first choice, all prompts submitted at once."""
        return [choices[0] for choices in self.generate_choices(prompts, max_tokens, **params)]

    def generate_choices(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, **params: Any
    ) -> list[dict[int, list[int]]]:
        got: list[dict[int, list[int]]] = [{} for _ in prompts]
        for output in self.run(prompts, max_tokens, **params):
            got[int(output.request_id)].setdefault(output.choice, []).extend(output.token_ids)
        return got

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, **params: Any) -> list[ChoiceOutput]:
        """All outputs of all steps, request i being prompt i."""
        sampling = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **params})
        for i, prompt in enumerate(prompts):
            blocks = self.layout.request_blocks(len(prompt), max_tokens, sampling.n)
            self.core.submit(Submit(str(i), list(prompt), sampling, blocks))
        outputs: list[ChoiceOutput] = []
        while self.core.has_work:
            result = self.core.step()
            assert result is not None
            outputs += result.outputs
        return outputs

    def layers(self) -> list[PagedLayer]:
        return [
            layer
            for module in self.modules
            for layer in vars(module).values()
            if isinstance(layer, PagedLayer)
        ]


Serve = Callable[..., Served]


@pytest.fixture
def serve() -> Serve:
    def serve(
        model: nn.Module,
        max_num_batched_tokens: int = 64,
        blocks: int = 400,
        prepare: Callable[[nn.Module, list[nn.Module]], PagedAttention] | None = None,
    ) -> Served:
        """`prepare` may change the model and its attention modules, and chooses the attention."""
        model = copy.deepcopy(model)
        dtype: torch.dtype = model.dtype
        config = model.config.to_dict()
        spec = KVCacheSpec.from_config(config, kv_dtype=str(dtype).removeprefix("torch."))
        layout = BlockLayout.from_spec(spec, block_size=BLOCK_SIZE)
        headroom = layout.headroom_blocks(max_num_batched_tokens)
        kv_cache = allocate_kv_cache(layout, blocks + headroom, dtype, torch.device("cpu"))
        kv_cache.fill_(1e4)  # whatever is read before it is written shows
        sampler = RecordingSampler()
        modules = attention_modules(model, layout)
        attention = torch_paged_attention if prepare is None else prepare(model, modules)
        runner = ModelRunner(model, modules, layout, kv_cache, sampler, attention)
        core = EngineCore(
            layout,
            runner,
            num_blocks=blocks,
            headroom_blocks=headroom,
            max_num_seqs=16,
            max_num_batched_tokens=max_num_batched_tokens,
            eos_token_ids=(),
            max_model_len=model.config.max_position_embeddings,
        )
        return Served(core, runner, sampler, layout, kv_cache, modules)

    return serve


class Families:
    """Makes tiny models by family name."""

    names = tuple(FAMILIES)

    def config(self, family: str, **changes: Any) -> PreTrainedConfig:
        return make_config(family, **changes)

    def make(self, family: str, **changes: Any) -> nn.Module:
        return make_model(make_config(family, **changes))

    def make_of_type(self, model_type: str, **own: Any) -> nn.Module:
        """One that is of none of the families."""
        return make_model(AutoConfig.for_model(model_type, **{**_COMMON, **own}))


@pytest.fixture(scope="session")
def families() -> Families:
    return Families()


@pytest.fixture(params=FAMILIES, scope="module")
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
