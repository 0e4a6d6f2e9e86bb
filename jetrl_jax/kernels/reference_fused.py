"""The oracles of the fused kernels, in jnp: float64 between bf16 and bf16, then `quantize.canonical_quantize`. They run wherever jax does.

Results are lists in the kernels' order: payload and scales by rows, then by columns, then what is in bf16.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jetrl_jax import numerics
from jetrl_jax.precision import Format
from jetrl_jax.quantize import QTensor, canonical_jitted, dequantize

BLOCK = 128


def quantize(x: jax.Array, fmt: Format | None) -> list[jax.Array]:
    """The quantizer's own steps, not its primitive: that may be a kernel."""
    return [] if fmt is None else canonical_jitted(x, site="", fmt=fmt)


def quantize_both(x: jax.Array, row_fmt: Format, column_fmt: Format) -> list[jax.Array]:
    """x [..., T, K] in both layouts: four arrays."""
    return quantize(x, row_fmt) + quantize(x, column_fmt)


def quantize_blocks(w: jax.Array, fmt: Format) -> list[jax.Array]:
    """w [..., N, K] -> payload, scales, transposed payload."""
    values, scales = quantize(w, fmt)
    return [values, scales, jnp.swapaxes(values, -1, -2)]


def requantize(values: jax.Array, scales: jax.Array, column_fmt: Format) -> list[jax.Array]:
    """A saved payload and its scales -> payload and scales along tokens, by way of their float32 product.

    The barrier keeps that product rounded: in one program XLA's GPU compiler made q · s · (1/s') another one (seen on an H200).
    """
    return quantize(lax.optimization_barrier(dequantize(QTensor(values, scales))), column_fmt)


rms_norm = functools.partial(numerics.rms_norm, reductions="float64")
silu_mul = functools.partial(numerics.silu_mul, reductions="float64")


def norm_quantize(
    x: jax.Array, weight: jax.Array, *, eps: float, fmt: Format | None, column_fmt: Format | None = None, y: bool = False
) -> list[jax.Array]:
    normed = rms_norm(x, weight, eps)
    return quantize(normed, fmt) + quantize(normed, column_fmt) + [normed] * y


def halves(g: jax.Array, u: jax.Array | None, features: int | None) -> tuple[jax.Array, jax.Array]:
    """g and u [..., F], from the two side by side if u is None."""
    if u is None:
        g, u = jnp.split(g, 2, -1)
    return g[..., :features], u[..., :features]


def silu_quantize(
    g: jax.Array, u: jax.Array | None, *, fmt: Format, column_fmt: Format | None = None, features: int | None = None
) -> list[jax.Array]:
    h = silu_mul(*halves(g, u, features))
    return quantize(h, fmt) + quantize(h, column_fmt)


def norm_backward(
    dy: jax.Array, x: jax.Array, weight: jax.Array, residual: jax.Array | None, *, eps: float, fmt: Format | None,
    column_fmt: Format | None,
) -> list[jax.Array]:
    """dx (the residual's gradient added before the one rounding), dweight float32, dx quantized."""

    def norm(x, w):
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * w

    with jax.enable_x64(True):
        _, vjp = jax.vjp(norm, x.astype(jnp.float64), weight.astype(jnp.float64))
        dx, dw = vjp(dy.astype(jnp.float64))
        dx = dx if residual is None else dx + residual.astype(jnp.float64)
        dx, dw = dx.astype(jnp.float32).astype(x.dtype), dw.astype(jnp.float32)
    return [dx, dw] + quantize(dx, fmt) + quantize(dx, column_fmt)


def silu_backward_quantize(
    dh: jax.Array, g: jax.Array, u: jax.Array | None, *, fmt: Format, column_fmt: Format, features: int | None = None, bf16: bool = False
) -> list[jax.Array]:
    """[dg | du], each padded to whole blocks."""
    g, u = halves(g, u, features)
    with jax.enable_x64(True):
        _, vjp = jax.vjp(lambda g, u: jax.nn.silu(g) * u, g.astype(jnp.float64), u.astype(jnp.float64))
        grads = [d.astype(jnp.float32).astype(g.dtype) for d in vjp(dh[..., :features].astype(jnp.float64))]
    pad = [(0, 0)] * (g.ndim - 1) + [(0, -g.shape[-1] % BLOCK)]
    both = jnp.concatenate([jnp.pad(d, pad) for d in grads], -1)
    return quantize(both, fmt) + quantize(both, column_fmt) + [both] * bf16
