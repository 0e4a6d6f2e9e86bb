"""The block-scaled product as an operator: `gemm.py`, `decode.py` and `wgrad.py` on Hopper, the canonical order in jnp elsewhere.

`product_p` is y = a · wᵀ with a scale a row of `a` and one a block of 128×128 of `w` (FProp, DGrad); `wgrad_p` has a scale a row on both
sides. The flow graph reads both as products.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jetrl_jax.kernels import launch
from jetrl_jax.precision import Format

ROWS, BLOCKS = (1, 128), (128, 128)
NAMES = ("jetrl_product", "jetrl_wgrad")
DECODE_ROWS = 256  # up to so many rows the product is read-bound: decode.py


def fits(a: Format, w: Format) -> bool:
    """Whether a pair of formats is the kernels': E4M3 (the gradient, on the left, may be E5M2), 1×128 by 128×128 or by 1×128."""
    return a.dtype in ("e4m3", "e5m2") and w.dtype == "e4m3" and a.block == ROWS and w.block in (ROWS, BLOCKS)


def _oracle(a: jax.Array, sa: jax.Array, w: jax.Array, sw: jax.Array, layer: jax.Array, *, a_fmt: Format, w_fmt: Format, dtype: Any,
            reductions: str, kernels: str) -> list[jax.Array]:
    """a [..., K], sa [..., K/128]; w [L, N, K], sw [L, N/128, K/128], layer int32 [1] -> [..., N] in dtype."""
    from jetrl_jax.linear import scaled_product
    from jetrl_jax.quantize import QTensor

    del kernels
    payload, scales = (jax.lax.dynamic_index_in_dim(x, layer[0], 0, keepdims=False) for x in (w, sw))
    return [scaled_product(QTensor(a, sa, "", a_fmt), QTensor(payload, scales, "", w_fmt), reductions).astype(dtype)]


def _native(a, sa, w, sw, layer, *, a_fmt, w_fmt, dtype, reductions, kernels):
    from jetrl_jax.kernels import decode, gemm

    rows = a.reshape(-1, a.shape[-1])
    scales = sa.reshape(-1, sa.shape[-1]).T  # quantizers write them so: XLA drops the pair of transposes
    kernel = decode.product if rows.shape[0] <= DECODE_ROWS else gemm.product
    return [kernel(rows, scales, w, sw, layer).reshape(*a.shape[:-1], -1)]


def _whole(k: int) -> bool:
    return k % 16 == 0  # TMA reads rows of whole 16 bytes


def _supported(a, sa, w, sw, layer, *, a_fmt, w_fmt, dtype, reductions, kernels):
    whole_blocks = sa.shape[-1] == -(-a.shape[-1] // 128) and sw.shape[-2] == -(-w.shape[-2] // 128)
    return fits(a_fmt, w_fmt) and w_fmt.block == BLOCKS and reductions != "float64" and dtype == jnp.bfloat16 and whole_blocks and (
        _whole(a.shape[-1]) and a.size > 0)


product_p = launch.operator("jetrl_product", _oracle, _native, _supported)


def product(a: Any, w: Any, layer: jax.Array | None, dtype: Any, reductions: str, kernels: str) -> jax.Array:
    """QTensors a [..., K] and w [N, K], or [L, N, K] of which `layer` is read -> [..., N] in `dtype`."""
    stack = (w.values, w.scales) if layer is not None else (w.values[None], w.scales[None])
    index = jnp.zeros(1, jnp.int32) if layer is None else jnp.reshape(layer, 1).astype(jnp.int32)
    return product_p.bind(a.values, a.scales, *stack, index, a_fmt=a.fmt, w_fmt=w.fmt, dtype=jnp.dtype(dtype), reductions=reductions,
                          kernels=kernels)[0]


def _wgrad_oracle(a, sa, b, sb, *, a_fmt, b_fmt, reductions, kernels):
    """a [N, T], sa [N, T/128]; b [K, T], sb [K, T/128] -> float32 [N, K]."""
    from jetrl_jax.linear import scaled_product
    from jetrl_jax.quantize import QTensor

    del kernels
    return [scaled_product(QTensor(a, sa, "", a_fmt), QTensor(b, sb, "", b_fmt), reductions)]


def _wgrad_native(a, sa, b, sb, *, a_fmt, b_fmt, reductions, kernels):
    from jetrl_jax.kernels import wgrad

    return [wgrad.product(a, sa.T, b, sb.T)]


def _wgrad_supported(a, sa, b, sb, *, a_fmt, b_fmt, reductions, kernels):
    return fits(a_fmt, b_fmt) and b_fmt.block == ROWS and reductions != "float64" and a.shape[1] % 128 == 0 and a.size > 0 and (
        sa.shape[-1] == a.shape[1] // 128)


wgrad_p = launch.operator("jetrl_wgrad", _wgrad_oracle, _wgrad_native, _wgrad_supported)


def wgrad(a: Any, b: Any, reductions: str, kernels: str) -> jax.Array:
    """QTensors a [N, T] and b [K, T], in groups along T -> float32 [N, K]."""
    return wgrad_p.bind(a.values, a.scales, b.values, b.scales, a_fmt=a.fmt, b_fmt=b.fmt, reductions=reductions, kernels=kernels)[0]
