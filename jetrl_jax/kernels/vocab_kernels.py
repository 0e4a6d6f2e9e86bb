"""The vocabulary on Hopper: log-probability, entropy and their gradient behind `ordered_dot`'s loop, without [R, V] in memory.

Forward: a tile's logits stay in registers; what leaves are four numbers a row and tile of 256 entries (`partials`), merged in a fixed
order. Backward: a chunk's logits are formed again and leave as their bf16 gradient. Logits that a decode step holds anyway go through the
same statistics of the same tiles, so that both sides give one log-probability for one row of logits, to the bit.
"""

import jax
import jax.numpy as jnp
import triton
import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.experimental import gluon
from triton.language.extra import libdevice

from jetrl_jax.kernels import launch
from jetrl_jax.kernels.ordered_dot import ROWS, Config, accumulate, operands, plan_for, produce, ring, tile_at, times

TILE = 256  # entries of the vocabulary that are summed together: part of the numerics, not a setting
OUTSIDE = gl.constexpr(-1e30)  # a logit outside the kept set: like -inf, but 0 times it is 0
MERGED = 4  # rows a program of the merge
CONFIG = Config(cm=2, cn=1, bn=TILE, stages=4)


@gluon.jit
def _halves(z, N: gl.constexpr):
    """Left and right half of z [64, N], in wgmma's layout of that width: no data moves."""
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N // 2, 16])
    left, right = z.reshape([64, 2, N // 2]).permute((0, 2, 1)).split()
    return gl.convert_layout(left, L, assert_trivial=True), gl.convert_layout(right, L, assert_trivial=True)


@gluon.jit
def _kept(z, own, cut, left, FILTERED: gl.constexpr, RAGGED: gl.constexpr):
    """z [64, 64] with OUTSIDE where z < cut or beyond `left` columns; its largest; the target's logit, or 0 where that is elsewhere."""
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    S: gl.constexpr = gl.SliceLayout(1, L)
    col = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, L)), 0)
    target = gl.sum(gl.where(col == gl.expand_dims(gl.convert_layout(own, S), 1), z, 0.0), axis=1)
    if FILTERED:
        z = gl.where(z >= gl.expand_dims(gl.convert_layout(cut, S), 1), z, OUTSIDE)
    if RAGGED:
        z = gl.where(col < left, z, OUTSIDE)
    return z, gl.max(z, axis=1), target


@gluon.jit
def _sums(z, m):
    """z [64, 64], m [64] -> Σ e^(z - m) where z < m, how many z equal m, Σ e^(z - m)·(z - m)."""
    u = z - gl.expand_dims(m, 1)
    e = gl.exp(u)
    return gl.sum(gl.where(u == 0.0, 0.0, e), axis=1), gl.sum(gl.where(u == 0.0, 1.0, 0.0), axis=1), gl.sum(e * u, axis=1)


@gluon.jit
def tile_statistics(z, own, cut, left, FILTERED: gl.constexpr, RAGGED: gl.constexpr):
    """Logits z [64, 256] -> per row, over {z >= cut}: largest m, Σ e^(z - m) of all others, Σ e^(z - m)·(z - m), target's logit or 0.

    own: the target's column; left: columns that exist, where RAGGED. Entries equal to the largest are counted, one of them left out, so
    that the sum keeps its digits however small it is. By quarters, for the registers. A tile with nothing kept has m = OUTSIDE and weighs
    nothing.
    """
    a, b = _halves(z, 256)
    z0, z1 = _halves(a, 128)
    z2, z3 = _halves(b, 128)
    z0, m0, t0 = _kept(z0, own, cut, left, FILTERED, RAGGED)
    z1, m1, t1 = _kept(z1, own - 64, cut, left - 64, FILTERED, RAGGED)
    z2, m2, t2 = _kept(z2, own - 128, cut, left - 128, FILTERED, RAGGED)
    z3, m3, t3 = _kept(z3, own - 192, cut, left - 192, FILTERED, RAGGED)
    m = gl.maximum(gl.maximum(m0, m1), gl.maximum(m2, m3))
    r0, n0, c0 = _sums(z0, m)
    r1, n1, c1 = _sums(z1, m)
    r2, n2, c2 = _sums(z2, m)
    r3, n3, c3 = _sums(z3, m)
    return m, ((r0 + r1) + (r2 + r3)) + (((n0 + n1) + (n2 + n3)) - 1.0), (c0 + c1) + (c2 + c3), (t0 + t1) + (t2 + t3)


@gluon.jit
def _store_partials(largest, rest, centred, target, values, row, tile, R: gl.constexpr, NT: gl.constexpr):
    at = row.to(gl.int64) * NT + tile
    gl.store(largest + at, gl.convert_layout(values[0], row.type.layout), mask=row < R)
    gl.store(rest + at, gl.convert_layout(values[1], row.type.layout), mask=row < R)
    gl.store(centred + at, gl.convert_layout(values[2], row.type.layout), mask=row < R)
    gl.store(target + at, gl.convert_layout(values[3], row.type.layout), mask=row < R)


@gluon.jit
def _forward_tiles(W: gl.constexpr, factor, targets, tau, largest, rest, centred, target, x_bufs, w_bufs, full, empty, P: gl.constexpr,
                   FILTERED: gl.constexpr):
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, P.bn, 16])
    it = 0
    for t in range(gl.program_id(0), P.nm * P.nn, gl.num_programs(0)):
        pm, pn = tile_at(t, P)
        acc, it = accumulate(it, x_bufs, w_bufs, full, empty, W, P)
        row = (pm * P.cm + W) * 64 + gl.arange(0, 64, gl.SliceLayout(1, L))
        z = times(acc, gl.expand_dims(gl.load(factor + row, mask=row < P.r, other=0.0), 1))
        own = gl.load(targets + row, mask=row < P.r, other=-1) - pn * P.bn
        cut = gl.load(tau + row, mask=row < P.r, other=0.0)
        values = tile_statistics(z, own, cut, P.c - pn * P.bn, FILTERED, P.c % P.bn != 0)
        _store_partials(largest, rest, centred, target, values, row, pn, P.r, P.nn)


@gluon.jit
def _vocab_forward(x_desc, w_desc, factor, targets, tau, start, largest, rest, centred, target, P: gl.constexpr, FILTERED: gl.constexpr):
    x_bufs, w_bufs, full, empty = ring(x_desc, w_desc, P)
    gl.warp_specialize([
        (_forward_tiles, (0, factor, targets, tau, largest, rest, centred, target, x_bufs, w_bufs, full, empty, P, FILTERED)),
        (_forward_tiles, (1, factor, targets, tau, largest, rest, centred, target, x_bufs, w_bufs, full, empty, P, FILTERED)),
        (produce, (x_desc, w_desc, start, x_bufs, w_bufs, full, empty, P)),
    ], [4, 1], [P.registers, 24])


@gluon.jit
def _partials_of_logits(z, targets, tau, largest, rest, centred, target, R: gl.constexpr, V: gl.constexpr, FILTERED: gl.constexpr):
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    tile = gl.program_id(0)
    row = gl.program_id(1) * 64 + gl.arange(0, 64, gl.SliceLayout(1, L))
    col = gl.arange(0, 256, gl.SliceLayout(0, L))
    at = gl.expand_dims(z + (row.to(gl.int64) * V + tile * 256), 1) + gl.expand_dims(col, 0)
    logits = gl.load(at, mask=gl.expand_dims(row < R, 1) & gl.expand_dims(col < V - tile * 256, 0), other=OUTSIDE)
    own = gl.load(targets + row, mask=row < R, other=-1) - tile * 256
    cut = gl.load(tau + row, mask=row < R, other=0.0)
    values = tile_statistics(logits, own, cut, 0, FILTERED, False)
    _store_partials(largest, rest, centred, target, values, row, tile, R, (V + 255) // 256)


@triton.jit
def _merge(largest, rest, centred, target, tau, logp, entropy, lse, mean, NT: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
           FILTERED: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile = tl.arange(0, TILES)[None, :]
    at = row.to(tl.int64)[:, None] * NT + tile
    m = tl.load(largest + at, mask=tile < NT, other=OUTSIDE)
    others = tl.load(rest + at, mask=tile < NT, other=0.0)
    moment = tl.load(centred + at, mask=tile < NT, other=0.0)
    own = tl.sum(tl.load(target + at, mask=tile < NT, other=0.0), 1)
    top = tl.max(m, 1)
    first = tl.min(tl.where(m == top[:, None], tile, TILES), 1)
    shift = top
    if FILTERED:
        apart = own < tl.load(tau + row)  # the token fell below the cut-off that it was drawn with: one more entry
        shift = tl.where(apart & (own > top), own, top)
        first = tl.where(shift > top, TILES, first)
    d = m - shift[:, None]
    scale = tl.exp(d)
    mass = tl.sum(tl.where(tile == first[:, None], others, (1.0 + others) * scale), 1)  # without the 1 of the largest
    moved = tl.sum(scale * (moment + d * (1.0 + others)), 1)
    if FILTERED:
        d = own - shift
        scale = tl.where(apart, tl.exp(d), 0.0)
        mass += tl.where(shift > top, 0.0, scale)
        moved += scale * d
    tail = libdevice.log1p(mass)
    centre = moved / (1.0 + mass)
    tl.store(logp + row, (own - shift) - tail)
    tl.store(entropy + row, tail - centre)
    tl.store(lse + row, shift + tail)
    tl.store(mean + row, shift + centre)


def _shapes(r: int, nt: int) -> list[jax.ShapeDtypeStruct]:
    """Partials, with whole programs of `_merge`: what it compiles to, and so its bits, must not depend on the rows."""
    return [jax.ShapeDtypeStruct((-(-r // MERGED) * MERGED, nt), jnp.float32)] * 4


def _merged(partials: list[jax.Array], tau: jax.Array, filtered: bool) -> list[jax.Array]:
    (r, (padded, nt)) = tau.shape[0], partials[0].shape
    out = launch.call(
        *partials, jnp.pad(tau, (0, padded - r)), kernel=_merge, out=[jax.ShapeDtypeStruct((padded,), jnp.float32)] * 4,
        grid=(padded // MERGED,), bytes_accessed=16 * padded * (nt + 1), NT=nt, ROWS=MERGED, TILES=triton.next_power_of_2(nt),
        FILTERED=filtered)
    return [y[:r] for y in out]


def forward(x: jax.Array, w: jax.Array, targets: jax.Array, tau: jax.Array, factor: jax.Array, filtered: bool) -> list[jax.Array]:
    """Log-probability of the targets, entropy, log-sum-exp and Σ p·z of x · wᵀ · factor, each float32 [R].

    x [R, D], w [V, D]: bf16 (`ordered_dot.supported`); targets [R] int32; τ and factor (1 / temperature) [R] float32. filtered: whether τ
    counts.
    """
    p = plan_for(x, w, config=CONFIG)
    partials = launch.call(
        *operands(x, w, p), factor, targets, tau, jnp.zeros(1, jnp.int32), kernel=_vocab_forward, out=_shapes(p.r, p.nn),
        grid=(p.programs,), flops=2 * p.r * p.c * p.d, bytes_accessed=2 * (p.r + p.c) * p.d, P=p, FILTERED=filtered)
    return _merged(partials, tau, filtered)


def statistics(z: jax.Array, targets: jax.Array, tau: jax.Array, filtered: bool) -> list[jax.Array]:
    """The same of logits z [R, V] float32 over the temperature; the same bits, where they are the logits that `forward` forms."""
    (r, v), nt = z.shape, -(-z.shape[1] // TILE)
    partials = launch.call(
        z, targets, tau, kernel=_partials_of_logits, out=_shapes(r, nt), grid=(nt, -(-r // ROWS)), bytes_accessed=4 * r * v, R=r, V=v,
        FILTERED=filtered)
    return _merged(partials, tau, filtered)


@gluon.jit
def _gradient_tiles(W: gl.constexpr, rows, targets, start, dz, x_bufs, w_bufs, full, empty, P: gl.constexpr, FILTERED: gl.constexpr):
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, P.bn, 16])
    skipped = gl.load(start)
    it = 0
    for t in range(gl.program_id(0), P.nm * P.nn, gl.num_programs(0)):
        pm, pn = tile_at(t, P)
        acc, it = accumulate(it, x_bufs, w_bufs, full, empty, W, P)
        row = (pm * P.cm + W) * 64 + gl.arange(0, 64, gl.SliceLayout(1, L))
        col = gl.arange(0, P.bn, gl.SliceLayout(0, L))
        real = row < P.r
        own = gl.load(targets + row, mask=real, other=-1) - skipped - pn * P.bn
        hit = gl.expand_dims(col, 0) == gl.expand_dims(own, 1)
        z = times(acc, gl.expand_dims(gl.load(rows + row, mask=real, other=0.0), 1))
        log_p = z - gl.expand_dims(gl.load(rows + P.r + row, mask=real, other=0.0), 1)
        centred = log_p + gl.expand_dims(gl.load(rows + 2 * P.r + row, mask=real, other=0.0), 1)
        of_logp = gl.expand_dims(gl.load(rows + 3 * P.r + row, mask=real, other=0.0), 1)
        of_entropy = gl.expand_dims(gl.load(rows + 4 * P.r + row, mask=real, other=0.0), 1)
        g = gl.exp(log_p) * (of_logp + of_entropy * centred)
        if FILTERED:
            g = gl.where(z >= gl.expand_dims(gl.load(rows + 5 * P.r + row, mask=real, other=0.0), 1), g, 0.0)
        g = gl.where(hit, gl.expand_dims(gl.load(rows + 6 * P.r + row, mask=real, other=0.0), 1), g)
        at = gl.expand_dims(dz + (row.to(gl.int64) * P.c + pn * P.bn), 1) + gl.expand_dims(col, 0)
        gl.store(at, g.to(gl.bfloat16), mask=gl.expand_dims(real, 1) & gl.expand_dims(col < P.c - pn * P.bn, 0))


@gluon.jit
def _vocab_gradient(x_desc, w_desc, rows, targets, start, dz, P: gl.constexpr, FILTERED: gl.constexpr):
    x_bufs, w_bufs, full, empty = ring(x_desc, w_desc, P)
    gl.warp_specialize([
        (_gradient_tiles, (0, rows, targets, start, dz, x_bufs, w_bufs, full, empty, P, FILTERED)),
        (_gradient_tiles, (1, rows, targets, start, dz, x_bufs, w_bufs, full, empty, P, FILTERED)),
        (produce, (x_desc, w_desc, start, x_bufs, w_bufs, full, empty, P)),
    ], [4, 1], [P.registers, 24])


def gradient_rows(tau, factor, logp, entropy, lse, g_logp, g_entropy) -> jax.Array:
    """What `gradient` needs of each row, float32 [7, R]; all arguments float32 [R].

    d loss / d z is ((hit - p)·g_logp - p·(log p + entropy)·g_entropy) · factor. The target's own is formed here, from its log-probability:
    1 - p and log p + entropy keep their digits however certain it is.
    """
    own = (-jnp.expm1(logp) * g_logp - jnp.exp(logp) * (logp + entropy) * g_entropy) * factor
    return jnp.stack([factor, lse, entropy, -g_logp * factor, -g_entropy * factor, tau, own])


def gradient(x: jax.Array, w: jax.Array, rows: jax.Array, targets: jax.Array, start: jax.Array, cols: int, filtered: bool) -> jax.Array:
    """Gradient of the untempered logits of entries [start, start + cols), bf16 [R, cols]. rows by `gradient_rows`; start int32 [1]."""
    p = plan_for(x, w, cols, CONFIG)
    return launch.call(
        *operands(x, w, p), rows, targets, start, kernel=_vocab_gradient, out=jax.ShapeDtypeStruct((p.r, p.c), jnp.bfloat16),
        grid=(p.programs,), flops=2 * p.r * p.c * p.d, bytes_accessed=2 * (p.r + p.c) * p.d + 2 * p.r * p.c, P=p, FILTERED=filtered)
