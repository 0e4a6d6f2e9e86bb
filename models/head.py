"""lm_head: logits of a few rows, and log-probabilities of many without ever holding the full [B, T, V] logits.

Logits are float32, divided by the temperature. With top-k, top-p or min-p the rollout stores each token's cut-off τ, and a log-probability
is that of the kept set {v : z_v ≥ τ} ∪ {token} (design.md "Numerics" 8).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from jetrl_jax.numerics import rest_of_max, wide_dtype
from jetrl_jax.precision import Flow, Format
from jetrl_jax.quantize import QTensor, quantize


@dataclasses.dataclass(frozen=True)
class HeadSpec:
    """Static part: the operands' format, temperature, rows of the vocabulary held at a time, and whether a cut-off applies."""

    fmt: Format
    temperature: float = 1.0
    chunk: int = 4096
    filtered: bool = False
    reductions: str = "auto"

    @classmethod
    def of(cls, flow: Flow, temperature: float = 1.0, chunk: int = 4096, filtered: bool = False) -> "HeadSpec":
        """Greedy decoding (temperature 0) reports the distribution at temperature 1."""
        return cls(flow.base.logits, temperature or 1.0, chunk, filtered, flow.reductions)


def _logits(x: jax.Array, w: jax.Array, spec: HeadSpec) -> jax.Array:
    """x [R, D] · w [C, D]ᵀ / temperature, wide [R, C] but rounded to float32: float32 is what logits are. Called in an x64 region."""
    dtype = wide_dtype(spec.reductions)
    inverse = jnp.asarray(1 / spec.temperature, dtype)
    if dtype == jnp.float64:
        z = (x.astype(dtype) @ w.astype(dtype).T) * inverse
        return z if x.dtype == jnp.float64 else z.astype(jnp.float32).astype(dtype)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum("rd,cd->rc", x, w, preferred_element_type=jnp.float32, precision=precision) * inverse


def logits(hidden: jax.Array, w: QTensor, spec: HeadSpec) -> jax.Array:
    """hidden [B, D] -> logits over the temperature, float32 [B, V]."""
    x = quantize(hidden, "lm_head.x", spec.fmt)
    with jax.enable_x64(True):
        return _logits(x.values, w.values, spec).astype(jnp.float32)


def _chunks(w: jax.Array, spec: HeadSpec) -> tuple[int, int]:
    size = min(spec.chunk, w.shape[0])
    return size, -(-w.shape[0] // size)


def _chunk(w, i, size, targets, tau, x, spec):
    """Chunk i: rows of w, their vocabulary ids, logits with -inf outside the kept set, and which column is the target."""
    start = jnp.minimum(i * size, w.shape[0] - size)  # the last chunk overlaps the one before it …
    rows = lax.dynamic_slice_in_dim(w, start, size)
    ids = start + jnp.arange(size)
    z = _logits(x, rows, spec)
    hit = ids == targets[:, None]
    keep = ids >= i * size  # … and does not count twice
    if spec.filtered:
        keep = keep & ((z.astype(jnp.float32) >= tau[:, None]) | hit)
    return start, rows, jnp.where(keep, z, -jnp.inf), hit & keep


def _forward(x, w, targets, tau, spec):
    """Largest logit m, Σ e^(z - m) over all others, target logit and Σ p·z, by one pass over the vocabulary in chunks; all [R], wide.

    The largest is kept out of the sum (`numerics.rest_of_max`): a near-certain token's log-probability is -log1p of a tiny sum, and
    loses its digits, and with them the agreement with rollout, if that is added to 1 first.
    """
    dtype = jnp.float64 if x.dtype == jnp.float64 else wide_dtype(spec.reductions)
    size, n = _chunks(w, spec)

    def body(i, carry):
        m, rest, sz, target = carry
        _, _, z, hit = _chunk(w, i, size, targets, tau, x, spec)
        top, others = rest_of_max(z)
        new = jnp.maximum(m, top)
        old, here = (jnp.where(jnp.isneginf(a), 0.0, jnp.exp(a - jnp.where(jnp.isneginf(new), 0.0, new))) for a in (m, top))
        rest = jnp.where(m >= top, rest + (1 + others) * here, others + (1 + rest) * old)
        p = jnp.exp(z - jnp.where(jnp.isneginf(new), 0.0, new)[:, None])
        sz = sz * old + jnp.where(jnp.isneginf(z), 0.0, p * z).sum(-1)
        return new, rest, sz, target + jnp.where(hit, z, 0.0).sum(-1)

    r = x.shape[0]
    m, rest, sz, target = lax.fori_loop(0, n, body, (jnp.full(r, -jnp.inf, dtype), *(jnp.zeros(r, dtype) for _ in range(3))))
    return m, rest, target, sz / (1 + rest)


def _narrow(y: jax.Array, x: jax.Array) -> jax.Array:
    return y.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def token_logprobs(hidden: jax.Array, w: QTensor, tap: jax.Array | None, targets: jax.Array, tau: jax.Array, spec: HeadSpec):
    """hidden [R, D], targets [R], τ [R] -> log-probability of each target and entropy of its distribution, both float32 [R].

    Only [R, spec.chunk] logits exist at a time, forward and backward; the gradient of lm_head arrives at the master `tap` [V, D].
    """
    return _token_fwd(hidden, w, tap, targets, tau, spec)[0]


def _token_fwd(hidden, w, tap, targets, tau, spec):
    x = quantize(hidden, "lm_head.x", spec.fmt).values
    with jax.enable_x64(True):
        m, rest, target, mean_z = _forward(x, w.values, targets, tau, spec)
        lse = m + jnp.log1p(rest)
        out = _narrow((target - m) - jnp.log1p(rest), x), _narrow(lse - mean_z, x)
    return out, (hidden, x, w, tap, targets, tau, lse, mean_z)


def _token_bwd(spec, residuals, cotangents):
    hidden, x, w, tap, targets, tau, lse, mean_z = residuals
    g_logp, g_entropy = cotangents
    with jax.enable_x64(True):
        dtype = lse.dtype
        g_logp, g_entropy = (g.astype(dtype)[:, None] for g in (g_logp, g_entropy))
        size, n = _chunks(w.values, spec)
        inverse = jnp.asarray(1 / spec.temperature, dtype)

        def body(i, carry):
            dx, dw = carry
            start, rows, z, hit = _chunk(w.values, i, size, targets, tau, x, spec)
            p = jnp.exp(z - lse[:, None])  # 0 outside the kept set
            centred = jnp.where(jnp.isneginf(z), 0.0, z - mean_z[:, None])
            dz = (g_logp * (hit - p) - g_entropy * p * centred) * inverse
            dx = dx + dz @ rows.astype(dtype)
            if dw is not None:
                old = lax.dynamic_slice_in_dim(dw, start, size)
                dw = lax.dynamic_update_slice_in_dim(dw, old + (dz.T @ x.astype(dtype)).astype(dw.dtype), start, 0)
            return dx, dw

        init = (jnp.zeros(x.shape, dtype), None if tap is None else jnp.zeros(tap.shape, tap.dtype))
        dx, dw = lax.fori_loop(0, n, body, init)
    return dx.astype(hidden.dtype), None, dw, None, None


token_logprobs.defvjp(_token_fwd, _token_bwd)
