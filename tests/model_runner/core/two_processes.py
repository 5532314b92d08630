"""Ledger, queue, scheduler and block pool under every crossing of messages between the two processes.

The API process is its real Dispatcher and AdmissionController; the engine process is its real EngineCore
with a runner that counts. Between them are two mailboxes, from which hypothesis delivers one message at a
time, when it likes: aborts cross finishes, admissions cross crashes, dead engines' words arrive late. After
every event the invariants of the design hold, and at the end everything comes to rest: every request has
ended once, nothing is reserved or held.
"""

from __future__ import annotations

import random
from collections import deque

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from model_runner.core.admission import AdmissionController
from model_runner.core.dispatcher import Dispatcher
from model_runner.core.lengths import Lengths
from model_runner.core.live_request import Submission
from model_runner.core.pace import Pace
from model_runner.core.policy import Policy, Predictive, Strict
from model_runner.engine import EngineCore
from model_runner.errors import KVCacheBudgetExceeded, LoadError
from model_runner.messages import (
    Abort,
    StepDone,
    Submit,
    ToEngine,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from model_runner.types import FinishReason, SamplingParams
from tests.model_runner.core.always_holds import AlwaysHolds
from tests.model_runner.core.witnesses import (
    EOS,
    Client,
    CountingRunner,
    Observer,
    check_retry,
    make_layout,
    the_advice_is_right,
    what_was_finished_is_whole,
)

MAX_NUM_BATCHED_TOKENS, MAX_MODEL_LEN, MAX_QUEUE_SECONDS = 9, 64, 20.0
WINDOWS = st.sampled_from([None, 1, 5, 9])


class TwoProcesses(AlwaysHolds):
    """`engine` is None when there is none; `epoch` is that of the last one that was started."""

    @initialize(
        window=WINDOWS, num_blocks=st.integers(8, 40), max_num_seqs=st.integers(1, MAX_NUM_BATCHED_TOKENS)
    )
    def begin(self, window: int | None, num_blocks: int, max_num_seqs: int) -> None:
        self.layout = make_layout(window)
        self.num_blocks, self.max_num_seqs = num_blocks, max_num_seqs
        self.now, self.reserved_block_seconds = 100.0, 0.0
        self.observer = Observer()
        self.admission = AdmissionController(
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_queue_requests=self.max_queue_requests,
            max_queue_seconds=MAX_QUEUE_SECONDS,
            pace=Pace(decode_step_seconds=0.1, prefill_tokens_per_second=100.0),
            policy=self.make_policy(),
            lengths=self.lengths,
        )
        self.dispatcher = Dispatcher(self.layout, self.admission, self.observer, self.send)
        self.clients: list[Client] = []
        self.epoch = 0
        self.dice = random.Random(0)
        self.death_noticed = True
        self.preempted = 0
        self.engine: EngineCore | None = None
        self.to_engine: deque[bytes] = deque()
        self.to_api: deque[bytes] = deque()
        self.start_engine()

    def make_policy(self) -> Policy:
        self.lengths: Lengths | None = None
        if not self.predictive:
            return Strict()
        self.lengths = Lengths(MAX_MODEL_LEN)
        return Predictive(self.layout, self.lengths, num_blocks=self.num_blocks, overflow_risk=0.2)

    def send(self, message: ToEngine) -> None:
        assert not self.death_noticed, "a message to an engine that is known to be dead"
        if isinstance(message, Submit):
            request, _ = self.dispatcher._parts[message.request_id]
            serial = int(request.ask.ask_id)
            assert serial >= self.last_launched, "one has overtaken another"
            self.last_launched = serial
            if not request.deaths:
                assert self.now < request.arrived_at + MAX_QUEUE_SECONDS, "let in after its deadline"
        self.to_engine.append(encode(message))

    # ---- clients

    @property
    def living(self) -> list[Client]:
        return [client for client in self.clients if not client.endings]

    @rule(
        prompts=st.lists(st.integers(1, 12), min_size=1, max_size=2),
        max_tokens=st.integers(1, 12),
        n=st.integers(1, 3),
        streaming=st.booleans(),
        stop_strings=st.booleans(),
    )
    def one_arrives(
        self, prompts: list[int], max_tokens: int, n: int, streaming: bool, stop_strings: bool
    ) -> None:
        self.arrive(prompts, max_tokens, n, streaming, stop_strings)

    @rule(crowd=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=2, max_size=6))
    def a_crowd_arrives(self, crowd: list[tuple[int, int]]) -> None:
        for prompt, max_tokens in crowd:
            self.arrive([prompt], max_tokens, 1, streaming=False)

    def arrive(
        self, prompts: list[int], max_tokens: int, n: int, streaming: bool, stop_strings: bool = False
    ) -> None:
        if n > self.max_num_seqs or self.death_noticed:
            return  # refused before it comes to the dispatcher
        params = SamplingParams(max_tokens=max_tokens, n=n)
        submission = Submission("r", [[5] * length for length in prompts], params, streaming, stop_strings)
        client = Client(submission)
        price = sum(self.layout.request_blocks(length, max_tokens, n) for length in prompts)
        never_fits = price > self.num_blocks
        try:
            client.request = self.dispatcher.submit(submission, client, self.now)
        except KVCacheBudgetExceeded as error:
            assert never_fits
            the_advice_is_right(error, self.layout, self.num_blocks, prompts, n)
        except LoadError as error:
            assert not never_fits
            check_retry(error)
        else:
            assert not never_fits
            assert client.request.projected_bytes == price * self.layout.block_bytes
            self.clients.append(client)

    @rule(which=st.integers(0, 9), again=st.booleans())
    def abort(self, which: int, again: bool) -> None:
        """Clients that have had their ending try it too."""
        among = self.clients if again else self.living
        if not among:
            return
        client = among[which % len(among)]
        alive = not client.endings
        self.dispatcher.abort(client.request, "client_disconnected", self.now)
        client.aborted |= alive
        assert client.endings == 1

    @precondition(lambda self: self.dispatcher.num_live)
    @rule(data=st.data())
    def stop_string_matches(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.living))
        seen = sorted(key for key, tokens in client.collected.items() if tokens)
        if client.request.restart_unseen:
            self.dispatcher.stop(client.request, 0, 0, 1, self.now)  # it speaks of the run that is void
            assert (
                client.request.choices[0].finish_reason is not FinishReason.STOP or (0, 0) in client.finished
            )
            return
        if not seen:
            return
        prompt_index, choice = data.draw(st.sampled_from(seen))
        client.stopped.add((prompt_index, choice))
        self.dispatcher.stop(client.request, prompt_index, choice, 1, self.now)

    @property
    def unread(self) -> list[Client]:
        return [client for client in self.clients if client.request.unsaid is not None]

    @precondition(lambda self: self.unread)
    @rule(data=st.data(), matches=st.booleans())
    def the_end_is_read(self, data: st.DataObject, matches: bool) -> None:
        """Long after the engine has finished it; a stop string may be in its last tokens."""
        client = data.draw(st.sampled_from(self.unread))
        matches &= not client.request.restart_unseen
        if matches:
            client.stopped.add((0, 0))
            self.dispatcher.stop(client.request, 0, 0, 1, self.now)
        self.dispatcher.read_to_end(client.request)
        assert client.request.unsaid is None
        ending = self.observer.endings[-1]
        assert (ending.reason == "length") == (client.request.how_finished is FinishReason.LENGTH)

    @precondition(lambda self: self.dispatcher.num_live)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.living))
        unseen = client.request.restart_unseen
        if client.collected or unseen:
            self.dispatcher.delivering(client.request, self.now)
            assert client.endings == unseen

    @precondition(lambda self: self.dispatcher.num_live)
    @rule(data=st.data())
    def see_restart(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.living))
        self.dispatcher.restart_seen(client.request)

    @rule(seconds=st.sampled_from([0.1, 1.0, 7.0, 21.0]), tick=st.booleans())
    def time_passes(self, seconds: float, tick: bool) -> None:
        self.pass_time(seconds)
        if tick:
            self.dispatcher.expire(self.now)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.reserved_block_seconds += self.admission.reserved_blocks * seconds

    # ---- messages and steps

    @rule(
        order=st.lists(st.sampled_from(["engine_receives", "engine_steps", "api_receives"]), min_size=1),
        dice=st.integers(0, 2**16),
    )
    def both_work(self, order: list[str], dice: int) -> None:
        """In any order: many small events, each of them looked at."""
        self.dice.seed(dice)
        for event in order:
            getattr(self, event)()
            self.look()

    @rule(rounds=st.integers(1, 12), lag=st.integers(0, 3), dice=st.integers(0, 2**16))
    def engine_runs_ahead(self, rounds: int, lag: int, dice: int) -> None:
        """As it mostly is: the engine takes what has come and steps, and is heard `lag` words late."""
        self.dice.seed(dice)
        for _ in range(rounds):
            while self.engine and self.to_engine:
                self.engine_receives()
            self.engine_steps()
            self.look()
            while len(self.to_api) > lag:
                self.api_receives()
                self.look()

    def engine_receives(self) -> None:
        if self.engine is None or not self.to_engine:
            return
        message = decode_to_engine(self.to_engine.popleft())
        if isinstance(message, Submit):
            self.engine.submit(message)
        else:
            assert isinstance(message, Abort)
            self.engine.abort(message.request_id, message.choice)

    def engine_steps(self) -> None:
        if self.engine is None:
            return
        result = self.engine.step()
        if result is not None:
            stats = result.stats(0.1)
            self.preempted += len(result.preempted)
            step = result.message(self.epoch, stats)
        else:
            step = StepDone(self.epoch, [], self.engine.drain(), None)
        if step.stats or step.released:
            self.to_api.append(encode(step))

    def api_receives(self) -> None:
        if not self.to_api:
            return
        step = decode_from_engine(self.to_api.popleft())
        assert isinstance(step, StepDone)
        reserved = self.admission.reserved_blocks
        current = step.epoch == self.dispatcher.epoch
        self.pass_time(0.001)
        self.dispatcher.step_done(step, self.now)
        for client in self.living:
            if client.submission.streaming and client.collected:
                self.dispatcher.restart_seen(client.request)
                self.dispatcher.delivering(client.request, self.now)
        if not current:
            assert self.admission.reserved_blocks == reserved, "a dead engine's word has moved the ledger"

    # ---- deaths and births

    @precondition(lambda self: self.engine and self.admission.reservations())
    @rule()
    def engine_crashes(self) -> None:
        self.engine = None
        self.to_engine.clear()

    @precondition(lambda self: not self.engine and not self.death_noticed)
    @rule()
    def death_is_noticed(self) -> None:
        self.to_engine.clear()
        self.death_noticed = True
        self.dispatcher.engine_died(self.now)
        assert self.admission.reserved_blocks == 0

    @precondition(lambda self: not self.engine and self.death_noticed)
    @rule()
    def engine_starts(self) -> None:
        self.start_engine()

    def start_engine(self) -> None:
        self.engine = EngineCore(
            self.layout,
            CountingRunner(self.dice),
            num_blocks=self.num_blocks,
            headroom_blocks=self.layout.headroom_blocks(MAX_NUM_BATCHED_TOKENS),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            eos_token_ids=(EOS,),
            max_model_len=MAX_MODEL_LEN,
            grows=self.predictive,
        )
        self.epoch += 1
        self.death_noticed = False
        self.last_launched = 0  # by this engine's time
        self.dispatcher.engine_ready(self.epoch, self.now)

    def teardown(self) -> None:
        """Let everything come to rest, and look at what is left."""
        if not hasattr(self, "dispatcher"):
            return
        for client in self.clients:
            self.dispatcher.restart_seen(client.request)
        for _ in range(10_000):
            if self.engine is None:
                if not self.death_noticed:
                    self.death_is_noticed()
                self.engine_starts()
            assert self.engine is not None
            if self.to_engine:
                self.engine_receives()
            elif self.to_api:
                self.api_receives()
            elif self.engine.has_work or self.admission.reservations():
                self.engine_steps()
                assert self.to_api, "something is reserved, and the engine has nothing to say"
            else:
                break
            self.look()
        assert self.engine is not None
        self.engine.check_idle()
        assert self.dispatcher.num_live == 0
        assert (self.admission.reserved_blocks, self.admission.queued_blocks) == (0, 0)
        assert (self.dispatcher.used_blocks, self.admission.queue_length) == (0, 0)
        if self.predictive:
            assert self.admission.policy.predicted_peak_blocks == 0.0
        for client in self.clients:
            self.dispatcher.read_to_end(client.request)
        assert not self.unread
        self.every_request_ends_once()
        what_was_finished_is_whole(self.clients)
