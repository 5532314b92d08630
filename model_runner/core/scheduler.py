"""What runs in the next step, and what becomes of its results.

The batch is rebuilt every step, first come first served: one token for every sequence that is decoding, then
prompts in chunks, until `max_num_batched_tokens` are used. Nothing is ever preempted and no allocation can
fail, because every request arrives with its whole lifetime's blocks reserved:

    blocks held by a request <= its reservation + what its prefill chunk borrows from the headroom
    sum of reservations      <= num_blocks
    sum of what is borrowed  <= headroom_blocks
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator

from model_runner.core.block_layout import BlockLayout
from model_runner.core.block_pool import BlockLease, BlockPool, BlockTables
from model_runner.core.output import RunnerOutput, SampleRow, ScheduledSequence, SchedulerOutput
from model_runner.core.request import Choice, Request, RequestStatus
from model_runner.types import ChoiceOutput, FinishReason, SamplingParams, TokenLogprobs


class Scheduler:
    """Owns the requests and the block pool. Calls come one at a time, and aborts only between a step's
    update_from_output() and the next schedule().

    Raises ValueError when `max_num_batched_tokens` is below `max_num_seqs`: decodes, which are never held
    back, could then leave a prompt no token for ever.
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
        self.reserved_blocks = 0
        self.running_sequences = 0  # choices of running requests, from their prompt's first chunk on
        self.waiting_sequences = 0
        # A request is in exactly one of these three, in order of arrival.
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._prefilling: dict[str, Request] = {}
        self._decoding: dict[str, Request] = {}
        self._requests: dict[str, Request] = {}  # all three
        self._by_sequence: dict[int, tuple[Request, Choice]] = {}
        self._next_sequence_id = 0
        self._released: list[str] = []

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def submit(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, reserved_blocks: int
    ) -> None:
        """Take an admitted prompt. A duplicate id, a reservation below the price or more reservations than
        blocks are programmer errors."""
        assert request_id not in self._requests, f"{request_id} is already here"
        price = self.layout.request_blocks(len(prompt_token_ids), params.max_tokens, params.n)
        assert reserved_blocks >= price, f"{request_id} reserved {reserved_blocks} blocks of {price}"
        self.reserved_blocks += reserved_blocks
        assert self.reserved_blocks <= self.num_blocks, "more blocks are reserved than there are"
        request = self._make_request(request_id, prompt_token_ids, params, reserved_blocks)
        self._requests[request_id] = self._waiting[request_id] = request
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

    def schedule(self) -> SchedulerOutput:
        """Build the next batch: decodes first, then prefill chunks. Only to be called when there is work."""
        sequences: list[ScheduledSequence] = []
        samples: list[SampleRow] = []
        copies: list[tuple[int, int]] = []
        for request in self._decoding.values():
            for choice in request.live():
                self._schedule_decode(request, choice, sequences, samples, copies)
        decode_tokens = len(sequences)
        prefill_tokens = self._schedule_prefills(sequences, samples)
        assert sequences, "there is work, but nothing can run"
        return SchedulerOutput(sequences, samples, copies, prefill_tokens, decode_tokens)

    def update_from_output(self, scheduled: SchedulerOutput, produced: RunnerOutput) -> list[ChoiceOutput]:
        """Book what a step computed: prefill progress, drawn tokens, endings, blocks left behind."""
        for sequence in scheduled.sequences[scheduled.decode_tokens :]:
            request, _ = self._by_sequence[sequence.sequence_id]
            self._advance_prefill(request, len(sequence.token_ids))
            request.prompt_logprobs += produced.prompt_logprobs.get(sequence.sequence_id, [])
        outputs = [
            self._take_token(sample, token_id, logprobs)
            for sample, token_id, logprobs in zip(
                scheduled.samples, produced.token_ids, produced.logprobs, strict=True
            )
        ]
        for request in [request for request in self._prefilling.values() if request.is_prefilled]:
            request.fork()
            self._decoding[request.request_id] = self._prefilling.pop(request.request_id)
        self._check_books()
        return outputs

    def take_released(self) -> list[str]:
        """Requests that have ended since the last call and hold nothing any more."""
        released, self._released = self._released, []
        return released

    def check_idle(self) -> None:
        """Asserts that without work nothing is reserved, held or counted."""
        if self.has_work:
            return
        counts = self.reserved_blocks, self.pool.used, self.running_sequences, self.waiting_sequences
        assert counts == (0, 0, 0, 0), f"idle, but (reserved, used, running, waiting) = {counts}"
        assert not self._by_sequence

    def _make_request(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, reserved_blocks: int
    ) -> Request:
        stop_token_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_token_ids |= self.eos_token_ids
        first_id = self._next_sequence_id
        self._next_sequence_id += params.n
        lease = BlockLease(self.pool, reserved_blocks)
        return Request(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            params=params,
            choices=[Choice(index, first_id + index) for index in range(params.n)],
            lease=lease,
            tables=BlockTables(self.layout, lease),
            stop_token_ids=stop_token_ids,
            max_output_tokens=min(params.max_tokens, self.max_model_len - len(prompt_token_ids)),
            banned_token_ids=tuple(sorted(stop_token_ids)),
        )

    def _schedule_decode(
        self,
        request: Request,
        choice: Choice,
        sequences: list[ScheduledSequence],
        samples: list[SampleRow],
        copies: list[tuple[int, int]],
    ) -> None:
        tables = choice.tables
        assert tables is not None
        position = len(request.prompt_token_ids) + len(choice.output_token_ids) - 1
        if tables.shares_last_block:
            copies += tables.unshare_last_block()
        elif position % self.layout.block_size == 0:
            tables.grow(position + 1)
        samples.append(self._sample_row(request, choice, len(sequences)))
        sequences.append(
            ScheduledSequence(choice.sequence_id, choice.output_token_ids[-1:], position, tables.tables)
        )

    def _schedule_prefills(self, sequences: list[ScheduledSequence], samples: list[SampleRow]) -> int:
        """Give what the decodes left of the token budget to prompts. Returns the tokens scheduled."""
        budget = self.max_num_batched_tokens - len(sequences)
        headroom = self.headroom_blocks
        scheduled = 0
        candidates = self._prefill_candidates()
        while scheduled < budget and (request := next(candidates, None)) is not None:
            tokens = self._chunk_tokens(request, budget - scheduled, headroom)
            headroom -= request.lease.borrowed
            self._schedule_chunk(request, tokens, sequences, samples)
            scheduled += tokens
        return scheduled

    def _prefill_candidates(self) -> Iterator[Request]:
        """Prompts under way, then waiting ones, started as they are drawn, while there are sequences left.

        A request with more choices than `max_num_seqs` runs when nothing else does.
        """
        yield from list(self._prefilling.values())
        while self._waiting:
            request = next(iter(self._waiting.values()))
            sequences = self.running_sequences + request.live_choices
            if sequences > self.max_num_seqs and self.running_sequences > 0:
                return
            del self._waiting[request.request_id]
            request.change_status(RequestStatus.RUNNING)
            self.waiting_sequences -= request.live_choices
            self.running_sequences = sequences
            self._prefilling[request.request_id] = request
            yield request

    def _chunk_tokens(self, request: Request, budget: int, headroom: int) -> int:
        """The length of a prompt's next chunk, at least 1; its lease borrows what the chunk needs.

        All groups grow by the same blocks. One token always fits the reservation: that is what it was priced
        for.
        """
        lease, have, block_size = request.lease, request.tables.num_blocks, self.layout.block_size
        groups = len(self.layout.groups)
        start = request.num_computed_tokens
        affordable = (lease.reserved + headroom - lease.held) // groups
        room = (have + affordable) * block_size - start
        tokens = min(budget, room, len(request.prompt_token_ids) - start)
        assert tokens > 0, f"{request.request_id} can't prefill within its reservation"
        blocks = -(-(start + tokens) // block_size) - have
        lease.borrowed = max(0, lease.held + blocks * groups - lease.reserved)
        return tokens

    def _schedule_chunk(
        self,
        request: Request,
        tokens: int,
        sequences: list[ScheduledSequence],
        samples: list[SampleRow],
    ) -> None:
        prompt, start = request.prompt_token_ids, request.num_computed_tokens
        end = start + tokens
        request.tables.grow(end)
        if end == len(prompt):
            samples += [self._sample_row(request, choice, len(sequences)) for choice in request.live()]
        wants_logprobs = request.params.prompt_logprobs is not None
        sequences.append(
            ScheduledSequence(
                sequence_id=request.sequence_id,
                token_ids=prompt[start:end],
                start=start,
                block_tables=request.tables.tables,
                prompt_logprobs=request.params.prompt_logprobs,
                next_prompt_token_id=prompt[end] if wants_logprobs and end < len(prompt) else None,
            )
        )

    def _sample_row(self, request: Request, choice: Choice, row: int) -> SampleRow:
        generated = len(choice.output_token_ids)
        return SampleRow(
            row=row,
            sequence_id=choice.sequence_id,
            choice=choice.index,
            position=generated,
            params=request.params,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=choice.output_token_ids,
            banned_token_ids=request.banned_token_ids if generated < request.params.min_tokens else (),
        )

    def _advance_prefill(self, request: Request, tokens: int) -> None:
        request.num_computed_tokens += tokens
        request.tables.trim(request.num_computed_tokens)
        request.lease.borrowed = 0

    def _take_token(self, sample: SampleRow, token_id: int, logprobs: TokenLogprobs | None) -> ChoiceOutput:
        request, choice = self._by_sequence[sample.sequence_id]
        choice.output_token_ids.append(token_id)
        generated = len(choice.output_token_ids)
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
        request.change_status(RequestStatus.FINISHED)
        assert request.lease.held == 0, f"{request.request_id} ended and holds {request.lease.held} blocks"
        self.reserved_blocks -= request.lease.reserved
        del self._requests[request.request_id]
        for queue in (self._waiting, self._prefilling, self._decoding):
            queue.pop(request.request_id, None)
        for choice in request.choices:
            del self._by_sequence[choice.sequence_id]
        self._released.append(request.request_id)

    def _check_books(self) -> None:
        held = 0
        for queue in (self._prefilling, self._decoding):
            for request in queue.values():
                lease = request.lease
                assert lease.held <= lease.reserved, f"{request.request_id} outgrew its reservation"
                held += lease.held
        assert held == self.pool.used, f"requests hold {held} blocks, the pool has given {self.pool.used}"
