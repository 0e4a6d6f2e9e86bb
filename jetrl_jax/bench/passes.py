"""Passes over memory: quantization alone and fused with what is beside it, against the bandwidth of a copy."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jetrl_jax.bench import data, timing
from jetrl_jax.bench.shapes import COPY_BANDWIDTH, ROWS, Shapes
from jetrl_jax.bench.works import OURS, Work
from jetrl_jax.precision import Format

COPY = "device-to-device copy"
COPY_BYTES = 2**30  # that one copy reads and writes together
ROWS_EDGE, TOKENS_EDGE = ("bench.x", Format()), ("bench.xT", Format(block=(128, 1)))


def copy() -> timing.Contestant:
    """Large copies: what a memory-bound kernel can hope for."""
    return timing.program(jnp.copy, [(data.normal((COPY_BYTES // 4,), i),) for i in range(2)])


def moved_bytes(operation: Callable, inputs: tuple) -> int:
    """Bytes of the inputs and of the outputs: each read or written once."""
    leaves = jax.tree.leaves((inputs, jax.eval_shape(operation, *inputs)))
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in leaves)


def _work(title: str, make: Callable[[], Callable], inputs: Callable[[int], tuple]) -> Work:
    """make() gives the operation (and imports its kernels); inputs(seed) its operands."""
    try:
        with data.abstract():
            moved = moved_bytes(make(), inputs(0))
    except Exception as e:  # the kernels cannot be imported or do not cover this shape: told when the work is measured
        reason = e

        def refused() -> Any:
            raise reason

        return Work(title, "GB/s", {OURS: refused})
    count = timing.number_of_sets(moved, moved / COPY_BANDWIDTH)
    return Work(title, "GB/s", {OURS: lambda: timing.program(make(), [inputs(i) for i in range(count)]), COPY: copy}, moved,
                {COPY: COPY_BYTES}, targets={COPY: (0.7, 0.85)})


# Operations return arrays as they lie in memory: XLA then writes no transposed copy of what a kernel's wrapper returns as a transpose.
def _by_rows(values: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    return values, scales.T


def _by_tokens(values: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    return values.T, scales


def _rows():
    from jetrl_jax.kernels import quantizers

    return lambda x: _by_rows(*quantizers.rows(x, ROWS_EDGE[1]))


def _columns():
    from jetrl_jax.kernels import quantizers

    return lambda x: _by_tokens(*quantizers.columns(x, TOKENS_EDGE[1]))


def _operator(name: str, **params: Any) -> Callable:
    """An operator of `kernels/operators.py`, which must run its kernel."""
    from jetrl_jax.kernels import operators

    return functools.partial(getattr(operators, name).bind, kernels="required", **params)


def _both():
    quantize = _operator("quantize_both_p", declares=(ROWS_EDGE, None, TOKENS_EDGE, None))

    def both(x):
        outs = quantize(x)
        return _by_rows(*outs[:2]), _by_tokens(*outs[2:])

    return both


def _requantize():
    requantize = _operator("requantize_p", declares=(TOKENS_EDGE, None))
    return lambda values, scales: _by_tokens(*requantize(values, scales.T))


def _blocks():
    edge = ("bench.w", Format(block=(128, 128)))
    return _operator("quantize_blocks_p", declares=(edge, None, edge))


def _norm():
    norm = _operator("norm_quantize_p", eps=1e-6, declares=(ROWS_EDGE, None))
    return lambda x, w: _by_rows(*norm(x, w))


def _silu():
    silu = _operator("silu_quantize_p", features=None, declares=(ROWS_EDGE, None))
    return lambda gate_up: _by_rows(*silu(gate_up))


def _norm_backward():
    gradient = _operator("norm_backward_p", eps=1e-6, declares=(None, None, ROWS_EDGE, None))

    def backward(dy, x, w, residual):
        dx, dw, values, scales = gradient(dy, x, w, residual)
        return dx, dw, _by_rows(values, scales)

    return backward


def _silu_backward():
    gradient = _operator("silu_backward_p", features=None, declares=(ROWS_EDGE, None, TOKENS_EDGE, None))

    def backward(dh, gate_up):
        outs = gradient(dh, gate_up)
        return _by_rows(*outs[:2]), _by_tokens(*outs[2:])

    return backward


def passes(shapes: Shapes) -> Iterator[Work]:
    """Every pass that a training step makes, at 8192 tokens."""
    d, f = shapes.hidden, shapes.ffn

    def activations(width: int) -> Callable[[int], tuple]:
        return lambda seed: (data.normal((ROWS, width), seed),)

    def saved(seed: int) -> tuple:
        return data.payload((ROWS, d), seed), data.scales((-(-d // 128), ROWS), seed)

    def master(seed: int) -> tuple:
        return (data.normal((2 * f, d), seed, d**-0.5, jnp.float32),)

    def normed(seed: int) -> tuple:
        return data.normal((ROWS, d), seed), data.normal((d,), seed)

    def norm_gradients(seed: int) -> tuple:
        dy, x, residual = (data.normal((ROWS, d), 3 * seed + i) for i in range(3))
        return dy, x, data.normal((d,), seed), residual

    def silu_gradients(seed: int) -> tuple:
        return data.normal((ROWS, f), 2 * seed), data.normal((ROWS, 2 * f), 2 * seed + 1)

    name = f"{shapes.name}, {ROWS} tokens"
    yield _work(f"quantize 1x128 of {d}, {name}", _rows, activations(d))
    yield _work(f"quantize 128x1 of {d}, {name}", _columns, activations(d))
    yield _work(f"quantize 1x128 and 128x1 of {2 * f}, {name}", _both, activations(2 * f))
    yield _work(f"requantize 1x128 to 128x1 of {d}, {name}", _requantize, saved)
    yield _work(f"quantize weight 128x128 and its transpose, {shapes.name}, {2 * f}x{d}", _blocks, master)
    yield _work(f"RMSNorm and quantize 1x128 of {d}, {name}", _norm, normed)
    yield _work(f"SiLU·mul and quantize 1x128 of {f}, {name}", _silu, activations(2 * f))
    yield _work(f"gradient of RMSNorm and quantize 1x128 of {d}, {name}", _norm_backward, norm_gradients)
    yield _work(f"gradient of SiLU·mul and quantize both ways of {2 * f}, {name}", _silu_backward, silu_gradients)
