# mypy: disallow-untyped-defs=False, disable-error-code="call-arg"
"""Attention forward on Hopper.

One persistent block of threads on each multiprocessor, split by warps: one warp loads, two or three warpgroups of 64
query rows each compute.  They share the tiles of keys and values:

    load         K0 V0 | K1 V1 | K2 V2 | ...            TMA into rings of STAGES tiles, the next tile's Q, K, V too
    warpgroup 0  S0 softmax0 | S1 + O0 softmax1 | ...   S(j) = Q K(j)^T is issued together with O += P(j-1) V(j-1),
    warpgroup 1     S0 softmax0 | S1 + O0 softmax1 ...  which is in flight while softmax(j) is computed

Blocks of keys are visited from the right: those cut by ``upper`` first, then whole ones, then those cut by ``lower``,
in three loops, so that whole blocks pay for no mask.  A warpgroup passes over blocks that only others of its tile see.

With PING_PONG warpgroups take turns at each block: one issues its products while the others are in softmax.  With a
softcap scores are bounded, and bfloat16 holds their exponentials as they are: no maximum, nothing to rescale, a third
fewer instructions.

Measured on one H200: the persistent grid gains 13 % at length 1k; tiles handed out by a counter, longest first, up to
30 % with causal masks.  Part of the exponentials as polynomials, more registers for the loading warp: no gain.  Exact
huge scores (``power``) cost 1 to 3 %; found without a comparison, 1 to 5 %.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .device import LN2, accumulator, bar_arrive, bar_sync, pin16, struct, tanh, tma_store
from .tiles import WARPGROUP_ROWS, Memory, Problem, make_ring

_TURN = gl.constexpr(8)  # the first named barrier that is ours: Triton uses the low numbers


@gluon.jit
def _begin_turn(W: gl.constexpr, PING_PONG: gl.constexpr):
    if PING_PONG:
        bar_sync(_TURN + W, 256)


@gluon.jit
def _end_turn(W: gl.constexpr, WARPGROUPS: gl.constexpr, PING_PONG: gl.constexpr):
    if PING_PONG:
        bar_arrive(_TURN + (W + 1) % WARPGROUPS, 256)


@gluon.jit
def _load(problem, memory, q_desc, k_desc, v_desc, counter_ptr):
    """The partition that loads and hands out tiles: from a counter in global memory, which the last fetch sets to 0."""
    BLOCK_N: gl.constexpr = problem.BLOCK_N
    n = 0  # tiles of keys so far
    turn = 0  # tiles of queries so far
    index = gl.program_id(0)
    while index < problem.tiles:
        row, batch, head = problem.place(index)
        kv_head = head // problem.group
        begin, end = problem.keys(row, WARPGROUP_ROWS * problem.WARPGROUPS)
        blocks = (end - begin) // BLOCK_N
        for j in range(blocks):
            if j == blocks - 1:
                fetched = gl.atomic_add(counter_ptr, 1, sem="relaxed")
                index = gl.num_programs(0) + fetched
                if fetched == problem.tiles - 1:
                    gl.store(counter_ptr, 0)
                memory.give_tile(index, turn)
            slot, phase = memory.slot(n)
            first_key = end - (j + 1) * BLOCK_N
            if j == 0:
                memory.query.load(q_desc, batch, head, row, 0, turn & 1)
            memory.key.load(k_desc, batch, kv_head, first_key, slot, phase)
            if j == 0:
                for w in gl.static_range(1, problem.WARPGROUPS):
                    memory.query.load(q_desc, batch, head, row + WARPGROUP_ROWS * w, w, turn & 1)
            memory.value.load(v_desc, batch, kv_head, first_key, slot, phase)
            n += 1
        turn += 1


@struct
class Rows:
    """How a warpgroup computes its 64 rows.

    Head dims are split in two powers of two, the second one maybe 0, and so is the accumulator: 80 = 64 + 16.
    """

    inner: gl.tensor  # scale / softcap
    factor: gl.tensor  # softcap, else scale, by log2(e): what makes exponents to base 2
    power: gl.tensor  # the power of two not below it, for rows whose scores reach ``limit``
    limit: gl.tensor
    RAGGED: gl.constexpr  # the last block of keys isn't whole, and no bound hides its end
    NARROW: gl.constexpr  # a block may be cut by both bounds
    SOFTCAP: gl.constexpr
    BOUNDED: gl.constexpr  # exponents are so small that no maximum has to be subtracted
    PING_PONG: gl.constexpr
    QK_FIRST: gl.constexpr
    QK_SECOND: gl.constexpr
    V_FIRST: gl.constexpr
    V_SECOND: gl.constexpr
    S: gl.constexpr  # layout of the scores
    O_FIRST: gl.constexpr  # layouts of the accumulators
    O_SECOND: gl.constexpr

    @gluon.jit
    def issue_scores(self, q, k, zeros):
        FIRST: gl.constexpr = self.QK_FIRST
        SECOND: gl.constexpr = self.QK_SECOND
        k_first = k.slice(0, FIRST, dim=1).permute((1, 0))
        s = warpgroup_mma(q.slice(0, FIRST, dim=1), k_first, zeros, use_acc=False, is_async=True)
        if SECOND > 0:
            k_second = k.slice(FIRST, SECOND, dim=1).permute((1, 0))
            s = warpgroup_mma(q.slice(FIRST, SECOND, dim=1), k_second, s, is_async=True)
        return s

    @gluon.jit
    def issue_out(self, p, v, first, second):
        first = warpgroup_mma(p, v.slice(0, self.V_FIRST, dim=1), first, is_async=True)
        if self.V_SECOND > 0:
            p = gl.convert_layout(p, gl.DotOperandLayout(0, self.O_SECOND, 2))
            second = warpgroup_mma(p, v.slice(self.V_FIRST, self.V_SECOND, dim=1), second, is_async=True)
        return first, second

    @gluon.jit
    def operand(self, probs, DTYPE: gl.constexpr):
        """P for the next product, pinned: carried around a loop unpinned, its halves are swapped there and back."""
        return pin16(gl.convert_layout(probs.to(DTYPE), gl.DotOperandLayout(0, self.O_FIRST, 2)))

    @gluon.jit
    def wait_scores(self, s):
        """With the products of ``issue_out`` left in flight."""
        if self.V_SECOND > 0:
            return warpgroup_mma_wait(2, [s])
        else:
            return warpgroup_mma_wait(1, [s])

    @gluon.jit
    def wait_out(self, first, second):
        if self.V_SECOND > 0:
            first, second = warpgroup_mma_wait(0, [first, second])
        else:
            first = warpgroup_mma_wait(0, [first])
        return first, second

    @gluon.jit
    def rescale(self, first, second, factor):
        first = first * gl.convert_layout(factor, gl.SliceLayout(1, self.O_FIRST))[:, None]
        if self.V_SECOND > 0:
            second = second * gl.convert_layout(factor, gl.SliceLayout(1, self.O_SECOND))[:, None]
        return first, second

    @gluon.jit
    def hide(self, s, problem, row, first_key, UPPER: gl.constexpr, LOWER: gl.constexpr, RAGGED: gl.constexpr):
        rows = row - first_key + gl.arange(0, WARPGROUP_ROWS, gl.SliceLayout(1, self.S))
        keys = gl.arange(0, problem.BLOCK_N, gl.SliceLayout(0, self.S))
        if UPPER:
            s = gl.where(keys[None, :] <= rows[:, None] + problem.upper, s, float("-inf"))
        if LOWER:
            s = gl.where(keys[None, :] >= rows[:, None] + problem.lower, s, float("-inf"))
        if RAGGED:
            s = gl.where((keys < problem.kv_len - first_key)[None, :], s, float("-inf"))
        return s

    @gluon.jit
    def softmax(
        self, s, highest, problem, row, first_key, DTYPE: gl.constexpr,
        FIRST: gl.constexpr, UPPER: gl.constexpr, LOWER: gl.constexpr,
    ):  # fmt: skip
        """exp2 of the scores less the rows' maximum; the new maximum, the same with 0 for rows that see nothing, and
        what both are scaled by."""
        MASKED: gl.constexpr = UPPER or LOWER or (FIRST and self.RAGGED)
        if self.SOFTCAP:
            s = tanh(s * self.inner, DTYPE)
        if MASKED:
            s = self.hide(s, problem, row, first_key, UPPER, LOWER, FIRST and self.RAGGED)
        if self.BOUNDED:
            return gl.exp2(s * self.factor), highest, highest, highest
        largest = gl.max(s, 1)
        if not FIRST:
            largest = gl.maximum(highest, largest)
        base = largest
        if MASKED:
            base = gl.where(largest == float("-inf"), 0.0, largest)
        # As in the Triton kernel's row_factor: for huge scores the product with the maximum has to be exact.
        steepness = gl.where(gl.abs(largest) < self.limit, self.factor, self.power)
        return gl.exp2(s * steepness[:, None] - (base * steepness)[:, None]), largest, base, steepness


@gluon.jit
def _step(
    rows, problem, memory, W: gl.constexpr, n, first_key, row, zeros, p, first, second, highest, total,
    UPPER: gl.constexpr, LOWER: gl.constexpr,
):  # fmt: skip
    """One block of keys: its scores and softmax, and the product that the block before left to do."""
    DTYPE: gl.constexpr = p.dtype
    slot, phase = memory.slot(n)
    last_slot, last_phase = memory.slot(n - 1)
    memory.key.wait(slot, phase)
    _begin_turn(W, rows.PING_PONG)
    s = rows.issue_scores(memory.query.tile(W), memory.key.tile(slot), zeros)
    memory.value.wait(last_slot, last_phase)
    first, second = rows.issue_out(p, memory.value.tile(last_slot), first, second)
    _end_turn(W, problem.WARPGROUPS, rows.PING_PONG)
    s = rows.wait_scores(s)
    memory.key.release(slot)
    probs, largest, base, steepness = rows.softmax(s, highest, problem, row, first_key, DTYPE, False, UPPER, LOWER)
    factor = gl.exp2((highest - base) * steepness)
    if not rows.BOUNDED:
        total = total * factor
    total = total + gl.sum(probs, 1)
    first, second = rows.wait_out(first, second)
    memory.value.release(last_slot)
    if not rows.BOUNDED:
        first, second = rows.rescale(first, second, factor)
    return rows.operand(probs, DTYPE), first, second, largest, total


@gluon.jit
def _pass_over(memory, W: gl.constexpr, n, WARPGROUPS: gl.constexpr, PING_PONG: gl.constexpr):
    """A block that only other warpgroups see."""
    memory.pass_over(n)
    _begin_turn(W, PING_PONG)
    _end_turn(W, WARPGROUPS, PING_PONG)


@gluon.jit
def _compute(W: gl.constexpr, rows, problem, memory, o_desc, lse_ptr, OUT_IN_QUERY: gl.constexpr):
    """The partition of warpgroup ``W``: the rows ``64 * W`` and on of each tile."""
    BLOCK_N: gl.constexpr = problem.BLOCK_N
    DTYPE: gl.constexpr = o_desc.dtype
    query = memory.query.tile(W)
    out = memory.out.index(W)
    zeros = gl.zeros([WARPGROUP_ROWS, BLOCK_N], gl.float32, rows.S)
    none = gl.zeros([WARPGROUP_ROWS], gl.float32, gl.SliceLayout(1, rows.S))
    if W == problem.WARPGROUPS - 1:
        _end_turn(W, problem.WARPGROUPS, rows.PING_PONG)  # opens the first one's turn
    n = 0
    turn = 0
    index = gl.program_id(0)
    while index < problem.tiles:
        tile_row, batch, head = problem.place(index)
        row = tile_row + WARPGROUP_ROWS * W
        tile_begin, tile_end = problem.keys(tile_row, WARPGROUP_ROWS * problem.WARPGROUPS)
        if row < problem.q_len:
            begin, end = problem.keys(row, WARPGROUP_ROWS)
        else:  # these rows are beyond the last one
            begin, end = tile_end - BLOCK_N, tile_end
        for j in range((tile_end - end) // BLOCK_N):
            _pass_over(memory, W, n + j, problem.WARPGROUPS, rows.PING_PONG)
        n += (tile_end - end) // BLOCK_N
        blocks = (end - begin) // BLOCK_N
        uncut, cut = problem.uncut(row, begin, end)

        first = gl.zeros([WARPGROUP_ROWS, rows.V_FIRST], gl.float32, rows.O_FIRST)
        second = gl.to_tensor(0)
        if rows.V_SECOND > 0:
            second = gl.zeros([WARPGROUP_ROWS, rows.V_SECOND], gl.float32, rows.O_SECOND)
        slot, phase = memory.slot(n)
        memory.query.wait(W, turn & 1)
        memory.key.wait(slot, phase)
        _begin_turn(W, rows.PING_PONG)
        s = rows.issue_scores(query, memory.key.tile(slot), zeros)
        _end_turn(W, problem.WARPGROUPS, rows.PING_PONG)
        s = warpgroup_mma_wait(0, [s])
        memory.key.release(slot)
        probs, highest, _, _ = rows.softmax(
            s, none, problem, row, end - BLOCK_N, DTYPE, True, problem.HAS_UPPER, problem.HAS_LOWER
        )
        total = gl.sum(probs, 1)
        p = rows.operand(probs, DTYPE)
        if problem.HAS_UPPER:
            for j in range(1, uncut):
                p, first, second, highest, total = _step(
                    rows, problem, memory, W, n + j, end - (j + 1) * BLOCK_N, row, zeros, p, first, second, highest,
                    total, True, problem.HAS_LOWER and rows.NARROW,
                )  # fmt: skip
        for j in range(uncut, cut):
            p, first, second, highest, total = _step(
                rows, problem, memory, W, n + j, 0, row, zeros, p, first, second, highest, total, False, False
            )
        if problem.HAS_LOWER:
            for j in range(cut, blocks):
                p, first, second, highest, total = _step(
                    rows, problem, memory, W, n + j, end - (j + 1) * BLOCK_N, row, zeros, p, first, second, highest,
                    total, False, True,
                )  # fmt: skip
        n += blocks

        if not OUT_IN_QUERY:
            memory.query.release(W)
        slot, phase = memory.slot(n - 1)
        memory.value.wait(slot, phase)
        first, second = rows.issue_out(p, memory.value.tile(slot), first, second)
        blind = total == 0.0
        factor = gl.where(blind, 0.0, 1.0 / total)
        lse = gl.where(blind, float("-inf"), (highest * rows.factor + gl.log2(total)) * LN2)
        lengthwise = row + gl.arange(0, WARPGROUP_ROWS, gl.SliceLayout(1, rows.S))
        first_lse = gl.cast(batch * problem.heads + head, gl.int64) * problem.q_len
        gl.store(lse_ptr + first_lse + lengthwise, lse, mask=lengthwise < problem.q_len)
        tma.store_wait(0)  # the tile before has left its buffer
        first, second = rows.wait_out(first, second)
        memory.value.release(slot)
        # Before waiting for the next tile's number, which comes with the last block of this one.
        for j in range((begin - tile_begin) // BLOCK_N):
            _pass_over(memory, W, n + j, problem.WARPGROUPS, rows.PING_PONG)
        n += (begin - tile_begin) // BLOCK_N
        index = memory.take_tile(turn)
        first, second = rows.rescale(first, second, factor)
        flat = out.reshape([WARPGROUP_ROWS, o_desc.block_shape[3]])
        flat.slice(0, rows.V_FIRST, dim=1).store(first.to(DTYPE))
        if rows.V_SECOND > 0:
            flat.slice(rows.V_FIRST, rows.V_SECOND, dim=1).store(second.to(DTYPE))
        fence_async_shared()
        tma_store(o_desc, [batch, head, row, 0], out)
        if OUT_IN_QUERY:
            tma.store_wait(0)
            memory.query.release(W)
        turn += 1
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "lse_ptr", "counter_ptr", "tiles", "blocks_m", "head_set", "batch_heads", "heads", "group", "q_len", "kv_len",
        "lower", "upper",
    ]
)  # fmt: skip
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, counter_ptr,
    tiles, blocks_m, head_set, batch_heads, heads, group, q_len, kv_len, lower, upper, inner, factor, power, limit,
    HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr, RAGGED: gl.constexpr, NARROW: gl.constexpr,
    SOFTCAP: gl.constexpr, BOUNDED: gl.constexpr, QK_FIRST: gl.constexpr, QK_SECOND: gl.constexpr,
    V_FIRST: gl.constexpr, V_SECOND: gl.constexpr, WARPGROUPS: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, PING_PONG: gl.constexpr, OUT_IN_QUERY: gl.constexpr, ROW_FASTEST: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Writes out and lse (fp32 [batch, heads, q_len]); ``counter_ptr`` points to a 0 that it leaves at 0.

    The descriptors' boxes are [1, 1, rows, cols] with 64 rows for query and out and BLOCK_N for key and value.
    """
    problem = Problem(
        tiles, blocks_m, head_set, batch_heads, heads, group, q_len, kv_len, lower, upper,
        HAS_LOWER, HAS_UPPER, WARPGROUPS, BLOCK_N, ROW_FASTEST,
    )  # fmt: skip
    query = make_ring(q_desc, WARPGROUPS, 1)
    if OUT_IN_QUERY:
        out = query.tiles
    else:
        out = gl.allocate_shared_memory(o_desc.dtype, [WARPGROUPS, 1, 1, 64, o_desc.block_shape[3]], o_desc.layout)
    key = make_ring(k_desc, STAGES, WARPGROUPS)
    value = make_ring(v_desc, STAGES, WARPGROUPS)
    next_tile = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    next_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    next_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(next_full.index(i), count=1)
        mbarrier.init(next_empty.index(i), count=WARPGROUPS)
    memory = Memory(query, key, value, next_tile, next_full, next_empty, out, STAGES)
    S: gl.constexpr = accumulator(BLOCK_N)
    O_FIRST: gl.constexpr = accumulator(V_FIRST)
    O_SECOND: gl.constexpr = accumulator(V_SECOND)
    rows = Rows(
        inner,
        factor,
        power,
        limit,
        RAGGED,
        NARROW,
        SOFTCAP,
        BOUNDED,
        PING_PONG,
        QK_FIRST,
        QK_SECOND,
        V_FIRST,
        V_SECOND,
        S,
        O_FIRST,
        O_SECOND,
    )
    if WARPGROUPS == 1:
        gl.warp_specialize([
            (_compute, (0, rows, problem, memory, o_desc, lse_ptr, OUT_IN_QUERY)),
            (_load, (problem, memory, q_desc, k_desc, v_desc, counter_ptr)),
        ], [1], [24])  # fmt: skip
    elif WARPGROUPS == 2:
        gl.warp_specialize([
            (_compute, (0, rows, problem, memory, o_desc, lse_ptr, OUT_IN_QUERY)),
            (_compute, (1, rows, problem, memory, o_desc, lse_ptr, OUT_IN_QUERY)),
            (_load, (problem, memory, q_desc, k_desc, v_desc, counter_ptr)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_compute, (0, rows, problem, memory, o_desc, lse_ptr, OUT_IN_QUERY)),
            (_compute, (1, rows, problem, memory, o_desc, lse_ptr, OUT_IN_QUERY)),
            (_compute, (2, rows, problem, memory, o_desc, lse_ptr, OUT_IN_QUERY)),
            (_load, (problem, memory, q_desc, k_desc, v_desc, counter_ptr)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
