"""bf16 products of one fixed order on Hopper: y [R, C] = x [R, D] · w [C, D]ᵀ, float32, the same bits for one row and for 8192.

Every output element is one chain of wgmma additions over D, in order, 16 products a link; a row's neighbours, the tile's shape and the
number of programs do not enter. Split-K or another instruction would. So decode and update read equal logits from equal hidden states.

Persistent and warp-specialised: one producer warp fills a ring of TMA stages (64 columns of D each); each of cm x cn consumer warpgroups
owns 64 rows of x and bn rows of w. `vocab_kernels.py` puts other epilogues behind the same loop.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from jetrl_jax.kernels import launch, tuned

ROWS = 64  # of x per consumer: the M of wgmma
BK = 64  # columns of D a stage: 128 bytes, the widest swizzle
PADDED = 512  # up to here x is padded to whole tiles for real: rows that TMA fills cost time (hopper.md), where few rows are


@dataclasses.dataclass(frozen=True)
class Config:
    """cm x cn consumers of 64 x bn; stages in the ring; tiles of rows that run side by side, for the L2; registers of a consumer."""

    cm: int
    cn: int
    bn: int
    stages: int
    group: int = 16
    registers: int = 240


@dataclasses.dataclass(frozen=True)
class Plan(Config):
    """A `Config` for one shape: what a kernel is compiled for."""

    r: int = 0
    c: int = 0
    d: int = 0

    @property
    def nm(self) -> int:
        return -(-self.r // (ROWS * self.cm))

    @property
    def nn(self) -> int:
        return -(-self.c // (self.bn * self.cn))

    @property
    def nk(self) -> int:
        return -(-self.d // BK)

    @property
    def programs(self) -> int:
        return min(self.nm * self.nn, launch.multiprocessors())


CONFIGS = (
    Config(1, 1, 128, 8, 1),  # decode: up to 64 rows, w read once
    Config(1, 2, 64, 8, 1),
    Config(1, 3, 64, 6, 1, 160),
    Config(1, 2, 128, 5, 1),
    Config(2, 1, 128, 6),
    Config(2, 1, 256, 4),
)


def config_for(rows: int, cols: int, depth: int) -> Config:
    """The tuned tile of the nearest shape, or `_default`."""
    few = rows <= ROWS
    fields = tuned.lookup("ordered_dot", rows, cols, depth, dataclasses.asdict(_default(rows, cols)), lambda f: (f["cm"] == 1) == few)
    return Config(**fields)


def _default(rows: int, cols: int) -> Config:
    """Of the small tiles, what leaves the fewest programs idle in the last round, then what shares x most."""
    if rows > ROWS:
        return CONFIGS[4] if rows <= 2 * ROWS and cols < 256 * launch.multiprocessors() else CONFIGS[5]

    def columns_walked(c):  # by each program
        return -(-cols // (c.cn * c.bn * launch.multiprocessors())) * c.cn * c.bn

    return min(CONFIGS[:3], key=lambda c: (columns_walked(c), -c.cn * c.bn))


def candidates(rows: int) -> list[Config]:
    """What `jetrl bench tune` tries."""
    if rows <= ROWS:
        return [c for c in CONFIGS if c.cm == 1]
    return [dataclasses.replace(c, group=g) for c in CONFIGS if c.cm > 1 for g in (8, 16, 32)]


@gluon.jit
def tile_at(t, P: gl.constexpr):
    """Tile t: P.group tiles of rows go together through all columns, so that both operands stay in the L2."""
    size = P.group * P.nn
    first = t // size * P.group
    within = t % size
    height = min(P.nm - first, P.group)
    return first + within % height, within // height


@gluon.jit
def produce(x_desc, w_desc, start, x_bufs, w_bufs, full, empty, P: gl.constexpr):
    """The producer: keeps the ring full, across tiles."""
    CM: gl.constexpr = P.cm
    CN: gl.constexpr = P.cn
    first = gl.load(start)
    it = 0
    for t in range(gl.program_id(0), P.nm * P.nn, gl.num_programs(0)):
        pm, pn = tile_at(t, P)
        for k in range(P.nk):
            s = it % P.stages
            mbarrier.wait(empty.index(s), ((it // P.stages) & 1) ^ 1)
            mbarrier.expect(full.index(s), (P.cm * 64 + P.cn * P.bn) * 128)
            for i in gl.static_range(CM):
                tma.async_load(x_desc, [(pm * CM + i) * 64, k * 64], full.index(s), x_bufs.index(s * CM + i))
            for j in gl.static_range(CN):
                tma.async_load(w_desc, [first + (pn * CN + j) * P.bn, k * 64], full.index(s), w_bufs.index(s * CN + j))
            it += 1


@gluon.jit
def accumulate(it, x_bufs, w_bufs, full, empty, W: gl.constexpr, P: gl.constexpr):
    """Consumer W's 64 x bn sums of a tile, in wgmma's layout; `it` counts stages since the launch. One group of wgmmas stays in flight."""
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, P.bn, 16])
    acc = gl.zeros((64, P.bn), gl.float32, L)
    for k in range(P.nk):
        s = it % P.stages
        mbarrier.wait(full.index(s), (it // P.stages) & 1)
        acc = warpgroup_mma(x_bufs.index(s * P.cm + W % P.cm), w_bufs.index(s * P.cn + W // P.cm).permute((1, 0)), acc, use_acc=k > 0,
                            is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index((it + P.stages - 1) % P.stages), count=1, pred=k > 0)
        it += 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((it + P.stages - 1) % P.stages), count=1)
    return acc, it


@gluon.jit
def times(a, b):
    """a · b rounded: never contracted with an addition that follows, so that the product is the same number wherever it is formed."""
    return gl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _store_tiles(W: gl.constexpr, factor, y, x_bufs, w_bufs, full, empty, P: gl.constexpr, SCALED: gl.constexpr):
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, P.bn, 16])
    it = 0
    for t in range(gl.program_id(0), P.nm * P.nn, gl.num_programs(0)):
        pm, pn = tile_at(t, P)
        acc, it = accumulate(it, x_bufs, w_bufs, full, empty, W, P)
        row = (pm * P.cm + W % P.cm) * 64 + gl.arange(0, 64, gl.SliceLayout(1, L))
        first = (pn * P.cn + W // P.cm) * P.bn
        col = gl.arange(0, P.bn, gl.SliceLayout(0, L))
        if SCALED:
            acc = times(acc, gl.expand_dims(gl.load(factor + row, mask=row < P.r, other=0.0), 1))
        at = gl.expand_dims(y + (row.to(gl.int64) * P.c + first), 1) + gl.expand_dims(col, 0)
        gl.store(at, acc.to(y.dtype.element_ty), mask=gl.expand_dims(row < P.r, 1) & gl.expand_dims(col < P.c - first, 0))


@gluon.jit
def ring(x_desc, w_desc, P: gl.constexpr):
    """Shared memory of the stages and their barriers."""
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [P.stages * P.cm, 64, 64], x_desc.layout)
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [P.stages * P.cn, P.bn, 64], w_desc.layout)
    full = mbarrier.allocate_mbarrier(batch=P.stages)
    empty = mbarrier.allocate_mbarrier(batch=P.stages)
    STAGES: gl.constexpr = P.stages
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=P.cm * P.cn)
    return x_bufs, w_bufs, full, empty


@gluon.jit
def _ordered_dot(x_desc, w_desc, factor, start, y, P: gl.constexpr, SCALED: gl.constexpr):
    x_bufs, w_bufs, full, empty = ring(x_desc, w_desc, P)
    if P.cm * P.cn == 1:
        gl.warp_specialize([
            (_store_tiles, (0, factor, y, x_bufs, w_bufs, full, empty, P, SCALED)),
            (produce, (x_desc, w_desc, start, x_bufs, w_bufs, full, empty, P)),
        ], [1], [24])
    elif P.cm * P.cn == 2:
        gl.warp_specialize([
            (_store_tiles, (0, factor, y, x_bufs, w_bufs, full, empty, P, SCALED)),
            (_store_tiles, (1, factor, y, x_bufs, w_bufs, full, empty, P, SCALED)),
            (produce, (x_desc, w_desc, start, x_bufs, w_bufs, full, empty, P)),
        ], [4, 1], [P.registers, 24])
    else:
        gl.warp_specialize([
            (_store_tiles, (0, factor, y, x_bufs, w_bufs, full, empty, P, SCALED)),
            (_store_tiles, (1, factor, y, x_bufs, w_bufs, full, empty, P, SCALED)),
            (_store_tiles, (2, factor, y, x_bufs, w_bufs, full, empty, P, SCALED)),
            (produce, (x_desc, w_desc, start, x_bufs, w_bufs, full, empty, P)),
        ], [4, 4, 1], [P.registers, P.registers, 24])


def plan_for(x: jax.Array, w: jax.Array, cols: int | None = None, config: Config | None = None) -> Plan:
    """The plan of x [R, D] · w[:cols]ᵀ."""
    (r, d), c = x.shape, cols or w.shape[0]
    return Plan(**dataclasses.asdict(config or config_for(r, c, d)), r=r, c=c, d=d)


def operands(x: jax.Array, w: jax.Array, plan: Plan) -> tuple[Any, Any]:
    """TMA descriptors of both; x gets zero rows up to a multiple of 64 where it has few."""
    x = x if plan.r > PADDED else jnp.pad(x, ((0, -plan.r % ROWS), (0, 0)))
    return launch.descriptor(x, (ROWS, BK)), launch.descriptor(w, (plan.bn, BK))


def supported(x: Any, w: Any) -> bool:
    """Whether `product` covers x [R, D] and w [C, D]: bf16, D a multiple of 8 (TMA's 16 bytes), nothing empty."""
    return x.dtype == w.dtype == jnp.bfloat16 and x.shape[1] % 8 == 0 and x.size > 0 and w.size > 0


def product(x: jax.Array, w: jax.Array, factor: jax.Array | None = None, start: jax.Array | None = None, cols: int | None = None,
            dtype: Any = jnp.float32, config: Config | None = None) -> jax.Array:
    """x [R, D] · w[start : start + cols]ᵀ -> [R, cols] float32 or bf16, times factor [R] float32 (rounded once more).

    Args:
      x, w: bf16, D a multiple of 8 (`supported`).
      start: int32 [1], the first row of w, read by the kernel so that no slice is copied inside a loop; 0 without it.
    """
    p = plan_for(x, w, cols, config)
    return launch.call(
        *operands(x, w, p), jnp.ones(1, jnp.float32) if factor is None else factor, jnp.zeros(1, jnp.int32) if start is None else start,
        kernel=_ordered_dot, out=jax.ShapeDtypeStruct((p.r, p.c), dtype), grid=(p.programs,), flops=2 * p.r * p.c * p.d,
        bytes_accessed=2 * (p.r + p.c) * p.d + p.r * p.c * jnp.dtype(dtype).itemsize, P=p, SCALED=factor is not None)
