"""Attention on Hopper: cuDNN's flash attention for whole sequences, our kernel for a decode step. One choice serves both.

Prefill and update go to cuDNN through `jax.nn.dot_product_attention`; a decode step is the operator `decode_attention_p`, which reads the
layer-stacked cache in place (`decode_attention.py`). Rollout and update must take the same way, so `native` answers for all three at once,
when they are traced: elsewhere `models/attention.py` runs, in jnp. This module needs no triton.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jetrl_jax.errors import UserError
from jetrl_jax.kernels import launch
from jetrl_jax.quantize import QTensor

FULL = "dot_product_attention_fwd_wrapper"  # cuDNN's forward in a jaxpr; its first three operands are q, k, v
DECODE = "decode_attention"  # likewise
BLOCK = 64  # cuDNN's backward pass takes whole blocks of tokens


def native(heads: int, kv_heads: int, head_dim: int, dtype: Any, reductions: str = "auto", kernels: str = "auto") -> bool:
    """Whether attention of this shape takes cuDNN and our decode kernel here: on Hopper, in bf16, unless reductions are float64.

    Head sizes: multiples of 16 up to 128; groups of up to 16 query heads. kernels: the policy's wish ("auto", "off", "required").

    Raises:
      UserError: kernels="required", and it cannot be kept.
    """
    fits = head_dim % 16 == 0 and head_dim <= 128 and heads // kv_heads <= 16 and dtype == jnp.bfloat16
    if kernels == "required":
        why = launch.missing() or ("" if fits else f"{heads} heads of {head_dim} over {kv_heads} in {jnp.dtype(dtype)} have no kernel")
        why = why or ("reductions='float64' runs the jnp path" if reductions == "float64" else "")
        if why:
            raise UserError(f"policy_overrides.kernels='required', but {why}; write 'auto'")
    return fits and kernels != "off" and reductions != "float64" and not launch.missing()


def full(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """q [B, T, H, hd], k and v [B, T, K, hd], bf16 -> [B, T, H, hd]: row t sees slots <= t. Differentiable; cuDNN, Hopper only.

    T is padded to whole blocks. Rows that are cut off again have no gradient, and no real row sees a padded slot.
    """
    t = q.shape[1]
    pad = -t % BLOCK
    if pad:
        q, k, v = (jnp.pad(x, [(0, 0), (0, pad), (0, 0), (0, 0)]) for x in (q, k, v))
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    return y[:, :t] if pad else y


def _oracle(q, k, v, layer, positions, ks=None, vs=None, *, kernels="auto"):
    (b, h, hd), (s, kv) = q.shape, k.shape[2:4]

    def read(x, scales):
        x = jax.lax.dynamic_index_in_dim(x, layer[0], 0, keepdims=False)
        if scales is not None:
            x = (x.astype(jnp.float32) * jax.lax.dynamic_index_in_dim(scales, layer[0], 0, keepdims=False)).astype(jnp.bfloat16)
        return x.astype(jnp.float32)

    highest = jax.lax.Precision.HIGHEST
    seen = jnp.arange(s) <= jnp.clip(positions, 0, s - 1)[:, None]  # [B, S]
    values = jnp.where(seen[..., None, None], read(v, vs), 0)  # what lies in a slot that is not seen says nothing, NaN included
    scores = jnp.einsum("bkrd,bskd->bkrs", q.astype(jnp.float32).reshape(b, kv, h // kv, hd), read(k, ks), precision=highest)
    p = jax.nn.softmax(jnp.where(seen[:, None, None], scores * (1 / hd**0.5), -jnp.inf), -1)
    return [jnp.einsum("bkrs,bskd->bkrd", p, values, precision=highest).reshape(b, h, hd).astype(q.dtype)]


def _native(q, k, v, layer, positions, ks=None, vs=None, *, kernels="auto"):
    from jetrl_jax.kernels import decode_attention

    return [decode_attention.attention(q, k, v, layer, positions, ks, vs)]


def _supported(q, k, v, layer, positions, ks=None, vs=None, *, kernels="auto"):
    payload = (jnp.float8_e4m3fn, jnp.float8_e5m2) if ks is not None else (jnp.bfloat16,)
    return (q.dtype == jnp.bfloat16 and k.dtype == v.dtype and k.dtype in payload and q.shape[-1] % 16 == 0 and q.shape[-1] <= 128
            and q.shape[1] // k.shape[3] <= 16)


decode_attention_p = launch.operator(DECODE, _oracle, _native, _supported)
"""(q, k, v, layer, positions[, k scales, v scales]) -> [output]; see `decode_attention.attention`."""


def decode(q: jax.Array, k: QTensor, v: QTensor, layer: jax.Array, positions: jax.Array, kernels: str = "auto") -> jax.Array:
    """q [B, H, hd] over the slots <= positions [B] of one layer (int32) of the cache's stacks, values [l, B, S, K, hd] -> [B, H, hd].

    Positions past the cache, of sequences that have ended, are clamped to its last slot.
    """
    scales = (k.scales, v.scales) if k.fmt.quantized else ()
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    return decode_attention_p.bind(q, k.values, v.values, layer, positions.astype(jnp.int32), *scales, kernels=kernels)[0]
