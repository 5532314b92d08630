"""What each request of the engine has been granted of the block pool, and what happens when it runs short.

Strict: the door has reserved a request's whole lifetime, which is granted when it comes; nothing else ever
happens here. Predictive: the door has only foreseen that it will fit. A request is granted its prompt when it
starts, and then every block before the step that writes it, so the pool can run short. Work is then kept, in
this order:

1. Nobody new is started.
2. Blocks go to the senior first. Those that get none are put **on hold**: they keep what they have, and go on
   as soon as others release.
3. When holding has cost about as much time as computing the newest again would, or when nothing else could
   run, the newest is **preempted**: its blocks go back, its tokens are kept, and it is computed again later.

Someone can always finish. No request's lifetime is larger than the pool, so the most senior could be given
everything; it is denied a block only while others hold them, and each of those can be preempted but one that
has been before and has drawn no token since. Such a one has all the blocks for its next token already, draws
it without any growth, and can be preempted from then on. (`can_all_finish` checks a state as Dijkstra's
banker does; the tests ask it after every event.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal, TypeAlias

from model_runner.core.block_layout import BlockLayout
from model_runner.core.request import Request

# A held sequence loses about the time in which so many tokens are computed again: a step's time is shared by
# the sequences of its batch, and a prompt's tokens go through by the thousand. Waiting until the loss equals
# the price of the alternative costs at most twice what knowing the future would (the ski-rental bound).
_TOKENS_PER_HELD_STEP = 8
# Near the line a sequence takes a block only if so many are left for each of its seniors. The fewer are free,
# the fewer go on, and the longer those do: someone's end comes before the last block more often than not.
# A senior that comes to its limit before needs none, and if all may run to theirs, nobody is held at all.
_BLOCKS_FOR_EACH_BEFORE = 1
# After a preemption nobody is started again until this many steps' growth of all who run is free.
_CALM_STEPS = 16


# What is done before the pool runs out. "hold early": the newest are held while there is still something left
# for their seniors. The others are for policies to compare with: "hold", once nothing is left, which does for
# one that never lets in too many; "preempt", at once, as engines do that admit greedily.
WhenShort: TypeAlias = Literal["hold early", "hold", "preempt"]


class Growth:
    """Holds `sum of grants == granted_blocks <= num_blocks`."""

    def __init__(
        self, layout: BlockLayout, num_blocks: int, *, grows: bool, when_short: WhenShort = "hold early"
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.grows = grows
        self.granted_blocks = 0
        self.on_hold: list[Request] = []  # in the step that is being put together
        self._patient = when_short != "preempt"
        self._early = when_short == "hold early"
        self._changes: dict[str, int] = {}
        self._tokens_lost = 0
        self._calm_needed = False

    @property
    def free_blocks(self) -> int:
        return self.num_blocks - self.granted_blocks

    def grant(self, request: Request, blocks: int) -> None:
        """From now on it may hold so many. 0 when it has left or was preempted."""
        if blocks == request.lease.reserved:
            return
        self.granted_blocks += blocks - request.lease.reserved
        assert self.granted_blocks <= self.num_blocks, "more blocks are granted than there are"
        request.lease.reserved = blocks
        if self.grows:
            self._changes[request.request_id] = blocks

    def take_changes(self) -> list[tuple[str, int]]:
        """(request id, blocks granted) of all whose grant has changed since the last call."""
        changes, self._changes = self._changes, {}
        return list(changes.items())

    def may_start(self, request: Request, running: Collection[Request]) -> bool:
        """Grant a waiting request what its next token needs, if that is free."""
        if not self.grows:
            return True
        if self.on_hold:
            return False
        blocks = self.blocks_to_start(request)
        calm = self._blocks_soon(running) if self._calm_needed else 0
        if blocks + calm > self.free_blocks and (running or blocks > self.free_blocks):
            return False
        self._calm_needed = False
        self.grant(request, blocks)
        return True

    def blocks_to_start(self, request: Request) -> int:
        """What its prompt and, once preempted, all that its live choices have drawn will hold."""
        # With the last token it has drawn: once it has come so far, the next is drawn without any growth.
        output = request.longest_output + 1
        return self.layout.request_blocks(len(request.prompt_token_ids), output, request.live_choices)

    def settle(
        self, decoding: Iterable[Request], others: Sequence[Request], preempt: Callable[[Request], None]
    ) -> list[Request]:
        """Grant the next token of those that decode. Returns the ones that may run this step.

        `others` hold blocks too, and need none now. `preempt` must take a request's blocks back.
        """
        self.on_hold = []
        if not self.grows:
            return list(decoding)
        candidates = list(decoding)
        wanted: dict[str, int] = {}
        missing = 0
        for request in candidates:
            blocks = self._next_blocks(request)
            if blocks > request.lease.reserved:
                wanted[request.request_id] = blocks
                missing += blocks - request.lease.reserved
            else:
                self.grant(request, blocks)
        sequences = sum(request.live_choices for request in candidates)
        if missing + self._reserve(sequences) <= self.free_blocks:
            self._tokens_lost = 0
            self._grant_all(candidates, wanted)
            return candidates
        return self._share(candidates, wanted, others, preempt)

    def _share(
        self,
        candidates: list[Request],
        wanted: dict[str, int],
        others: Sequence[Request],
        preempt: Callable[[Request], None],
    ) -> list[Request]:
        """There may be too little for all of them. Returns those that may run."""
        to_come = {request.request_id: self._blocks_to_come(request) for request in [*candidates, *others]}
        if sum(to_come.values()) <= self.free_blocks:
            # The pool is enough even if everyone runs to the limit: there is nothing to be careful about.
            self._tokens_lost = 0
            self._grant_all(candidates, wanted)
            return candidates
        candidates.sort(key=_seniority)
        able = self._grant_by_seniority(candidates, wanted, to_come)
        self._tokens_lost += _TOKENS_PER_HELD_STEP * len(self.on_hold)
        holders = sorted([*candidates, *others], key=_seniority)
        while self.on_hold:
            stuck = not able and not others
            victim = self._victim(holders)
            if victim is None:
                assert not stuck, "nobody can run and nobody can be preempted"
                break
            if self._patient and not stuck and self._tokens_lost < _cost(victim):
                break
            preempt(victim)
            holders.remove(victim)
            others = [request for request in others if request is not victim]
            candidates = [request for request in candidates if request is not victim]
            self._tokens_lost = 0
            self._calm_needed = True
            able = self._grant_by_seniority(candidates, wanted, to_come)
        return able

    def _grant_by_seniority(
        self, candidates: list[Request], wanted: dict[str, int], to_come: dict[str, int]
    ) -> list[Request]:
        """`to_come`: blocks that each may still want, from before this step."""
        able, self.on_hold = [], []
        before = 0
        for request in candidates:
            blocks = wanted.get(request.request_id, request.lease.reserved)
            more = blocks - request.lease.reserved
            left = to_come[request.request_id] - more
            if more <= 0:
                able.append(request)
            elif more + before <= self.free_blocks:
                self.grant(request, blocks)
                able.append(request)
            else:
                self.on_hold.append(request)
            before += min(self._reserve(request.live_choices), max(left, 0))
        return able

    def _grant_all(self, candidates: list[Request], wanted: dict[str, int]) -> None:
        for request in candidates:
            blocks = wanted.get(request.request_id)
            if blocks is not None:
                self.grant(request, blocks)

    def _reserve(self, sequences: int) -> int:
        """Blocks to leave for so many sequences, if they may still want them."""
        return _BLOCKS_FOR_EACH_BEFORE * sequences * len(self.layout.groups) if self._early else 0

    def _victim(self, holders: Sequence[Request]) -> Request | None:
        """Whose preemption costs least, of the newer half of those of the lowest priority; when none of them
        may be preempted, the newest that may. Never the most senior: it would give its blocks to itself.

        It must give back enough for a while, or the next would follow at once.
        """
        able = [r for r in holders[1:] if r.generated_tokens >= r.protected_until]
        if not able:
            return None
        if not self._patient:
            return able[-1]
        lowest = able[-1].seniority[0]
        newer = [request for request in able[len(able) // 2 :] if request.seniority[0] == lowest]
        enough = len(holders) * len(self.layout.groups) // 4
        ample = [request for request in newer if request.lease.held >= enough]
        return min(ample, key=_cost, default=able[-1])

    def _next_blocks(self, request: Request) -> int:
        """What it must be granted to write one more token of every live choice."""
        prompt, groups, block_size = (
            len(request.prompt_token_ids),
            len(self.layout.groups),
            self.layout.block_size,
        )
        blocks, shares = request.lease.held, False
        for choice in request.live():
            assert choice.tables is not None
            shares = shares or choice.tables.shares_last_block
            if (prompt + len(choice.output_token_ids) - 1) % block_size == 0:
                blocks += groups
        # What the copies of a shared last block need was granted with the prompt.
        return max(blocks, request.lease.reserved) if shares else blocks

    def _blocks_to_come(self, request: Request) -> int:
        """What it may still want, at most: up to the limit of every live choice."""
        prompt, limit = len(request.prompt_token_ids), request.max_output_tokens
        lifetime = self.layout.request_blocks(prompt, limit, request.live_choices)
        return max(lifetime - request.lease.reserved, 0)

    def _blocks_soon(self, running: Collection[Request]) -> int:
        growth = _CALM_STEPS * len(self.layout.groups) / self.layout.block_size
        return -int(-growth * sum(request.live_choices for request in running) // 1)


def can_all_finish(free_blocks: int, claims: Iterable[tuple[int, int]]) -> bool:
    """Dijkstra's banker: is there an order in which all finish, each giving back what it holds?

    `claims` are (blocks held, blocks it may still want at most). Once the smallest claim can't be met, none
    can; so the order of rising claims finds one if there is one.

    Source: E. W. Dijkstra, "Cooperating sequential processes" (1965), section 6.3.
    """
    for held, claim in sorted(claims, key=lambda pair: pair[1]):
        if claim > free_blocks:
            return False
        free_blocks += held
    return True


def _cost(request: Request) -> int:
    """Tokens that must be computed again if it is preempted."""
    return request.num_computed_tokens + request.generated_tokens


def _seniority(request: Request) -> tuple[int, int]:
    return request.seniority
