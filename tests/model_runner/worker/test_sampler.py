from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from model_runner.core.output import SampleRow
from model_runner.types import SamplingParams
from model_runner.worker import sampler as sampler_module
from model_runner.worker.sampler import Sampler, uniforms

VOCABULARY = 64


def sample_row(
    *,
    choice: int = 0,
    position: int = 0,
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    banned: tuple[int, ...] = (),
    **params: Any,
) -> SampleRow:
    return SampleRow(
        row=0,
        sequence_id=0,
        choice=choice,
        position=position,
        params=SamplingParams(max_tokens=16, **params),
        prompt_token_ids=prompt,
        output_token_ids=output,
        banned_token_ids=banned,
    )


def random_logits(rows: int, seed: int = 0, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def draws(logits: torch.Tensor, count: int, **row: Any) -> np.ndarray[Any, Any]:
    rows = [sample_row(position=i, **row) for i in range(count)]
    return np.array(Sampler()(logits.expand(count, -1), rows)[0])


def kept_tokens(logits: torch.Tensor, **params: Any) -> set[int]:
    """The tokens that can be drawn, read off the filtered distribution itself."""
    probabilities = sampler_module._filter(logits, [SamplingParams(max_tokens=1, **params)])
    return set(probabilities[0].nonzero().squeeze(1).tolist())


def test_no_rows_give_nothing() -> None:
    assert Sampler()(torch.empty(0, VOCABULARY), []) == ([], [])


def test_greedy_takes_the_largest_logit() -> None:
    logits = random_logits(9)
    rows = [sample_row(temperature=0.0, seed=i) for i in range(9)]
    assert Sampler()(logits, rows)[0] == logits.argmax(dim=-1).tolist()


def test_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    logits = random_logits(3)
    for temperature in (1e-300, 1e-5, 2e-5):
        rows = [sample_row(temperature=temperature) for _ in range(3)]
        assert Sampler()(logits, rows)[0] == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.5}, {"temperature": 2.0}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}],
    ids=str,
)
def test_draws_follow_the_distribution(params: dict[str, Any]) -> None:
    logits = random_logits(1, seed=3, vocabulary=12)
    count = 20_000
    observed = np.bincount(draws(logits, count, seed=7, **params), minlength=12)
    scores = (logits / params.get("temperature", 1.0)).double()
    kept = kept_tokens(logits, **params)
    for token in range(12):
        if token not in kept:
            scores[0, token] = -math.inf
    expected = torch.softmax(scores, dim=-1)[0].numpy() * count
    assert observed[expected == 0].sum() == 0
    live = expected > 0
    chi_square = ((observed[live] - expected[live]) ** 2 / expected[live]).sum()
    # Wilson and Hilferty's approximation of the 99.9 % point.
    freedom = live.sum() - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square < bound


def test_filters_keep_what_transformers_keeps() -> None:
    for seed in range(20):
        logits = random_logits(1, seed=seed)
        ids = torch.zeros(1, 1, dtype=torch.long)
        for top_k in (1, 5, 63, 64):
            warped = TopKLogitsWarper(top_k)(ids, logits.clone())
            assert kept_tokens(logits, top_k=top_k) == set(warped[0].isfinite().nonzero().squeeze(1).tolist())
        for top_p in (0.01, 0.3, 0.9, 0.999):
            warped = TopPLogitsWarper(top_p)(ids, logits.clone())
            assert kept_tokens(logits, top_p=top_p) == set(warped[0].isfinite().nonzero().squeeze(1).tolist())
        for min_p in (0.01, 0.2, 1.0):
            warped = MinPLogitsWarper(min_p)(ids, logits.clone())
            assert kept_tokens(logits, min_p=min_p) == set(warped[0].isfinite().nonzero().squeeze(1).tolist())
        warped = TopPLogitsWarper(0.7)(ids, TopKLogitsWarper(9)(ids, logits / 0.8))
        warped = MinPLogitsWarper(0.05)(ids, warped)
        assert kept_tokens(logits, temperature=0.8, top_k=9, top_p=0.7, min_p=0.05) == set(
            warped[0].isfinite().nonzero().squeeze(1).tolist()
        )


def test_top_p_beyond_the_likeliest_thousand_is_exact() -> None:
    logits = torch.zeros(1, 5000) + torch.linspace(0, 1e-2, 5000)
    warped = TopPLogitsWarper(0.9)(torch.zeros(1, 1, dtype=torch.long), logits.double())
    expected = set(warped[0].isfinite().nonzero().squeeze(1).tolist())
    kept = kept_tokens(logits, top_p=0.9)
    assert len(expected ^ kept) <= 1  # the sum of 4500 float32 probabilities may round either way at the edge


def test_tied_tokens_are_kept_together() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]])
    assert kept_tokens(logits, top_k=1) == {1, 2, 3}
    assert kept_tokens(logits, top_p=0.1) == {1, 2, 3}


def test_repetition_penalty_is_transformers_own() -> None:
    logits = random_logits(1, seed=5)
    prompt, output = (3, 4, 4, 9), (10, 4)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[*prompt, *output]]), logits.clone())
    row = sample_row(prompt=prompt, output=output, repetition_penalty=1.7)
    assert torch.equal(sampler_module._adjust(logits, [row]), expected)


def test_presence_and_frequency_penalties_count_generated_tokens_only() -> None:
    logits = random_logits(1)
    row = sample_row(prompt=(1, 1), output=(2, 2, 2, 5), presence_penalty=0.5, frequency_penalty=0.25)
    change = sampler_module._adjust(logits, [row]) - logits
    expected = torch.zeros(1, VOCABULARY)
    expected[0, 2], expected[0, 5] = -(0.5 + 3 * 0.25), -(0.5 + 0.25)
    assert torch.allclose(change, expected, atol=1e-6)


def test_logit_bias_and_bans() -> None:
    logits = random_logits(1)
    best = int(logits.argmax())
    assert Sampler()(logits, [sample_row(temperature=0.0, logit_bias={11: 100.0})])[0] == [11]
    second = int(logits.topk(2).indices[0, 1])
    assert Sampler()(logits, [sample_row(temperature=0.0, banned=(best,))])[0] == [second]
    drawn = draws(logits, 500, banned=(best,), logit_bias={best: 100.0})
    assert best not in drawn


def test_ids_outside_of_the_vocabulary_change_nothing() -> None:
    logits = random_logits(1)
    row = sample_row(temperature=0.0, banned=(VOCABULARY, -1), logit_bias={VOCABULARY + 7: 5.0})
    assert torch.equal(sampler_module._adjust(logits, [row]), logits)


def test_the_caller_s_logits_are_not_changed() -> None:
    logits = random_logits(2)
    before = logits.clone()
    rows = [
        sample_row(top_k=3, top_p=0.5, min_p=0.1, banned=(1,), logit_bias={2: 3.0}, logprobs=2),
        sample_row(output=(5,), repetition_penalty=2.0, presence_penalty=1.0),
    ]
    Sampler()(logits, rows)
    assert torch.equal(logits, before)


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = random_logits(3)
    rows = [
        sample_row(temperature=0.3, top_k=2, logprobs=4, banned=(int(logits[0].argmax()),)),
        sample_row(),
        sample_row(temperature=0.0, logprobs=0),
    ]
    token_ids, logprobs = Sampler()(logits, rows)
    reference = torch.log_softmax(logits.double(), dim=-1)
    first, second, third = logprobs
    assert first is not None
    assert second is None
    assert third is not None
    assert first.token_id == token_ids[0]
    assert first.logprob == pytest.approx(reference[0, token_ids[0]].item(), abs=1e-5)
    assert first.top_token_ids == reference[0].topk(4).indices.tolist()
    assert first.top_logprobs == pytest.approx(reference[0].topk(4).values.tolist(), abs=1e-5)
    assert third.top_token_ids == []
    assert third.logprob == pytest.approx(reference[2].max().item(), abs=1e-5)


def test_logits_that_are_not_finite_are_refused() -> None:
    for value in (math.nan, -math.inf):
        logits = torch.full((1, VOCABULARY), value)
        for temperature in (0.0, 1.0):
            with pytest.raises(FloatingPointError, match="not finite"):
                Sampler()(logits, [sample_row(temperature=temperature)])


def test_uniforms_depend_on_seed_choice_and_position_alone() -> None:
    row = sample_row(seed=5, choice=2, position=9)
    other = sample_row(seed=5, choice=2, position=9, prompt=(1, 2), output=(3,), top_p=0.2)
    assert uniforms([row])[0] == uniforms([other, other])[1]
    keys = [(s, c, p) for s in (0, 1, 2**64 - 1) for c in range(8) for p in range(50)]
    numbers = uniforms([sample_row(seed=s, choice=c, position=p) for s, c, p in keys])
    assert len(set(numbers.tolist())) == len(keys)
    assert (numbers >= 0).all()
    assert (numbers < 1).all()


def test_uniforms_are_uniform_along_each_key() -> None:
    along = {
        "seed": [sample_row(seed=i) for i in range(4000)],
        "choice": [sample_row(choice=i) for i in range(4000)],
        "position": [sample_row(position=i) for i in range(4000)],
    }
    for rows in along.values():
        numbers = uniforms(rows)
        counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
        assert ((counts - 200) ** 2 / 200).sum() < 43.8  # chi-square, 19 degrees, 99.9 %
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.06


PARAMS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**64 - 1),
        "choice": st.integers(0, 7),
        "position": st.integers(0, 1000),
        "temperature": st.sampled_from([0.0, 0.2, 0.7, 1.0, 1.9]),
        "top_p": st.sampled_from([0.1, 0.9, 1.0]),
        "top_k": st.sampled_from([0, 1, 10, 1000, 2999]),
        "min_p": st.sampled_from([0.0, 0.05]),
        "prompt": st.sampled_from([(), (1, 2, 3), (7, 7)]),
        "output": st.sampled_from([(), (4,), (5, 6, 5)]),
        "presence_penalty": st.sampled_from([0.0, 0.4]),
        "frequency_penalty": st.sampled_from([0.0, -0.3]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "logit_bias": st.sampled_from([{}, {9: 4.0}]),
        "banned": st.sampled_from([(), (2,)]),
        "logprobs": st.sampled_from([None, 0, 3]),
    }
)


@settings(deadline=None, max_examples=60)
@given(st.lists(PARAMS, min_size=1, max_size=9), st.integers(0, 1000))
def test_a_row_s_token_is_the_same_alone_and_in_any_batch(rows: list[dict[str, Any]], seed: int) -> None:
    # Rounded as bfloat16 logits are, so that ties happen.
    logits = random_logits(len(rows), seed, vocabulary=3000).bfloat16().float()
    samples = [sample_row(**row) for row in rows]
    together, together_logprobs = Sampler()(logits, samples)
    for i, sample in enumerate(samples):
        alone, alone_logprobs = Sampler()(logits[i : i + 1], [sample])
        assert alone == [together[i]]
        assert alone_logprobs == [together_logprobs[i]]
