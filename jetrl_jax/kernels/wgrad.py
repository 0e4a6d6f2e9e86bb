"""WGrad: dW = dYᵀ · X over tokens, both operands in groups of 128 tokens, float32 out, added to a gradient buffer in place.

Both payloads arrive as [channels, tokens], where groups along the tokens read as 1×128. The structure is that of `gemm.py`; here both sides
have a scale a row, so a block is promoted by `acc += block · (sa · sb)` with one factor an element. Scales come with their stage by TMA.
"""

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from jetrl_jax.kernels import launch
from jetrl_jax.kernels.gemm import Tile as Config
from jetrl_jax.kernels.gemm import begin, tile_of


def product(
    a: jax.Array, sa: jax.Array, b: jax.Array, sb: jax.Array, acc: jax.Array | None = None, config: Config | None = None
) -> jax.Array:
    """a [N, T] · b [K, T]ᵀ -> float32 [N, K], added to `acc` [N, K] in its own memory if given.

    a, b: FP8 payloads; sa [⌈T/128⌉, N] and sb [⌈T/128⌉, K]: float32 scales of groups of 128 tokens. T is a multiple of 16 (TMA), N and K
    are any.
    """
    (n, t), k = a.shape, b.shape[0]
    c = config or config_for(n, k, t, acc is not None)
    tiles = -(-n // (64 * c.consumers)) * -(-k // c.columns)
    flat = launch.descriptor(sa.reshape(-1), (64,), swizzle=0), launch.descriptor(sb.reshape(-1), (c.columns,), swizzle=0)
    operands: list[Any] = [launch.descriptor(a, (64, 128)), launch.descriptor(b, (c.columns, 128)), *flat]
    into: dict[str, Any] = {"kernel": _wgrad} if acc is None else {"kernel": _wgrad_into, "aliases": {len(operands): 0}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # aliases by index: a Ref would have to be threaded through every caller
        return launch.call(
            *operands, *([] if acc is None else [acc]), **into, out=jax.ShapeDtypeStruct((n, k), jnp.float32),
            grid=(min(launch.multiprocessors(), tiles),), flops=2 * n * k * t,
            bytes_accessed=(n + k) * t + (4 if acc is None else 8) * n * k,
            N=n, K=k, NK=-(-t // 128), CONSUMERS=c.consumers, BN=c.columns, STAGES=c.stages, G=c.group, RC=c.registers)


def config_for(n: int, k: int, t: int, into: bool = False) -> Config:
    """The tuned configuration of the nearest shape in the table, or the default. into: for the sum with a buffer."""
    from jetrl_jax.kernels import tuned

    if into and (n % 64 or k % 128):  # three consumers have no registers left for the masks of ragged edges beside the sum: they spill
        return Config(consumers=2, stages=6, registers=240)
    found = Config(**tuned.lookup("wgrad", t, n, k, dataclasses.asdict(Config())))
    return dataclasses.replace(found, registers=min(found.registers, 144)) if into and found.consumers == 3 else found  # more of them spill


def candidates(n: int, k: int, t: int) -> list[Config]:
    """What `jetrl bench tune` tries."""
    return [*(Config(group=g) for g in (4, 8, 16)), Config(consumers=2, stages=6, registers=240)]


@gluon.jit
def _load(sources, NK: gl.constexpr, N: gl.constexpr, K: gl.constexpr, CONSUMERS: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
          G: gl.constexpr):
    a_desc, b_desc, sa_desc, sb_desc, a_bufs, b_bufs, sa_bufs, sb_bufs, full, empty, nm, nn = sources
    i = 0
    for t in range(gl.program_id(0), nm * nn, gl.num_programs(0)):
        pm, pn = tile_of(t, nm, nn, G)
        for k in range(NK):
            s = i % STAGES
            mbarrier.wait(empty.index(s), (i // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(s), (CONSUMERS * 64 + BN) * 132)
            for j in gl.static_range(CONSUMERS):
                row = (pm * CONSUMERS + j) * 64
                tma.async_load(a_desc, [row, k * 128], full.index(s), a_bufs.index(s * CONSUMERS + j))
                tma.async_load(sa_desc, [k * N + row], full.index(s), sa_bufs.index(s * CONSUMERS + j))
            tma.async_load(b_desc, [pn * BN, k * 128], full.index(s), b_bufs.index(s))
            tma.async_load(sb_desc, [k * K + pn * BN], full.index(s), sb_bufs.index(s))
            i += 1


@gluon.jit
def _put(old, out, acc, row0, col0, N: gl.constexpr, K: gl.constexpr, ADD: gl.constexpr, BN: gl.constexpr, L: gl.constexpr):
    r = row0 + gl.arange(0, 64, gl.SliceLayout(1, L))
    c = col0 + gl.arange(0, BN, gl.SliceLayout(0, L))
    at = gl.expand_dims(r.to(gl.int64), 1) * K + gl.expand_dims(c, 0)
    inside = gl.expand_dims(r < N, 1) & gl.expand_dims(c < K, 0)
    if ADD:
        acc += gl.load(old + at, mask=inside, other=0.0)
    gl.store(out + at, acc, mask=inside)


@gluon.jit
def _math(I: gl.constexpr, operands, NK: gl.constexpr, N: gl.constexpr, K: gl.constexpr, ADD: gl.constexpr, CONSUMERS: gl.constexpr,
          BN: gl.constexpr, STAGES: gl.constexpr, G: gl.constexpr):
    old, out, a_bufs, b_bufs, sa_bufs, sb_bufs, full, empty, nm, nn = operands
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    zero = gl.zeros((64, BN), gl.float32, L)
    i = 0
    for t in range(gl.program_id(0), nm * nn, gl.num_programs(0)):
        pm, pn = tile_of(t, nm, nn, G)
        acc = gl.zeros((64, BN), gl.float32, L)
        for k in range(NK):
            j = i % STAGES
            d = begin(a_bufs, b_bufs, full, i, zero, I, CONSUMERS, STAGES)
            rows = sa_bufs.index(j * CONSUMERS + I).load(gl.SliceLayout(1, L))
            d = warpgroup_mma_wait(0, deps=(d,))
            cols = sb_bufs.index(j).load(gl.SliceLayout(0, L))
            acc += d * (gl.expand_dims(rows, 1) * gl.expand_dims(cols, 0))
            # Ordinary reads of what TMA is to overwrite: without the fence some were still under way when it did (seen on the GPU).
            fence_async_shared()
            mbarrier.arrive(empty.index(j), count=1)
            i += 1
        _put(old, out, acc, (pm * CONSUMERS + I) * 64, pn * BN, N, K, ADD, BN, L)


@gluon.jit
def _run(a_desc, b_desc, sa_desc, sb_desc, old, out, N: gl.constexpr, K: gl.constexpr, NK: gl.constexpr, ADD: gl.constexpr,
         CONSUMERS: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, G: gl.constexpr, RC: gl.constexpr):
    gl.static_assert(CONSUMERS == 2 or CONSUMERS == 3)
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES * CONSUMERS, 64, 128], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BN, 128], b_desc.layout)
    sa_bufs = gl.allocate_shared_memory(gl.float32, [STAGES * CONSUMERS, 64], sa_desc.layout)
    sb_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, BN], sb_desc.layout)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=CONSUMERS)
    nm = gl.cdiv(N, CONSUMERS * 64)
    nn = gl.cdiv(K, BN)
    operands = (old, out, a_bufs, b_bufs, sa_bufs, sb_bufs, full, empty, nm, nn)
    sources = (a_desc, b_desc, sa_desc, sb_desc, a_bufs, b_bufs, sa_bufs, sb_bufs, full, empty, nm, nn)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_math, (0, operands, NK, N, K, ADD, CONSUMERS, BN, STAGES, G)),
            (_math, (1, operands, NK, N, K, ADD, CONSUMERS, BN, STAGES, G)),
            (_load, (sources, NK, N, K, CONSUMERS, BN, STAGES, G)),
        ], [4, 1], [RC, 24])
    else:
        gl.warp_specialize([
            (_math, (0, operands, NK, N, K, ADD, CONSUMERS, BN, STAGES, G)),
            (_math, (1, operands, NK, N, K, ADD, CONSUMERS, BN, STAGES, G)),
            (_math, (2, operands, NK, N, K, ADD, CONSUMERS, BN, STAGES, G)),
            (_load, (sources, NK, N, K, CONSUMERS, BN, STAGES, G)),
        ], [4, 4, 1], [RC, RC, 24])


@gluon.jit
def _wgrad(a_desc, b_desc, sa_desc, sb_desc, out, N: gl.constexpr, K: gl.constexpr, NK: gl.constexpr, CONSUMERS: gl.constexpr,
           BN: gl.constexpr, STAGES: gl.constexpr, G: gl.constexpr, RC: gl.constexpr):
    _run(a_desc, b_desc, sa_desc, sb_desc, out, out, N, K, NK, False, CONSUMERS, BN, STAGES, G, RC)


@gluon.jit
def _wgrad_into(a_desc, b_desc, sa_desc, sb_desc, acc, N: gl.constexpr, K: gl.constexpr, NK: gl.constexpr, CONSUMERS: gl.constexpr,
                BN: gl.constexpr, STAGES: gl.constexpr, G: gl.constexpr, RC: gl.constexpr):
    _run(a_desc, b_desc, sa_desc, sb_desc, acc, acc, N, K, NK, True, CONSUMERS, BN, STAGES, G, RC)
