"""Kernels against their oracles on the machine at hand, on small random operands: what `jetrl doctor` shows.

The backward kernels of norm, SiLU·mul and the vocabulary, and cuDNN's attention, are left to tests/gpu.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jetrl_jax.kernels import flash, launch, operators, products, vocab
from jetrl_jax.precision import BF16, Format
from jetrl_jax.quantize import QTensor, canonical_quantize

ROWS, COLUMNS, BLOCKS = Format(), Format(block=(128, 1)), Format(block=(128, 128))
M, N, K = 192, 256, 384
CLOSE = 5e-3  # bf16 rounding of one side
WAY_OUT = "compare versions with BUILD.md; policy_overrides.kernels=off runs without kernels, but for quantizers"


def _random(seed: int, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def _quantized(x: jax.Array, fmt: Format) -> QTensor:
    values, scales = canonical_quantize(x, site="", fmt=fmt)
    return QTensor(values, scales, "", fmt)


def _primitive(primitive: Any, *xs: Any, **params: Any) -> tuple[Callable, Callable, tuple]:
    """(by kernel, by oracle, operands) of an operator."""
    return (lambda *a: primitive.bind(*a, kernels="required", **params)), (lambda *a: primitive.bind(*a, kernels="off", **params)), xs


def checks() -> Iterator[tuple[str, Callable, Callable, tuple, float]]:
    """(name, kernel, oracle, operands, largest relative error): 0 where the bits must be equal."""
    x, w = _random(0, (1, M, K)), _random(1, (N, K), jnp.float32)
    rows, weight = _quantized(x, ROWS), _quantized(w[None], BLOCKS)
    for name, fmt in (("quantize 1x128", ROWS), ("quantize 128x1", COLUMNS), ("quantize 128x128", BLOCKS)):
        kernel, oracle = operators.native("native_quantize"), canonical_quantize
        yield name, lambda x, f=fmt, k=kernel: k(x, site="", fmt=f), lambda x, f=fmt, o=oracle: o(x, site="", fmt=f), (x,), 0.0
    both = (("", ROWS), None, ("", COLUMNS), None)
    yield ("quantize, both layouts", *_primitive(operators.quantize_both_p, x, declares=both), 0.0)
    yield ("quantize with transpose", *_primitive(operators.quantize_blocks_p, w, declares=(("", BLOCKS), None, ("", BLOCKS))), 0.0)
    yield ("requantize", *_primitive(operators.requantize_p, rows.values, rows.scales, declares=(("", COLUMNS), None)), 0.0)
    fused: dict[str, Any] = {"declares": both[:2]}
    yield ("RMSNorm + quantize", *_primitive(operators.norm_quantize_p, x, jnp.ones(K), eps=1e-6, **fused), CLOSE)
    yield ("SiLU·mul + quantize", *_primitive(operators.silu_quantize_p, x, x[:, ::-1], **fused), CLOSE)
    product: dict[str, Any] = {"a_fmt": ROWS, "w_fmt": BLOCKS, "dtype": jnp.dtype(jnp.bfloat16), "reductions": "float32"}
    many = (jnp.tile(rows.values, (1, 2, 1)), jnp.tile(rows.scales, (1, 2, 1)), weight.values, weight.scales, jnp.zeros(1, jnp.int32))
    yield ("product (FProp, DGrad)", *_primitive(products.product_p, *many, **product), CLOSE)
    wide_range = _quantized(x, Format("e5m2"))
    gradient = (wide_range.values, wide_range.scales, *many[2:])
    yield ("product of an E5M2 gradient", *_primitive(products.product_p, *gradient, **{**product, "a_fmt": Format("e5m2")}), CLOSE)
    few = (rows.values[:, :16], rows.scales[:, :16], *many[2:])
    yield ("product of a decode step", *_primitive(products.product_p, *few, **product), CLOSE)
    turned = [_quantized(_random(s, (c, 256)), ROWS) for s, c in ((2, N), (3, K))]
    operands = [a for q in turned for a in (q.values, q.scales)]
    yield ("WGrad", *_primitive(products.wgrad_p, *operands, a_fmt=ROWS, b_fmt=ROWS, reductions="float32"), CLOSE)
    q, at = _random(4, (3, 4, 64)), jnp.array([0, 77, 199], jnp.int32)
    k, v = (QTensor(_random(s, (2, 3, 200, 2, 64)), jnp.ones((2, 3, 200, 1, 1)), "", BF16) for s in (5, 6))
    by_kernel, by_oracle = ((lambda q, at, wish=wish: [flash.decode(q, k, v, jnp.int32(1), at, wish)]) for wish in ("required", "off"))
    yield "decode attention", by_kernel, by_oracle, (q, at), 2e-2
    k8, v8 = (_quantized(t.values, Format(block=(1, 0))) for t in (k, v))
    by_kernel, by_oracle = ((lambda q, at, wish=wish: [flash.decode(q, k8, v8, jnp.int32(1), at, wish)]) for wish in ("required", "off"))
    yield "decode attention, FP8 cache", by_kernel, by_oracle, (q, at), 2e-2
    hidden, head = _random(7, (M, K)), _random(8, (1000, K)) * 0.05
    inverse, targets, tau = jnp.ones(M), jnp.arange(M, dtype=jnp.int32), jnp.full(M, -jnp.inf)
    yield ("logits", *_primitive(vocab.logits_p, hidden, head, inverse, reductions="float32"), CLOSE)
    params: dict[str, Any] = {"chunk": 512, "filtered": False, "reductions": "float32"}
    yield ("log-probability, entropy", *_primitive(vocab.forward_p, hidden, head, targets, tau, inverse, **params), CLOSE)


def _bits(x: jax.Array) -> np.ndarray:
    """As integers; all NaN are one."""
    kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    return np.where(np.isnan(_wide(x)), 0, np.asarray(jax.lax.bitcast_convert_type(x, kind)))


def _wide(x: jax.Array) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32), np.float64)


def error(got: list[jax.Array], want: list[jax.Array]) -> float:
    """Largest relative error in norm over the outputs, 0 only if the bits are equal; infinity for NaN, where the wanted one has none."""
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        x, y = _wide(a), _wide(b)
        if not np.array_equal(np.isnan(x), np.isnan(y)):
            return float("inf")
        x, y = np.nan_to_num(x), np.nan_to_num(y)
        off = float(np.linalg.norm(x - y) / (np.linalg.norm(y) or 1.0))
        worst = max(worst, off or (0.0 if np.array_equal(_bits(a), _bits(b)) else float(np.finfo(np.float64).tiny)))
    return worst


def run() -> tuple[list[str], list[str]]:
    """(a line a kernel, problems). Nothing runs where `launch.missing` says why."""
    if why := launch.missing():
        return [f"none: {why}; FP8 runs on the jnp reference path"], []
    lines: list[str] = []
    problems: list[str] = []
    for name, kernel, oracle, operands, tolerance in checks():
        try:
            by_kernel = jax.jit(kernel)
            got = jax.block_until_ready(by_kernel(*operands))
            start = time.perf_counter()
            jax.block_until_ready(by_kernel(*operands))
            took = time.perf_counter() - start
            # Bits are held to the CPU: XLA's GPU divisions and conversions are not the oracle's in every program.
            device = _cpu() if tolerance == 0 else None
            with jax.default_device(device):
                want = jax.jit(oracle)(*(jax.device_put(x, device) if device else x for x in operands))
            e = error(got, want)
        except Exception as err:  # a kernel that does not compile or launch is what doctor is asked about
            first = str(err).splitlines()[0] if str(err) else ""
            problems.append(f"kernel {name!r} fails: {type(err).__name__}: {first}; {WAY_OUT}")
            lines.append(f"{name:<28} FAILS")
            continue
        good = e <= tolerance
        found = "equal to the bit" if e == 0 else f"relative error {e:.1e}"
        lines.append(f"{name:<28} {found}{'' if good else '  WRONG'}  ({took * 1e6:.0f} us with the host)")
        if not good:
            problems.append(f"kernel {name!r} is off by {e:.1e} (at most {tolerance:.0e}); {WAY_OUT}")
    return lines, problems


def _cpu() -> Any:
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out
        return None
