"""RMSNorm + quantize and SiLU·mul + quantize on Hopper: what stands before a product, in one pass.

RMSNorm equals the float64 oracle (`reference_fused.rms_norm`) to the bit but for about one result in 2³⁰: the sum of squares is in float64,
and the product with the root and the weight in pairs of float32, whose error is 2⁻⁴⁶ (float64's conversions would be the limit: Hopper
makes 16 of them a clock and multiprocessor). So a decode step and a full forward give the same bits, whatever the tile.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from jetrl_jax.kernels import launch, tiles
from jetrl_jax.kernels.quantizers import S, bytes_of, column_shapes, columns, flags, logical_columns, rows_config
from jetrl_jax.precision import Format
from jetrl_jax.quantize import storage, whole_blocks


@gluon.jit
def split_root(r):
    """r > 0 float64 -> float32 (p, h, l), r = p · (h + l): p a power of two, h of 24 bits, 0 <= l. NaN stays NaN, 0 gives 0."""
    bits = r.to(gl.int64, bitcast=True)
    p = (bits & 0x7FF0000000000000).to(gl.float64, bitcast=True).to(gl.float32)
    m = (bits & 0x000FFFFFFFFFFFFF) | 0x3FF0000000000000
    h = (m & 0x7FFFFFFFE0000000).to(gl.float64, bitcast=True)
    return gl.where(r == r, p, float("nan")), h.to(gl.float32), (m.to(gl.float64, bitcast=True) - h).to(gl.float32)


@gluon.jit
def normalize(x, w, p, h, l, WIDE: gl.constexpr):
    """x · r · w in float32, the nearest but for 2⁻⁴⁶; x holds bf16's numbers, and w unless WIDE."""
    z = x * p  # exact: about one, whatever the size of x
    if WIDE:
        top = (w.to(gl.uint32, bitcast=True) & 0xFFFF0000).to(gl.float32, bitcast=True)
        a = z * top  # 8 bits by 8: exact, as is the rest of the product below
        y = gl.fma(a, h, gl.fma(z * (w - top), h, a * l))
        sign = (x.to(gl.uint32, bitcast=True) ^ w.to(gl.uint32, bitcast=True)) & 0x80000000  # of a zero
        y = ((y.to(gl.uint32, bitcast=True) & 0x7FFFFFFF) | sign).to(gl.float32, bitcast=True)
    else:
        a = z * w
        y = gl.fma(a, h, a * l)
    return y


@gluon.jit
def norm_kernel(x, w, values, scales, y, stats, M: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, EPS: gl.constexpr, R: gl.constexpr,
                NB: gl.constexpr, CHUNKS: gl.constexpr, WIDE: gl.constexpr, QUANTIZE: gl.constexpr, Y: gl.constexpr, STATS: gl.constexpr,
                E5M2: gl.constexpr, POW2: gl.constexpr):
    """R rows; a row in CHUNKS of NB blocks, all of it in registers."""
    L: gl.constexpr = gl.BlockedLayout([1, 1, 16], [1, 4, 8], [1, gl.num_warps(), 1], [2, 1, 0])
    row = gl.program_id(0) * R
    r = gl.arange(0, R, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))
    m = r[:, None, None]
    b = gl.arange(0, NB, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    column, base = b * 128 + c, row.to(gl.int64) * D
    xs: "Any" = ()  # noqa: UP037  (Gluon evaluates it)
    ws: "Any" = ()  # noqa: UP037
    for i in gl.static_range(CHUNKS):
        at = i * NB * 128 + column
        if M % R == 0 and D % (NB * 128) == 0:
            xs = xs + (gl.load(x + base + i * NB * 128 + m * D + column),)
        else:
            xs = xs + (gl.load(x + base + i * NB * 128 + m * D + column, mask=(row + m < M) & (at < D), other=0.0),)
        ws = ws + (gl.load(w + at, mask=at < D, other=0.0),)  # on its way before the sum, behind which it would wait
    total = gl.full([R], 0.0, gl.float64, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))
    for i in gl.static_range(CHUNKS):
        wide = xs[i].to(gl.float32).to(gl.float64)
        total += gl.sum(gl.sum(wide * wide, 2), 1)
    mean = total * gl.full([R], 1 / D, gl.float64, layout=total.type.layout)
    p, h, l = split_root(gl.rsqrt(mean + gl.full([R], EPS, gl.float64, layout=total.type.layout)))
    if STATS:
        gl.store(stats + row + r, p, mask=row + r < M)
        gl.store(stats + M + row + r, h, mask=row + r < M)
        gl.store(stats + 2 * M + row + r, l, mask=row + r < M)
    p, h, l = p[:, None, None], h[:, None, None], l[:, None, None]
    for i in gl.static_range(CHUNKS):
        at = i * NB * 128 + column
        exact = normalize(tiles.widen(xs[i]), tiles.widen(ws[i]), p, h, l, WIDE)
        out, q, scale = tiles.round_and_quantize_last(exact, E5M2, POW2)
        if Y:
            gl.store(y + base + i * NB * 128 + m * D + column, out, mask=(row + m < M) & (at < D))
        if QUANTIZE:
            gl.store(values + row.to(gl.int64) * DP + i * NB * 128 + m * DP + column, q, mask=(row + m < M) & (at < DP))
            tiles.store_scales(scale, scales, row, M, i * NB, (DP + 127) // 128)


@gluon.jit
def _normalized(x, i: gl.constexpr, weight, stats, token, T: gl.constexpr, LEAD: gl.constexpr, WIDE: gl.constexpr):
    """Array i of a tile, normalized by its rows' roots; padding is +0, whatever the weight's sign."""
    r = 4 * gl.arange(0, 32, layout=gl.SliceLayout(1, x.type.layout)) + i
    p = gl.load(stats + r, mask=token + r < T, other=0.0)[:, None]
    h = gl.load(stats + LEAD * T + r, mask=token + r < T, other=0.0)[:, None]
    l = gl.load(stats + 2 * LEAD * T + r, mask=token + r < T, other=0.0)[:, None]
    y = normalize(tiles.widen(x), weight, p, h, l, WIDE)
    return tiles.round_bf16(y if T % 128 == 0 else gl.where((token + r < T)[:, None], y, 0.0))


@gluon.jit
def norm_columns_kernel(x, w, stats, values, scales, LEAD: gl.constexpr, T: gl.constexpr, TP: gl.constexpr, D: gl.constexpr,
                        WIDE: gl.constexpr, E5M2: gl.constexpr, POW2: gl.constexpr):
    """128 tokens by 128 columns of the norm as 128×1, from x and the rows' roots that `norm_kernel` has left."""
    L: gl.constexpr = tiles.layout(128)
    tile, column = gl.program_id(0) // ((D + 127) // 128), gl.program_id(0) % ((D + 127) // 128) * 128
    token, row, first = tiles.locate(tile, T, TP)
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, L))
    xs = tiles.load_tiles(x, row, token, T, column, D, D, 128, L)
    weight = tiles.widen(gl.load(w + column + c, mask=column + c < D, other=0.0))[None, :]
    stats += row
    ys = (_normalized(xs[0], 0, weight, stats, token, T, LEAD, WIDE), _normalized(xs[1], 1, weight, stats, token, T, LEAD, WIDE),
          _normalized(xs[2], 2, weight, stats, token, T, LEAD, WIDE), _normalized(xs[3], 3, weight, stats, token, T, LEAD, WIDE))
    tiles.store_columns(ys, values, scales, tile, first, LEAD * TP, token, TP, column, D, E5M2, POW2)


@gluon.jit
def exp_of_minus(x):
    """e^-|x| to about 2⁻²⁰: the square of the half, since the instruction gives 0 where the result would be subnormal."""
    x = -gl.abs(x * 0.7213475204444817)  # log2(e) / 2
    half = gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
    return half * half


@gluon.jit
def near_reciprocal(x):
    """1/x to a unit in the last place, for x from 1 to 2."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def silu_mul(g, u):
    """g · sigmoid(g) · u in float32 with an error of about 2⁻²⁰: rounded to bf16 the nearest number, or rarely its neighbour."""
    e = exp_of_minus(g)  # never above 1: nothing overflows
    return gl.where(g < 0, g * e, g) * near_reciprocal(1 + e) * u


@gluon.jit
def _silu_bf16(g, u):
    return tiles.round_bf16(silu_mul(tiles.widen(g), tiles.widen(u)))


@gluon.jit
def silu_rows_kernel(g, u, values, scales, M: gl.constexpr, F: gl.constexpr, FP: gl.constexpr, GS: gl.constexpr, US: gl.constexpr,
                     UO: gl.constexpr, BM: gl.constexpr, NB: gl.constexpr, LB: gl.constexpr, E5M2: gl.constexpr, POW2: gl.constexpr):
    """BM rows by NB blocks of 128 columns. GS, US: strides of a row; UO: where u starts."""
    L: gl.constexpr = gl.BlockedLayout([1, 1, 16], [4 // LB, LB, 8], [gl.num_warps(), 1, 1], [2, 1, 0])
    tiles_k: gl.constexpr = (FP + NB * 128 - 1) // (NB * 128)
    row, b0 = gl.program_id(0) // tiles_k * BM, gl.program_id(0) % tiles_k * NB
    m = gl.arange(0, BM, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    b = gl.arange(0, NB, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    at = b * 128 + c
    g, u = g + (row.to(gl.int64) * GS + b0 * 128), u + (row.to(gl.int64) * US + b0 * 128 + UO)
    if M % BM == 0 and F % (NB * 128) == 0:
        gv, uv = gl.load(g + (m * GS + at)), gl.load(u + (m * US + at))
    else:
        inside = (row + m < M) & (b0 * 128 + at < F)
        gv, uv = gl.load(g + (m * GS + at), mask=inside, other=0.0), gl.load(u + (m * US + at), mask=inside, other=0.0)
    h = silu_mul(tiles.widen(gv), tiles.widen(uv))
    _, q, scale = tiles.round_and_quantize_last(h, E5M2, POW2)
    gl.store(values + (row.to(gl.int64) * FP + b0 * 128) + (m * FP + at), q, mask=(row + m < M) & (b0 * 128 + at < FP))
    tiles.store_scales(scale, scales, row, M, b0, (FP + 127) // 128)


@gluon.jit
def silu_both_kernel(g, u, values, scales, values_t, scales_t, LEAD: gl.constexpr, T: gl.constexpr, TP: gl.constexpr, F: gl.constexpr,
                     FP: gl.constexpr, GS: gl.constexpr, US: gl.constexpr, UO: gl.constexpr, E5M2: gl.constexpr, POW2: gl.constexpr,
                     E5M2_T: gl.constexpr, POW2_T: gl.constexpr):
    """128 tokens by 128 columns, in both layouts."""
    L: gl.constexpr = tiles.layout(128)
    tile, column = gl.program_id(0) // ((F + 127) // 128), gl.program_id(0) % ((F + 127) // 128) * 128
    token, row, first = tiles.locate(tile, T, TP)
    gs = tiles.load_tiles(g, row, token, T, column, F, GS, 128, L)
    us = tiles.load_tiles(u + UO, row, token, T, column, F, US, 128, L)
    hs = (_silu_bf16(gs[0], us[0]), _silu_bf16(gs[1], us[1]), _silu_bf16(gs[2], us[2]), _silu_bf16(gs[3], us[3]))
    tiles.store_rows(hs, values, scales, row, token, T, column, FP, LEAD * T, E5M2, POW2)
    tiles.store_columns(hs, values_t, scales_t, tile, first, LEAD * TP, token, TP, column, F, E5M2_T, POW2_T)


def _norm_config(m: int, blocks: int, wide: bool) -> tuple[int, int, int, int]:
    """(rows, blocks of a chunk, chunks, warps) of a program."""
    nb = 1 << (blocks - 1).bit_length()
    if nb - blocks > blocks // 4:  # a chunk that wastes less than the next power of two
        nb = min((1 << i for i in range(2, nb.bit_length())), key=lambda n: (-(-blocks // n) * n - blocks) * 8 + -(-blocks // n))
    chunks, total = -(-blocks // nb), -(-blocks // nb) * nb
    few = m < 4 * launch.multiprocessors()  # latency counts, so more warps share a row
    warps = max(1, min(16 if few else 8, max(2, total // (4 if few else 8)), nb // 4))
    return (1 if few or wide or total > 32 else 2), nb, chunks, warps


def norm_quantize(
    x: jax.Array, weight: jax.Array, *, eps: float, fmt: Format | None, column_fmt: Format | None = None, y: bool = False,
    config: tuple[int, int, int, int] | None = None,
) -> list[jax.Array]:
    """RMSNorm of x [..., D] bf16 by weight [D] float32 or bf16, then quantized.

    Gives the payload and scales by `fmt`, (1, 128), then by `column_fmt`, (128, 1), then the norm in bf16; each if asked for.
    config: rows, blocks of a chunk, chunks and warps of a program.
    """
    d, m = x.shape[-1], math.prod(x.shape[:-1])
    fmt_, (dp, block) = fmt or Format(), whole_blocks(d, 128)
    blocks, stats, wide = dp // block, column_fmt is not None and not y, weight.dtype != jnp.bfloat16
    r, nb, chunks, warps = config or _norm_config(m, blocks, wide)
    out = [S((m, dp) if fmt else (1,), storage(fmt_)), S((blocks, m) if fmt else (1,), jnp.float32),
           S(x.shape if y else (1,), x.dtype), S((3, m) if stats else (1,), jnp.float32)]
    values, scales, normed, roots = launch.call(
        x, weight, kernel=norm_kernel, out=out, grid=(-(-m // r),), num_warps=warps, bytes_accessed=2 * m * d + sum(map(bytes_of, out)),
        M=m, D=d, DP=dp, EPS=eps, R=r, NB=nb, CHUNKS=chunks, WIDE=wide, QUANTIZE=fmt is not None, Y=y, STATS=stats, **flags(fmt_))
    outs = [values.reshape(*x.shape[:-1], dp), scales.T.reshape(*x.shape[:-1], blocks)] if fmt else []
    if column_fmt is not None and y:
        outs += columns(normed, column_fmt)
    elif column_fmt is not None:
        shapes, sizes = column_shapes(x, d, column_fmt)
        pair = launch.call(
            x, weight, roots, kernel=norm_columns_kernel, out=shapes, grid=(shapes[1].shape[0] * -(-d // 128),), num_warps=8,
            bytes_accessed=2 * m * d + sum(map(bytes_of, shapes)), D=d, WIDE=wide, **sizes, **flags(column_fmt))
        outs += logical_columns(pair[0], pair[1], x.shape[:-2])
    return outs + [normed] * y


def silu_quantize(
    g: jax.Array, u: jax.Array | None, *, fmt: Format, column_fmt: Format | None = None, features: int | None = None,
    config: tuple[int, int, int] | None = None,
) -> list[jax.Array]:
    """silu(g) · u in bf16, quantized by `fmt`, (1, 128), and by `column_fmt`, (128, 1), if given: payload and scales of each.

    g, u: [..., F] bf16; or u None and g [..., 2 P], the two side by side, `features` F <= P numbers of each taken (all if None).
    config: rows and blocks of a tile and warps, where one layout is asked for.
    """
    width, m = g.shape[-1], math.prod(g.shape[:-1])
    offset = 0 if u is not None else width // 2
    f = features or (width if u is not None else offset)
    u = g if u is None else u
    fp, block = whole_blocks(f, 128)
    out = [S((m, fp), storage(fmt)), S((fp // block, m), jnp.float32)]
    sizes: dict[str, Any] = {"F": f, "FP": fp, "GS": width, "US": u.shape[-1], "UO": offset}
    moved = 4 * m * f + sum(map(bytes_of, out))
    if column_fmt is None:
        bm, nb, warps = config or rows_config(m, fp // block, 128)
        values, scales = launch.call(
            g, u, kernel=silu_rows_kernel, out=out, grid=(-(-m // bm) * -(-fp // (128 * nb)),), num_warps=warps, bytes_accessed=moved,
            M=m, BM=bm, NB=nb, LB=min(nb, 4), **sizes, **flags(fmt))
        return [values.reshape(*g.shape[:-1], fp), scales.T.reshape(*g.shape[:-1], -1)]
    shapes, tokens = column_shapes(g, f, column_fmt)
    values, scales, values_t, scales_t = launch.call(
        g, u, kernel=silu_both_kernel, out=out + shapes, grid=(shapes[1].shape[0] * -(-f // 128),), num_warps=8,
        bytes_accessed=moved + sum(map(bytes_of, shapes)), **sizes, **tokens, **flags(fmt), **flags(column_fmt, "_T"))
    return [values.reshape(*g.shape[:-1], fp), scales.T.reshape(*g.shape[:-1], -1), *logical_columns(values_t, scales_t, g.shape[:-2])]
