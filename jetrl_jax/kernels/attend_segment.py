"""One segment of decode attention in Gluon: a few query rows over a run of cached slots, for several KV heads.

The heads of a program lie side by side in memory. Each warp has a head, or a share of its slots, to itself: nothing is exchanged until the
end. A ring of `cp.async` stages keeps the memory busy; slots that the row does not see are not read (zeros stand for them). FP8 goes from
shared memory to the tensor core's operand in registers, dequantized on the way: columns are renamed so that each thread reads 16 bytes in a
row, and the query's and the output's columns are renamed alike.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2


@gluon.constexpr_function
def _bits(n, axis, low=1):
    """Bases of a layout [W, slots, columns] for the bits low … n/2 of one axis."""
    found = []
    while low < n:
        found.append([low if a == axis else 0 for a in range(3)])
        low *= 2
    return found


@gluon.constexpr_function
def _columns_of_thread(W, BW, HD, K, FIRST):
    """Layouts in which a warp reads FP8 K and V: whole runs of a row's columns a thread, then (FIRST) in the order of the operand.

    K (contracted over columns): lane bits 0, 1 pick a quarter of the columns, bits 2 to 4 the slot. V (contracted over slots): lane bits 0,
    1 are slot bits 1, 2, lane bits 2 to 4 pick an eighth of the columns; FIRST sets two slots side by side, which share a register in bf16.
    """
    if K:
        regs, lanes = _bits(HD // 4, 2) + _bits(BW, 1, 8), _bits(HD, 2, HD // 4) + _bits(8, 1)
    else:
        pair, columns = [[0, 1, 0]], _bits(HD // 8, 2)
        regs = pair + _bits(BW, 1, 8) + columns if FIRST else columns + pair + _bits(BW, 1, 8)
        lanes = [[0, 2, 0], [0, 4, 0]] + _bits(HD, 2, HD // 8)
    return gl.DistributedLinearLayout(regs, lanes, _bits(W, 0), [], [W, BW, HD])


@gluon.constexpr_function
def _widen(dtype):
    """PTX: four FP8 values of a register -> float32. Triton's own conversion takes the bytes apart first."""
    kind = "e4m3x2" if dtype == gl.float8e4nv else "e5m2x2"
    return f"""{{ .reg .b16 a, b, c, d; .reg .b32 x, y;
        mov.b32 {{a, b}}, $4;
        cvt.rn.f16x2.{kind} x, a;
        cvt.rn.f16x2.{kind} y, b;
        mov.b32 {{a, b}}, x;
        mov.b32 {{c, d}}, y;
        cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; cvt.f32.f16 $2, c; cvt.f32.f16 $3, d; }}"""


@gluon.constexpr_function
def whole_layout(HB, W, HD):
    """Layout of [W / HB, HB, 16, HD] with what all warps of a head have of one element in one thread."""
    lanes = min(32, HD // 4)
    return gl.BlockedLayout([W // HB, 1, 1, 4], [1, 1, 32 // lanes, lanes], [1, HB, W // HB, 1], [3, 2, 1, 0])


@gluon.jit
def along(N: gl.constexpr, AXIS: gl.constexpr, L: gl.constexpr):
    """0 … N-1 along one axis of a tensor of three."""
    FIRST: gl.constexpr = 1 if AXIS == 0 else 0
    SECOND: gl.constexpr = 1 if AXIS == 2 else 2
    return gl.expand_dims(gl.expand_dims(gl.arange(0, N, gl.SliceLayout(FIRST, gl.SliceLayout(SECOND, L))), FIRST), SECOND)


@gluon.jit
def _copy(k, v, ks, vs, kbuf, vbuf, ksbuf, vsbuf, stage, start, end, D: gl.constexpr, KV: gl.constexpr, FP8: gl.constexpr,
          HB: gl.constexpr, W: gl.constexpr, BW: gl.constexpr, HD: gl.constexpr):
    """Starts the copies of the block at slot `start`: warp w has head w % HB. Slots from `end` on are not read, zeros stand for them."""
    VEC: gl.constexpr = min(16 if FP8 else 8, HD)
    LC: gl.constexpr = min(32, HD // VEC)
    L: gl.constexpr = gl.BlockedLayout([1, 1, VEC], [1, 32 // LC, LC], [W, 1, 1], [2, 1, 0])
    col = along(HD, 2, L)
    warp = along(W, 0, L)
    slot = warp // HB * BW + along(8, 1, L)
    at = start.to(gl.int64) * (KV * D) + (slot * (KV * D) + warp % HB * D + col)
    kp = k + at
    vp = v + at
    for j in gl.static_range(BW // 8):  # by 8 slots, which is how often the swizzle repeats: only constants change, and registers are few
        mask = slot < end - start - j * 8
        if HD != D:
            mask = mask & (col < D)
        async_copy.async_load(kbuf.index(stage).slice(j * 8, 8, dim=1), kp + j * 8 * KV * D, mask=mask)
        async_copy.async_load(vbuf.index(stage).slice(j * 8, 8, dim=1), vp + j * 8 * KV * D, mask=mask)
    if FP8:  # neighbouring lanes take neighbouring heads
        S: gl.constexpr = gl.BlockedLayout([1, 1], [HB, 32 // HB], [W // HB, HB], [0, 1])
        warp = gl.expand_dims(gl.arange(0, W, gl.SliceLayout(1, S)), 1)
        slot = warp // HB * BW + gl.expand_dims(gl.arange(0, BW, gl.SliceLayout(0, S)), 0)
        at = (start + slot).to(gl.int64) * KV + warp % HB
        async_copy.async_load(ksbuf.index(stage), ks + at, mask=slot < end - start)
        async_copy.async_load(vsbuf.index(stage), vs + at, mask=slot < end - start)
    async_copy.commit_group()


@gluon.jit
def _dequantized(buf, scales, stage, W: gl.constexpr, BW: gl.constexpr, HD: gl.constexpr, K: gl.constexpr):
    """A block of FP8 [W, slots, columns] in bf16: payload · scale in float32, rounded."""
    READ: gl.constexpr = _columns_of_thread(W, BW, HD, K, False)
    L: gl.constexpr = _columns_of_thread(W, BW, HD, K, True)
    x = buf.index(stage).load(READ)
    x = gl.inline_asm_elementwise(_widen(buf.dtype), "=r,=r,=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=4)
    x = gl.convert_layout(x, L, assert_trivial=True)
    return (x * gl.expand_dims(scales.index(stage).load(gl.SliceLayout(2, L)), 2)).to(gl.bfloat16)


@gluon.jit
def seen(positions, row, S: gl.constexpr):
    """How many slots the row sees; a sequence that has ended stands past the cache."""
    return min(max(gl.load(positions + row), 0), S - 1) + 1


@gluon.jit
def attend(q, k, v, ks, vs, layer, positions, B: gl.constexpr, S: gl.constexpr, KV: gl.constexpr, G: gl.constexpr, D: gl.constexpr,
            HD: gl.constexpr, FP8: gl.constexpr, SEGMENT: gl.constexpr, PARTS: gl.constexpr, HB: gl.constexpr, W: gl.constexpr,
            BW: gl.constexpr, STAGES: gl.constexpr):
    """A segment of HB heads -> float32 sums [HB, 16, HD] over V, not yet divided; the largest score (in powers of two) and the sum of the
    weights, both [HB, 16, 1]."""
    M: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    Q_OPERAND: gl.constexpr = gl.DotOperandLayout(0, M, 2)
    KV_OPERAND: gl.constexpr = gl.DotOperandLayout(1, M, 2)
    R: gl.constexpr = gl.SliceLayout(2, M)
    VEC: gl.constexpr = min(16 if FP8 else 8, HD)
    PHASES: gl.constexpr = min(8, HD // VEC)
    SH: gl.constexpr = gl.SwizzledSharedLayout(VEC, max(1, 8 // PHASES), PHASES, [2, 1, 0])
    S1: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    kbuf = gl.allocate_shared_memory(k.dtype.element_ty, [STAGES, W, BW, HD], SH)
    vbuf = gl.allocate_shared_memory(k.dtype.element_ty, [STAGES, W, BW, HD], SH)
    if FP8:
        ksbuf = gl.allocate_shared_memory(gl.float32, [STAGES, W, BW], S1)
        vsbuf = gl.allocate_shared_memory(gl.float32, [STAGES, W, BW], S1)
    else:
        ksbuf = 0
        vsbuf = 0
    head = gl.program_id(0) % (KV // HB) * HB
    row = gl.program_id(0) // (KV // HB) // PARTS
    first = gl.program_id(0) // (KV // HB) % PARTS * SEGMENT
    last = min(seen(positions, row, S), first + SEGMENT)
    base = ((gl.load(layer).to(gl.int64) * B + row) * S * KV + head)
    k += base * D
    v += base * D
    if FP8:
        ks += base
        vs += base
    BLOCK: gl.constexpr = W // HB * BW
    for i in gl.static_range(STAGES - 1):
        _copy(k, v, ks, vs, kbuf, vbuf, ksbuf, vsbuf, i, first + i * BLOCK, last, D, KV, FP8, HB, W, BW, HD)

    heads = along(16, 1, Q_OPERAND)
    c = along(HD, 2, Q_OPERAND)
    if FP8:  # the operand's column c is the payload's column of a thread's own quarter
        c = c // 2 % 4 * (HD // 4) + c // 16 * 4 + c // 8 % 2 * 2 + c % 2
    heads_of = (row * KV + head + along(W, 0, Q_OPERAND) % HB) * G
    qt = gl.load(q + (heads_of + heads) * D + c, mask=(heads < G) & (c < D), other=0.0)

    SCALE: gl.constexpr = 1.4426950408889634 / D**0.5
    NEVER: gl.constexpr = float("-inf")
    m = gl.full((W, 16), NEVER, gl.float32, R)
    total = gl.zeros((W, 16), gl.float32, R)
    acc = gl.zeros((W, 16, HD), gl.float32, M)
    zero = gl.zeros((W, 16, BW), gl.float32, M)
    slot = along(W, 0, M) // HB * BW + along(BW, 2, M)
    blocks = (last - first + (BLOCK - 1)) // BLOCK
    for i in range(blocks):
        async_copy.wait_group(STAGES - 2)
        stage = i % STAGES
        start = first + i * BLOCK
        ahead = i + STAGES - 1
        _copy(k, v, ks, vs, kbuf, vbuf, ksbuf, vsbuf, ahead % STAGES, first + ahead * BLOCK, last, D, KV, FP8, HB, W, BW, HD)
        if FP8:
            kt = _dequantized(kbuf, ksbuf, stage, W, BW, HD, True)
            kt = kt.reshape([W, BW, 4, HD // 16, 2, 2]).permute(0, 3, 4, 2, 5, 1).reshape([W, HD, BW])
            kt = gl.convert_layout(kt, KV_OPERAND, assert_trivial=True)
            vt = _dequantized(vbuf, vsbuf, stage, W, BW, HD, False)
            vt = vt.reshape([W, BW, 8, HD // 8]).permute(0, 1, 3, 2).reshape([W, BW, HD])
            vt = gl.convert_layout(vt, KV_OPERAND, assert_trivial=True)
        else:
            kt = kbuf.index(stage).permute((0, 2, 1)).load(KV_OPERAND)
            vt = vbuf.index(stage).load(KV_OPERAND)
        score = mma_v2(qt, kt, zero) * SCALE
        score = gl.where(start + slot < last, score, NEVER)
        new = gl.maximum(m, gl.max(score, 2))
        safe = gl.where(new == NEVER, 0.0, new)  # a warp that has seen no slot yet
        p = gl.exp2(score - gl.expand_dims(safe, 2))
        shrink = gl.exp2(m - safe)
        total = total * shrink + gl.sum(p, 2)
        acc = mma_v2(gl.convert_layout(p.to(gl.bfloat16), Q_OPERAND), vt, acc * gl.expand_dims(shrink, 2))
        m = new
    async_copy.wait_group(0)
    # The shares of a head's warps: a thread takes an element's from all of them, and adds them in order.
    N: gl.constexpr = W // HB
    if FP8:
        acc = acc.reshape([W, 16, HD // 8, 8]).permute(0, 1, 3, 2).reshape([W, 16, HD])
    ALL: gl.constexpr = whole_layout(HB, W, HD)
    acc = gl.convert_layout(acc.reshape([N, HB, 16, HD]), ALL)
    m = gl.expand_dims(gl.convert_layout(m.reshape([N, HB, 16]), gl.SliceLayout(3, ALL)), 3)
    total = gl.expand_dims(gl.convert_layout(total.reshape([N, HB, 16]), gl.SliceLayout(3, ALL)), 3)
    top = gl.max(m, 0)
    safe = gl.where(top == NEVER, 0.0, top)
    weight = gl.exp2(m - gl.expand_dims(safe, 0))
    return gl.sum(acc * weight, 0), top, gl.sum(total * weight, 0)
