"""The block-scaled FP8 product of a decode step: few tokens, weights read once from the layer stack, at the speed of memory.

Tokens stand on wgmma's 64 rows, weight rows on its columns, so that there are about as many programs as multiprocessors, all at once.
`warpgroups` consumers share one token tile; a stage of the ring holds `blocks` blocks of K, with as many wgmmas in flight, promoted in
order: the same bits as `gemm.py`. More than 64 tokens go to `gemm.py`'s small tiles.
"""

import dataclasses

import jax
import jax.numpy as jnp
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from jetrl_jax.kernels import gemm, launch

ROWS = 64


@dataclasses.dataclass(frozen=True)
class Config:
    """`warpgroups` consumers of `columns` weight rows each (within one 128-block), `blocks` blocks of K a stage, a ring of `stages`."""

    warpgroups: int = 1
    blocks: int = 2
    columns: int = 64
    stages: int = 6
    registers: int = 168


def product(
    x: jax.Array, sx: jax.Array, w: jax.Array, sw: jax.Array, layer: jax.Array, config: Config | gemm.Config | None = None
) -> jax.Array:
    """x [M, K] · w[layer]ᵀ -> bf16 [M, N], 1 <= M <= 256; w [L, N, K] is read by index, nothing of it is copied.

    sx: float32 [⌈K/128⌉, M]; sw: float32 [L, ⌈N/128⌉, ⌈K/128⌉]; layer: int32 [1]. Fewer than 64 rows are padded: hand in 64 to save that
    copy (rows that TMA fills cost more than real ones).
    """
    (m, k), n = x.shape, w.shape[-2]
    c = config or config_for(m, n, k)
    if isinstance(c, gemm.Config):
        return gemm.product(x, sx, w, sw, layer, c)
    if m > ROWS:
        raise ValueError(f"decode.Config is for at most {ROWS} rows, and x has {m}; pass a gemm.Config")
    if m < ROWS:
        x, sx = jnp.pad(x, [(0, ROWS - m), (0, 0)]), jnp.pad(sx, [(0, 0), (0, ROWS - m)])
    nk = -(-k // 128)
    y = launch.call(
        launch.descriptor(w.reshape(-1, k), (c.columns, 128)), launch.descriptor(x, (ROWS, 128)),
        launch.descriptor(sx.reshape(-1), (ROWS,), swizzle=0), sw, layer, kernel=_decode, out=jax.ShapeDtypeStruct((ROWS, n), jnp.bfloat16),
        grid=(-(-n // (c.warpgroups * c.columns)),), flops=2 * m * n * k, bytes_accessed=n * k + ROWS * k + 2 * ROWS * n,
        N=n, NK=nk, NW=c.warpgroups, KU=c.blocks, BN=c.columns, STAGES=c.stages, RC=c.registers)
    return y if m == ROWS else y[:m]


def config_for(m: int, n: int, k: int) -> Config | gemm.Config:
    """The tuned configuration of the nearest shape in the table, or one whose programs fit in one wave."""
    from jetrl_jax.kernels import tuned

    if m > ROWS:
        columns = 64 if -(-n // 64) <= launch.multiprocessors() else 128
        default = gemm.Config(consumers=2, columns=columns, stages=6 if columns == 128 else 8, flight=2, registers=240)
        return gemm.Config(**tuned.lookup("decode_wide", m, n, k, dataclasses.asdict(default)))
    return Config(**tuned.lookup("decode", ROWS, n, k, dataclasses.asdict(_one_wave(n, k))))


def _one_wave(n: int, k: int) -> Config:
    """Widest tiles that still give about one program a multiprocessor."""
    for warpgroups, columns in ((1, 32), (1, 64), (2, 64), (3, 64)):
        if -(-n // (warpgroups * columns)) <= launch.multiprocessors():
            break
    blocks = 4 if k >= 8192 and warpgroups == 1 else 2
    per_stage = blocks * (128 * (ROWS + warpgroups * columns) + 4 * ROWS)
    return Config(warpgroups, blocks, columns, min(6, 210_000 // per_stage))


def candidates(m: int, n: int, k: int) -> list[Config | gemm.Config]:
    """What `jetrl bench tune` tries."""
    if m > ROWS:
        return list(gemm.candidates(m, n, k))
    found: list[Config | gemm.Config] = []
    for warpgroups, columns in ((1, 32), (1, 64), (2, 32), (2, 64), (3, 64)):
        programs = -(-n // (warpgroups * columns))
        if not launch.multiprocessors() // 2 <= programs <= 2 * launch.multiprocessors():
            continue
        for blocks in (1, 2, 4):
            per_stage = blocks * (128 * (ROWS + warpgroups * columns) + 4 * ROWS)
            stages = min(8, 225_000 // per_stage)
            if stages >= 2 and 128 * warpgroups * (blocks + 1) * columns // 2 <= 40_000:
                found.append(Config(warpgroups, blocks, columns, stages))
    return found


@gluon.jit
def _load(sources, NK: gl.constexpr, NW: gl.constexpr, KU: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr):
    w_desc, x_desc, sx_desc, w_bufs, x_bufs, sx_bufs, full, empty, row0 = sources
    for i in range((NK + KU - 1) // KU):
        s = i % STAGES
        mbarrier.wait(empty.index(s), (i // STAGES & 1) ^ 1)
        mbarrier.expect(full.index(s), KU * (NW * BN * 128 + 64 * 128 + 64 * 4))
        for u in gl.static_range(KU):
            k = i * KU + u  # past the last block TMA fills zeros
            for j in gl.static_range(NW):
                tma.async_load(w_desc, [row0 + j * BN, k * 128], full.index(s), w_bufs.index((s * KU + u) * NW + j))
            tma.async_load(x_desc, [0, k * 128], full.index(s), x_bufs.index(s * KU + u))
            tma.async_load(sx_desc, [k * 64], full.index(s), sx_bufs.index(s * KU + u))


@gluon.jit
def _mma(x_bufs, w_bufs, j, zero, I: gl.constexpr, NW: gl.constexpr):
    return warpgroup_mma(x_bufs.index(j), w_bufs.index(j * NW + I).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _math(I: gl.constexpr, operands, N: gl.constexpr, NK: gl.constexpr, NW: gl.constexpr, KU: gl.constexpr, BN: gl.constexpr,
          STAGES: gl.constexpr):
    sw, y, w_bufs, x_bufs, sx_bufs, full, empty, layer, n0 = operands
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    R: gl.constexpr = gl.SliceLayout(1, L)
    acc = gl.zeros((64, BN), gl.float32, L)
    zero = gl.zeros((64, BN), gl.float32, L)
    n = n0 + I * BN
    ws = sw + (layer * ((N + 127) // 128) + min(n, N - 1) // 128) * NK
    q = ()
    for u in gl.static_range(KU):
        q += (gl.load(ws + min(u, NK - 1)),)  # type: ignore[assignment]
    for i in range((NK + KU - 1) // KU):
        s = i % STAGES
        q1 = ()  # the next stage's weight scales: loaded in the same stage they would stall between two wgmmas
        for u in gl.static_range(KU):
            q1 += (gl.load(ws + min((i + 1) * KU + u, NK - 1)),)  # type: ignore[assignment]
        mbarrier.wait(full.index(s), i // STAGES & 1)
        d = ()
        for u in gl.static_range(KU):
            w = w_bufs.index((s * KU + u) * NW + I).permute((1, 0))
            d += (warpgroup_mma(x_bufs.index(s * KU + u), w, zero, use_acc=False, is_async=True),)  # type: ignore[assignment]
        p = ()
        for u in gl.static_range(KU):
            p += (sx_bufs.index(s * KU + u).load(R) * q[u],)  # type: ignore[assignment]
        fence_async_shared()  # before TMA may overwrite what these ordinary loads read (wgrad.py)
        for u in gl.static_range(KU):
            e = warpgroup_mma_wait(KU - 1 - u, deps=(d[u],))
            if u == KU - 1:
                mbarrier.arrive(empty.index(s), count=1)
            acc += e * gl.expand_dims(p[u], 1)
        q = q1
    rows = gl.arange(0, 64, R)
    cols = n + gl.arange(0, BN, gl.SliceLayout(0, L))
    gl.store(y + gl.expand_dims(rows, 1) * N + gl.expand_dims(cols, 0), acc.to(gl.bfloat16), mask=gl.expand_dims(cols < N, 0))


@gluon.jit
def _decode(w_desc, x_desc, sx_desc, sw, layer_ptr, y, N: gl.constexpr, NK: gl.constexpr, NW: gl.constexpr, KU: gl.constexpr,
            BN: gl.constexpr, STAGES: gl.constexpr, RC: gl.constexpr):
    gl.static_assert(NW <= 3)
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES * KU * NW, BN, 128], w_desc.layout)
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES * KU, 64, 128], x_desc.layout)
    sx_bufs = gl.allocate_shared_memory(sx_desc.dtype, [STAGES * KU, 64], sx_desc.layout)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=NW)
    layer = gl.load(layer_ptr)
    n0 = gl.program_id(0) * (NW * BN)
    operands = (sw, y, w_bufs, x_bufs, sx_bufs, full, empty, layer, n0)
    sources = (w_desc, x_desc, sx_desc, w_bufs, x_bufs, sx_bufs, full, empty, layer * N + n0)
    if NW == 1:
        gl.warp_specialize([
            (_math, (0, operands, N, NK, NW, KU, BN, STAGES)),
            (_load, (sources, NK, NW, KU, BN, STAGES)),
        ], [1], [40])
    elif NW == 2:
        gl.warp_specialize([
            (_math, (0, operands, N, NK, NW, KU, BN, STAGES)),
            (_math, (1, operands, N, NK, NW, KU, BN, STAGES)),
            (_load, (sources, NK, NW, KU, BN, STAGES)),
        ], [4, 1], [RC, 40])
    else:
        gl.warp_specialize([
            (_math, (0, operands, N, NK, NW, KU, BN, STAGES)),
            (_math, (1, operands, N, NK, NW, KU, BN, STAGES)),
            (_math, (2, operands, N, NK, NW, KU, BN, STAGES)),
            (_load, (sources, NK, NW, KU, BN, STAGES)),
        ], [4, 4, 1], [RC, RC, 40])
