"""What the three products multiply: the layer's inputs and output gradients, quantized as FProp, DGrad and WGrad read them.

FProp and DGrad contract columns and read groups along them ("by rows"). WGrad contracts tokens: it reads groups along tokens, laid with the
tokens last ("turned"), the output gradient from its own value and the input from what the forward saved of it
(`Precision.saved_activation`). Formats are the policy's, and a sequence is quantized alone unless one scale is to span all tokens, so that
the split into micro-batches changes no bit. Sites are those of the flow graph: `x` and `dy` by rows, `xT` and `dyT` turned.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jetrl_jax.kernels import launch, products
from jetrl_jax.kernels.operators import norm_backward_p, norm_quantize_p, quantize_both_p, requantize_p, silu_quantize_p
from jetrl_jax.numerics import silu_mul
from jetrl_jax.precision import Format, Precision
from jetrl_jax.quantize import QTensor, dequantize, quantize

BLOCK = 128


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


def widened(x: jax.Array, k: int) -> jax.Array:
    """x [..., K] with its columns padded with zeros to the weight's k, [..., k]."""
    return x if x.shape[-1] == k else jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, k - x.shape[-1])])


def side_by_side(parts: list[jax.Array], fmt: Format) -> jax.Array:
    """Output gradients [..., T, n] of the projections, each padded as its weight (in `fmt`) was, side by side: [..., T, N]."""
    return jnp.concatenate([jnp.pad(p, [(0, 0)] * (p.ndim - 1) + [(0, padded(p.shape[-1], fmt) - p.shape[-1])]) for p in parts], -1)


def _flat(x: jax.Array, fmt: Format) -> jax.Array:
    """[B, T, C] as it is, or [1, B·T, C] where one scale spans all tokens."""
    return x.reshape(1, -1, x.shape[-1]) if fmt.quantized and fmt.block[0] == 0 else x


def by_rows(x: jax.Array, site: str, fmt: Format) -> QTensor:
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


def tokens_last(x: jax.Array, site: str, fmt: Format, p: Precision) -> QTensor:
    """x [B, T, C] quantized in groups along tokens (fmt) and laid as [C, B·T'], where it reads as groups along the contracted axis.

    T' is T, or whole groups of it (see `_whole_tokens`); the zeros beyond a sequence add nothing to WGrad.
    """
    x = _whole_tokens(x, p)
    q = quantize(_flat(x, fmt), site, fmt)
    if not fmt.quantized:
        return QTensor(q.values.reshape(-1, x.shape[-1]).T, q.scales[0], site, fmt)
    return _turned(q.values, q.scales, site, fmt)


def both_ways(x: jax.Array, site: str, fmt: Format, p: Precision) -> tuple[QTensor, QTensor]:
    """`by_rows` and `tokens_last` of x [B, T, C] at `site` and `site`T, in one pass where a scale is of one row and 128 columns."""
    turned = fmt.along_tokens
    if not fmt.quantized or fmt.block != products.ROWS:
        return by_rows(x, site, fmt), tokens_last(x, f"{site}T", turned, p)
    whole = _whole_tokens(x, p)
    declares = ((site, fmt), None, (f"{site}T", turned), None)
    rows, scales, columns, groups = quantize_both_p.bind(whole, declares=declares)
    if whole.shape != x.shape:
        rows, scales = rows[:, :x.shape[1]], scales[:, :x.shape[1]]
    return QTensor(rows, scales, site, fmt), _turned(columns, groups, f"{site}T", turned)


def requantized(q: QTensor, site: str, fmt: Format, p: Precision) -> QTensor:
    """FProp's saved input [B, T, K] requantized from groups along columns to groups along tokens (fmt) and turned, [K, B·T'].

    This is Jet-RL's saved activation (reference notes): no bf16 copy of the input is kept.
    """
    if q.fmt.block != products.ROWS:
        # XLA's GPU would join payload · scale with the next 1 / scale: other ties than the oracle's.
        return tokens_last(lax.optimization_barrier(dequantize(q)), site, fmt, p)
    values, scales = _whole_tokens(q.values, p), _whole_tokens(q.scales, p)
    columns, groups = requantize_p.bind(values, scales, declares=((site, fmt), None))
    return _turned(columns, groups, site, fmt)


def entered(inputs: tuple[jax.Array, ...], width: int, spec: DotSpec) -> QTensor:
    """What FProp multiplies, from its inputs [B, T, K] (see `DotSpec.before`): quantized by rows, `width` columns as the weight has."""
    site, fmt = f"{spec.site}.x", spec.precision.activation
    if not spec.before:
        return by_rows(widened(inputs[0], width), site, fmt)
    if spec.before == "norm":
        x, gain = inputs
        values, scales = norm_quantize_p.bind(x, gain.astype(x.dtype), eps=spec.eps, declares=((site, fmt), None))
    else:
        values, scales = silu_quantize_p.bind(*inputs, declares=((site, fmt), None))
    if values.shape[-1] != width:  # fewer columns than a block are a block of their own
        values = lax.pad(values, np.zeros((), values.dtype), [(0, 0, 0), (0, 0, 0), (0, width - values.shape[-1], 0)])
    return QTensor(values, scales, site, fmt)


def input_gradients(dx: jax.Array, inputs: tuple[jax.Array, ...], spec: DotSpec) -> tuple[jax.Array, ...]:
    """Gradients of the inputs, each in its shape, from dx [B, T, K], that of what the product multiplied."""
    if spec.before == "norm":
        x, gain = inputs
        dx, dgain = norm_backward_p.bind(dx, x, gain.astype(x.dtype), eps=spec.eps, declares=(None, None))
        return dx, dgain.astype(gain.dtype)
    if spec.before == "silu":
        return jax.vjp(lambda g, u: silu_mul(g, u, spec.reductions), *inputs)[1](dx)
    return (dx,)
