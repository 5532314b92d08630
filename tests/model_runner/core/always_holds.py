"""What holds after every event, whatever the two processes have been through."""

from __future__ import annotations

import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant

from model_runner.core.admission import AdmissionController
from model_runner.core.block_layout import BlockLayout
from model_runner.core.dispatcher import Dispatcher
from model_runner.engine import EngineCore
from tests.model_runner.core.witnesses import Client, Observer


class AlwaysHolds(RuleBasedStateMachine):
    """The state of both processes, and its invariants."""

    predictive = False
    max_queue_requests = 4
    reserved_block_seconds: float  # that the ledger has shown so far
    layout: BlockLayout
    num_blocks: int
    max_num_seqs: int
    admission: AdmissionController
    dispatcher: Dispatcher
    observer: Observer
    clients: list[Client]
    engine: EngineCore | None
    death_noticed: bool
    now: float

    def look(self) -> None:
        self.the_ledger_is_the_sum_of_its_reservations()
        self.no_request_holds_more_than_it_has_reserved()
        self.every_request_ends_once()
        self.byte_seconds_are_what_was_reserved()
        self.the_queue_is_bounded_and_its_head_can_run()

    @invariant()
    def the_ledger_is_the_sum_of_its_reservations(self) -> None:
        reservations = self.admission.reservations()
        assert 0 <= self.admission.reserved_blocks == sum(reservations.values()) <= self.num_blocks
        assert 0 <= self.admission.reserved_sequences <= self.max_num_seqs
        assert bool(reservations) == bool(self.admission.reserved_sequences)

    @invariant()
    def no_request_holds_more_than_it_has_reserved(self) -> None:
        if self.engine is None:
            return
        scheduler = self.engine.scheduler
        leases = {request_id: request.lease for request_id, request in scheduler._requests.items()}
        for lease in leases.values():
            assert 0 <= lease.held <= lease.reserved + lease.borrowed
        assert sum(lease.held for lease in leases.values()) == scheduler.pool.used
        assert sum(lease.borrowed for lease in leases.values()) <= scheduler.headroom_blocks
        assert scheduler.reserved_blocks <= self.num_blocks
        if self.predictive:
            return  # grants are the engine's: the ledger hears of them by and by
        # What the engine has, the ledger has reserved, block for block: bytes are never given away twice.
        reservations = self.admission.reservations()
        for request_id, lease in leases.items():
            assert reservations[request_id] == lease.reserved

    @invariant()
    def every_request_ends_once(self) -> None:
        ended = sum(client.endings for client in self.clients)
        assert ended == len(self.observer.endings) + len(self.unread)
        assert self.observer.accepted == len(self.clients) == ended + self.dispatcher.num_live
        for client in self.clients:
            assert client.request.ended == bool(client.endings)

    @invariant()
    def byte_seconds_are_what_was_reserved(self) -> None:
        held = sum(one.block_seconds(self.now) for one in self.admission.ledger.reservations.values())
        assert held + self.observer.block_seconds(self.layout) == pytest.approx(self.reserved_block_seconds)

    @invariant()
    def the_queue_is_bounded_and_its_head_can_run(self) -> None:
        queued = self.admission.queued_ask_ids(self.now)
        again = sum(client.request.deaths > 0 for client in self.clients)
        assert len(queued) <= self.max_queue_requests + again
        waiting = [c.request for c in self.clients if not c.request.ended and not c.request.running]
        assert sorted(request.ask.ask_id for request in waiting) == sorted(queued)
        assert self.admission.queued_blocks == sum(request.ask.blocks for request in waiting)
        assert all(request.ask.blocks <= self.num_blocks for request in waiting)
        if queued and not self.death_noticed and not self.predictive:
            head = next(request for request in waiting if request.ask.ask_id == queued[0])
            blocks_free = head.ask.blocks <= self.admission.free_blocks
            places = min(head.ask.sequences, self.max_num_seqs)
            places_free = self.admission.reserved_sequences + places <= self.max_num_seqs
            assert not (blocks_free and places_free), "there is room, and the head of the queue waits"
