"""`quantize_params`: the float32 master -> everything that a forward reads, once per optimizer step and distinct flow.

The tree (`q` collection of the modules): {"embed": [V, D], "final_norm": [D], "lm_head": QTensor [V, D] or None where the embedding serves,
"segments": one tree for each run of consecutive layers of equal precision: {"attn_norm": [l, D], "attn": {"qkv": QWeight, "o": QWeight,
"q_bias": …}, "mlp_norm": …, "mlp": {"gate_up": …, "down": …}}}. Leaves that stay unquantized are in the operators' dtype (bf16), so that
rollout needs nothing else than this tree.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jetrl_jax.errors import UserError
from jetrl_jax.kernels import products
from jetrl_jax.kernels.operators import quantize_blocks_p
from jetrl_jax.linear import QWeight, padded
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.precision import SITES, Flow, Precision, matches
from jetrl_jax.quantize import QTensor, quantize

PRODUCTS = {"attn": {"qkv": ("q", "k", "v"), "o": ("o",)}, "mlp": {"gate_up": ("gate", "up"), "down": ("down",)}}
"""Which projections lie side by side in which product."""


def operators_dtype(flow: Flow) -> Any:
    return {"bf16": jnp.bfloat16, "float64": jnp.float64}[flow.base.operators]


def _pad(w: jax.Array, rows: int, cols: int) -> jax.Array:
    return jnp.pad(w, [(0, 0)] * (w.ndim - 2) + [(0, rows - w.shape[-2]), (0, cols - w.shape[-1])])


def quantize_weight(masters: list[jax.Array], site: str, p: Precision, transposed: bool = False) -> QWeight:
    """Masters [l, n, K] of one product at `site` -> QWeight [l, N, K]: each quantized and padded alone, then laid side by side.

    transposed: with the payload once more as DGrad's kernel reads it, [l, K, N], the same bytes written in the same pass.
    """
    fmt = p.weight
    parts = [_pad(w, padded(w.shape[-2], fmt), padded(w.shape[-1], fmt)) for w in masters]
    if transposed and products.fits(p.gradient, fmt) and fmt.block == products.BLOCKS:
        made = [quantize_blocks_p.bind(w, declares=((f"{site}.w", fmt), None, (f"{site}.w", fmt))) for w in parts]
        payload, shared, turned = (jnp.concatenate(x, axis) for x, axis in zip(zip(*made, strict=True), (-2, -2, -1), strict=True))
        fprop = QTensor(payload, shared, f"{site}.w", fmt)
        return QWeight(fprop, QTensor(turned, jnp.swapaxes(shared, -1, -2), f"{site}.w", fmt))
    q = [quantize(w, f"{site}.w", fmt) for w in parts]
    scales = [t.scales for t in q]
    if fmt.quantized and fmt.block[0] == 0:  # one scale a projection: repeated by rows of 128, since sizes differ
        scales = [jnp.repeat(t.scales, t.values.shape[-2] // 128, -2) for t in q]
    side = [jnp.concatenate([t.values for t in q], -2), jnp.concatenate(scales, -2) if fmt.quantized else q[0].scales]
    fprop = QTensor(side[0], side[1], f"{site}.w", fmt)
    if fmt.quantized and fmt.block == (1, 0):  # a scale per output row does not transpose: quantized a second time, per input channel
        return QWeight(fprop, quantize(jnp.swapaxes(jnp.concatenate(parts, -2), -1, -2), f"{site}.wT", fmt))
    return QWeight(fprop)


def _segment(layers: dict, flow: Flow, segment: tuple[int, int], num_layers: int, transposed: bool) -> dict:
    a, b = segment
    layers = jax.tree.map(lambda w: w[a:b], layers)
    dtype = operators_dtype(flow)
    out: dict[str, Any] = {n: layers[n].astype(dtype) for n in ("attn_norm", "mlp_norm")}
    for module, by_name in PRODUCTS.items():
        used = {n for names in by_name.values() for n in names}
        out[module] = {n: w.astype(dtype) for n, w in layers[module].items() if n not in used}
        for name, projections in by_name.items():
            p = flow.at(f"layers/{a}/{module}/{name}", num_layers)
            site = f"{flow.label(segment, num_layers)}/{module}/{name}"
            out[module][name] = quantize_weight([layers[module][n] for n in projections], site, p, transposed)
    return out


def quantize_params(flow: Flow, config: ModelConfig, params: dict, transposed: bool = False) -> dict:
    """Master params (float32, the tree of `ModelConfig.param_shapes`) -> the tree that `Transformer` reads as `q`. Pure, jit it.

    transposed: for an update by kernels (`kernels.launch.missing` is ""): DGrad's payloads too. Rollout alone needs none.
    """
    dtype = operators_dtype(flow)
    shared = config.tie_embeddings and flow.base.logits.dtype == flow.base.operators  # then lm_head reads `embed` itself
    head = None if shared else quantize(params["embed" if config.tie_embeddings else "lm_head"], "lm_head.w", flow.base.logits)
    return {
        "embed": params["embed"].astype(dtype),
        "final_norm": params["final_norm"].astype(dtype),
        "lm_head": head,
        "segments": tuple(_segment(params["layers"], flow, s, config.num_layers, transposed) for s in flow.segments(config.num_layers)),
    }


def check_paths(flow: Flow, config: ModelConfig) -> None:
    """Raises UserError for an override pattern that matches no place in the model."""
    paths = [f"layers/{i}/{site}" for i in range(config.num_layers) for site in SITES]
    for pattern, _, _ in flow.overrides:
        if not any(matches(pattern, path, config.num_layers) for path in paths):
            raise UserError(f"policy_overrides.paths pattern {pattern!r} matches nothing in a model of {config.num_layers} layers; "
                            f"paths are layers/INDEX/SITE with SITE one of {', '.join(SITES)}")
