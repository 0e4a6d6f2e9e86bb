"""`QTensor` and the one primitive through which every operand of a product goes.

`quantize_p(site, fmt)` is a JAX primitive of our own, so that the flow graph is read from the traced program (`flow.py`) instead of being
declared. An operand that stays unquantized passes it too, as the identity. It has no derivative on purpose: quantization is
straight-through and lives only inside `custom_vjp` rules (a cast to FP8 that autodiff sees crushes gradients in silence; design.md
"Numerics" 4).
"""

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jax.interpreters import batching, mlir

from jetrl_jax.kernels.launch import abstract
from jetrl_jax.precision import FP8, Format

_STORAGE: dict[str, Any] = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2,
                            "bf16": jnp.bfloat16, "float32": jnp.float32, "float64": jnp.float64}


def storage(fmt: Format) -> Any:
    """The dtype in which a format's payload lies in memory."""
    return jnp.dtype(_STORAGE[fmt.dtype])


TINY = 2.0**-100  # the smallest amax: an all-zero block gets a finite scale


@flax.struct.dataclass
class QTensor:
    """Payload and scales of a tensor [..., rows, columns].

    values: [..., R, C] in the format's dtype, R and C padded to whole blocks; scales: float32 [..., R / block rows, C / block columns].
    An unquantized tensor has scales [..., 1, 1] of ones. `site` and `fmt` are static: they name the edge in the flow graph.
    """

    values: jax.Array
    scales: jax.Array
    site: str = flax.struct.field(pytree_node=False, default="")
    fmt: Format = flax.struct.field(pytree_node=False, default=Format())

    @property
    def T(self) -> "QTensor":
        """The same payload read as its transpose: no second quantization (what DGrad reads)."""
        fmt = Format(self.fmt.dtype, self.fmt.block[::-1], self.fmt.scale)
        return QTensor(jnp.swapaxes(self.values, -1, -2), jnp.swapaxes(self.scales, -1, -2), self.site, fmt)


def whole_blocks(n: int, block: int) -> tuple[int, int]:
    """(padded size, block) of an axis of n: 0 is the whole axis, and an axis shorter than a block is one block of its own."""
    block = n if block == 0 or n <= block else block
    return -(-n // block) * block, block


def scale_of(amax: jax.Array, fmt: Format) -> jax.Array:
    """The scale of a block with the given largest magnitude, float32. "pow2" rounds it up to a power of two."""
    scale = jnp.maximum(amax, TINY) * jnp.float32(1 / FP8[fmt.dtype])
    if fmt.scale == "pow2":
        bits = jax.lax.bitcast_convert_type(scale, jnp.uint32)
        scale = jax.lax.bitcast_convert_type((bits + jnp.uint32(0x7FFFFF)) & jnp.uint32(0xFF800000), jnp.float32)
    return scale


def canonical_quantize(x: jax.Array, *, site: str, fmt: Format) -> list[jax.Array]:
    """The canonical quantizer, to the operation: kernels must repeat these very steps (design.md "Numerics" 2).

    x [..., n, k] in any float dtype -> values and scales as `QTensor` has them. `quantize` is for models: it may run a kernel, and it is
    seen by the flow graph. `site` is not read: the signature is the primitive's.
    """
    if not fmt.quantized:
        dtype = _STORAGE[fmt.dtype]  # a float64 operand stays one where this is traced or lowered outside its x64 region
        return [x if x.dtype == dtype else x.astype(dtype), jnp.ones((*x.shape[:-2], 1, 1), jnp.float32)]
    lead, (n, k) = x.shape[:-2], x.shape[-2:]
    (rows, br), (cols, bc) = whole_blocks(n, fmt.block[0]), whole_blocks(k, fmt.block[1])
    x = x.astype(jnp.float32)
    if (rows, cols) != (n, k):
        x = jnp.pad(x, [(0, 0)] * len(lead) + [(0, rows - n), (0, cols - k)])
    blocks = x.reshape(*lead, rows // br, br, cols // bc, bc)
    # Magnitudes are compared as integers: in the same order as floats, with NaN above infinity. (XLA's float max loses NaNs on the CPU.)
    bits = (jax.lax.bitcast_convert_type(blocks, jnp.uint32) & jnp.uint32(0x7FFFFFFF)).max((-3, -1), keepdims=True)
    amax, finite = jax.lax.bitcast_convert_type(bits, jnp.float32), bits < jnp.uint32(0x7F800000)
    scale = scale_of(jnp.where(finite, amax, 1.0), fmt)
    limit = jnp.float32(FP8[fmt.dtype])
    # Never x / s, and no division that XLA can join with the product: on the GPU it did so in one program and not in another. Divided in
    # float64 and rounded, the reciprocal is float32's to the bit (53 >= 2 · 24 + 2). Clipped, since XLA's cast gives NaN above the range.
    with jax.enable_x64(True):
        inverse = (1 / scale.astype(jnp.float64)).astype(jnp.float32)
    # Subnormal numbers of float32 count as zeros of their sign: XLA's CPU takes them so, and kernels do.
    own = jax.lax.bitcast_convert_type(blocks, jnp.uint32)
    small = (own & jnp.uint32(0x7FFFFFFF)) < jnp.uint32(0x00800000)
    blocks = jnp.where(small, jax.lax.bitcast_convert_type(own & jnp.uint32(0x80000000), jnp.float32), blocks)
    q = jnp.clip(blocks * inverse, -limit, limit)
    q = jnp.where(finite, q, 0.0).astype(_STORAGE[fmt.dtype]).reshape(*lead, rows, cols)
    return [q, jnp.where(finite, scale, jnp.nan)[..., 0, :, 0]]


quantize_p = jex.Primitive("jetrl_quantize")
quantize_p.multiple_results = True
canonical_jitted = jax.jit(canonical_quantize, static_argnames=("site", "fmt"))  # with site="": compiled once a format
quantize_p.def_impl(lambda x, *, site, fmt: canonical_jitted(x, site="", fmt=fmt))  # op by op, wherever it stands


def _abstract(x, *, site, fmt):
    if fmt.dtype == "float64":  # outside an x64 region it would be traced as float32
        return [jax.core.ShapedArray(x.shape, jnp.dtype(jnp.float64)), jax.core.ShapedArray((*x.shape[:-2], 1, 1), jnp.float32)]
    return abstract(canonical_quantize, x, site=site, fmt=fmt)


quantize_p.def_abstract_eval(_abstract)
mlir.register_lowering(quantize_p, mlir.lower_fun(canonical_quantize, multiple_results=True))


def _lower_cuda(ctx, x, *, site, fmt):
    """On Hopper a kernel that gives the same bits, for the formats that one covers."""
    from jetrl_jax.kernels import launch, operators

    native = not launch.missing() and operators.supported(ctx.avals_in[0], site=site, fmt=fmt)
    run = operators.native("native_quantize") if native else canonical_quantize
    return mlir.lower_fun(run, multiple_results=True)(ctx, x, site=site, fmt=fmt)


mlir.register_lowering(quantize_p, _lower_cuda, platform="cuda")


def _batch(args, dims, **kw):
    (x,), (d,) = args, dims
    return quantize_p.bind(jnp.moveaxis(x, d, 0), **kw), [0, 0]


batching.primitive_batchers[quantize_p] = _batch


def quantize(x: jax.Array, site: str, fmt: Format) -> QTensor:
    """x [..., n, k] in any float dtype -> QTensor at `site`. Leading axes are independent; see `QTensor` for shapes."""
    values, scales = quantize_p.bind(x, site=site, fmt=fmt)
    return QTensor(values, scales, site, fmt)


def expand_scales(q: QTensor) -> jax.Array:
    """Scales repeated to the payload's shape [..., R, C], float32."""
    (rows, cols), (sr, sc) = q.values.shape[-2:], q.scales.shape[-2:]
    return jnp.repeat(jnp.repeat(q.scales, rows // sr, -2), cols // sc, -1)


def dequantize(q: QTensor, shape: tuple[int, int] | None = None, dtype: Any = jnp.float32) -> jax.Array:
    """payload · scale in float32 [..., R, C], cut to the unpadded `shape` (rows, columns) if given, rounded to `dtype`."""
    x = q.values if not q.fmt.quantized else q.values.astype(jnp.float32) * expand_scales(q)
    return (x if shape is None else x[..., :shape[0], :shape[1]]).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def straight_through(x: jax.Array, site: str, fmt: Format) -> jax.Array:
    """quantize, then dequantize to x's dtype; the gradient passes unchanged. x [..., n, k] (unified KV cache, design.md "Numerics" 6)."""
    return dequantize(quantize(x, site, fmt), (x.shape[-2], x.shape[-1]), x.dtype)


straight_through.defvjp(lambda x, site, fmt: (straight_through(x, site, fmt), None), lambda site, fmt, _, ct: (ct,))
