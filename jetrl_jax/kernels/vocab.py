"""Operators of the vocabulary: logits of fixed order, log-probability and entropy of given tokens, and their gradients, by row.

Each row has a temperature (as its inverse) and a cut-off τ; the distribution is softmax over {v : z_v ≥ τ} ∪ {token}. [R, V] is never held
but where a decode step asks for its logits. Oracles in jnp, in the wide type of `numerics`; on Hopper `ordered_dot` and `vocab_kernels`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jetrl_jax.kernels.launch import operator
from jetrl_jax.numerics import rest_of_max, wide, wide_dtype

NAMES = frozenset(("vocab_logits", "vocab_forward", "vocab_backward"))  # products of their first two operands, for the flow graph


def _product(x: jax.Array, w: jax.Array, inverse: jax.Array, reductions: str) -> jax.Array:
    """x [R, D] · w [C, D]ᵀ · inverse [R], wide [R, C] but rounded to float32: float32 is what logits are. Called in an x64 region."""
    dtype = wide_dtype(reductions)
    inverse = inverse.astype(dtype)[:, None]
    if dtype == jnp.float64:
        z = (x.astype(dtype) @ w.astype(dtype).T) * inverse
        return z if x.dtype == jnp.float64 else z.astype(jnp.float32).astype(dtype)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum("rd,cd->rc", x, w, preferred_element_type=jnp.float32, precision=precision) * inverse


def _sizes(w: jax.Array, chunk: int) -> tuple[int, int]:
    size = min(chunk, w.shape[0])
    return size, -(-w.shape[0] // size)


def _chunk(i, size, x, w, targets, tau, inverse, filtered, reductions):
    """Chunk i: its first row in w, those rows, logits with -inf outside the kept set, and which column is the target."""
    start = jnp.minimum(i * size, w.shape[0] - size)  # the last chunk overlaps the one before it …
    rows = lax.dynamic_slice_in_dim(w, start, size)
    ids = start + jnp.arange(size)
    z = _product(x, rows, inverse, reductions)
    hit = ids == targets[:, None]
    keep = ids >= i * size  # … and does not count twice
    if filtered:
        keep = keep & ((z.astype(jnp.float32) >= tau[:, None]) | hit)
    return start, rows, jnp.where(keep, z, -jnp.inf), hit & keep


def _logits(x, w, inverse, *, reductions, kernels):
    with jax.enable_x64(True):
        return [_product(x, w, inverse, reductions).astype(jnp.float32)]


def _forward(x, w, targets, tau, inverse, *, chunk, filtered, reductions, kernels):
    """By one pass over the chunks: largest logit m, Σ e^(z - m) over all others, target logit and Σ p·z.

    The largest is kept out of the sum (`numerics.rest_of_max`): a near-certain token's log-probability is -log1p of a tiny sum, and
    loses its digits, and with them the agreement with rollout, if that is added to 1 first.
    """
    with jax.enable_x64(True):
        dtype = jnp.float64 if x.dtype == jnp.float64 else wide_dtype(reductions)
        size, n = _sizes(w, chunk)

        def body(i, carry):
            m, rest, sz, target = carry
            _, _, z, hit = _chunk(i, size, x, w, targets, tau, inverse, filtered, reductions)
            top, others = rest_of_max(z)
            new = jnp.maximum(m, top)
            old, here = (jnp.where(jnp.isneginf(a), 0.0, jnp.exp(a - jnp.where(jnp.isneginf(new), 0.0, new))) for a in (m, top))
            rest = jnp.where(m >= top, rest + (1 + others) * here, others + (1 + rest) * old)
            p = jnp.exp(z - jnp.where(jnp.isneginf(new), 0.0, new)[:, None])
            sz = sz * old + jnp.where(jnp.isneginf(z), 0.0, p * z).sum(-1)
            return new, rest, sz, target + jnp.where(hit, z, 0.0).sum(-1)

        r = x.shape[0]
        m, rest, sz, target = lax.fori_loop(0, n, body, (jnp.full(r, -jnp.inf, dtype), *(jnp.zeros(r, dtype) for _ in range(3))))
        lse, mean_z = m + jnp.log1p(rest), sz / (1 + rest)
        return [(target - m) - jnp.log1p(rest), lse - mean_z, lse, mean_z]


def _backward(x, w, targets, tau, inverse, logp, entropy, lse, mean_z, g_logp, g_entropy, *, weight, chunk, filtered, reductions, kernels):
    with jax.enable_x64(True):
        dtype = lse.dtype
        of_logp, of_entropy = (g.astype(dtype)[:, None] for g in (g_logp, g_entropy))
        size, n = _sizes(w, chunk)

        def body(i, carry):
            dx, dw = carry
            start, rows, z, hit = _chunk(i, size, x, w, targets, tau, inverse, filtered, reductions)
            p = jnp.exp(z - lse[:, None])  # 0 outside the kept set
            centred = jnp.where(jnp.isneginf(z), 0.0, z - mean_z[:, None])
            dz = (of_logp * (hit - p) - of_entropy * p * centred) * inverse.astype(dtype)[:, None]
            dx = dx + dz @ rows.astype(dtype)
            if dw is not None:
                old = lax.dynamic_slice_in_dim(dw, start, size)
                dw = lax.dynamic_update_slice_in_dim(dw, old + (dz.T @ x.astype(dtype)).astype(dw.dtype), start, 0)
            return dx, dw

        dx, dw = lax.fori_loop(0, n, body, (jnp.zeros(x.shape, dtype), None if weight is None else jnp.zeros(w.shape, weight)))
        return [dx] if dw is None else [dx, dw]


def masked_logprob(z: jax.Array, tokens: jax.Array, tau: jax.Array, reductions: str = "auto") -> jax.Array:
    """log p(token) under softmax over `{v : z_v >= tau}` and the token itself; differentiable in z.

    The token belongs to the set even where a later z puts it below the stored tau: it was drawn (design.md, item 8). With tau = -inf
    this is the plain log-softmax. Tokens outside the set get no gradient.

    Args:
      z: `[..., V]` float32. tokens: `[...]` int. tau: `[...]` float32. reductions: static, the type of the log-sum-exp.

    Returns:
      `[...]` float32, rounded once from the wide type of `jetrl_jax.numerics`.
    """

    def logprob(z: jax.Array, tokens: jax.Array, tau: jax.Array) -> jax.Array:
        own = jnp.arange(z.shape[-1], dtype=jnp.int32) == tokens[..., None]
        kept = jnp.where((z >= tau[..., None]) | own, z, -jnp.inf)
        chosen = jnp.take_along_axis(z, tokens[..., None], axis=-1)[..., 0]
        top, others = rest_of_max(kept)
        return (chosen - top) - jnp.log1p(others)

    return wide(logprob, reductions)(z, tokens, tau)


def _of_logits(z, tokens, tau, *, reductions, kernels):
    return [masked_logprob(z, tokens, tau, reductions)]


def _fits(x: Any, w: Any, reductions: str) -> bool:
    from jetrl_jax.kernels.ordered_dot import supported

    return wide_dtype(reductions) == jnp.float32 and supported(x, w)


def _logits_native(x, w, inverse, *, reductions, kernels):
    from jetrl_jax.kernels import ordered_dot

    return [ordered_dot.product(x, w, inverse)]


def _forward_native(x, w, targets, tau, inverse, *, chunk, filtered, reductions, kernels):
    from jetrl_jax.kernels import vocab_kernels

    return vocab_kernels.forward(x, w, targets, tau, inverse, filtered)


def _backward_native(x, w, targets, tau, inverse, logp, entropy, lse, mean_z, g_logp, g_entropy, *, weight, chunk, filtered, reductions,
                     kernels):
    """By chunks of 2 · chunk in bf16, the bytes of `chunk` float32 logits a row; the ragged last one stands outside the loop."""
    from jetrl_jax.kernels import vocab_kernels

    v, size = w.shape[0], min(max(2 * chunk // 256, 1) * 256, w.shape[0])
    rows = vocab_kernels.gradient_rows(tau, inverse, logp, entropy, lse, g_logp, g_entropy)

    def step(start, size, carry):
        dx, *dw = carry
        dz = vocab_kernels.gradient(x, w, rows, targets, start[None], size, filtered)
        dx = dx + jnp.dot(dz, lax.dynamic_slice_in_dim(w, start, size), preferred_element_type=jnp.float32)
        if dw:
            here = jnp.dot(dz.T, x, preferred_element_type=jnp.float32)
            dw = [lax.dynamic_update_slice_in_dim(dw[0], here.astype(dw[0].dtype), start, 0)]
        return [dx, *dw]

    carry = [jnp.zeros(x.shape, jnp.float32)] + ([] if weight is None else [jnp.zeros(w.shape, weight)])
    carry = lax.fori_loop(0, v // size, lambda i, c: step(jnp.int32(i * size), size, c), carry)
    return step(jnp.int32(v // size * size), v % size, carry) if v % size else carry


def _of_logits_native(z, tokens, tau, *, reductions, kernels):
    from jetrl_jax.kernels import vocab_kernels

    return vocab_kernels.statistics(z, tokens, tau, True)[:1]


logits_p = operator(
    "vocab_logits", _logits, _logits_native, lambda x, w, inverse, *, reductions, kernels: _fits(x, w, reductions))
"""x [R, D], w [V, D], inverse temperatures [R] -> logits float32 [R, V]. Params reductions, kernels."""

forward_p = operator(
    "vocab_forward", _forward, _forward_native, lambda x, w, *rest, reductions, **params: _fits(x, w, reductions))
"""x [R, D], w [V, D], targets [R] int32, τ [R] float32, inverse temperatures [R] -> log-probability, entropy, log-sum-exp, Σ p·z, each [R].

Params: chunk (entries held at a time, oracle only), filtered (whether τ counts), reductions, kernels. Results in the wide type.
"""

backward_p = operator(
    "vocab_backward", _backward, _backward_native, lambda x, w, *rest, reductions, **params: _fits(x, w, reductions))
"""Gradients of log-probability and entropy: dx [R, D] wide and, if `weight` (a dtype's name) is not None, dw [V, D] of that type.

Operands: those of `forward_p`, its four results, and the cotangents of the first two, float32 [R]. Params: `forward_p`'s, and weight.
"""

of_logits_p = operator(
    "vocab_of_logits", _of_logits, _of_logits_native,
    lambda z, *rest, reductions, kernels: z.ndim == 2 and z.dtype == jnp.float32 and z.size > 0 and wide_dtype(reductions) == jnp.float32)
"""`masked_logprob` as an operator, not differentiable: on Hopper, z [R, V], the bits of `forward_p` where the logits are its own."""
