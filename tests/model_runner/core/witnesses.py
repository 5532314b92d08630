"""What the state machine sets around the two processes: clients that hold them to their word, and a model."""

from __future__ import annotations

import random
from collections import Counter

from model_runner.core.block_layout import BlockLayout
from model_runner.core.kv_spec import KVCacheSpec
from model_runner.core.live_request import LiveRequest, Submission
from model_runner.core.output import RunnerOutput, SchedulerOutput
from model_runner.errors import EngineDied, KVCacheBudgetExceeded, LoadError, PlimsollError, QueueTimeout
from model_runner.types import ChoiceOutput, Ending, FinishReason, StepStats

EOS, FIRST_TOKEN = 0, 10


def make_layout(window: int | None) -> BlockLayout:
    """Two full layers; or two full and two sliding ones, in two groups that draw on one pool."""
    kinds = ["full_attention"] * 2 + ["sliding_attention"] * (0 if window is None else 2)
    config = {
        "num_hidden_layers": len(kinds),
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "hidden_size": 8,
        "head_dim": 8,
        "layer_types": kinds,
        "sliding_window": window,
    }
    return BlockLayout.from_spec(KVCacheSpec.from_config(config), block_size=4)


class CountingRunner:
    """The token at position p is FIRST_TOKEN + p, or the end of the text when the dice say so."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice

    def execute(self, scheduled: SchedulerOutput) -> RunnerOutput:
        tokens = [
            EOS if self.dice.random() < 0.1 else FIRST_TOKEN + sample.position for sample in scheduled.samples
        ]
        return RunnerOutput(tokens, [None] * len(tokens))


class Client:
    """A listener that holds the dispatcher to its promises."""

    def __init__(self, submission: Submission) -> None:
        self.submission = submission
        self.request: LiveRequest
        self.collected: Counter[tuple[int, int]] = Counter()
        self.finished: dict[tuple[int, int], FinishReason] = {}
        self.stopped: set[tuple[int, int]] = set()
        self.aborted = False
        self.endings = 0
        self.error: PlimsollError | None = None

    def output(self, prompt_index: int, output: ChoiceOutput) -> None:
        assert self.endings == 0, "output after the end"
        key = (prompt_index, output.choice)
        assert key not in {*self.finished, *self.stopped}, "output of a choice that has ended"
        for token in output.token_ids:
            assert token in (EOS, FIRST_TOKEN + self.collected[key]), "a token was lost or came twice"
            self.collected[key] += 1
        if output.finish_reason is not None:
            self.finished[key] = output.finish_reason

    def restarted(self) -> None:
        assert not self.request.delivered, "what a client has seen was run again"
        self.collected.clear()
        self.finished.clear()
        self.stopped.clear()

    def ended(self, error: PlimsollError | None) -> None:
        self.endings += 1
        assert self.endings == 1, "a second ending"
        self.error = error
        if isinstance(error, EngineDied):
            assert self.request.delivered or self.request.deaths == 2
        if isinstance(error, QueueTimeout) and not self.request.deaths:
            assert self.request.admitted_at is None, "it was let in and timed out in the queue all the same"


class Observer:
    def __init__(self) -> None:
        self.endings: list[Ending] = []
        self.accepted = 0
        self.byte_seconds = 0.0

    def decided(self, decision: str, reason: str, projected_bytes: int) -> None:
        assert projected_bytes > 0
        self.accepted += decision != "rejected"

    def dequeued(self, queue_time_seconds: float) -> None:
        assert queue_time_seconds >= 0

    def first_token(self, seconds: float) -> None:
        assert seconds >= 0

    def inter_token(self, seconds: float) -> None:
        assert seconds >= 0

    def tokens(self, *, prompt: int, generated: int) -> None:
        assert prompt + generated > 0

    def stepped(self, stats: StepStats) -> None:
        pass

    def ended(self, ending: Ending) -> None:
        self.endings.append(ending)

    def released(self, tenant: str, kv_byte_seconds: float) -> None:
        self.byte_seconds += kv_byte_seconds

    def block_seconds(self, layout: BlockLayout) -> float:
        return self.byte_seconds / layout.block_bytes

    def engine_restarted(self) -> None:
        pass


def check_retry(error: LoadError) -> None:
    assert 0 <= error.retry_after_seconds < 1000


def the_advice_is_right(
    error: KVCacheBudgetExceeded, layout: BlockLayout, num_blocks: int, prompts: list[int], n: int
) -> None:
    def price(max_tokens: int) -> int:
        return sum(layout.request_blocks(length, max_tokens, n) for length in prompts)

    largest = error.largest_max_tokens
    assert largest == 0 or price(largest) <= num_blocks
    assert price(largest + 1) > num_blocks
    assert error.required_bytes > error.budget_bytes == num_blocks * layout.block_bytes


def what_was_finished_is_whole(clients: list[Client]) -> None:
    for client in clients:
        if client.aborted or client.error is not None:
            continue
        params = client.submission.params
        for prompt_index in range(len(client.submission.prompts)):
            for choice in range(params.n):
                key = (prompt_index, choice)
                assert key in client.stopped or key in client.finished
                if client.finished.get(key) is FinishReason.LENGTH and key not in client.stopped:
                    assert client.collected[key] == params.max_tokens
