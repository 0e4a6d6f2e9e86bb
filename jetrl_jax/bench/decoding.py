"""Decoding: the linear layers of one token a sequence, and attention over the cache."""

import functools
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from jetrl_jax.bench import data, others, timing
from jetrl_jax.bench.passes import COPY, COPY_BYTES, copy
from jetrl_jax.bench.shapes import COPY_BANDWIDTH, Shapes, floor
from jetrl_jax.bench.works import OURS, Work

LAYERS = 4  # stacked, or as many as exceed the L2 cache
TOKENS = (16, 64, 128, 256)
SEQUENCES, SLOTS = 128, 4096
PADDED = 64  # rows that the kernel works on at least: what prepares its input writes so many


def operands(m: int, n: int, k: int, seed: int = 0, layers: int = LAYERS) -> tuple[jax.Array, ...]:
    """(x [m, k], padded with zeros to 64 rows, sx [k/128, rows], w [layers, n, k], sw) of one product."""
    rows = max(m, PADDED)
    x = data.made(lambda x: jnp.pad(x, ((0, rows - m), (0, 0))), data.payload((m, k), seed))
    return (x, data.scales((-(-k // 128), rows), seed + 1), data.payload((layers, n, k), seed + 2),
            data.scales((layers, -(-n // 128), -(-k // 128)), seed + 3, k**-0.5))


def layer_indices(layers: int = LAYERS) -> list[jax.Array]:
    """int32 [1] each."""
    return [jnp.full(1, i, jnp.int32) for i in range(layers)]


def products(shapes: Shapes) -> Iterator[Work]:
    """The four products of a layer, layer after layer: ours on stacked weights read by index, XLA's with the layers unrolled."""
    sizes = list(shapes.products.values())
    weights = sum(n * k for n, k in sizes)
    layers = max(LAYERS, math.ceil(timing.SPAN / weights))

    def build(m: int) -> Work:
        def ours():
            from jetrl_jax.kernels import decode

            four = [operands(m, n, k, 4 * i, layers) for i, (n, k) in enumerate(sizes)]

            def run(four, at):
                return [decode.product(x, sx, w, sw, layer) for layer in at for x, sx, w, sw in four]

            return timing.jitted(run, four, layer_indices(layers), operations=layers)

        def bf16():
            # Every product has an x of its own: XLA would join two that share one.
            pairs = [(data.normal((m, k), 8 * i + j), data.normal((n, k), 8 * i + j + 40, k**-0.5))
                     for i in range(layers) for j, (n, k) in enumerate(sizes)]
            return timing.jitted(lambda pairs: [others.xla_bf16(x, w) for x, w in pairs], pairs, operations=layers)

        moved = weights + sum(m * (k + 2 * n) for n, k in sizes)
        return Work(f"decode products of a layer, {shapes.name}, {m} tokens", "µs", {OURS: ours, others.XLA_BF16: bf16},
                    floor=floor(2 * m * weights, moved), targets=shapes.targets(others.XLA_BF16, *((1.6, 1.9) if m <= 64 else (1.4, 1.7))))

    for m in TOKENS:
        yield build(m)


def cache(shapes: Shapes, fp8: bool, layers: int, slots: int = SLOTS) -> tuple:
    """(k, v, ks, vs) of SEQUENCES sequences: [layers, B, S, K, hd] in bf16 with no scales, or FP8 with one a token and head."""
    shape = (layers, SEQUENCES, slots, shapes.kv_heads, shapes.head_dim)
    if not fp8:
        return data.normal(shape, 1), data.normal(shape, 2), None, None
    return data.payload(shape, 1), data.payload(shape, 2), data.scales((*shape[:-1], 1), 3), data.scales((*shape[:-1], 1), 4)


def cache_bytes(shapes: Shapes, fp8: bool, slots: int = SLOTS) -> int:
    """What one step reads of one layer's cache."""
    return 2 * SEQUENCES * slots * shapes.kv_heads * (shapes.head_dim + 4 if fp8 else 2 * shapes.head_dim)


def attention_program(shapes: Shapes, fp8: bool, config=None) -> timing.Contestant:
    """One token of each sequence over a cache whose slots are all valid, in as many layers as exceed the L2 cache."""
    from jetrl_jax.kernels import decode_attention

    moved = cache_bytes(shapes, fp8)
    layers = timing.number_of_sets(moved, moved / COPY_BANDWIDTH)
    q = data.normal((SEQUENCES, shapes.heads, shapes.head_dim), 9)
    positions = jnp.full(SEQUENCES, SLOTS - 1, jnp.int32)

    def run(q, cache, positions, layers):
        return [decode_attention.attention(q, cache[0], cache[1], at, positions, cache[2], cache[3], config) for at in layers]

    return timing.jitted(run, q, cache(shapes, fp8, layers), positions, layer_indices(layers), operations=layers)


def attention(shapes: Shapes) -> Iterator[Work]:
    """Attention of a decode step against the bandwidth of a copy."""
    for fp8 in (False, True):
        title = f"decode attention, {shapes.name}, {SEQUENCES} x {SLOTS}, {'FP8' if fp8 else 'bf16'} cache"
        contestants: dict[str, Callable[[], timing.Contestant]] = {OURS: functools.partial(attention_program, shapes, fp8), COPY: copy}
        yield Work(title, "GB/s", contestants, cache_bytes(shapes, fp8), {COPY: COPY_BYTES},
                   targets={COPY: (0.55, 0.75) if fp8 else (0.65, 0.85)})
