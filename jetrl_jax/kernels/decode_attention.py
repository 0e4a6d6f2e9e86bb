"""Attention of one new token a sequence over the layer-stacked KV cache, in bf16 or FP8, on Hopper.

A program takes one segment of one sequence's slots and a few neighbouring KV heads (`attend_segment.py`). Segments have a fixed size and
are merged in order, as Flash-Decoding does: a row's bits do not depend on the batch.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import triton
import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.experimental import gluon

from jetrl_jax.kernels import launch
from jetrl_jax.kernels.attend_segment import along, attend, seen, whole_layout


@dataclasses.dataclass(frozen=True)
class Config:
    """heads: KV heads of a program, a power of two (fewer where they do not divide). warps: of each head, which share its slots out. slots:
    of a warp in a block. stages: of the ring. segment: its slots, a multiple of warps · slots. Bits depend on warps, slots and segment."""

    heads: int = 2
    warps: int = 1
    slots: int = 32
    stages: int = 3
    segment: int = 512


def config_for(s: int, kv: int, hd: int, fp8: bool) -> Config:
    """The tuned configuration. It may depend on the cache's shape, never on the number of sequences, or bits would depend on company."""
    from jetrl_jax.kernels import tuned

    default = dataclasses.asdict(Config(heads=4 if fp8 else 2))
    return Config(**tuned.lookup("decode_attention_fp8" if fp8 else "decode_attention", s, kv * hd, hd, default))


def candidates(fp8: bool) -> list[Config]:
    """What `jetrl bench tune` tries."""
    bf16 = [(2, 1, 32, 3), (1, 1, 32, 3), (4, 1, 16, 3), (1, 1, 16, 6), (1, 1, 32, 4), (1, 2, 32, 2), (2, 2, 16, 3)]
    low = [(4, 1, 32, 3), (2, 1, 32, 3), (1, 1, 32, 3), (8, 1, 32, 3), (1, 1, 32, 4), (2, 1, 32, 4), (2, 2, 32, 3), (1, 4, 32, 2)]
    return [Config(h, w, n, t, g) for g in (1024, 512) for h, w, n, t in (low if fp8 else bf16)]


def attention(q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array, positions: jax.Array, ks: jax.Array | None = None,
              vs: jax.Array | None = None, config: Config | None = None) -> jax.Array:
    """q [B, H, hd] bf16 over slots <= positions [B] (int32, clamped to the cache) of the layer -> [B, H, hd] bf16.

    k, v: [l, B, S, K, hd] bf16, or FP8 with float32 scales ks, vs [l, B, S, K, 1]; layer: int32 [1], read in place. H / K is at most 16, hd
    a multiple of 16 up to 128. FP8 is dequantized to bf16 as `quantize.dequantize` does; scores and softmax are float32, its weights are
    rounded to bf16 for the product with V, which sums in float32. Split over segments as Flash-Decoding does.
    """
    (b, h, hd), (s, kv) = q.shape, k.shape[2:4]
    fp8 = ks is not None
    c = config or config_for(s, kv, hd, fp8)
    heads = math.gcd(kv, c.heads)
    width = triton.next_power_of_2(hd)
    parts = -(-s // c.segment)
    single = parts == 1
    part = [jax.ShapeDtypeStruct((b, parts, h, hd), jnp.bfloat16 if single else jnp.float32)]
    part += [] if single else [jax.ShapeDtypeStruct((b, parts, h, 2), jnp.float32)]
    moved = 2 * b * s * kv * (hd * k.dtype.itemsize + (4 if fp8 else 0))
    outs = launch.call(
        q, k, v, ks if fp8 else layer, vs if fp8 else layer, layer, positions, kernel=_single if single else _segments, out=part,
        grid=(b * parts * kv // heads,), num_warps=heads * c.warps, flops=4 * b * s * h * hd, bytes_accessed=moved,
        B=b, S=s, KV=kv, G=h // kv, D=hd, HD=width, FP8=fp8, SEGMENT=c.segment, PARTS=parts, HB=heads, W=heads * c.warps, BW=c.slots,
        STAGES=c.stages)
    if single:
        return outs[0][:, 0]
    return launch.call(*outs, positions, kernel=_merge, out=jax.ShapeDtypeStruct((b, h, hd), jnp.bfloat16), grid=(b * h,), num_warps=1,
                       bytes_accessed=4 * b * parts * h * hd, S=s, H=h, D=hd, HD=width, SEGMENT=c.segment, PARTS=parts,
                       P2=triton.next_power_of_2(parts), CHUNK=min(8, triton.next_power_of_2(parts)))


@gluon.jit
def _store(out, sums, acc, m, total, G: gl.constexpr, D: gl.constexpr, HB: gl.constexpr, W: gl.constexpr, HD: gl.constexpr,
           SINGLE: gl.constexpr):
    """The program's rows of out [B, parts, H, D]: divided and in bf16 if SINGLE, and else with sums [B, parts, H, 2], largest score and
    sum."""
    OUT: gl.constexpr = gl.SliceLayout(0, whole_layout(HB, W, HD))
    g = along(16, 1, OUT)
    col = along(HD, 2, OUT)
    row = (gl.program_id(0) * HB + along(HB, 0, OUT)) * G + g
    at = out + row.to(gl.int64) * D + col
    if SINGLE:
        gl.store(at, (acc / total).to(gl.bfloat16), mask=(g < G) & (col < D))
    else:
        gl.store(at, acc, mask=(g < G) & (col < D))
        gl.store(sums + 2 * row, m, mask=g < G)
        gl.store(sums + 2 * row + 1, total, mask=g < G)


@gluon.jit
def _single(q, k, v, ks, vs, layer, positions, out, B: gl.constexpr, S: gl.constexpr, KV: gl.constexpr, G: gl.constexpr, D: gl.constexpr,
            HD: gl.constexpr, FP8: gl.constexpr, SEGMENT: gl.constexpr, PARTS: gl.constexpr, HB: gl.constexpr, W: gl.constexpr,
            BW: gl.constexpr, STAGES: gl.constexpr):
    """The whole cache is one segment: the output at once."""
    acc, m, total = attend(q, k, v, ks, vs, layer, positions, B, S, KV, G, D, HD, FP8, SEGMENT, PARTS, HB, W, BW, STAGES)
    _store(out, out, acc, m, total, G, D, HB, W, HD, True)


@gluon.jit
def _segments(q, k, v, ks, vs, layer, positions, part, sums, B: gl.constexpr, S: gl.constexpr, KV: gl.constexpr, G: gl.constexpr,
              D: gl.constexpr, HD: gl.constexpr, FP8: gl.constexpr, SEGMENT: gl.constexpr, PARTS: gl.constexpr, HB: gl.constexpr,
              W: gl.constexpr, BW: gl.constexpr, STAGES: gl.constexpr):
    """One segment's share. Segments that the row does not see are not written."""
    segment = gl.program_id(0) // (KV // HB)
    if segment % PARTS * SEGMENT < seen(positions, segment // PARTS, S):
        acc, m, total = attend(q, k, v, ks, vs, layer, positions, B, S, KV, G, D, HD, FP8, SEGMENT, PARTS, HB, W, BW, STAGES)
        _store(part, sums, acc, m, total, G, D, HB, W, HD, False)


@triton.jit
def _merge(part, sums, positions, out, S: tl.constexpr, H: tl.constexpr, D: tl.constexpr, HD: tl.constexpr, SEGMENT: tl.constexpr,
           PARTS: tl.constexpr, P2: tl.constexpr, CHUNK: tl.constexpr):
    """One query head of one row: its segments weighted by their largest scores and summed in order."""
    row, head = tl.program_id(0) // H, tl.program_id(0) % H
    n = (tl.minimum(tl.maximum(tl.load(positions + row), 0), S - 1) + SEGMENT) // SEGMENT
    j = tl.arange(0, P2)
    at = (row * PARTS + j) * H + head
    m = tl.load(sums + at * 2, mask=j < n, other=float("-inf"))
    top = tl.max(m, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.load(sums + at * 2 + 1, mask=j < n, other=0.0) * tl.exp2(m - safe), 0)
    c = tl.arange(0, HD)
    acc = tl.zeros((HD,), tl.float32)
    for start in range(0, n, CHUNK):
        i = start + tl.arange(0, CHUNK)
        at = (row * PARTS + i) * H + head
        weight = tl.exp2(tl.load(sums + at * 2, mask=i < n, other=float("-inf")) - safe)
        x = tl.load(part + at.to(tl.int64)[:, None] * D + c[None, :], mask=(i < n)[:, None] & (c < D)[None, :], other=0.0)
        acc += tl.sum(x * weight[:, None], 0)
    tl.store(out + tl.program_id(0) * D + c, (acc / total).to(tl.bfloat16), mask=c < D)
