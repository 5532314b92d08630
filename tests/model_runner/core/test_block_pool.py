from __future__ import annotations

import pytest

from model_runner.core.block_pool import FREED, BlockLease, BlockPool, BlockTables
from tests.model_runner.core.fake_runner import layout_with


def make_tables(windows: list[int | None], block_size: int = 4, reserved: int = 100) -> BlockTables:
    return BlockTables(layout_with(windows, block_size), BlockLease(BlockPool(100), reserved))


def test_blocks_come_and_go() -> None:
    pool = BlockPool(3)
    blocks = [pool.allocate() for _ in range(3)]
    assert sorted(blocks) == [0, 1, 2]
    assert (pool.used, pool.free) == (3, 0)
    assert pool.release(blocks[1])
    assert pool.allocate() == blocks[1]


def test_a_shared_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.share(block)
    assert pool.holders(block) == 2
    assert not pool.release(block)
    assert pool.used == 1
    assert pool.release(block)
    assert pool.used == 0


def test_mistakes_assert() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    with pytest.raises(AssertionError, match="pool empty"):
        pool.allocate()
    with pytest.raises(AssertionError, match="not one of this pool's"):
        pool.release(1)
    with pytest.raises(AssertionError, match="not one of this pool's"):
        pool.release(FREED)
    pool.release(block)
    with pytest.raises(AssertionError, match="already free"):
        pool.release(block)
    with pytest.raises(AssertionError, match="can't be shared"):
        pool.share(block)


def test_a_lease_ends_at_its_reservation_and_what_it_borrows() -> None:
    lease = BlockLease(BlockPool(10), reserved=2)
    blocks = [lease.allocate(), lease.allocate()]
    with pytest.raises(AssertionError, match="outgrew its reservation"):
        lease.allocate()
    lease.borrowed = 1
    lease.allocate()
    assert lease.held == lease.pool.used == 3
    lease.pool.share(blocks[0])
    lease.release(blocks[0])
    assert lease.held == 3  # the other holder still has it
    lease.release(blocks[0])
    assert lease.held == 2


def test_tables_grow_by_whole_blocks_in_every_group() -> None:
    tables = make_tables([None, 4])
    tables.grow(4)
    assert tables.num_blocks == 1
    tables.grow(5)
    tables.grow(8)
    assert [len(table) for table in tables.tables] == [2, 2]
    assert tables.lease.held == 4


def test_trim_frees_what_the_next_token_cannot_see_and_nothing_else() -> None:
    tables = make_tables([None, 6, 3])
    tables.grow(16)
    full, six, three = tables.tables
    assert tables.next_trim == 6  # position 6, window 3, sees 4 … 6: block 0 is out of sight
    tables.trim(5)
    assert FREED not in three
    tables.trim(6)
    assert [block == FREED for block in three] == [True, False, False, False]
    assert FREED not in six
    assert tables.next_trim == 9  # window 6 sees 4 … 9
    tables.trim(13)  # sees 8 … 13 and 11 … 13
    assert [block == FREED for block in six] == [True, True, False, False]
    assert [block == FREED for block in three] == [True, True, False, False]
    assert FREED not in full
    assert tables.lease.held == 4 + 2 + 2
    tables.release()
    assert tables.lease.held == tables.lease.pool.used == 0


def test_a_window_of_one_keeps_nothing_behind() -> None:
    tables = make_tables([1])
    tables.grow(8)
    tables.trim(8)  # the next token starts a block of its own
    assert tables.lease.held == 0
    tables.grow(9)
    assert tables.lease.held == 1


def test_forks_share_and_all_but_the_last_copy_the_partial_block() -> None:
    trunk = make_tables([None, 6])
    trunk.grow(10)
    originals = [table[-1] for table in trunk.tables]
    trunk.trim(10)
    held = trunk.lease.held
    forks = [trunk.fork(10) for _ in range(3)]
    trunk.release()
    assert trunk.lease.held == held
    copies = [fork.unshare_last_block() for fork in forks]
    assert [len(copied) for copied in copies] == [2, 2, 0]
    assert all([source for source, _ in copied] == originals for copied in copies[:2])
    assert [table[-1] for table in forks[2].tables] == originals
    assert trunk.lease.held == held + 4
    assert len({table[-1] for fork in forks for table in fork.tables}) == 6
    assert not any(fork.shares_last_block for fork in forks)
    for fork in forks:
        fork.release()
    assert trunk.lease.pool.used == 0


def test_forks_of_whole_blocks_have_nothing_to_copy() -> None:
    trunk = make_tables([None])
    trunk.grow(8)
    assert not trunk.fork(8).shares_last_block
