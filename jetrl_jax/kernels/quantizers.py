"""Quantization on Hopper: 1×128, 128×1, both in one pass, 128×128 with its transpose, and 1×128 turned to 128×1 without the original.

Every result equals `quantize.canonical_quantize` to the bit, NaN, infinity and all-zero blocks included. Payloads in groups along tokens
are written transposed, [columns, tokens], where WGrad's product reads them as 1×128; scales of rows are written [K / 128, M], so that a
warp of a product reads them in one line. Wrappers return the logical arrays as transposes of those, which XLA turns into bitcasts.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from jetrl_jax.kernels import launch, tiles
from jetrl_jax.precision import Format
from jetrl_jax.quantize import storage, whole_blocks

S = jax.ShapeDtypeStruct


@gluon.jit
def rows_kernel(x, values, scales, M: gl.constexpr, K: gl.constexpr, KP: gl.constexpr, BLOCK: gl.constexpr, BM: gl.constexpr,
                NB: gl.constexpr, BC: gl.constexpr, LB: gl.constexpr, E5M2: gl.constexpr, POW2: gl.constexpr):
    """BM rows by NB blocks of BLOCK columns; BC is the next power of two. LB of a warp's lanes go along the blocks."""
    lanes: gl.constexpr = BC // 16  # one block
    L: gl.constexpr = gl.BlockedLayout([1, 1, 16], [32 // lanes // LB, LB, lanes], [gl.num_warps(), 1, 1], [2, 1, 0])
    blocks: gl.constexpr = KP // BLOCK
    tiles_k: gl.constexpr = (blocks + NB - 1) // NB
    row, b0 = gl.program_id(0) // tiles_k * BM, gl.program_id(0) % tiles_k * NB
    m = gl.arange(0, BM, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    b = gl.arange(0, NB, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    c = gl.arange(0, BC, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    at = m * K + b * BLOCK + c
    x += row.to(gl.int64) * K + b0 * BLOCK
    if M % BM == 0 and K % (NB * BC) == 0 and BLOCK == BC:
        y = gl.load(x + at)
    else:
        y = gl.load(x + at, mask=(row + m < M) & ((b0 + b) * BLOCK + c < K) & (c < BLOCK), other=0.0)
    y = y.to(gl.float32)
    q, scale = tiles.quantize_last(y, tiles.largest_of_last(y), E5M2, POW2)
    gl.store(values + (row.to(gl.int64) * KP + b0 * BLOCK) + (m * KP + b * BLOCK + c), q,
             mask=(row + m < M) & (b0 + b < blocks) & (c < BLOCK))
    tiles.store_scales(scale, scales, row, M, b0, blocks)


@gluon.jit
def columns_kernel(x, values, scales, LEAD: gl.constexpr, T: gl.constexpr, TP: gl.constexpr, K: gl.constexpr, BC: gl.constexpr,
                   E5M2: gl.constexpr, POW2: gl.constexpr):
    """128 tokens by BC columns as 128×1."""
    L: gl.constexpr = tiles.layout(BC)
    tile, column = gl.program_id(0) // ((K + BC - 1) // BC), gl.program_id(0) % ((K + BC - 1) // BC) * BC
    token, row, first = tiles.locate(tile, T, TP)
    ys = tiles.load_tiles(x, row, token, T, column, K, K, BC, L)
    tiles.store_columns(ys, values, scales, tile, first, LEAD * TP, token, TP, column, K, E5M2, POW2)


@gluon.jit
def both_kernel(x, values, scales, values_t, scales_t, LEAD: gl.constexpr, T: gl.constexpr, TP: gl.constexpr, K: gl.constexpr,
                KP: gl.constexpr, E5M2: gl.constexpr, POW2: gl.constexpr, E5M2_T: gl.constexpr, POW2_T: gl.constexpr):
    """128 tokens by 128 columns as 1×128 and as 128×1."""
    L: gl.constexpr = tiles.layout(128)
    tile, column = gl.program_id(0) // ((K + 127) // 128), gl.program_id(0) % ((K + 127) // 128) * 128
    token, row, first = tiles.locate(tile, T, TP)
    ys = tiles.load_tiles(x, row, token, T, column, K, K, 128, L)
    tiles.store_rows(ys, values, scales, row, token, T, column, KP, LEAD * T, E5M2, POW2)
    tiles.store_columns(ys, values_t, scales_t, tile, first, LEAD * TP, token, TP, column, K, E5M2_T, POW2_T)


@gluon.jit
def _dequantized(q, i: gl.constexpr, scales, token, T: gl.constexpr):
    """Array i of a tile by the scales of its rows, float32."""
    r = 4 * gl.arange(0, 32, layout=gl.SliceLayout(1, q.type.layout)) + i
    return q.to(gl.float32) * gl.load(scales + r, mask=token + r < T, other=0.0)[:, None]


@gluon.jit
def requantize_kernel(q, s, values, scales, LEAD: gl.constexpr, T: gl.constexpr, TP: gl.constexpr, K: gl.constexpr, BC: gl.constexpr,
                      BLOCK: gl.constexpr, E5M2: gl.constexpr, POW2: gl.constexpr):
    """128 tokens by BC columns of a payload with scales [K / BLOCK, tokens] as 128×1."""
    L: gl.constexpr = tiles.layout(BC)
    tile, column = gl.program_id(0) // ((K + BC - 1) // BC), gl.program_id(0) % ((K + BC - 1) // BC) * BC
    token, row, first = tiles.locate(tile, T, TP)
    qs = tiles.load_tiles(q, row, token, T, column, K, K, BC, L)
    s += (column // BLOCK).to(gl.int64) * (LEAD * T) + row
    ys = (_dequantized(qs[0], 0, s, token, T), _dequantized(qs[1], 1, s, token, T), _dequantized(qs[2], 2, s, token, T),
          _dequantized(qs[3], 3, s, token, T))
    tiles.store_columns(ys, values, scales, tile, first, LEAD * TP, token, TP, column, K, E5M2, POW2)


@gluon.jit
def _block(w, values, scales, N: gl.constexpr, NP: gl.constexpr, K: gl.constexpr, KP: gl.constexpr, E5M2: gl.constexpr,
           POW2: gl.constexpr):
    """A 128×128 block of w [N, K] of the program's leading index -> its payload and scale stored; what its transpose needs."""
    L: gl.constexpr = tiles.layout(128)
    blocks_k: gl.constexpr = (KP + 127) // 128
    blocks: gl.constexpr = (NP + 127) // 128 * blocks_k
    lead, block = gl.program_id(0) // blocks, gl.program_id(0) % blocks
    row, column = block // blocks_k * 128, block % blocks_k * 128
    ys = tiles.load_tiles(w + lead.to(gl.int64) * (N * K), row, row, N, column, K, K, 128, L)
    amax = gl.reduce(gl.reduce(tiles.largest_of_four(ys[0], ys[1], ys[2], ys[3]), 1, tiles.largest), 0, tiles.largest)
    scale, inverse, keep = tiles.scale_of(amax, E5M2, POW2)
    for i in gl.static_range(4):
        q = tiles.fp8_kept(ys[i], inverse, keep, E5M2)
        tiles.store_tile(q, i, values + lead.to(gl.int64) * (NP * KP), row, row, NP, column, KP, KP)
    gl.store(scales + gl.program_id(0), scale)
    word = tiles.word_of(ys[0], ys[1], ys[2], ys[3], inverse, E5M2)
    return word, gl.full([128], 0, gl.int32, layout=gl.SliceLayout(0, L)) + keep, lead, row, column


@gluon.jit
def blocks_kernel(w, values, scales, N: gl.constexpr, NP: gl.constexpr, K: gl.constexpr, KP: gl.constexpr, E5M2: gl.constexpr,
                  POW2: gl.constexpr):
    """w [..., N, K] as 128×128, one block a program."""
    _block(w, values, scales, N, NP, K, KP, E5M2, POW2)


@gluon.jit
def blocks_both_kernel(w, values, scales, values_t, N: gl.constexpr, NP: gl.constexpr, K: gl.constexpr, KP: gl.constexpr,
                       E5M2: gl.constexpr, POW2: gl.constexpr):
    """The same, and the payload transposed, [..., K, N]."""
    word, keep, lead, row, column = _block(w, values, scales, N, NP, K, KP, E5M2, POW2)
    tiles.store_words(word, keep, values_t + lead.to(gl.int64) * (NP * KP), row, NP, row, NP, column, KP)


def flags(fmt: Format, suffix: str = "") -> dict[str, Any]:
    return {f"E5M2{suffix}": fmt.dtype == "e5m2", f"POW2{suffix}": fmt.scale == "pow2"}


def bytes_of(shape: Any) -> int:
    return math.prod(shape.shape) * shape.dtype.itemsize


def _leads(x: Any) -> int:
    return math.prod(x.shape[:-2])


def rows(x: jax.Array, fmt: Format, config: tuple[int, int, int] | None = None) -> tuple[jax.Array, jax.Array]:
    """x [..., K] bf16 or float32 -> payload [..., K'] and scales [..., K' / block] (in memory [K' / block, rows]) by `fmt`, (1, block).

    config: rows and blocks of a tile, and warps.
    """
    k, m = x.shape[-1], math.prod(x.shape[:-1])
    kp, block = whole_blocks(k, fmt.block[1])
    blocks, width = kp // block, max(16, 1 << (block - 1).bit_length())
    bm, nb, warps = config or rows_config(m, blocks, width)
    values, scales = launch.call(
        x, kernel=rows_kernel, out=[S((m, kp), storage(fmt)), S((blocks, m), jnp.float32)], grid=(-(-m // bm) * -(-blocks // nb),),
        num_warps=warps, bytes_accessed=m * (k * x.dtype.itemsize + kp + 4 * blocks), M=m, K=k, KP=kp, BLOCK=block, BM=bm, NB=nb, BC=width,
        LB=min(nb, 512 // width), **flags(fmt))
    return values.reshape(*x.shape[:-1], kp), scales.T.reshape(*x.shape[:-1], blocks)


def rows_config(m: int, blocks: int, width: int) -> tuple[int, int, int]:
    """Tiles of 4096 numbers; smaller ones where those would not fill the chip."""
    size, warps = 4096, 4
    while size > 512 and m * blocks * width < size * launch.multiprocessors():
        size //= 2
    warps = max(1, size // 1024)
    nb = min(1 << (blocks - 1).bit_length(), max(1, size // width // 16)) if m >= 16 else min(1 << (blocks - 1).bit_length(), size // width)
    return max(1, size // width // nb), nb, warps


def column_shapes(x: Any, width: int, fmt: Format) -> tuple[list[Any], dict[str, Any]]:
    """Shapes of a payload in groups along tokens with `width` channels, and the sizes that its kernel asks for."""
    t, lead = x.shape[-2], _leads(x)
    tp, group = whole_blocks(t, tiles.TILE)
    return [S((width, lead * tp), storage(fmt)), S((lead * tp // group, width), jnp.float32)], {"LEAD": lead, "T": t, "TP": tp}


def logical_columns(values: jax.Array, scales: jax.Array, lead: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Payload [C, tokens] and scales [groups, C] as written -> as the oracle gives them: [*lead, T', C] and [*lead, T' / group, C]."""
    c, total = values.shape
    tokens = total // math.prod(lead)
    return values.T.reshape(*lead, tokens, c), scales.reshape(*lead, -1, c)


def columns(x: jax.Array, fmt: Format, config: tuple[int, int] = (128, 8)) -> tuple[jax.Array, jax.Array]:
    """x [..., T, K] bf16 or float32 -> payload [..., T', K] (in memory [K, tokens]) and scales [..., T' / group, K] by `fmt`, (128, 1).

    config: columns of a tile (64 or 128), warps. Groups never straddle leading indices.
    """
    k = x.shape[-1]
    out, sizes = column_shapes(x, k, fmt)
    groups, (bc, warps) = out[1].shape[0], config
    values, scales = launch.call(
        x, kernel=columns_kernel, out=out, grid=(groups * -(-k // bc),), num_warps=warps,
        bytes_accessed=x.size * x.dtype.itemsize + math.prod(out[0].shape) + 4 * groups * k, K=k, BC=bc, **sizes, **flags(fmt))
    return logical_columns(values, scales, x.shape[:-2])


def quantize_both(x: jax.Array, row_fmt: Format, column_fmt: Format, warps: int = 8) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`rows(x, row_fmt)` and `columns(x, column_fmt)`, x read once; row_fmt (1, 128)."""
    k, m = x.shape[-1], math.prod(x.shape[:-1])
    kp, block = whole_blocks(k, row_fmt.block[1])
    out, sizes = column_shapes(x, k, column_fmt)
    groups = out[1].shape[0]
    values, scales, values_t, scales_t = launch.call(
        x, kernel=both_kernel, out=[S((m, kp), storage(row_fmt)), S((kp // block, m), jnp.float32), *out],
        grid=(groups * -(-k // tiles.TILE),), num_warps=warps,
        bytes_accessed=x.size * x.dtype.itemsize + m * (kp + 4 * kp // block) + math.prod(out[0].shape) + 4 * groups * k,
        K=k, KP=kp, **sizes, **flags(row_fmt), **flags(column_fmt, "_T"))
    return (values.reshape(*x.shape[:-1], kp), scales.T.reshape(*x.shape[:-1], -1), *logical_columns(values_t, scales_t, x.shape[:-2]))


def requantize(
    values: jax.Array, scales: jax.Array, column_fmt: Format, config: tuple[int, int, int | None] = (64, 4, 80)
) -> tuple[jax.Array, jax.Array]:
    """Saved 1×128 payload [..., T, K'] and scales [..., T, K' / block] -> `columns` of their float32 product, never in memory.

    config: columns of a tile, warps, registers of a thread: what hides its latency is many small programs at a time.
    """
    k = values.shape[-1]
    out, sizes = column_shapes(values, k, column_fmt)
    groups, (bc, warps, registers), blocks = out[1].shape[0], config, scales.shape[-1]
    stored = scales.reshape(-1, blocks).T
    q, s = launch.call(
        values, stored, kernel=requantize_kernel, out=out, grid=(groups * -(-k // bc),), num_warps=warps, registers=registers,
        bytes_accessed=values.size + 4 * scales.size + math.prod(out[0].shape) + 4 * groups * k, K=k, BC=bc, BLOCK=k // blocks,
        **sizes, **flags(column_fmt))
    return logical_columns(q, s, values.shape[:-2])


def blocks(w: jax.Array, fmt: Format, transposed: bool = False, warps: int = 8) -> tuple[jax.Array, ...]:
    """w [..., N, K] float32 or bf16 -> payload [..., N', K'], scales [..., N' / 128, K' / 128] and, if asked, payload [..., K', N']."""
    lead, (n, k) = w.shape[:-2], w.shape[-2:]
    (np_, bn), (kp, bk) = whole_blocks(n, fmt.block[0]), whole_blocks(k, fmt.block[1])
    out = [S((*lead, np_, kp), storage(fmt)), S((*lead, np_ // bn, kp // bk), jnp.float32)]
    size = math.prod(out[0].shape)
    return tuple(launch.call(
        w, kernel=blocks_both_kernel if transposed else blocks_kernel, out=out + [S((*lead, kp, np_), out[0].dtype)] * transposed,
        grid=(math.prod(out[1].shape),), num_warps=warps, bytes_accessed=w.size * w.dtype.itemsize + size * (1 + transposed),
        N=n, NP=np_, K=k, KP=kp, **flags(fmt)))


def quantize_blocks(w: jax.Array, fmt: Format) -> tuple[jax.Array, ...]:
    return blocks(w, fmt, transposed=True)


def native_quantize(x: jax.Array, *, site: str, fmt: Format) -> list[jax.Array]:
    """`quantize.canonical_quantize` on Hopper, where `operators.supported` says so."""
    if fmt.block[0] == 1:
        return list(rows(x, fmt))
    return list(columns(x, fmt) if fmt.block == (tiles.TILE, 1) else blocks(x, fmt))
