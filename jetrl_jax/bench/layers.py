"""Whole linear layers through `linear.dot`, forward and backward with every quantization in them, and the vocabulary's product."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jetrl_jax.bench import data, others, timing
from jetrl_jax.bench.shapes import BF16_RATE, ROWS, Shapes, floor
from jetrl_jax.bench.works import OURS, Work
from jetrl_jax.linear import DotSpec, dot
from jetrl_jax.models.qparams import quantize_weight
from jetrl_jax.precision import Precision, make_policy

OWN_BF16 = "our bf16 policy"
SEQUENCES = 4  # that the tokens are shared among
HEAD_ROWS = (64, ROWS)
Sizes = list[tuple[int, int]]


def policy_step(precision: Precision, sizes: Sizes):
    """f(xs, weights, taps, dys) -> [(output, (gradient of x, gradient of the master))] through `linear.dot`."""
    specs = [DotSpec(f"bench/{i}", precision, (n,)) for i, (n, _) in enumerate(sizes)]

    def step(xs, weights, taps, dys):
        outs = []
        for x, w, tap, dy, spec in zip(xs, weights, taps, dys, specs, strict=True):
            y, back = jax.vjp(lambda x, tap, w=w, spec=spec: dot(x, w, (tap,), spec)[0], x, tap)
            outs.append((y, back(dy)))
        return outs

    return step


def xla_step(xs, weights, _, dys):
    """The same in three bf16 products of XLA each, with no machinery of ours."""
    flat = [(x.reshape(-1, x.shape[-1]), w, dy.reshape(-1, dy.shape[-1])) for x, w, dy in zip(xs, weights, dys, strict=True)]
    return [(others.xla_bf16(x, w), others.xla_bf16_dgrad(dy, w), others.xla_bf16_wgrad(dy, x)) for x, w, dy in flat]


def quantized_weight(precision: Precision, n: int, k: int, seed: int):
    """A weight [n, k] as `quantize_params` leaves one for this precision."""
    def one_layer(master):
        return jax.tree.map(lambda a: a[0], quantize_weight([master], "bench", precision, transposed=True))

    return data.made(one_layer, data.normal((1, n, k), seed, k**-0.5, jnp.float32))


def _sets(sizes: Sizes, count: int, weight) -> list[tuple]:
    """Sets of (xs, weights, taps, dys); `weight(n, k, seed)` makes a weight."""
    shape, sets = (SEQUENCES, ROWS // SEQUENCES), []
    for c in range(count):
        xs = [data.normal((*shape, k), 8 * c + i) for i, (_, k) in enumerate(sizes)]
        dys = [data.normal((*shape, n), 8 * c + i + 4, ROWS**-0.5) for i, (n, _) in enumerate(sizes)]
        weights = [weight(n, k, 8 * c + i) for i, (n, k) in enumerate(sizes)]
        # Taps are only the address where a gradient arrives: nobody reads them.
        sets.append((xs, weights, [data.normal((n, k), i, 0.0, jnp.float32) for i, (n, k) in enumerate(sizes)], dys))
    return sets


def _linear(title: str, sizes: Sizes) -> Work:
    flops = sum(6 * ROWS * n * k for n, k in sizes)
    # Read in bf16 and written in bf16, or float32 for a weight's gradient: x, dy, y, dx; the payload is read twice.
    moved = sum(4 * ROWS * (n + k) + 6 * n * k for n, k in sizes)
    count = timing.number_of_sets(moved, floor(flops, moved))

    def by_policy(name):
        precision = make_policy(name).train.base
        sets = _sets(sizes, count, lambda n, k, seed: quantized_weight(precision, n, k, seed))
        return timing.program(policy_step(precision, sizes), sets)

    def plain():
        return timing.program(xla_step, _sets(sizes, count, lambda n, k, seed: data.normal((n, k), seed, k**-0.5)))

    contestants = {OURS: lambda: by_policy("jet_fp8"), others.XLA_BF16: plain, OWN_BF16: lambda: by_policy("bf16")}
    return Work(title, "TFLOP/s", contestants, flops, floor=floor(flops, moved), targets={others.XLA_BF16: (1.25, 1.41)})


def linear(shapes: Shapes) -> Iterator[Work]:
    """Each linear layer alone, then the four of a transformer layer together."""
    for name, size in shapes.products.items():
        yield _linear(f"linear {name} forward + backward, {shapes.name}, {ROWS} tokens", [size])
    yield _linear(f"the four linear layers forward + backward, {shapes.name}, {ROWS} tokens", list(shapes.products.values()))


def xla_logits(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [rows, D] · w [V, D]ᵀ -> float32 [rows, V]."""
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def lm_head(shapes: Shapes) -> Iterator[Work]:
    """Logits [rows, V] in float32 of bf16 operands, in the fixed order that decode and update share."""
    v, d = shapes.vocabulary, shapes.hidden

    def build(rows: int) -> Work:
        flops, moved = 2 * rows * v * d, 2 * d * (rows + v) + 4 * rows * v
        least = floor(flops, moved, BF16_RATE)

        def sets():
            count = timing.number_of_sets(moved, least)
            return [(data.normal((rows, d), 2 * i), data.normal((v, d), 2 * i + 1, d**-0.5)) for i in range(count)]

        def ours():
            from jetrl_jax.kernels import ordered_dot

            return timing.program(lambda x, w: ordered_dot.product(x, w), sets())

        contestants = {OURS: ours, others.XLA_BF16: lambda: timing.program(xla_logits, sets())}
        return Work(f"lm_head, {shapes.name}, {rows} rows of {d} by {v}", "TFLOP/s", contestants, flops, floor=least,
                    targets={others.XLA_BF16: (0.9, 1.0)})

    for rows in HEAD_ROWS:
        yield build(rows)
