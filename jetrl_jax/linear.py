"""The one product: y = x · Wᵀ with FProp, DGrad and WGrad in the formats of the policy.

`dot` reads a weight that was quantized once for this optimizer step. The float32 master does not enter the forward: it is handed in as
`taps`, the address where its gradient arrives. Products walk the contracted axis in blocks in order and promote every block's sum to
float32 (design.md "Numerics" 3): later kernels must give these numbers.
"""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jetrl_jax.numerics import wide_dot
from jetrl_jax.precision import Format, Precision
from jetrl_jax.quantize import QTensor, dequantize, quantize

UNROLLED_BLOCKS = 16  # up to so many blocks of K the loop is unrolled; above, it is a scan
BLOCK = 128


@flax.struct.dataclass
class QWeight:
    """The projections of one product side by side: `fprop` [N, K] by rows, each padded alone, and what DGrad reads.

    `dgrad` [K, N] is None where the transposed payload serves (always, but for one scale per row: `fp8_rowwise`).
    """

    fprop: QTensor
    dgrad: QTensor | None = None


@dataclasses.dataclass(frozen=True)
class DotSpec:
    """What is static in a product: its site, its formats, and the unpadded sizes of the projections side by side in it."""

    site: str
    precision: Precision
    features: tuple[int, ...]
    reductions: str = "auto"


def padded(n: int, fmt: Format) -> int:
    """Rows or columns that a weight axis of n takes in the payload: whole blocks of 128 where it is quantized."""
    return -(-n // BLOCK) * BLOCK if fmt.quantized else n


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


def _tokens_last(x: jax.Array, site: str, fmt: Format, p: Precision) -> QTensor:
    """x [B, T, C] quantized in groups along tokens and laid as [C, B·T'], where it reads as groups along the contracted axis.

    Every sequence is padded to whole groups, T', also where this operand has none: the other operand of WGrad may.
    """
    group = max((f.block[1] for f in (p.activation, p.gradient) if f.quantized), default=0)
    if group and x.shape[-2] > group:
        x = jnp.pad(x, [(0, 0), (0, -x.shape[-2] % group), (0, 0)])
    q = quantize(_flat(x, fmt), site, fmt)
    if not fmt.quantized:
        return QTensor(q.values.reshape(-1, x.shape[-1]).T, q.scales[0], site, fmt)
    return QTensor(q.values.reshape(-1, q.values.shape[-1]).T, q.scales.reshape(-1, q.scales.shape[-1]).T, site, fmt)


def _fprop(x: jax.Array, w: QWeight, spec: DotSpec) -> tuple[QTensor, tuple[jax.Array, ...]]:
    q = _quantize_rows(_input(x, w.fprop.values.shape[-1]), f"{spec.site}.x", spec.precision.activation)
    y = scaled_product(q, w.fprop, spec.reductions).astype(x.dtype)
    outs, at = [], 0
    for n in spec.features:
        outs.append(y[..., at:at + n])
        at += padded(n, w.fprop.fmt)
    return q, tuple(outs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def dot(x: jax.Array, w: QWeight, taps: tuple[jax.Array, ...] | None, spec: DotSpec) -> tuple[jax.Array, ...]:
    """x [B, T, K] by the projections in `w` -> one [B, T, n] for each n in spec.features, in x's dtype.

    Args:
      taps: float32 masters [n, K], one a projection: unused in the forward, given the gradient in the backward; None where only rollout
        runs.
    FProp, DGrad and WGrad as Jet-RL's section on the precision flow (reference notes; design.md "Numerics" 3 to 5): activations and
    gradients are quantized at the product's input, the weight's payload is shared, the gradient is straight-through.
    """
    return _fprop(x, w, spec)[1]


def _saved(p: Precision) -> str:
    """How the input is kept for WGrad; an unquantized one is kept as it is."""
    return p.saved_activation if p.activation.quantized else "bf16"


def _dot_fwd(x, w, taps, spec):
    q, y = _fprop(x, w, spec)
    p, saved = spec.precision, x
    if _saved(p) == "requantize":
        saved = q
    elif _saved(p) == "dual":
        saved = _tokens_last(x, f"{spec.site}.xT", p.activation.along_tokens, p)
    # Empty slices carry widths and dtypes: whole masters among the residuals would be stacked once more by the scan over layers.
    return y, (saved, w, None if taps is None else tuple(t[:0] for t in taps), x[:0])


def _dot_bwd(spec, residuals, dys):
    saved, w, taps, x0 = residuals
    p, k = spec.precision, x0.shape[-1]
    dy = _columns(list(dys), w.fprop.fmt)
    weight = w.fprop.T if w.dgrad is None else w.dgrad
    dyq = _quantize_rows(dy, f"{spec.site}.dy", p.gradient)
    dx = scaled_product(dyq, weight, spec.reductions)[..., :k].astype(x0.dtype)
    if taps is None:
        return dx, None, None
    # WGrad: both operands in groups along the tokens; dY from its bf16 value, x from what the policy saved.
    if _saved(p) == "requantize":
        saved = dequantize(saved)
    xt = saved if _saved(p) == "dual" else _tokens_last(saved, f"{spec.site}.xT", p.activation.along_tokens, p)
    dyt = _tokens_last(dy, f"{spec.site}.dyT", p.gradient.along_tokens, p)
    dw = scaled_product(dyt, xt, spec.reductions)
    grads, at = [], 0
    for n, tap in zip(spec.features, taps, strict=True):
        grads.append(dw[at:at + n, :k].astype(tap.dtype))
        at += padded(n, w.fprop.fmt)
    return dx, None, tuple(grads)


dot.defvjp(_dot_fwd, _dot_bwd)


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
