"""Reductions whose rounding does not see their order: the reason why a decode step and a full forward agree to the bit on CPU.

A sum in float64, rounded to float32 or bf16 at the end, gives the same bits in whatever order and shape XLA computes it (but for a
straddled rounding boundary, about one result in 2²⁹). On the CPU every norm, softmax, product and loss runs so; on the GPU they run in
float32 unless `reductions="float64"` asks for the slow exact way (design.md, "Numerics, to the bit", items 2, 3, 7; `reference` of every
later kernel).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

REDUCTIONS = ("auto", "float32", "float64")


def wide_dtype(reductions: str = "auto") -> Any:
    """The dtype that reductions run in: "auto" is float64 on the CPU and float32 on an accelerator."""
    if reductions == "auto":
        return jnp.float64 if jax.default_backend() == "cpu" else jnp.float32
    return {"float32": jnp.float32, "float64": jnp.float64}[reductions]


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def wide(f: Callable, reductions: str = "auto", out: Any = jnp.float32) -> Callable:
    """`f` run on wide copies of its float arguments, its float results rounded once to `out`; differentiable in its arguments: `f` may
    close over no traced array.

    The backward pass recomputes `f` and differentiates it inside the same wide region: left to autodiff, the transposed operations
    would be traced outside it and lose the wide dtype. Only the narrow arguments are saved. Gradients have the arguments' dtypes.
    """
    dtype = wide_dtype(reductions)

    def narrow(y):
        # To bf16 by way of float32, always: compilers may or may not go that way on their own, and the two round differently.
        step = jnp.float64 if out == jnp.float64 else jnp.float32
        return jax.tree.map(lambda a: a.astype(step).astype(out) if _is_float(a) else a, y)

    def call(xs):
        return f(*[x.astype(dtype) if _is_float(x) else x for x in xs])

    @jax.custom_vjp
    def g(*xs):
        with jax.enable_x64(True):
            return narrow(call(xs))

    def fwd(*xs):
        return g(*xs), xs

    def bwd(xs, ct):
        at = [i for i, x in enumerate(xs) if _is_float(x)]
        with jax.enable_x64(True):

            def of_floats(*floats):
                full = list(xs)
                for i, v in zip(at, floats, strict=True):
                    full[i] = v
                return f(*full)

            y, vjp = jax.vjp(of_floats, *[xs[i].astype(dtype) for i in at])
            ct = jax.tree.map(lambda c, a: c.astype(a.dtype) if _is_float(a) else c, ct, y)
            grads = [d.astype(xs[i].dtype) for i, d in zip(at, vjp(ct), strict=True)]
        result: list[Any] = [None] * len(xs)
        for i, d in zip(at, grads, strict=True):
            result[i] = d
        return tuple(result)

    g.defvjp(fwd, bwd)
    return lambda *xs: g(*[jnp.asarray(x) for x in xs])


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, reductions: str = "auto") -> jax.Array:
    """x [..., D] over its root mean square, times weight [D] (arXiv 1910.07467), x's dtype."""
    return wide(lambda x, w: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * w, reductions, x.dtype)(x, weight)


def silu_mul(g: jax.Array, u: jax.Array, reductions: str = "auto") -> jax.Array:
    """silu(g) · u (SwiGLU, arXiv 2002.05202), both [..., F], in g's dtype."""
    return wide(lambda g, u: jax.nn.silu(g) * u, reductions, g.dtype)(g, u)


def rest_of_max(z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """z [..., V] -> its largest m [...] and Σ e^(z - m) over all entries but that one [...]; log-sum-exp is m + log1p of it.

    With the 1 of the largest left out the sum keeps all its digits however small it is. A row of -inf gives -inf and 0.
    """
    index = jnp.arange(z.shape[-1], dtype=jnp.int32)
    # argmax by hand: jnp's is lowered outside the x64 region, and fails there.
    at = jnp.where(z == z.max(-1, keepdims=True), index, z.shape[-1] - 1).min(-1, keepdims=True)
    m = jnp.take_along_axis(z, at, -1)
    others = (index != at) & ~jnp.isneginf(z)
    return m[..., 0], jnp.where(others, jnp.exp(jnp.where(others, z - m, 0.0)), 0.0).sum(-1)


def wide_dot(a: jax.Array, b: jax.Array, spec: str, reductions: str = "auto") -> jax.Array:
    """`einsum(spec, a, b)` summed in the wide dtype, float32 out [shape by spec]. Not differentiable: callers own their backward rule.

    In float32, bf16 and FP8 operands go to the tensor core (both fit in bf16 exactly) with float32 accumulation.
    """
    if wide_dtype(reductions) == jnp.float64:
        with jax.enable_x64(True):
            y = jnp.einsum(spec, a.astype(jnp.float64), b.astype(jnp.float64))
            return y if a.dtype == jnp.float64 or b.dtype == jnp.float64 else y.astype(jnp.float32)
    if any(x.dtype in (jnp.float32, jnp.float64) for x in (a, b)):
        return jnp.einsum(spec, a.astype(jnp.float32), b.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    return jnp.einsum(spec, a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
