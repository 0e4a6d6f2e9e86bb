"""What the memory-bound kernels share: the quantizer's steps on arrays in registers, and loads and stores of tiles in both layouts.

A tile is 128 tokens by BC columns (64 or 128), held as four arrays [32, BC], bf16 or float32: array i has the tokens 4·r + i. So the
payloads of four neighbouring tokens are packed in one word before they change places: a quarter of the traffic through shared memory, and
stores of 16 bytes in both layouts. The steps are those of `quantize.canonical_quantize`, to the bit; the clip of that is in the saturating
conversion, and |y · (1/scale)| stays below infinity, since the scale comes from the largest |y|.
"""

import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.experimental import gluon

TILE = 128
TINY = gl.constexpr(2.0**-100)
NAN_WINS = gl.constexpr(tl.PropagateNan.ALL)


def _ptx(*lines: str) -> str:
    """One block of PTX with registers of its own; outputs are written last, since the compiler may keep them where inputs are."""
    return "{ .reg .b32 e<4>, o<4>, w, v; .reg .b16 l, h; " + " ".join(f"{line};" for line in lines) + " }"


def _unpack(at: int, even: str, odd: str) -> list[str]:
    """Operand `at`, two bf16, as two float32."""
    return [f"shl.b32 {even}, ${at}, 16", f"and.b32 {odd}, ${at}, 0xffff0000"]


def _fp8(fmt: str, x: tuple[str, ...], scales: tuple[int, ...], to: str) -> list[str]:
    """Four float32 by operands `scales` -> FP8, the first in the lowest byte, to nearest even, saturating; subnormals count as 0."""
    n = "e" if to == "w" else "o"
    return [f"mul.rn.ftz.f32 {n}{i}, {v}, ${scales[i]}" for i, v in enumerate(x)] + [
        f"cvt.rn.satfinite.{fmt}x2.f32 l, {n}1, {n}0", f"cvt.rn.satfinite.{fmt}x2.f32 h, {n}3, {n}2", f"mov.b32 {to}, {{l, h}}"]


def _words(fmt: str, bf16: bool) -> str:
    """Of one column, or of two where a register holds two bf16."""
    if not bf16:
        return _ptx(*_fp8(fmt, ("$1", "$2", "$3", "$4"), (5,) * 4, "w"), "mov.b32 $0, w")
    unpacked = [line for i in range(4) for line in _unpack(2 + i, f"e{i}", f"o{i}")]
    even, odd = (tuple(f"{n}{i}" for i in range(4)) for n in "eo")
    return _ptx(*unpacked, *_fp8(fmt, even, (6,) * 4, "w"), *_fp8(fmt, odd, (7,) * 4, "v"), "mov.b32 $0, w", "mov.b32 $1, v")


def _kept(fmt: str, bf16: bool) -> str:
    """Of four neighbours in a row, which share a scale."""
    if not bf16:
        return _ptx(*_fp8(fmt, ("$1", "$2", "$3", "$4"), (5,) * 4, "w"), "and.b32 $0, w, $9")
    return _ptx(*_unpack(1, "e0", "e1"), *_unpack(2, "e2", "e3"), *_fp8(fmt, ("e0", "e1", "e2", "e3"), (3,) * 4, "w"), "and.b32 $0, w, $7")


E4M3_WORD, E5M2_WORD, E4M3_WORDS, E5M2_WORDS = (gl.constexpr(_words(f, b)) for b in (False, True) for f in ("e4m3", "e5m2"))
E4M3_KEPT, E5M2_KEPT, E4M3_KEPT16, E5M2_KEPT16 = (gl.constexpr(_kept(f, b)) for b in (False, True) for f in ("e4m3", "e5m2"))
WIDEN = gl.constexpr(_ptx(*_unpack(2, "e0", "o0"), "mov.b32 $0, e0", "mov.b32 $1, o0"))
LARGER = gl.constexpr(_ptx("abs.bf16x2 e0, $1", "abs.bf16x2 o0, $2", "max.NaN.bf16x2 $0, e0, o0"))


@gluon.constexpr_function
def layout(BC):
    """Of an array [32, BC]: 16 columns a thread, so that a block of 128 is eight threads'; 8 warps at 128 columns, 4 at 64."""
    return gl.BlockedLayout([1, 16], [512 // BC, BC // 16], [BC // 16, 1], [1, 0])


@gluon.jit
def largest(a, b):
    """The larger one; NaN if either is: a block with a NaN must be seen."""
    return gl.maximum(a, b, propagate_nan=NAN_WINS)


@gluon.jit
def reciprocal(x):
    """1/x rounded to nearest: the instruction for it is a third of a division."""
    return gl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def widen(x):
    """bf16, float32 or FP8 -> float32; bf16 at one instruction a number."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(WIDEN, "=f,=f,r", [x], dtype=gl.float32, is_pure=True, pack=2)
    else:
        return x.to(gl.float32)


@gluon.jit
def round_bf16(x):
    """float32 -> bf16 to nearest even, in pairs: one at a time it is an instruction of a quarter of the rate."""
    return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def largest_of_four(a, b, c, d):
    """Largest magnitudes of four arrays, bf16 or float32, as float32."""
    if a.dtype == gl.bfloat16:
        x = gl.inline_asm_elementwise(LARGER, "=r,r,r", [a, b], dtype=gl.bfloat16, is_pure=True, pack=2)
        y = gl.inline_asm_elementwise(LARGER, "=r,r,r", [c, d], dtype=gl.bfloat16, is_pure=True, pack=2)
        return widen(gl.inline_asm_elementwise(LARGER, "=r,r,r", [x, y], dtype=gl.bfloat16, is_pure=True, pack=2))
    else:
        return largest(largest(gl.abs(a), gl.abs(b)), largest(gl.abs(c), gl.abs(d)))


@gluon.jit
def word_of(a, b, c, d, inverse, E5M2: gl.constexpr):
    """Four bf16 or float32 arrays by `inverse` -> one int32 array: their FP8 in bytes 0 to 3."""
    if a.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(E5M2_WORDS if E5M2 else E4M3_WORDS, "=r,=r,r,r,r,r,f,f", [a, b, c, d, inverse], dtype=gl.int32,
                                         is_pure=True, pack=2)
    else:
        return gl.inline_asm_elementwise(E5M2_WORD if E5M2 else E4M3_WORD, "=r,f,f,f,f,f", [a, b, c, d, inverse], dtype=gl.int32,
                                         is_pure=True, pack=1)


@gluon.jit
def fp8_kept(y, inverse, keep, E5M2: gl.constexpr):
    """y bf16 or float32 by `inverse` -> FP8, zero where `keep` (int32 -1 or 0) is; both the same for four neighbours in a register."""
    if y.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(E5M2_KEPT16 if E5M2 else E4M3_KEPT16, "=r,r,r,f,f,f,f,r,r,r,r", [y, inverse, keep],
                                         dtype=gl.float8e5 if E5M2 else gl.float8e4nv, is_pure=True, pack=4)
    else:
        return gl.inline_asm_elementwise(E5M2_KEPT if E5M2 else E4M3_KEPT, "=r,f,f,f,f,f,f,f,f,r,r,r,r", [y, inverse, keep],
                                         dtype=gl.float8e5 if E5M2 else gl.float8e4nv, is_pure=True, pack=4)


@gluon.jit
def scale_of(amax, E5M2: gl.constexpr, POW2: gl.constexpr):
    """Largest magnitude -> (scale, NaN for a block that is not finite; its reciprocal; -1 for a finite block, else 0)."""
    finite = amax < float("inf")
    scale = gl.maximum(gl.where(finite, amax, 1.0), TINY) * ((1 / 57344) if E5M2 else (1 / 448))
    if POW2:
        scale = ((scale.to(gl.uint32, bitcast=True) + 0x7FFFFF) & 0xFF800000).to(gl.float32, bitcast=True)
    return gl.where(finite, scale, float("nan")), reciprocal(scale), gl.where(finite, -1, 0)


@gluon.jit
def largest_of_last(y):
    """Largest magnitudes along the last axis, float32; bf16 is widened by Triton's way, which leaves |y| to the comparison."""
    return gl.reduce(gl.abs(y.to(gl.float32)), len(y.shape) - 1, largest)


@gluon.jit
def quantize_last(y, amax, E5M2: gl.constexpr, POW2: gl.constexpr):
    """y [..., block] bf16 or float32 with the last axis innermost in registers, and its largest magnitudes -> (payload, scales [...])."""
    axis: gl.constexpr = len(y.shape) - 1
    scale, inverse, keep = scale_of(amax, E5M2, POW2)
    return fp8_kept(y, gl.expand_dims(inverse, axis), gl.expand_dims(keep, axis), E5M2), scale


@gluon.jit
def round_and_quantize_last(y, E5M2: gl.constexpr, POW2: gl.constexpr):
    """y [..., block] float32 -> (bf16, its payload, scales): rounding keeps the order, so the largest is that of y, rounded."""
    out = round_bf16(y)
    q, scale = quantize_last(out, largest_of_last(y).to(gl.bfloat16).to(gl.float32), E5M2, POW2)
    return out, q, scale


@gluon.jit
def store_scales(scale, scales, row, M: gl.constexpr, block, BLOCKS: gl.constexpr):
    """Scales [rows, blocks] of a tile that starts at (row, block) -> [BLOCKS, M] in memory."""
    m = row + gl.arange(0, scale.shape[0], layout=gl.SliceLayout(1, scale.type.layout))[:, None]
    b = block + gl.arange(0, scale.shape[1], layout=gl.SliceLayout(0, scale.type.layout))[None, :]
    gl.store(scales + (b.to(gl.int64) * M + m), scale, mask=(m < M) & (b < BLOCKS))


@gluon.jit
def locate(tile, T: gl.constexpr, TP: gl.constexpr):
    """Tile of tokens -> (its first token in its sequence, the same in all sequences laid end to end, and in the padded ones)."""
    tiles: gl.constexpr = (TP + 127) // 128
    token = tile % tiles * 128
    return token, tile // tiles * T + token, tile // tiles * TP + token


@gluon.jit
def load_tile(x, i: gl.constexpr, row, token, T: gl.constexpr, column, WIDTH: gl.constexpr, STRIDE: gl.constexpr, BC: gl.constexpr,
              L: gl.constexpr):
    """Array i of a tile of x [tokens, STRIDE], zeros from column WIDTH and token T of the sequence on."""
    r, c = 4 * gl.arange(0, 32, layout=gl.SliceLayout(1, L)) + i, gl.arange(0, BC, layout=gl.SliceLayout(0, L))
    at = x + (row.to(gl.int64) * STRIDE + column) + (r[:, None] * STRIDE + c[None, :])
    if T % 128 == 0 and WIDTH % BC == 0:
        return gl.load(at)
    else:
        return gl.load(at, mask=(token + r < T)[:, None] & (column + c < WIDTH)[None, :], other=0.0)


@gluon.jit
def load_tiles(x, row, token, T: gl.constexpr, column, WIDTH: gl.constexpr, STRIDE: gl.constexpr, BC: gl.constexpr, L: gl.constexpr):
    """The four arrays of a tile, see `load_tile`."""
    return (load_tile(x, 0, row, token, T, column, WIDTH, STRIDE, BC, L), load_tile(x, 1, row, token, T, column, WIDTH, STRIDE, BC, L),
            load_tile(x, 2, row, token, T, column, WIDTH, STRIDE, BC, L), load_tile(x, 3, row, token, T, column, WIDTH, STRIDE, BC, L))


@gluon.jit
def store_tile(y, i: gl.constexpr, out, row, token, T: gl.constexpr, column, WIDTH: gl.constexpr, STRIDE: gl.constexpr):
    """The counterpart of `load_tile`."""
    L: gl.constexpr = y.type.layout
    r = 4 * gl.arange(0, 32, layout=gl.SliceLayout(1, L)) + i
    c = gl.arange(0, y.shape[1], layout=gl.SliceLayout(0, L))
    at = out + (row.to(gl.int64) * STRIDE + column) + (r[:, None] * STRIDE + c[None, :])
    if T % 128 == 0 and WIDTH % y.shape[1] == 0:
        gl.store(at, y)
    else:
        gl.store(at, y, mask=(token + r < T)[:, None] & (column + c < WIDTH)[None, :])


@gluon.jit
def store_rows(ys, values, scales, row, token, T: gl.constexpr, column, WIDTH: gl.constexpr, TOKENS: gl.constexpr,
               E5M2: gl.constexpr, POW2: gl.constexpr):
    """A tile of 128 columns as 1×128: payload [TOKENS, WIDTH], scales [blocks, TOKENS] in memory."""
    for i in gl.static_range(4):
        q, scale = quantize_last(ys[i], largest_of_last(ys[i]), E5M2, POW2)
        store_tile(q, i, values, row, token, T, column, WIDTH, WIDTH)
        r = 4 * gl.arange(0, 32, layout=gl.SliceLayout(1, ys[i].type.layout)) + i
        gl.store(scales + ((column // 128).to(gl.int64) * TOKENS + row) + r, scale, mask=token + r < T)


@gluon.jit
def store_words(words, keep, values, first, TOTAL: gl.constexpr, token, TP: gl.constexpr, column, WIDTH: gl.constexpr):
    """Words [32, BC] of four tokens each, transposed into the payload [WIDTH, TOTAL] at `first` along TOTAL; zero where keep [BC] is.

    token: the tile's first within its sequence of TP tokens, padding included. The layout gives a thread 16 tokens of a column.
    """
    W: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, gl.num_warps()], [0, 1])
    words = gl.convert_layout(words, W) & gl.convert_layout(keep, gl.SliceLayout(0, W))[None, :]
    j, c = gl.arange(0, 32, layout=gl.SliceLayout(1, W))[:, None], gl.arange(0, words.shape[1], layout=gl.SliceLayout(0, W))[None, :]
    if TP % 4 == 0:
        at = values.to(gl.pointer_type(gl.int32), bitcast=True) + (column.to(gl.int64) * (TOTAL // 4) + first // 4)
        at += c * (TOTAL // 4) + j
        if TP % 128 == 0 and WIDTH % words.shape[1] == 0:
            gl.store(at, words)
        else:
            gl.store(at, words, mask=(column + c < WIDTH) & (token // 4 + j < TP // 4))
    else:
        at = values.to(gl.pointer_type(gl.int8), bitcast=True) + (column.to(gl.int64) * TOTAL + first)
        for i in gl.static_range(4):
            byte = (words >> (8 * i)).to(gl.int8)
            gl.store(at + (c * TOTAL + 4 * j + i), byte, mask=(column + c < WIDTH) & (token + 4 * j + i < TP))


@gluon.jit
def store_columns(ys, values, scales, tile, first, TOTAL: gl.constexpr, token, TP: gl.constexpr, column, WIDTH: gl.constexpr,
                  E5M2: gl.constexpr, POW2: gl.constexpr):
    """A tile as 128×1 along tokens: payload [WIDTH, TOTAL] and scales [tiles of tokens, WIDTH] in memory. See `store_words`."""
    # Sixteen tokens a thread and two threads a column: the column's reduction is in registers, and its costly reciprocal is taken twice
    # and not in every thread of the tile's layout.
    R: gl.constexpr = gl.BlockedLayout([16, 1], [2, 16], [1, gl.num_warps()], [0, 1])
    amax = largest_of_four(ys[0], ys[1], ys[2], ys[3])
    scale, inverse, keep = scale_of(gl.reduce(gl.convert_layout(amax, R), 0, largest), E5M2, POW2)
    c = gl.arange(0, ys[0].shape[1], layout=gl.SliceLayout(0, R))
    gl.store(scales + (tile.to(gl.int64) * WIDTH + column) + c, scale, mask=column + c < WIDTH)
    inverse = gl.convert_layout(inverse, gl.SliceLayout(0, ys[0].type.layout))[None, :]
    words = word_of(ys[0], ys[1], ys[2], ys[3], inverse, E5M2)
    store_words(words, keep, values, first, TOTAL, token, TP, column, WIDTH)
