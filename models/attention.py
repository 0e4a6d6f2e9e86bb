"""Causal attention with grouped KV heads (GQA, arXiv 2305.13245): one function for the full forward and for a decode step."""

import jax
import jax.numpy as jnp

from jetrl_jax.numerics import wide
from jetrl_jax.precision import Format
from jetrl_jax.quantize import straight_through

MASKED = -1e30  # exp gives exactly 0, and a fully masked row stays finite


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array | None, reductions: str = "auto", site: str = "attn"
) -> jax.Array:
    """q [B, T, H, hd], k and v [B, S, K, hd] -> [B, T, H, hd] in q's dtype.

    positions None: the full forward, T = S, row t sees slots ≤ t (right-padded batches need no other mask: pads come after every real row).
    positions [B]: a decode step, T = 1, row b sees slots ≤ positions[b].
    """
    b, t, h, hd = q.shape
    s, kv = k.shape[1:3]
    rows = jnp.arange(t)[None] if positions is None else positions[:, None]  # [B or 1, T]: the last slot that each row sees
    seen = (jnp.arange(s) <= rows[..., None])[:, None, None]  # [B or 1, 1, 1, T, S]

    def f(q, k, v, seen):
        highest = jax.lax.Precision.HIGHEST  # float32 on the GPU: TF32 would round decode and full forward differently
        scores = jnp.einsum("btkrd,bskd->bkrts", q.reshape(b, t, kv, h // kv, hd), k, precision=highest) * (1 / hd**0.5)
        p = jax.nn.softmax(jnp.where(seen, scores, MASKED), -1)
        p = straight_through(p, f"{site}/values.p", Format(str(p.dtype), (0, 0)))  # not rounded, but an edge of the flow graph
        return jnp.einsum("bkrts,bskd->btkrd", p, v, precision=highest).reshape(b, t, h, hd)

    return wide(f, reductions, q.dtype)(q, k, v, seen)
