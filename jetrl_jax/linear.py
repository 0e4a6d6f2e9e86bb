"""The one product: y = x · Wᵀ with FProp, DGrad and WGrad in the formats of the policy.

`dot` reads a weight that was quantized once for this optimizer step. The float32 master does not enter the forward: it is handed in as
`taps`, the address where its gradient arrives. Products walk the contracted axis in blocks in order and promote every block's sum to
float32 (design.md "Numerics" 3): here in jnp, on Hopper by `kernels/products.py` where the formats are the kernels'.
"""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jetrl_jax.errors import UserError
from jetrl_jax.kernels import launch, products
from jetrl_jax.kernels.operators import norm_backward_p, norm_quantize_p, quantize_both_p, requantize_p, silu_quantize_p
from jetrl_jax.numerics import silu_mul, wide_dot
from jetrl_jax.precision import Format, Precision
from jetrl_jax.quantize import QTensor, dequantize, quantize

UNROLLED_BLOCKS = 16  # up to so many blocks of K the loop is unrolled; above, it is a scan
BLOCK = 128


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


@dataclasses.dataclass(frozen=True)
class DotSpec:
    """What is static in a product: its site, its formats, and the unpadded sizes of the projections side by side in it.

    before: what its inputs pass first: "" nothing (x), "norm" RMSNorm with `eps` (x, gain), "silu" SiLU·mul (gate, up).
    """

    site: str
    precision: Precision
    features: tuple[int, ...]
    reductions: str = "auto"
    kernels: str = "auto"
    before: str = ""
    eps: float = 0.0

    @property
    def fuses(self) -> bool:
        """Whether what stands before the product is done in the same kernel as its quantization: FP8 in rows of 128 columns, saved so too.

        Both phases decide it alike, from the policy alone: a norm that one phase fuses would round otherwise than the other's.
        """
        p = self.precision
        rows = p.activation.quantized and p.activation.block == products.ROWS and p.weight.quantized and p.saved_activation == "requantize"
        return rows and self.reductions == "auto" and self.kernels != "off" and p.operators == "bf16"


def padded(n: int, fmt: Format) -> int:
    """Rows or columns that a weight axis of n takes in the payload: whole blocks of 128 where it is quantized."""
    return -(-n // BLOCK) * BLOCK if fmt.quantized else n


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
    a, w = (q if q.fmt.quantized else QTensor(_input(q.values, k), q.scales, q.site, q.fmt) for q in (a, w))
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


def _columns(parts: list[jax.Array], fmt: Format) -> jax.Array:
    """Output gradients of the projections, each padded as its weight was, side by side: [..., T, N]."""
    return jnp.concatenate([jnp.pad(p, [(0, 0)] * (p.ndim - 1) + [(0, padded(p.shape[-1], fmt) - p.shape[-1])]) for p in parts], -1)


def _input(x: jax.Array, k: int) -> jax.Array:
    """x with its columns padded to the weight's k."""
    return x if x.shape[-1] == k else jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, k - x.shape[-1])])


def _flat(x: jax.Array, fmt: Format) -> jax.Array:
    """[B, T, C] as it is, or [1, B·T, C] where one scale spans all tokens."""
    return x.reshape(1, -1, x.shape[-1]) if fmt.quantized and fmt.block[0] == 0 else x


def _quantize_rows(x: jax.Array, site: str, fmt: Format) -> QTensor:
    """x [B, T, C] quantized for a product along C; tensor-wise scales see the whole batch."""
    q = quantize(_flat(x, fmt), site, fmt)
    scales = jnp.broadcast_to(q.scales, (x.shape[0], *q.scales.shape[1:])) if q.values.shape[0] != x.shape[0] else q.scales
    return QTensor(q.values.reshape(*x.shape[:-1], -1), scales, site, fmt)


def _whole_tokens(x: jax.Array, p: Precision) -> jax.Array:
    """x [B, T, C] with every sequence padded to whole groups of WGrad's operands, also where this operand has none: the other may.

    A sequence shorter than a group is one of its own; kernels want it whole, with the same scales.
    """
    group = max((f.block[1] for f in (p.activation, p.gradient) if f.quantized), default=0)
    if group and (x.shape[-2] > group or not launch.missing()):
        x = lax.pad(x, np.zeros((), x.dtype), [(0, 0, 0), (0, -x.shape[-2] % group, 0), (0, 0, 0)])
    return x


def _turned(values: jax.Array, scales: jax.Array, site: str, fmt: Format) -> QTensor:
    """Groups along tokens, [B, T', C], laid as [C, B·T'], where they read as groups along the contracted axis."""
    turned = Format(fmt.dtype, fmt.block[::-1], fmt.scale)
    return QTensor(values.reshape(-1, values.shape[-1]).T, scales.reshape(-1, scales.shape[-1]).T, site, turned)


def _tokens_last(x: jax.Array, site: str, fmt: Format, p: Precision) -> QTensor:
    """x [B, T, C] quantized in groups along tokens and laid as [C, B·T'], where it reads as groups along the contracted axis."""
    x = _whole_tokens(x, p)
    q = quantize(_flat(x, fmt), site, fmt)
    if not fmt.quantized:
        return QTensor(q.values.reshape(-1, x.shape[-1]).T, q.scales[0], site, fmt)
    return _turned(q.values, q.scales, site, fmt)


def _both(x: jax.Array, site: str, fmt: Format, spec: DotSpec) -> tuple[QTensor, QTensor]:
    """`_quantize_rows` and `_tokens_last` of x at `site` and `site`T, in one pass where a scale is of one row and 128 columns."""
    p, turned = spec.precision, fmt.along_tokens
    if not fmt.quantized or fmt.block != products.ROWS:
        return _quantize_rows(x, site, fmt), _tokens_last(x, f"{site}T", turned, p)
    whole = _whole_tokens(x, p)
    declares = ((site, fmt), None, (f"{site}T", turned), None)
    rows, scales, columns, groups = quantize_both_p.bind(whole, declares=declares)
    if whole.shape != x.shape:
        rows, scales = rows[:, :x.shape[1]], scales[:, :x.shape[1]]
    return QTensor(rows, scales, site, fmt), _turned(columns, groups, f"{site}T", turned)


def _requantized(q: QTensor, site: str, fmt: Format, spec: DotSpec) -> QTensor:
    """The saved input of FProp, [B, T, K], turned from groups along columns to groups along tokens (Jet-RL's saved activation)."""
    if q.fmt.block != products.ROWS:
        # XLA's GPU would join payload · scale with the next 1 / scale: other ties than the oracle's.
        return _tokens_last(lax.optimization_barrier(dequantize(q)), site, fmt, spec.precision)
    values, scales = _whole_tokens(q.values, spec.precision), _whole_tokens(q.scales, spec.precision)
    columns, groups = requantize_p.bind(values, scales, declares=((site, fmt), None))
    return _turned(columns, groups, site, fmt)


def _wgrad(dy: QTensor, x: QTensor, spec: DotSpec) -> jax.Array:
    """dY [N, T] by X [K, T], both in groups of tokens -> float32 [N, K]."""
    if products.fits(dy.fmt, x.fmt):
        return products.wgrad(dy, x, spec.reductions, spec.kernels)
    _no_kernel(dy.fmt, x.fmt, spec)
    return scaled_product(dy, x, spec.reductions)


def _entered(inputs: tuple[jax.Array, ...], width: int, spec: DotSpec) -> QTensor:
    """The product's input, quantized by rows, with `width` columns as the weight has."""
    site, fmt = f"{spec.site}.x", spec.precision.activation
    if not spec.before:
        return _quantize_rows(_input(inputs[0], width), site, fmt)
    if spec.before == "norm":
        x, gain = inputs
        values, scales = norm_quantize_p.bind(x, gain.astype(x.dtype), eps=spec.eps, declares=((site, fmt), None))
    else:
        values, scales = silu_quantize_p.bind(*inputs, declares=((site, fmt), None))
    if values.shape[-1] != width:  # fewer columns than a block are a block of their own
        values = lax.pad(values, np.zeros((), values.dtype), [(0, 0, 0), (0, 0, 0), (0, width - values.shape[-1], 0)])
    return QTensor(values, scales, site, fmt)


def _left(dx: jax.Array, inputs: tuple[jax.Array, ...], spec: DotSpec) -> tuple[jax.Array, ...]:
    """Gradients of the inputs from that of what the product multiplied."""
    if spec.before == "norm":
        x, gain = inputs
        dx, dgain = norm_backward_p.bind(dx, x, gain.astype(x.dtype), eps=spec.eps, declares=(None, None))
        return dx, dgain.astype(gain.dtype)
    if spec.before == "silu":
        return jax.vjp(lambda g, u: silu_mul(g, u, spec.reductions), *inputs)[1](dx)
    return (dx,)


def _fprop(inputs: tuple[jax.Array, ...], w: QWeight, spec: DotSpec) -> tuple[QTensor, tuple[jax.Array, ...]]:
    q = _entered(inputs, w.fprop.values.shape[-1], spec)
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
        q, saved = _both(_input(x, w.fprop.values.shape[-1]), f"{spec.site}.x", p.activation, spec)
        y = _split(_product(q, w, x.dtype, spec), w, spec)
    else:
        q, y = _fprop(inputs, w, spec)
        saved = q if _saved(p) == "requantize" else x
    # Empty slices carry widths and dtypes: whole masters among the residuals would be stacked once more by the scan over layers.
    return y, (saved, w, None if taps is None else tuple(t[:0] for t in taps), x[:0], inputs if spec.before else ())


def _dot_bwd(spec, residuals, dys):
    saved, w, taps, x0, inputs = residuals
    p, k = spec.precision, x0.shape[-1]
    dy = _columns(list(dys), w.fprop.fmt)
    if taps is None:
        dx = _dgrad(_quantize_rows(dy, f"{spec.site}.dy", p.gradient), w, x0, spec)
        return _left(dx, inputs, spec), None, None
    dyq, dyt = _both(dy, f"{spec.site}.dy", p.gradient, spec)  # both from the bf16 value
    dx = _dgrad(dyq, w, x0, spec)
    # WGrad: both operands in groups along the tokens, x from what the policy saved.
    site, turned = f"{spec.site}.xT", p.activation.along_tokens
    if _saved(p) == "requantize":
        saved = _requantized(saved, site, turned, spec)
    elif _saved(p) == "bf16":
        saved = _tokens_last(saved, site, turned, p)
    dw = _wgrad(dyt, saved, spec)
    grads, at = [], 0
    for n, tap in zip(spec.features, taps, strict=True):
        grads.append(dw[at:at + n, :k].astype(tap.dtype))
        at += padded(n, w.fprop.fmt)
    return _left(dx, inputs, spec), None, tuple(grads)


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
