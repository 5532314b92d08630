"""What runs in the next step, and what becomes of its results.

The batch is rebuilt every step: one token for every sequence that is decoding, then prompts in chunks, until
`max_num_batched_tokens` are used. What a request may hold of the pool is what it has
been granted (growth.py): its lifetime from the start, or block by block as it grows. At every moment

    blocks held by a request <= its grant + what its prefill chunk borrows from the headroom
    sum of grants            <= num_blocks
    sum of what is borrowed  <= headroom_blocks
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterator

from model_runner.core.block_layout import BlockLayout
from model_runner.core.block_pool import BlockLease, BlockPool, BlockTables
from model_runner.core.growth import Growth, WhenShort
from model_runner.core.output import RunnerOutput, SampleRow, SchedulerOutput
from model_runner.core.request import Choice, Request, RequestStatus
from model_runner.core.step_batch import StepBatch
from model_runner.types import ChoiceOutput, FinishReason, SamplingParams, TokenLogprobs

_LOOKED_AT = 8  # waiting prompts, in search of a short one behind a long one


class Scheduler:
    """Owns the requests and the block pool. Calls come one at a time, and aborts only between a step's
    update_from_output() and the next schedule().

    `grows`: requests are granted their blocks as they grow (predictive admission), and not their lifetime's
    when they come (strict).

    Raises ValueError when `max_num_batched_tokens` is below `max_num_seqs`: decodes could then leave a prompt
    no token for ever.
    """

    def __init__(
        self,
        layout: BlockLayout,
        *,
        num_blocks: int,
        headroom_blocks: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        eos_token_ids: Collection[int],
        max_model_len: int,
        grows: bool = False,
        when_short: WhenShort = "hold early",
    ) -> None:
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise ValueError(f"{max_num_seqs=} must be in 1 … {max_num_batched_tokens=}")
        self.layout = layout
        self.num_blocks = num_blocks
        self.headroom_blocks = headroom_blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_model_len = max_model_len
        self.pool = BlockPool(num_blocks + headroom_blocks)
        self.growth = Growth(layout, num_blocks, grows=grows, when_short=when_short)
        self.running_sequences = 0  # choices of running requests, from their prompt's first chunk on
        self.waiting_sequences = 0
        self.prefill_limit: int | None = None  # prompt tokens in a step that decodes too; None: no limit
        self.recomputed_tokens = 0  # that preemptions have thrown away, since the beginning
        # A request is in exactly one of these three.
        self._waiting: list[Request] = []  # the most senior first
        self._prefilling: dict[str, Request] = {}
        self._decoding: dict[str, Request] = {}
        self._requests: dict[str, Request] = {}  # all three
        self._by_sequence: dict[int, tuple[Request, Choice]] = {}
        self._next_sequence_id = 0
        self._arrivals = 0
        self._released: list[str] = []
        self._preempted: list[str] = []

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def reserved_blocks(self) -> int:
        return self.growth.granted_blocks

    def submit(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        reserved_blocks: int,
        priority: int = 0,
    ) -> None:
        """Take an admitted prompt. A duplicate id, a reservation below the price, more reservations than
        blocks, or a price over all blocks are programmer errors."""
        assert request_id not in self._requests, f"{request_id} is already here"
        price = self.layout.request_blocks(len(prompt_token_ids), params.max_tokens, params.n)
        assert price <= self.num_blocks, f"{request_id} could never run to its end"
        request = self._make_request(request_id, prompt_token_ids, params, priority)
        if not self.growth.grows:
            assert reserved_blocks >= price, f"{request_id} reserved {reserved_blocks} blocks of {price}"
            self.growth.grant(request, reserved_blocks)
        self._requests[request_id] = request
        insort(self._waiting, request, key=_seniority)
        self.waiting_sequences += params.n
        for choice in request.choices:
            self._by_sequence[choice.sequence_id] = request, choice

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one choice of it. What is unknown or has ended is ignored."""
        request = self._requests.get(request_id)
        if request is None:
            return
        for live in request.live():
            if choice is None or live.index == choice:
                self._finish_choice(request, live, FinishReason.ABORT)
        if request.request_id in self._prefilling:
            self._change_phase(request)

    def schedule(self) -> SchedulerOutput:
        """Build the next batch: decodes first, then prefill chunks. Only to be called when there is work."""
        batch = StepBatch(self.layout.block_size, len(self.layout.groups))
        others = list(self._prefilling.values())
        for request in self.growth.settle(self._decoding.values(), others, self._preempt):
            for choice in request.live():
                batch.add_decode(request, choice)
        self._schedule_prefills(batch)
        assert batch.num_tokens, "there is work, but nothing can run"
        return batch.output()

    def update_from_output(self, scheduled: SchedulerOutput, produced: RunnerOutput) -> list[ChoiceOutput]:
        """Book what a step computed: prefill progress, drawn tokens, endings, blocks left behind."""
        for sequence in scheduled.sequences[scheduled.decode_tokens :]:
            request, choice = self._by_sequence[sequence.sequence_id]
            if request.is_prefilled:
                choice.num_computed_outputs += len(sequence.token_ids)
                assert choice.tables is not None
                choice.tables.trim(sequence.start + len(sequence.token_ids))
            else:
                request.num_computed_tokens += len(sequence.token_ids)
                request.tables.trim(request.num_computed_tokens)
                request.prompt_logprobs += produced.prompt_logprobs.get(sequence.sequence_id, [])
            request.lease.borrowed = 0
        outputs = [
            self._take_token(sample, token_id, logprobs)
            for sample, token_id, logprobs in zip(
                scheduled.samples, produced.token_ids, produced.logprobs, strict=True
            )
        ]
        for request in list(self._prefilling.values()):
            self._change_phase(request)
        self._check_books()
        return outputs

    def take_released(self) -> list[str]:
        """Requests that have ended since the last call and hold nothing any more."""
        released, self._released = self._released, []
        return released

    def take_preempted(self) -> list[str]:
        """Requests that had to give their blocks back since the last call."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def take_grants(self) -> list[tuple[str, int]]:
        """(request id, blocks) of those whose grant has changed since the last call. Empty in strict mode,
        and without those that have ended."""
        changes = self.growth.take_changes()
        return [(request_id, blocks) for request_id, blocks in changes if request_id in self._requests]

    def check_idle(self) -> None:
        """Asserts that without work nothing is reserved, held or counted."""
        if self.has_work:
            return
        counts = self.reserved_blocks, self.pool.used, self.running_sequences, self.waiting_sequences
        assert counts == (0, 0, 0, 0), f"idle, but (reserved, used, running, waiting) = {counts}"
        assert not self._by_sequence

    def _make_request(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, priority: int
    ) -> Request:
        stop_token_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_token_ids |= self.eos_token_ids
        first_id = self._next_sequence_id
        self._next_sequence_id += params.n
        self._arrivals += 1
        lease = BlockLease(self.pool, 0)
        return Request(
            request_id=request_id,
            seniority=(priority, self._arrivals),
            prompt_token_ids=prompt_token_ids,
            params=params,
            choices=[Choice(index, first_id + index) for index in range(params.n)],
            lease=lease,
            tables=BlockTables(self.layout, lease),
            stop_token_ids=stop_token_ids,
            max_output_tokens=min(params.max_tokens, self.max_model_len - len(prompt_token_ids)),
            banned_token_ids=tuple(sorted(stop_token_ids)),
        )

    def _schedule_prefills(self, batch: StepBatch) -> None:
        """Give prompts what the decodes leave of the step's tokens: in order, but up to half of it first to
        those that are much shorter than the first one, so that a long prompt doesn't hold them up."""
        left = self.max_num_batched_tokens - batch.num_tokens
        if batch.num_tokens and self.prefill_limit is not None:
            left = min(left, max(self.prefill_limit, self.layout.block_size))
        headroom, scheduled = self.headroom_blocks, set[str]()

        def add_chunk(request: Request, most: int) -> int:
            nonlocal left, headroom
            tokens = batch.add_chunk(request, most, headroom)
            headroom -= request.lease.borrowed
            left -= tokens
            scheduled.add(request.request_id)
            return tokens

        first = next(iter(self._prefilling.values()), None) or self._start(0)
        if first is not None and first.tokens_to_compute > left:
            half = left // 2
            for request in self._much_shorter_than(first):
                if half == 0:
                    break
                half -= add_chunk(request, half)
        for request in list(self._prefilling.values()):
            if left and request.request_id not in scheduled:
                add_chunk(request, left)
        while left and (started := self._start(0)) is not None:
            add_chunk(started, left)

    def _much_shorter_than(self, first: Request) -> Iterator[Request]:
        """Prompts under way with less than half as much left, the shortest first; then such ones that wait,
        started as they are drawn."""
        limit = first.tokens_to_compute // 2
        under_way = [r for r in self._prefilling.values() if r.tokens_to_compute < limit]
        yield from sorted(under_way, key=lambda request: request.tokens_to_compute)
        index = 0
        while index < min(len(self._waiting), _LOOKED_AT):
            if self._waiting[index].tokens_to_compute >= limit:
                index += 1
            elif (started := self._start(index)) is not None:
                yield started
            else:
                return

    def _start(self, index: int) -> Request | None:
        """Start a waiting request if there is room for it. One with more choices than `max_num_seqs` runs
        when nothing else does."""
        if index >= len(self._waiting):
            return None
        request = self._waiting[index]
        sequences = self.running_sequences + request.live_choices
        if sequences > self.max_num_seqs and self.running_sequences > 0:
            return None
        if not self.growth.may_start(request, [*self._decoding.values(), *self._prefilling.values()]):
            return None
        del self._waiting[index]
        request.change_status(RequestStatus.RUNNING)
        self.waiting_sequences -= request.live_choices
        self.running_sequences = sequences
        self._prefilling[request.request_id] = request
        return request

    def _preempt(self, request: Request) -> None:
        """Take all its blocks and keep all its tokens. It waits, in its old place, to be computed again."""
        self.recomputed_tokens += request.forget_cache()
        self._preempted.append(request.request_id)
        request.change_status(RequestStatus.WAITING)
        self.growth.grant(request, 0)
        for running in (self._prefilling, self._decoding):
            running.pop(request.request_id, None)
        insort(self._waiting, request, key=_seniority)
        self.running_sequences -= request.live_choices
        self.waiting_sequences += request.live_choices

    def _change_phase(self, request: Request) -> None:
        """A prompt that is computed is shared out to its choices; once none is behind, they decode."""
        if not request.is_prefilled or request.status is not RequestStatus.RUNNING:
            return
        if not request.is_forked:
            request.fork()
        if request.behind() is None:
            self._decoding[request.request_id] = self._prefilling.pop(request.request_id)

    def _take_token(self, sample: SampleRow, token_id: int, logprobs: TokenLogprobs | None) -> ChoiceOutput:
        request, choice = self._by_sequence[sample.sequence_id]
        choice.output_token_ids.append(token_id)
        request.generated_tokens += 1
        generated = len(choice.output_token_ids)
        choice.num_computed_outputs = generated - 1
        reason = request.finish_reason_after(token_id, generated)
        tables = choice.tables
        if reason is not None:
            self._finish_choice(request, choice, reason)
        elif tables is not None and tables.next_trim is not None:
            position = len(request.prompt_token_ids) + generated - 1
            if position >= tables.next_trim:
                tables.trim(position)
        is_first = choice.index == 0 and generated == 1
        return ChoiceOutput(
            request_id=request.request_id,
            choice=choice.index,
            token_ids=[token_id],
            logprobs=None if logprobs is None else [logprobs],
            finish_reason=reason,
            prompt_logprobs=request.prompt_logprobs
            if is_first and request.params.prompt_logprobs is not None
            else None,
        )

    def _finish_choice(self, request: Request, choice: Choice, reason: FinishReason) -> None:
        """The one way out: for a stop, the length and an abort alike."""
        request.finish_choice(choice, reason)
        if request.status is RequestStatus.WAITING:
            self.waiting_sequences -= 1
        else:
            self.running_sequences -= 1
        if request.live_choices == 0:
            self._release(request)

    def _release(self, request: Request) -> None:
        request.tables.release()
        if request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
        request.change_status(RequestStatus.FINISHED)
        assert request.lease.held == 0, f"{request.request_id} ended and holds {request.lease.held} blocks"
        self.growth.grant(request, 0)
        del self._requests[request.request_id]
        for running in (self._prefilling, self._decoding):
            running.pop(request.request_id, None)
        for choice in request.choices:
            del self._by_sequence[choice.sequence_id]
        self._released.append(request.request_id)

    def _check_books(self) -> None:
        held = 0
        for running in (self._prefilling, self._decoding):
            for request in running.values():
                lease = request.lease
                assert lease.held <= lease.reserved, f"{request.request_id} outgrew its reservation"
                held += lease.held
        assert held == self.pool.used, f"requests hold {held} blocks, the pool has given {self.pool.used}"


def _seniority(request: Request) -> tuple[int, int]:
    return request.seniority
