"""Inputs of decode attention over a poisoned cache, and what they give in float64."""

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jetrl_jax.precision import Format
from jetrl_jax.quantize import quantize

LAYERS = 2  # the first holds nothing but NaN
STORED = {"bf16": jnp.bfloat16, "e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


def case(fmt: str, b: int, s: int, kv: int, group: int, hd: int, seed: int | None = None) -> tuple[list[Any], np.ndarray, np.ndarray]:
    """Operands of the second layer, exact outputs [B, H, hd] and how far an output may lie from them.

    Operands: q, k, v, layer, positions[, k scales, v scales], numpy arrays; positions are random, with the cache's edges among them; slots
    that no row sees are NaN. The tolerance is that of the kernel's two roundings to bf16, of the softmax's weights and of the output (2^-9
    each), doubled.
    """
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(b, kv * group, hd)).astype(ml_dtypes.bfloat16)
    positions = rng.integers(0, s, b).astype(np.int32)
    edges = [s - 1, 0, s, 31, 32, s + 7, s // 2 // 64 * 64 - 1]
    positions[:min(b - 1, len(edges))] = edges[:b - 1]
    seen = np.arange(s) <= positions[:, None]  # [B, S]
    stored, exact = [], []
    for _ in range(2):
        x = jnp.asarray(rng.normal(size=(b, s, kv, hd)) * 10.0 ** rng.integers(-1, 2, (b, s, kv, 1)), jnp.bfloat16)
        t = quantize(x, "x", Format(fmt, (1, 0)) if fmt != "bf16" else Format("bf16", (0, 0)))
        values, scales = np.asarray(t.values), np.asarray(t.scales)
        if fmt != "bf16":
            x = (values.astype(np.float32) * scales).astype(ml_dtypes.bfloat16)
        exact.append(np.where(seen[..., None, None], np.asarray(x, np.float64), 0))
        values, scales = values.copy(), np.broadcast_to(scales, (b, s, kv, 1)).copy()
        values[~seen], scales[~seen] = np.nan, np.nan
        stored.append([np.stack([np.full_like(a, np.nan), a]) for a in (values, scales)])
    (k, ks), (v, vs) = stored
    scores = np.einsum("bkrd,bskd->bkrs", q.astype(np.float64).reshape(b, kv, group, hd), exact[0]) / hd**0.5
    scores = np.where(seen[:, None, None], scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    out, size = (np.einsum("bkrs,bskd->bkrd", p, x).reshape(b, kv * group, hd) for x in (exact[1], np.abs(exact[1])))
    operands = [q, k, v, np.array([1], np.int32), positions] + ([ks, vs] if fmt != "bf16" else [])
    return operands, out, 2.0**-8 * (size + np.abs(out)) + 1e-5 * np.abs(out).max()
