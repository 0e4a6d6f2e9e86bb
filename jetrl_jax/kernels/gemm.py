"""FProp and DGrad: the block-scaled FP8 product of many rows on Hopper, in Gluon.

One producer warp fills a ring of shared-memory stages by TMA; consumer warpgroups of 64 rows multiply on `wgmma`. Programs are persistent.
K is walked in blocks of 128 in order, each block from a zero accumulator, then `acc += block · (sa · sw)` in float32: the canonical order,
so every tile shape here and in `decode.py` gives the same bits (design.md "Numerics" 3). Three consumers are what fits in the registers:
while one promotes, the others keep the tensor core busy (what else was tried: docs/notes/kernels.md).
"""

import dataclasses

import jax
import jax.numpy as jnp
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from jetrl_jax.kernels import launch


@dataclasses.dataclass(frozen=True)
class Tile:
    """A tile of `consumers` · 64 rows by `columns` (a power of two up to 128), and a ring of `stages`.

    group: row tiles that are walked together, for the L2 cache. registers: of a consumer thread.
    """

    consumers: int = 3
    columns: int = 128
    stages: int = 5
    group: int = 8
    registers: int = 152


@dataclasses.dataclass(frozen=True)
class Config(Tile):
    """A tile, and `flight`: blocks of K that a consumer has on the tensor core at a time."""

    flight: int = 1


def product(
    a: jax.Array, sa: jax.Array, w: jax.Array, sw: jax.Array, layer: jax.Array | None = None, config: Config | None = None
) -> jax.Array:
    """a [M, K] · wᵀ -> bf16 [M, N]. FP8 payloads a [M, K] and w [N, K] or stacked [L, N, K], of which `layer` (int32 [1]) is read in place.

    sa: float32 [⌈K/128⌉, M], one scale a row and 128 columns. sw: float32 [⌈N/128⌉, ⌈K/128⌉] (or [L, …]). M and N are any; K is a multiple
    of 16, as TMA's rows of 16 bytes ask. DGrad is this product on the gradient and the transposed payload.
    """
    (m, k), n = a.shape, w.shape[-2]
    nk = -(-k // 128)
    layer = jnp.zeros(1, jnp.int32) if layer is None else layer
    c = config or config_for(m, n, k)
    tiles = -(-m // (64 * c.consumers)) * -(-n // c.columns)
    return launch.call(
        launch.descriptor(a, (64, 128)), launch.descriptor(w.reshape(-1, k), (c.columns, 128)), sa, sw.reshape(-1, nk), layer, kernel=_gemm,
        out=jax.ShapeDtypeStruct((m, n), jnp.bfloat16), grid=(min(launch.multiprocessors(), tiles),),
        flops=2 * m * n * k, bytes_accessed=m * k + n * k + 2 * m * n,
        M=m, N=n, NK=nk, CONSUMERS=c.consumers, BN=c.columns, STAGES=c.stages, FLIGHT=c.flight, G=c.group, RC=c.registers)


def config_for(m: int, n: int, k: int) -> Config:
    """The tuned configuration of the nearest shape in the table, or one that suits the size."""
    from jetrl_jax.kernels import tuned

    if m <= 1024:  # tiles for thousands of rows would leave multiprocessors idle
        return Config(consumers=2, stages=6, flight=2, registers=240)
    return Config(**tuned.lookup("gemm", m, n, k, dataclasses.asdict(Config())))


def candidates(m: int, n: int, k: int) -> list[Config]:
    """What `jetrl bench tune` tries."""
    if m <= 256:
        return [Config(2, columns, 8 if columns < 128 else 6, 8, 240, flight) for columns, flight in ((32, 4), (64, 2), (64, 4), (128, 2))]
    return [*(Config(group=g) for g in (4, 8, 16)), *(Config(2, 128, 6, g, 240, 2) for g in (8, 16))]


@gluon.jit
def tile_of(t, nm, nn, G: gl.constexpr):
    """Program step -> (row tile, column tile), G row tiles at a time."""
    per = G * nn
    first = t // per * G
    size = min(nm - first, G)
    return first + (t % per) % size, (t % per) // size


@gluon.jit
def _load(sources, NK: gl.constexpr, CONSUMERS: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, FLIGHT: gl.constexpr,
          G: gl.constexpr):
    a_desc, w_desc, a_bufs, w_bufs, full, empty, row0, nm, nn = sources
    i = 0
    for t in range(gl.program_id(0), nm * nn, gl.num_programs(0)):
        pm, pn = tile_of(t, nm, nn, G)
        for k in range((NK + FLIGHT - 1) // FLIGHT * FLIGHT):  # past the last block TMA fills zeros
            s = i % STAGES
            mbarrier.wait(empty.index(s), (i // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(s), (CONSUMERS * 64 + BN) * 128)
            for j in gl.static_range(CONSUMERS):
                tma.async_load(a_desc, [(pm * CONSUMERS + j) * 64, k * 128], full.index(s), a_bufs.index(s * CONSUMERS + j))
            tma.async_load(w_desc, [row0 + pn * BN, k * 128], full.index(s), w_bufs.index(s))
            i += 1


@gluon.jit
def begin(x_bufs, w_bufs, full, i, zero, I: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr):
    """Starts consumer I's wgmma of the ring's block i, once that is there."""
    j = i % STAGES
    mbarrier.wait(full.index(j), i // STAGES & 1)
    return warpgroup_mma(x_bufs.index(j * CONSUMERS + I), w_bufs.index(j).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _rows(sa, k, r, M: gl.constexpr):
    """Scales of the rows r in block k."""
    return gl.load(sa + k * M + r, mask=r < M, other=0.0)


@gluon.jit
def _store(out, acc, row0, col0, M: gl.constexpr, N: gl.constexpr, BN: gl.constexpr):
    S: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BN, BN // 8], [4, 1], [1, 0])
    y = gl.convert_layout(acc.to(gl.bfloat16), S)
    r = row0 + gl.arange(0, 64, gl.SliceLayout(1, S))
    c = col0 + gl.arange(0, BN, gl.SliceLayout(0, S))
    inside = gl.expand_dims(r < M, 1) & gl.expand_dims(c < N, 0)
    gl.store(out + gl.expand_dims(r.to(gl.int64), 1) * N + gl.expand_dims(c, 0), y, mask=inside)


@gluon.jit
def _math(I: gl.constexpr, operands, NK: gl.constexpr, M: gl.constexpr, N: gl.constexpr, CONSUMERS: gl.constexpr, BN: gl.constexpr,
          STAGES: gl.constexpr, FLIGHT: gl.constexpr, G: gl.constexpr):
    sa, sw, out, a_bufs, w_bufs, full, empty, layer, nm, nn = operands
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    zero = gl.zeros((64, BN), gl.float32, L)
    i = 0
    for t in range(gl.program_id(0), nm * nn, gl.num_programs(0)):
        pm, pn = tile_of(t, nm, nn, G)
        row0 = (pm * CONSUMERS + I) * 64
        r = row0 + gl.arange(0, 64, gl.SliceLayout(1, L))
        wp = sw + (layer * ((N + 127) // 128) + pn * BN // 128) * NK
        acc = gl.zeros((64, BN), gl.float32, L)
        # Scales are loaded a turn ahead and multiplied where they are used: a product of fresh loads would wait before the wgmma does.
        p, q = (), ()
        for u in gl.static_range(FLIGHT):
            p += (_rows(sa, min(u, NK - 1), r, M),)  # type: ignore[assignment]
            q += (gl.load(wp + min(u, NK - 1)),)  # type: ignore[assignment]
        for k in range(0, NK, FLIGHT):
            # All wgmmas of a turn start and end in it: carried into the next one, ptxas would run them one after the other.
            d = ()
            for u in gl.static_range(FLIGHT):
                d += (begin(a_bufs, w_bufs, full, i + u, zero, I, CONSUMERS, STAGES),)  # type: ignore[assignment]
            if i > 0:  # the last block of the turn before; not sooner: it is off the way to the next wgmma here
                mbarrier.arrive(empty.index((i - 1) % STAGES), count=1)
            p1, q1 = (), ()
            for u in gl.static_range(FLIGHT):
                e = warpgroup_mma_wait(FLIGHT - 1 - u, deps=(d[u],))
                if u < FLIGHT - 1:
                    mbarrier.arrive(empty.index((i + u) % STAGES), count=1)
                acc += e * gl.expand_dims(p[u] * q[u], 1)
                n = min(k + FLIGHT + u, NK - 1)
                p1 += (_rows(sa, n, r, M),)  # type: ignore[assignment]
                q1 += (gl.load(wp + n),)  # type: ignore[assignment]
            p, q = p1, q1
            i += FLIGHT
        _store(out, acc, row0, pn * BN, M, N, BN)


@gluon.jit
def _gemm(a_desc, w_desc, sa, sw, layer_ptr, out, M: gl.constexpr, N: gl.constexpr, NK: gl.constexpr, CONSUMERS: gl.constexpr,
          BN: gl.constexpr, STAGES: gl.constexpr, FLIGHT: gl.constexpr, G: gl.constexpr, RC: gl.constexpr):
    gl.static_assert(CONSUMERS == 2 or CONSUMERS == 3)
    gl.static_assert(FLIGHT < STAGES)  # the last block of a turn is released within the next
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES * CONSUMERS, 64, 128], a_desc.layout)
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BN, 128], w_desc.layout)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=CONSUMERS)
    nm = gl.cdiv(M, 64 * CONSUMERS)
    nn = gl.cdiv(N, BN)
    layer = gl.load(layer_ptr)
    operands = (sa, sw, out, a_bufs, w_bufs, full, empty, layer, nm, nn)
    sources = (a_desc, w_desc, a_bufs, w_bufs, full, empty, layer * N, nm, nn)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_math, (0, operands, NK, M, N, CONSUMERS, BN, STAGES, FLIGHT, G)),
            (_math, (1, operands, NK, M, N, CONSUMERS, BN, STAGES, FLIGHT, G)),
            (_load, (sources, NK, CONSUMERS, BN, STAGES, FLIGHT, G)),
        ], [4, 1], [RC, 24])
    else:
        gl.warp_specialize([
            (_math, (0, operands, NK, M, N, CONSUMERS, BN, STAGES, FLIGHT, G)),
            (_math, (1, operands, NK, M, N, CONSUMERS, BN, STAGES, FLIGHT, G)),
            (_math, (2, operands, NK, M, N, CONSUMERS, BN, STAGES, FLIGHT, G)),
            (_load, (sources, NK, CONSUMERS, BN, STAGES, FLIGHT, G)),
        ], [4, 4, 1], [RC, RC, 24])
