"""The backward counterparts of `fused_forward`: gradients of RMSNorm and of SiLU·mul, quantized where they are made.

In float32 (so |x| up to 10¹⁸); each result is rounded to bf16 once and quantized from that. The weight's gradient is summed
in a fixed order: every program over the rows that are its own, then one kernel over the programs.
"""

import math

import jax
import jax.numpy as jnp
import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from jetrl_jax.kernels import launch, tiles
from jetrl_jax.kernels.fused_forward import exp_of_minus, near_reciprocal
from jetrl_jax.kernels.quantizers import S, bytes_of, column_shapes, columns, flags, logical_columns
from jetrl_jax.precision import Format
from jetrl_jax.quantize import storage, whole_blocks


@gluon.jit
def _row(x, row, M: gl.constexpr, D: gl.constexpr, column):
    """A row of x [M, D], zeros beyond both ends."""
    return gl.load(x + row.to(gl.int64) * D + column, mask=(row < M) & (column < D), other=0.0)


@gluon.jit
def norm_backward_kernel(dy, x, w, residual, dx, values, scales, partial, M: gl.constexpr, D: gl.constexpr, DP: gl.constexpr,
                         EPS: gl.constexpr, NB: gl.constexpr, PROGRAMS: gl.constexpr, RESIDUAL: gl.constexpr, QUANTIZE: gl.constexpr,
                         E5M2: gl.constexpr, POW2: gl.constexpr):
    """Every PROGRAMS-th row, one at a time with the next on its way; its part of the weight's gradient stays in registers."""
    L: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [gl.num_warps(), 1], [1, 0])
    b = gl.arange(0, NB, layout=gl.SliceLayout(1, L))
    column = b[:, None] * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, L))[None, :]
    weight = tiles.widen(gl.load(w + column, mask=column < D, other=0.0))
    dw = gl.full([NB, 128], 0.0, gl.float32, layout=L)
    pid = gl.program_id(0)
    next_dy, next_x = _row(dy, pid, M, D, column), _row(x, pid, M, D, column)
    next_residual = _row(residual, pid, M, D, column) if RESIDUAL else next_dy
    for i in range((M + PROGRAMS - 1) // PROGRAMS):
        row = i * PROGRAMS + pid
        g, v, r = tiles.widen(next_dy), tiles.widen(next_x), tiles.widen(next_residual)
        next_dy, next_x = _row(dy, row + PROGRAMS, M, D, column), _row(x, row + PROGRAMS, M, D, column)
        if RESIDUAL:
            next_residual = _row(residual, row + PROGRAMS, M, D, column)
        t = g * weight
        f = gl.rsqrt(gl.sum(gl.sum(v * v, 1), 0) / D + EPS)
        c = gl.sum(gl.sum(v * t, 1), 0) * f / D
        n = v * f
        dw += g * n
        d = f * (t - n * c)
        if RESIDUAL:
            d += r
        out, q, scale = tiles.round_and_quantize_last(d, E5M2, POW2)
        gl.store(dx + row.to(gl.int64) * D + column, out, mask=(row < M) & (column < D))
        if QUANTIZE:
            gl.store(values + row.to(gl.int64) * DP + column, q, mask=(row < M) & (column < DP))
            gl.store(scales + b.to(gl.int64) * M + row, scale, mask=(row < M) & (b * 128 < DP))
    gl.store(partial + pid.to(gl.int64) * D + column, dw, mask=column < D)


@gluon.jit
def sum_kernel(partial, out, ROWS: gl.constexpr, D: gl.constexpr):
    """partial [ROWS, D] -> its sum over the rows, always in the same order; 32 columns a program of 4 warps."""
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    r = gl.arange(0, 32, layout=gl.SliceLayout(1, L))[:, None]
    c = gl.program_id(0) * 32 + gl.arange(0, 32, layout=gl.SliceLayout(0, L))
    total = gl.full([32, 32], 0.0, gl.float32, layout=L)
    for i in range((ROWS + 31) // 32):
        total += gl.load(partial + (i * 32 + r) * D + c[None, :], mask=(i * 32 + r < ROWS) & (c < D)[None, :], other=0.0)
    gl.store(out + c, gl.sum(total, 0), mask=c < D)


@gluon.jit
def silu_backward(dh, g, u):
    """Gradients of silu(g) · u, float32 by g and by u."""
    e = exp_of_minus(g)
    small = near_reciprocal(1 + e)
    other = e * small
    s, rest = gl.where(g < 0, other, small), gl.where(g < 0, small, other)  # sigmoid(g) and 1 - sigmoid(g)
    silu = g * s
    return dh * u * (s + silu * rest), dh * silu


@gluon.jit
def _gradients(dh, g, u, i: gl.constexpr, waiting, row, token, T: gl.constexpr, column, F: gl.constexpr, DS: gl.constexpr,
               GS: gl.constexpr, US: gl.constexpr, L: gl.constexpr):
    """dg of array i of a tile, in bf16; du goes to shared memory."""
    d = tiles.widen(tiles.load_tile(dh, i, row, token, T, column, F, DS, 128, L))
    gv = tiles.widen(tiles.load_tile(g, i, row, token, T, column, F, GS, 128, L))
    uv = tiles.widen(tiles.load_tile(u, i, row, token, T, column, F, US, 128, L))
    dg, du = silu_backward(d, gv, uv)
    waiting.index(i).store(tiles.round_bf16(du))
    return tiles.round_bf16(dg)


@gluon.jit
def silu_backward_kernel(dh, g, u, values, scales, values_t, scales_t, both, LEAD: gl.constexpr, T: gl.constexpr, TP: gl.constexpr,
                         F: gl.constexpr, FP: gl.constexpr, DS: gl.constexpr, GS: gl.constexpr, US: gl.constexpr, UO: gl.constexpr,
                         BF16: gl.constexpr, E5M2: gl.constexpr, POW2: gl.constexpr, E5M2_T: gl.constexpr, POW2_T: gl.constexpr):
    """128 tokens by 128 columns: [dg | du], padded(F) columns each, as 1×128 and as 128×1, and in bf16 if asked."""
    L: gl.constexpr = tiles.layout(128)
    tile, column = gl.program_id(0) // (FP // 128), gl.program_id(0) % (FP // 128) * 128
    token, row, first = tiles.locate(tile, T, TP)
    # du waits in shared memory while dg is stored: with both in registers only one program fits on a multiprocessor.
    waiting = gl.allocate_shared_memory(gl.bfloat16, [4, 32, 128], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    dgs = (_gradients(dh, g, u + UO, 0, waiting, row, token, T, column, F, DS, GS, US, L),
           _gradients(dh, g, u + UO, 1, waiting, row, token, T, column, F, DS, GS, US, L),
           _gradients(dh, g, u + UO, 2, waiting, row, token, T, column, F, DS, GS, US, L),
           _gradients(dh, g, u + UO, 3, waiting, row, token, T, column, F, DS, GS, US, L))
    if BF16:
        for i in gl.static_range(4):
            tiles.store_tile(dgs[i], i, both, row, token, T, column, 2 * FP, 2 * FP)
    tiles.store_rows(dgs, values, scales, row, token, T, column, 2 * FP, LEAD * T, E5M2, POW2)
    tiles.store_columns(dgs, values_t, scales_t, tile, first, LEAD * TP, token, TP, column, 2 * FP, E5M2_T, POW2_T)
    dus = (waiting.index(0).load(L), waiting.index(1).load(L), waiting.index(2).load(L), waiting.index(3).load(L))
    column += FP
    if BF16:
        for i in gl.static_range(4):
            tiles.store_tile(dus[i], i, both, row, token, T, column, 2 * FP, 2 * FP)
    tiles.store_rows(dus, values, scales, row, token, T, column, 2 * FP, LEAD * T, E5M2, POW2)
    tiles.store_columns(dus, values_t, scales_t, tile, first, LEAD * TP, token, TP, column, 2 * FP, E5M2_T, POW2_T)


def norm_backward(
    dy: jax.Array, x: jax.Array, weight: jax.Array, residual: jax.Array | None, *, eps: float, fmt: Format | None,
    column_fmt: Format | None, warps: int | None = None,
) -> list[jax.Array]:
    """Gradient of RMSNorm: dy, x [..., D] bf16, weight [D] -> dx bf16 and dweight [D] float32, then dx quantized.

    residual: the gradient that passes the norm by, added to dx before the one rounding. After dx and dweight come the payload and scales
    of dx by `fmt`, (1, 128), then by `column_fmt`, (128, 1), each if given.
    """
    d, m = x.shape[-1], math.prod(x.shape[:-1])
    fmt_, (dp, block) = fmt or Format(), whole_blocks(d, 128)
    blocks = dp // block
    nb = max(4, 1 << (blocks - 1).bit_length())
    warps = warps or max(1, min(16, nb // 4))
    programs = min(m, max(1, 16 // warps) * launch.multiprocessors())
    out = [S(x.shape, x.dtype), S((m, dp) if fmt else (1,), storage(fmt_)), S((blocks, m) if fmt else (1,), jnp.float32),
           S((programs, d), jnp.float32)]
    dx, values, scales, partial = launch.call(
        dy, x, weight, dy if residual is None else residual, kernel=norm_backward_kernel, out=out, grid=(programs,), num_warps=warps,
        bytes_accessed=(4 if residual is None else 6) * m * d + sum(map(bytes_of, out)), M=m, D=d, DP=dp, EPS=eps, NB=nb,
        PROGRAMS=programs, RESIDUAL=residual is not None, QUANTIZE=fmt is not None, **flags(fmt_))
    dw = launch.call(partial, kernel=sum_kernel, out=S((d,), jnp.float32), grid=(-(-d // 32),), num_warps=4,
                     bytes_accessed=4 * (programs + 1) * d, ROWS=programs, D=d)
    outs = [dx, dw]
    if fmt:
        outs += [values.reshape(*x.shape[:-1], dp), scales.T.reshape(*x.shape[:-1], blocks)]
    return outs + (list(columns(dx, column_fmt)) if column_fmt else [])


def silu_backward_quantize(
    dh: jax.Array, g: jax.Array, u: jax.Array | None, *, fmt: Format, column_fmt: Format, features: int | None = None, bf16: bool = False,
) -> list[jax.Array]:
    """Gradient of silu(g) · u: dh [..., F] bf16 and the forward's g and u (see `silu_quantize`) -> [dg | du], quantized in both layouts.

    dg and du take padded(F) columns each, whole blocks of 128, zeros in the rest. Gives payload and scales by `fmt`, (1, 128), by
    `column_fmt`, (128, 1), and [..., 2 padded(F)] in bf16 if asked.
    """
    width, m = g.shape[-1], math.prod(g.shape[:-1])
    offset = 0 if u is not None else width // 2
    f = features or (width if u is not None else offset)
    u = g if u is None else u
    fp = -(-f // tiles.TILE) * tiles.TILE
    shapes, sizes = column_shapes(g, 2 * fp, column_fmt)
    out = [S((m, 2 * fp), storage(fmt)), S((2 * fp // 128, m), jnp.float32), *shapes,
           S((*g.shape[:-1], 2 * fp) if bf16 else (1,), g.dtype)]
    values, scales, values_t, scales_t, both = launch.call(
        dh, g, u, kernel=silu_backward_kernel, out=out, grid=(shapes[1].shape[0] * fp // 128,), num_warps=8,
        bytes_accessed=6 * m * f + sum(map(bytes_of, out)), F=f, FP=fp, DS=dh.shape[-1], GS=width, US=u.shape[-1], UO=offset, BF16=bf16,
        **sizes, **flags(fmt), **flags(column_fmt, "_T"))
    return [values.reshape(*g.shape[:-1], -1), scales.T.reshape(*g.shape[:-1], -1),
            *logical_columns(values_t, scales_t, g.shape[:-2])] + [both] * bf16
