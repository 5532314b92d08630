"""Who holds which block: the pool, what one request may take from it, and the tables of one sequence.

    BlockPool       every block of the KV tensor, free or held; a block is held once or shared
    BlockLease      one request's account with the pool: held <= reserved + borrowed, at every moment
    BlockTables     one sequence's blocks, a table per layer group

Every operation on a block is O(1). Mistakes (a double free, a block past the lease) are programmer errors and
assert.
"""

from __future__ import annotations

from model_runner.core.block_layout import BlockLayout

FREED = -1  # in a block table: a block that a sliding window has left behind


class BlockPool:
    """A free list and reference counts over blocks 0 … size - 1."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(
            range(size - 1, -1, -1)
        )  # a stack: low blocks first, and the last freed is the next used
        self._holders = [0] * size

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.size - len(self._free)

    def allocate(self) -> int:
        assert self._free, "an admitted request found the pool empty: reservations and blocks disagree"
        block = self._free.pop()
        self._holders[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more sequence holds the block."""
        assert self.holders(block) > 0, f"block {block} is free and can't be shared"
        self._holders[block] += 1

    def release(self, block: int) -> bool:
        """One sequence fewer holds the block. True when it was the last and the block is free now."""
        assert self.holders(block) > 0, f"block {block} is already free"
        self._holders[block] -= 1
        if self._holders[block]:
            return False
        self._free.append(block)
        return True

    def holders(self, block: int) -> int:
        assert 0 <= block < self.size, f"block {block} is not one of this pool's {self.size}"
        return self._holders[block]


class BlockLease:
    """What one request holds of the pool, each block counted once however many of its choices share it."""

    __slots__ = ("borrowed", "held", "pool", "reserved")

    def __init__(self, pool: BlockPool, reserved: int) -> None:
        self.pool = pool
        self.reserved = reserved
        self.borrowed = 0  # from the headroom, for the prefill chunk in flight
        self.held = 0

    def allocate(self) -> int:
        assert self.held < self.reserved + self.borrowed, "a request outgrew its reservation"
        self.held += 1
        return self.pool.allocate()

    def release(self, block: int) -> None:
        if self.pool.release(block):
            self.held -= 1


class BlockTables:
    """The blocks of one sequence. `tables[g][i]` holds tokens [i * block_size, (i + 1) * block_size) of layer
    group g, or is FREED. All tables are equally long."""

    __slots__ = ("_first_held", "block_size", "lease", "next_trim", "shares_last_block", "tables", "windows")

    def __init__(self, layout: BlockLayout, lease: BlockLease) -> None:
        self.lease = lease
        self.block_size = layout.block_size
        self.windows = [
            (g, group.window) for g, group in enumerate(layout.groups) if group.window is not None
        ]
        self.tables: list[list[int]] = [[] for _ in layout.groups]
        self.shares_last_block = False  # with other choices, so that a write must copy it first
        self._first_held = [0] * len(layout.groups)
        self.next_trim = self._find_next_trim()  # the position from which trim() has something to free

    @property
    def num_blocks(self) -> int:
        """Blocks per table, those left behind included."""
        return len(self.tables[0])

    def grow(self, tokens: int) -> None:
        """Make room for the first `tokens` tokens of the sequence."""
        missing = -(-tokens // self.block_size) - self.num_blocks
        for _ in range(missing):
            for table in self.tables:
                table.append(self.lease.allocate())

    def trim(self, position: int) -> None:
        """Free every block that the token at `position`, the next to run, can't see: all of it lies below
        position - window + 1."""
        for g, window in self.windows:
            table = self.tables[g]
            end = min(max(position - window + 1, 0) // self.block_size, len(table))
            for i in range(self._first_held[g], end):
                self.lease.release(table[i])
                table[i] = FREED
            self._first_held[g] = max(self._first_held[g], end)
        self.next_trim = self._find_next_trim()

    def fork(self, tokens: int) -> BlockTables:
        """A second holder of the same blocks, which hold `tokens` tokens."""
        twin = object.__new__(BlockTables)
        twin.lease, twin.block_size, twin.windows = self.lease, self.block_size, self.windows
        twin.tables = [table.copy() for table in self.tables]
        twin._first_held = self._first_held.copy()
        twin.next_trim = self.next_trim
        twin.shares_last_block = tokens % self.block_size != 0
        for table, first in zip(self.tables, self._first_held, strict=True):
            for block in table[first:]:
                self.lease.pool.share(block)
        return twin

    def unshare_last_block(self) -> list[tuple[int, int]]:
        """Make the last, partly filled block of every table this sequence's own, so that it may be written.

        Returns the (source, destination) copies to make. The last of its holders keeps the original,
        uncopied.
        """
        copies = []
        for table in self.tables:
            shared = table[-1]
            if self.lease.pool.holders(shared) > 1:
                table[-1] = self.lease.allocate()
                self.lease.release(shared)
                copies.append((shared, table[-1]))
        self.shares_last_block = False
        return copies

    def release(self) -> None:
        """Give back everything."""
        for g, table in enumerate(self.tables):
            for block in table[self._first_held[g] :]:
                self.lease.release(block)
            table.clear()
            self._first_held[g] = 0
        self.next_trim = self._find_next_trim()
        self.shares_last_block = False

    def _find_next_trim(self) -> int | None:
        # Block i of a group is out of sight once position - window + 1 reaches (i + 1) * block_size.
        return min(
            ((self._first_held[g] + 1) * self.block_size + window - 1 for g, window in self.windows),
            default=None,
        )
