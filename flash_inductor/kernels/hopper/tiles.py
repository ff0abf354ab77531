# mypy: disallow-untyped-defs=False, disable-error-code="call-arg"
"""Which tiles the forward has, which keys they see, and the shared memory that they go through."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .device import struct, tma_load

WARPGROUP_ROWS = gl.constexpr(64)


@struct
class Problem:
    """Sizes, known at run time, and choices, known at compile time: which tiles there are and which keys they see."""

    tiles: gl.tensor
    blocks_m: gl.tensor  # of a head
    head_set: gl.tensor  # query heads whose tiles come together, so that their keys and values stay in L2
    batch_heads: gl.tensor
    heads: gl.tensor
    group: gl.tensor  # query heads to a head of keys
    q_len: gl.tensor
    kv_len: gl.tensor
    lower: gl.tensor
    upper: gl.tensor
    HAS_LOWER: gl.constexpr
    HAS_UPPER: gl.constexpr
    WARPGROUPS: gl.constexpr
    BLOCK_N: gl.constexpr
    ROW_FASTEST: gl.constexpr

    @gluon.jit
    def place(self, index):
        """First row, batch entry and head of a tile."""
        in_set = self.head_set * self.blocks_m
        first_head = index // in_set * self.head_set
        rest = index % in_set
        if self.ROW_FASTEST:
            block = rest % self.blocks_m
            head = first_head + rest // self.blocks_m
        else:
            count = gl.minimum(self.head_set, self.batch_heads - first_head)
            block = rest // count
            head = first_head + rest % count
        if self.HAS_UPPER:
            block = self.blocks_m - 1 - block  # the longest first
        return block * (WARPGROUP_ROWS * self.WARPGROUPS), head // self.heads, head % self.heads

    @gluon.jit
    def keys(self, row, ROWS: gl.constexpr):
        """[begin, end) in keys, whole blocks and at least one, of what the rows [row, row + ROWS) see."""
        end = ((self.kv_len + self.BLOCK_N - 1) // self.BLOCK_N) * self.BLOCK_N
        begin = end * 0
        if self.HAS_UPPER:
            seen = gl.minimum(row + ROWS, self.q_len) + self.upper
            blocks = (seen + self.BLOCK_N - 1) // self.BLOCK_N
            end = gl.minimum(end, gl.maximum(blocks, 1) * self.BLOCK_N)
        if self.HAS_LOWER:
            first = gl.maximum(row + self.lower, 0) // self.BLOCK_N * self.BLOCK_N
            begin = gl.minimum(first, end - self.BLOCK_N)
        return begin, end

    @gluon.jit
    def uncut(self, row, begin, end):
        """[first, last) of the blocks, counted from ``end``, that all of 64 rows see whole; the first never is."""
        blocks = (end - begin) // self.BLOCK_N
        first = blocks * 0 + 1
        if self.HAS_UPPER:
            cut = (end - gl.maximum(row + self.upper + 1, 0) + self.BLOCK_N - 1) // self.BLOCK_N
            first = gl.minimum(gl.maximum(cut, 1), blocks)
        last = blocks
        if self.HAS_LOWER:
            whole = (end - gl.maximum(row + WARPGROUP_ROWS - 1 + self.lower, 0)) // self.BLOCK_N
            last = gl.minimum(gl.maximum(whole, first), blocks)
        return first, last


@struct
class Ring:
    """Tiles that the load partition fills and the others release, each with its two barriers.

    The phase is the parity of how often the slot was used before.
    """

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    ROWS: gl.constexpr
    COLS: gl.constexpr

    @gluon.jit
    def load(self, desc, batch, head, row, slot, phase):
        mbarrier.wait(self.empty.index(slot), phase ^ 1)
        mbarrier.expect(self.full.index(slot), self.ROWS * self.COLS * 2)
        tma_load(desc, [batch, head, row, 0], self.full.index(slot), self.tiles.index(slot))

    @gluon.jit
    def wait(self, slot, phase):
        mbarrier.wait(self.full.index(slot), phase)

    @gluon.jit
    def release(self, slot):
        mbarrier.arrive(self.empty.index(slot), count=1)

    @gluon.jit
    def tile(self, slot):
        return self.tiles.index(slot).reshape([self.ROWS, self.COLS])


@gluon.jit
def make_ring(desc, SLOTS: gl.constexpr, READERS: gl.constexpr):
    """A ring of ``SLOTS`` tiles in boxes of a descriptor, each released by ``READERS`` warpgroups."""
    rows: gl.constexpr = desc.block_shape[2]
    cols: gl.constexpr = desc.block_shape[3]
    tiles = gl.allocate_shared_memory(desc.dtype, [SLOTS, 1, 1, rows, cols], desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return Ring(tiles, full, empty, rows, cols)


@struct
class Memory:
    """What is in shared memory.  ``key`` and ``value`` are rings of STAGES, ``query`` has a slot for each warpgroup.

    ``next`` are two slots for the number of the next tile, ``out`` the tiles that go out, which may be ``query``'s.
    """

    query: Ring
    key: Ring
    value: Ring
    next: gl.shared_memory_descriptor
    next_full: gl.shared_memory_descriptor
    next_empty: gl.shared_memory_descriptor
    out: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.jit
    def slot(self, n):
        """Slot and phase of the n-th tile of keys or values."""
        return n % self.STAGES, (n // self.STAGES) & 1

    @gluon.jit
    def pass_over(self, n):
        """Release a tile of keys and of values unread; not before it is there, or the barrier would count it early."""
        slot, phase = self.slot(n)
        self.key.wait(slot, phase)
        self.key.release(slot)
        self.value.wait(slot, phase)
        self.value.release(slot)

    @gluon.jit
    def give_tile(self, index, turn):
        mbarrier.wait(self.next_empty.index(turn & 1), ((turn >> 1) & 1) ^ 1)
        one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        self.next.index(turn & 1).store(gl.full([1], index, gl.int32, one))
        mbarrier.arrive(self.next_full.index(turn & 1), count=1)

    @gluon.jit
    def take_tile(self, turn):
        mbarrier.wait(self.next_full.index(turn & 1), (turn >> 1) & 1)
        index = gl.max(self.next.index(turn & 1).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        mbarrier.arrive(self.next_empty.index(turn & 1), count=1)
        return index
