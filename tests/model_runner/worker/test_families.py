"""Every family gives transformers' own greedy tokens and logits, and the comparison has teeth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from model_runner.core.kv_spec import KVCacheSpec
from model_runner.worker.model_config import resolved

MAX_TOKENS = 36
UNWRITTEN = 1e4  # what the cache is filled with before the engine runs (conftest)
# Shorter than a block, across blocks, and past every window (10); block_size is 4 and a chunk 16 tokens.
PROMPT_LENGTHS = (1, 6, 23, 37)


def make_prompts(vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(1, vocabulary, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


def reference_tokens(model: Any, prompt: Sequence[int], max_tokens: int = MAX_TOKENS) -> list[int]:
    inputs = torch.tensor([prompt])
    output = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=max_tokens, do_sample=False
    )
    return output[0, len(prompt) :].tolist()


def worst_logit_error(model: Any, served: Any, prompt: Sequence[int], output: Sequence[int]) -> float:
    """Of the logits behind each token of `output`, against one plain forward over prompt and output."""
    with torch.inference_mode():
        expected = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
    got = torch.stack([served.sampler.logits[*prompt, *output[:i]] for i in range(len(output))])
    return (got - expected).abs().max().item()


@pytest.fixture(scope="module")
def reference(families: Any) -> Callable[[str], tuple[nn.Module, list[list[int]], list[list[int]]]]:
    """By family: the model, the prompts, and what transformers' generate makes of them."""
    made: dict[str, tuple[nn.Module, list[list[int]], list[list[int]]]] = {}

    def get(family: str) -> tuple[nn.Module, list[list[int]], list[list[int]]]:
        if family not in made:
            model = families.make(family)
            prompts = make_prompts(model.config.vocab_size)
            made[family] = model, prompts, [reference_tokens(model, prompt) for prompt in prompts]
        return made[family]

    return get


def test_output_is_varied_enough_to_mean_something(family: str, reference: Any) -> None:
    _, _, outputs = reference(family)
    assert [len(set(tokens)) >= 20 for tokens in outputs] == [True] * len(outputs)


def test_alone(family: str, reference: Any, serve: Any) -> None:
    model, prompts, expected = reference(family)
    served = serve(model)
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert served.generate([prompt], MAX_TOKENS) == [tokens]
        assert worst_logit_error(model, served, prompt, tokens) < 1e-4


def test_in_mixed_batches_with_chunked_prefill(family: str, reference: Any, serve: Any) -> None:
    model, prompts, expected = reference(family)
    served = serve(model, max_num_batched_tokens=16)
    order = [3, 0, 2, 1, 3, 2]
    assert served.generate([prompts[i] for i in order], MAX_TOKENS) == [expected[i] for i in order]
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert worst_logit_error(model, served, prompt, tokens) < 1e-4


def test_choices_fork_from_one_prompt(family: str, reference: Any, serve: Any) -> None:
    model, prompts, _ = reference(family)
    served = serve(model, max_num_batched_tokens=16)
    asked = [prompts[1], prompts[2]]  # 6 and 23 tokens: both end inside a block
    choices = served.generate_choices(asked, 12, n=3, temperature=1.0, seed=11)
    for prompt, outputs in zip(asked, choices, strict=True):
        assert len({tuple(tokens) for tokens in outputs.values()}) == 3
        assert all(worst_logit_error(model, served, prompt, tokens) < 1e-4 for tokens in outputs.values())


def test_the_comparison_notices_one_old_block_zeroed(family: str, reference: Any, serve: Any) -> None:
    model, prompts, expected = reference(family)
    prompt, tokens = prompts[2], expected[2]
    groups = serve(model).layout.groups
    for number, group in enumerate(groups):
        served = serve(model)
        execute = served.runner.execute

        def sabotaged(
            scheduled: Any,
            execute: Any = execute,
            served: Any = served,
            number: int = number,
            group: Any = group,
        ) -> Any:
            sequence = scheduled.sequences[0]
            if sequence.start == len(prompt) + 10:
                oldest = 0 if group.window is None else sequence.start + 2 - group.window
                served.kv_cache[sequence.block_tables[number][oldest // served.layout.block_size]] = 0
            return execute(scheduled)

        served.runner.execute = sabotaged
        output = served.generate([prompt], MAX_TOKENS)[0]
        assert output[:10] == tokens[:10]
        assert worst_logit_error(model, served, prompt, output) > 1e-4


def test_the_engines_tensors_are_the_price_to_the_byte(family: str, reference: Any, serve: Any) -> None:
    model, prompts, expected = reference(family)
    served = serve(model, max_num_batched_tokens=16)
    spec = KVCacheSpec.from_config(resolved(model.config), kv_dtype="float32")
    layout, cache = served.layout, served.kv_cache
    assert cache[0].nbytes == layout.block_bytes
    assert cache.nbytes == len(cache) * layout.block_bytes
    assert len(layout.groups) * cache[0, ..., 0, :].nbytes == layout.bytes_per_token == spec.bytes_per_token
    prompt, tokens = prompts[2], expected[2]
    lifetime = len(prompt) + MAX_TOKENS - 1
    held: list[int] = []
    execute = served.runner.execute

    def watched(scheduled: Any) -> Any:
        if scheduled.sequences[0].start >= len(prompt):  # while it decodes: prefill may borrow
            held.append(served.core.scheduler.pool.used * cache[0].nbytes)
        return execute(scheduled)

    served.runner.execute = watched
    assert served.generate([prompt], MAX_TOKENS) == [tokens]
    assert max(held) == layout.request_bytes(len(prompt), MAX_TOKENS)
    assert max(held) >= spec.sequence_bytes(lifetime)
    if all(group.reach is None for group in spec.groups):  # no block was used twice: what was written shows
        assert (cache != UNWRITTEN).sum().item() * cache.itemsize == spec.sequence_bytes(lifetime)


@pytest.mark.parametrize("error", [-1, 1])
def test_the_comparison_notices_a_window_off_by_one(
    family: str, error: int, reference: Any, serve: Any
) -> None:
    model, prompts, _ = reference(family)
    served = serve(model)
    if all(group.window is None for group in served.layout.groups):
        pytest.skip("no sliding layers")
    for layer in served.layers():
        if layer.window is not None:
            layer.window += error
    output = served.generate([prompts[2]], 12)[0]
    assert worst_logit_error(model, served, prompts[2], output) > 1e-4


def test_prompt_logprobs_across_chunks(family: str, reference: Any, serve: Any) -> None:
    model, prompts, _ = reference(family)
    prompt = prompts[3]
    served = serve(model, max_num_batched_tokens=16)
    outputs = served.run([prompt], 1, prompt_logprobs=2)
    entries = next(o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    assert [entry.token_id for entry in entries] == prompt[1:]
    chosen = expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor([e.logprob for e in entries]), chosen, atol=1e-4, rtol=0)
    top = expected.topk(2)
    torch.testing.assert_close(torch.tensor([e.top_logprobs for e in entries]), top.values, atol=1e-4, rtol=0)
    assert [e.top_token_ids for e in entries] == top.indices.tolist()
