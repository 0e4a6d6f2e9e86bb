"""Causal attention with grouped KV heads (GQA, arXiv 2305.13245): the full forward, and a decode step over the KV cache.

In jnp here; on Hopper both go to kernels (`kernels/flash.py`), or neither does.
"""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jetrl_jax.kernels import flash
from jetrl_jax.numerics import wide
from jetrl_jax.precision import Format
from jetrl_jax.quantize import dequantize, straight_through

if TYPE_CHECKING:
    from jetrl_jax.rollout.cache import KVCache

MASKED = -1e30  # exp gives exactly 0, and a fully masked row stays finite


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array | None, reductions: str = "auto", site: str = "attn",
    kernels: str = "auto",
) -> jax.Array:
    """q [B, T, H, hd], k and v [B, S, K, hd] -> [B, T, H, hd] in q's dtype.

    positions None: the full forward, T = S, row t sees slots ≤ t (right-padded batches need no other mask: pads come after every real row).
    positions [B]: a decode step, T = 1, row b sees slots ≤ positions[b].
    """
    b, t, h, hd = q.shape
    s, kv = k.shape[1:3]
    if positions is None and flash.native(h, kv, hd, q.dtype, reductions, kernels):
        return flash.full(q, k, v)
    rows = jnp.arange(t)[None] if positions is None else positions[:, None]  # [B or 1, T]: the last slot that each row sees
    seen = (jnp.arange(s) <= rows[..., None])[:, None, None]  # [B or 1, 1, 1, T, S]

    def f(q, k, v, seen):
        highest = jax.lax.Precision.HIGHEST  # float32 on the GPU: TF32 would round decode and full forward differently
        scores = jnp.einsum("btkrd,bskd->bkrts", q.reshape(b, t, kv, h // kv, hd), k, precision=highest) * (1 / hd**0.5)
        p = jax.nn.softmax(jnp.where(seen, scores, MASKED), -1)
        p = straight_through(p, f"{site}/values.p", Format(str(p.dtype), (0, 0)))  # not rounded, but an edge of the flow graph
        return jnp.einsum("bkrts,bskd->btkrd", p, v, precision=highest).reshape(b, t, h, hd)

    return wide(f, reductions, q.dtype)(q, k, v, seen)


def attend_cache(
    q: jax.Array, cache: "KVCache", positions: jax.Array, reductions: str = "auto", site: str = "attn", kernels: str = "auto"
) -> jax.Array:
    """A decode step: q [B, 1, H, hd] over the slots <= positions [B] of the cache's current layer -> [B, 1, H, hd] in q's dtype."""
    h, hd = q.shape[2:]
    assert cache.layer is not None, "a decode step runs in a layer"
    if flash.native(h, cache.k.values.shape[3], hd, q.dtype, reductions, kernels):
        at = jnp.where(positions < cache.length, positions, 0)  # nobody reads what an ended sequence gives: let it read one slot
        return flash.decode(q[:, 0], cache.k, cache.v, cache.layer, at, kernels)[:, None]
    k, v = (dequantize(t, dtype=q.dtype) for t in cache.read())
    return attend(q, k, v, positions, reductions, site)
