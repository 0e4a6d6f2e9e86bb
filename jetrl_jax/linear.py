"""The one product: y = x · Wᵀ with FProp, DGrad and WGrad in the formats of the policy.

`dot` reads a weight that was quantized once for this optimizer step. The float32 master does not enter the forward: it is handed in as
`taps`, the address where its gradient arrives. Products walk the contracted axis in blocks in order and promote every block's sum to
float32 (design.md "Numerics" 3): here in jnp, on Hopper by `kernels/products.py` where the formats are the kernels'. What they multiply is
made in `operands.py`.
"""

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jetrl_jax import operands
from jetrl_jax.errors import UserError
from jetrl_jax.kernels import products
from jetrl_jax.numerics import wide_dot
from jetrl_jax.operands import DotSpec, padded
from jetrl_jax.precision import Format, Precision
from jetrl_jax.quantize import QTensor

UNROLLED_BLOCKS = 16  # up to so many blocks of K the loop is unrolled; above, it is a scan


@flax.struct.dataclass
class QWeight:
    """The projections of one product side by side: `fprop` [N, K] by rows, each padded alone, and what DGrad reads.

    `dgrad` [K, N] is None where the transposed payload serves as it is: kernels read it from memory, so on Hopper it is made with W; one
    scale per row (`fp8_rowwise`) does not transpose, and needs a second quantization. With `layer`, an int32 scalar, both are stacks
    [L, …] of which that layer is meant: a loop over layers then copies no weight.
    """

    fprop: QTensor
    dgrad: QTensor | None = None
    layer: jax.Array | None = None

    def at(self, layer: jax.Array) -> "QWeight":
        """One layer of a stack: by reference where a kernel could read it in place, else by value."""
        by_reference = self.replace(layer=layer)  # type: ignore[attr-defined]
        return by_reference if products.fits(Format(), self.fprop.fmt) else by_reference.value

    @property
    def value(self) -> "QWeight":
        """The layer that is meant, cut out of the stack."""
        if self.layer is None:
            return self
        return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, self.layer, 0, keepdims=False), QWeight(self.fprop, self.dgrad))

    @property
    def backward(self) -> "QWeight":
        """The weight whose `fprop` is what DGrad multiplies by."""
        return QWeight(self.value.fprop.T) if self.dgrad is None else QWeight(self.dgrad, None, self.layer)


def _product(a: QTensor, w: QWeight, dtype: Any, spec: DotSpec) -> jax.Array:
    """a [..., K] by the weight's `fprop` -> [..., N] in `dtype`."""
    if products.fits(a.fmt, w.fprop.fmt):
        return products.product(a, w.fprop, w.layer, dtype, spec.reductions, spec.kernels)
    _no_kernel(a.fmt, w.fprop.fmt, spec)
    return scaled_product(a, w.value.fprop, spec.reductions).astype(dtype)


def _no_kernel(a: Format, w: Format, spec: DotSpec) -> None:
    """Raises `UserError` for a quantized product without a kernel where the policy demands one."""
    if spec.kernels == "required" and (a.quantized or w.quantized):
        raise UserError(f"policy_overrides.kernels='required', but {spec.site} multiplies {a} by {w}, which no kernel does; write 'auto'")


def scaled_product(a: QTensor, w: QTensor, reductions: str = "auto") -> jax.Array:
    """a [..., M, K] · w [N, K]ᵀ in the canonical order -> float32 [..., M, N] (float64 for float64 operands).

    K in blocks in order, each block's sum from zero (exact in float64), then acc = f32(f64(acc) + f64(p) · f64(s)) with s = f32(sa · sb),
    which is a fused multiply-add but for double rounding, and is the same however XLA contracts. Blocks are those of the scales; operands
    without scales are one block, and stretch to the payload beside them if that was padded.
    """
    k = max(a.values.shape[-1], w.values.shape[-1])
    a, w = (q if q.fmt.quantized else QTensor(operands.widened(q.values, k), q.scales, q.site, q.fmt) for q in (a, w))
    if a.values.shape[-1] != w.values.shape[-1]:
        raise ValueError(f"contracted axes differ: {a.values.shape} and {w.values.shape}")
    if not a.fmt.quantized and not w.fmt.quantized:
        return wide_dot(a.values, w.values, "...mk,nk->...mn", reductions)
    blocks = max(a.scales.shape[-1], w.scales.shape[-1])
    size = k // blocks
    sa = jnp.broadcast_to(_rows(a), (*a.values.shape[:-1], blocks))
    sw = jnp.broadcast_to(_rows(w), (*w.values.shape[:-1], blocks))

    def step(acc, av, wv, sa_i, sw_i):
        p = wide_dot(av, wv, "...mk,nk->...mn", reductions)
        s = sa_i[..., :, None] * sw_i
        with jax.enable_x64(True):
            return (acc.astype(jnp.float64) + p.astype(jnp.float64) * s.astype(jnp.float64)).astype(jnp.float32)

    acc = jnp.zeros((*a.values.shape[:-1], w.values.shape[-2]), jnp.float32)
    if blocks <= UNROLLED_BLOCKS:
        for i in range(blocks):
            at = slice(i * size, (i + 1) * size)
            acc = step(acc, a.values[..., at], w.values[..., at], sa[..., i], sw[..., i])
        return acc

    def body(i, acc):
        av, wv = (lax.dynamic_slice_in_dim(v, i * size, size, -1) for v in (a.values, w.values))
        return step(acc, av, wv, *(lax.dynamic_index_in_dim(s, i, -1, keepdims=False) for s in (sa, sw)))

    return lax.fori_loop(0, blocks, body, acc)


def _rows(q: QTensor) -> jax.Array:
    """Scales with one row per payload row."""
    return jnp.repeat(q.scales, q.values.shape[-2] // q.scales.shape[-2], -2)


def _wgrad(dy: QTensor, x: QTensor, spec: DotSpec) -> jax.Array:
    """dY [N, T] by X [K, T], both in groups of tokens -> float32 [N, K]."""
    if products.fits(dy.fmt, x.fmt):
        return products.wgrad(dy, x, spec.reductions, spec.kernels)
    _no_kernel(dy.fmt, x.fmt, spec)
    return scaled_product(dy, x, spec.reductions)


def _fprop(inputs: tuple[jax.Array, ...], w: QWeight, spec: DotSpec) -> tuple[QTensor, tuple[jax.Array, ...]]:
    q = operands.entered(inputs, w.fprop.values.shape[-1], spec)
    return q, _split(_product(q, w, inputs[0].dtype, spec), w, spec)


def _split(y: jax.Array, w: QWeight, spec: DotSpec) -> tuple[jax.Array, ...]:
    """The projections that lie side by side in y [..., N], unpadded."""
    outs, at = [], 0
    for n in spec.features:
        outs.append(y[..., at:at + n])
        at += padded(n, w.fprop.fmt)
    return tuple(outs)


def dot(x: jax.Array, w: QWeight, taps: tuple[jax.Array, ...] | None, spec: DotSpec) -> tuple[jax.Array, ...]:
    """`dot_after` of x [B, T, K] alone."""
    return dot_after((x,), w, taps, spec)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def dot_after(inputs: tuple[jax.Array, ...], w: QWeight, taps: tuple[jax.Array, ...] | None, spec: DotSpec) -> tuple[jax.Array, ...]:
    """Inputs (see `DotSpec.before`) [B, T, K] by the projections in `w` -> one [B, T, n] for each n in spec.features, in their dtype.

    Args:
      taps: float32 masters [n, K], one a projection: unused in the forward, given the gradient in the backward; None where only rollout
        runs.
    FProp, DGrad and WGrad as Jet-RL's section on the precision flow (reference notes; design.md "Numerics" 3 to 5): activations and
    gradients are quantized at the product's input, the weight's payload is shared, the gradient is straight-through.
    """
    return _fprop(inputs, w, spec)[1]


def _saved(p: Precision) -> str:
    """How the input is kept for WGrad; an unquantized one is kept as it is."""
    return p.saved_activation if p.activation.quantized else "bf16"


def _dot_fwd(inputs, w, taps, spec):
    p, x = spec.precision, inputs[0]
    if _saved(p) == "dual":
        q, saved = operands.both_ways(operands.widened(x, w.fprop.values.shape[-1]), f"{spec.site}.x", p.activation, p)
        y = _split(_product(q, w, x.dtype, spec), w, spec)
    else:
        q, y = _fprop(inputs, w, spec)
        saved = q if _saved(p) == "requantize" else x
    # Empty slices carry widths and dtypes: whole masters among the residuals would be stacked once more by the scan over layers.
    return y, (saved, w, None if taps is None else tuple(t[:0] for t in taps), x[:0], inputs if spec.before else ())


def _dot_bwd(spec, residuals, dys):
    saved, w, taps, x0, inputs = residuals
    p, k = spec.precision, x0.shape[-1]
    dy = operands.side_by_side(list(dys), w.fprop.fmt)
    if taps is None:
        dx = _dgrad(operands.by_rows(dy, f"{spec.site}.dy", p.gradient), w, x0, spec)
        return operands.input_gradients(dx, inputs, spec), None, None
    dyq, dyt = operands.both_ways(dy, f"{spec.site}.dy", p.gradient, p)  # both from the bf16 value
    dx = _dgrad(dyq, w, x0, spec)
    # WGrad: both operands in groups along the tokens, x from what the policy saved.
    site, turned = f"{spec.site}.xT", p.activation.along_tokens
    if _saved(p) == "requantize":
        saved = operands.requantized(saved, site, turned, p)
    elif _saved(p) == "bf16":
        saved = operands.tokens_last(saved, site, turned, p)
    dw = _wgrad(dyt, saved, spec)
    grads, at = [], 0
    for n, tap in zip(spec.features, taps, strict=True):
        grads.append(dw[at:at + n, :k].astype(tap.dtype))
        at += padded(n, w.fprop.fmt)
    return operands.input_gradients(dx, inputs, spec), None, tuple(grads)


def _dgrad(dy: QTensor, w: QWeight, x0: jax.Array, spec: DotSpec) -> jax.Array:
    return _product(dy, w.backward, x0.dtype, spec)[..., :x0.shape[-1]]


dot_after.defvjp(_dot_fwd, _dot_bwd)


@jax.custom_vjp
def through(value: jax.Array, tap: jax.Array | None) -> jax.Array:
    """A weight that enters outside a product (norm, bias): the forward reads `value`, its gradient arrives at the master `tap`."""
    return value


def _through_bwd(like, ct):
    return None, None if like is None else ct.astype(like.dtype)


through.defvjp(lambda value, tap: (value, None if tap is None else tap[:0]), _through_bwd)


@jax.custom_vjp
def lookup(table: jax.Array, tap: jax.Array | None, tokens: jax.Array) -> jax.Array:
    """table [V, D], tokens [...] -> [..., D]; the gradient is summed in float32 into the master `tap` [V, D]."""
    return table[tokens]


def _lookup_bwd(residuals, ct):
    tap, tokens = residuals
    if tap is None:
        return None, None, None
    return None, jnp.zeros_like(tap).at[tokens].add(ct.astype(tap.dtype)), None


lookup.defvjp(lambda table, tap, tokens: (table[tokens], (tap, tokens)), _lookup_bwd)
