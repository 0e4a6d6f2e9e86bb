"""The quantizing operators as primitives: what a model calls, what the flow graph reads, on every platform. No triton is imported here.

Each has a static `declares`: one entry an output, (site, Format) of a payload, or None; the formats are read from it. A static `kernels`
("auto", "off", "required") may be given. Operands and the order of outputs are those of `reference_fused`.

quantize_both_p(x): declares (rows, None, columns, None). quantize_blocks_p(w): (payload, None, transposed payload).
requantize_p(values, scales): (columns, None).
norm_quantize_p(x, weight, eps=): (rows, None[, columns, None][, None for the norm in bf16]).
silu_quantize_p(g[, u], features=): (rows, None[, columns, None]).
norm_backward_p(dy, x, weight[, residual], eps=): (None, None[, rows, None[, columns, None]]).
silu_backward_p(dh, g[, u], features=): (rows, None, columns, None[, None for bf16]).
"""

import functools
import math
from typing import Any

import jax.numpy as jnp

from jetrl_jax.kernels import launch
from jetrl_jax.kernels import reference_fused as reference
from jetrl_jax.precision import Format
from jetrl_jax.quantize import whole_blocks

Declares = tuple[tuple[str, Format] | None, ...]
BLOCK = 128
_ROWS, _COLUMNS, _BLOCKS = (1, BLOCK), (BLOCK, 1), (BLOCK, BLOCK)
WIDEST = 512  # columns of a block that one warp reduces
LONGEST = 32 * 1024  # of a row that one program normalizes


def _fmt(declares: Declares, i: int) -> Format | None:
    at = declares[i] if i < len(declares) else None
    return None if at is None else at[1]


def _plain(*avals: Any, dtypes: tuple = (jnp.bfloat16,)) -> bool:
    return all(a.ndim >= 2 and math.prod(a.shape) > 0 and a.dtype in [jnp.dtype(d) for d in dtypes] for a in avals)


def _is(fmt: Format | None, block: tuple[int, int], given: bool = True) -> bool:
    return (fmt.quantized and fmt.block == block) if fmt is not None else not given


def supported(aval: Any, *, site: str, fmt: Format) -> bool:
    """Whether `quantizers.native_quantize` covers this: blocks (1, n) up to 512, (128, 1) and (128, 128) of bf16 or float32."""
    if not fmt.quantized or not _plain(aval, dtypes=(jnp.bfloat16, jnp.float32)):
        return False
    if fmt.block[0] == 1:
        return whole_blocks(aval.shape[-1], fmt.block[1])[1] <= WIDEST
    return fmt.block in (_COLUMNS, _BLOCKS)


def native(name: str, module: str = "quantizers"):
    """A kernel's wrapper, whose module (and triton) is imported at the first call."""

    def run(*args, **params):
        import importlib

        return list(getattr(importlib.import_module(f"jetrl_jax.kernels.{module}"), name)(*args, **params))

    return run


def _operator(name: str, run: str, module: str, arguments: Any, fits: Any) -> Any:
    """A primitive whose oracle and kernel share a name and a signature: `arguments(*xs, **params)` are theirs."""

    def call(target, *xs, **params):
        params.pop("kernels", None)
        args, static = arguments(*xs, **params)
        return target(*args, **static)

    return launch.operator(name, functools.partial(call, getattr(reference, run)), functools.partial(call, native(run, module)), fits)


def _both(x, *, declares):
    return (x, _fmt(declares, 0), _fmt(declares, 2)), {}


quantize_both_p = _operator(
    "jetrl_quantize_both", "quantize_both", "quantizers", _both,
    lambda x, *, declares, **_: (_plain(x, dtypes=(jnp.bfloat16, jnp.float32)) and _is(_fmt(declares, 0), _ROWS)
                                 and _is(_fmt(declares, 2), _COLUMNS)))


def _blocks(w, *, declares):
    return (w, _fmt(declares, 0)), {}


quantize_blocks_p = _operator(
    "jetrl_quantize_blocks", "quantize_blocks", "quantizers", _blocks,
    lambda w, *, declares, **_: _plain(w, dtypes=(jnp.bfloat16, jnp.float32)) and _is(_fmt(declares, 0), _BLOCKS))


def _requantize(values, scales, *, declares):
    return (values, scales, _fmt(declares, 0)), {}


def _requantizable(values, scales, *, declares, **_):
    k, blocks = values.shape[-1], scales.shape[-1]
    whole = scales.shape[:-1] == values.shape[:-1] and k == (blocks * BLOCK if k > BLOCK else k) and (k > BLOCK or blocks == 1)
    return _plain(values, dtypes=(jnp.float8_e4m3fn, jnp.float8_e5m2)) and whole and _is(_fmt(declares, 0), _COLUMNS)


requantize_p = _operator("jetrl_requantize", "requantize", "quantizers", _requantize, _requantizable)


def _norm(x, weight, *, eps, declares):
    y = len(declares) % 2 == 1
    return (x, weight), {"eps": eps, "fmt": _fmt(declares, 0), "column_fmt": _fmt(declares, 2), "y": y}


norm_quantize_p = _operator(
    "jetrl_norm_quantize", "norm_quantize", "fused_forward", _norm,
    lambda x, weight, *, declares, **_: (_plain(x) and x.shape[-1] <= LONGEST and _is(_fmt(declares, 0), _ROWS, len(declares) > 1)
                                         and _is(_fmt(declares, 2), _COLUMNS, len(declares) > 3)))


def _silu(g, u=None, *, declares, features=None):
    return (g, u), {"features": features, "fmt": _fmt(declares, 0), "column_fmt": _fmt(declares, 2)}


silu_quantize_p = _operator(
    "jetrl_silu_quantize", "silu_quantize", "fused_forward", _silu,
    lambda *gu, declares, **_: (_plain(*gu) and _is(_fmt(declares, 0), _ROWS) and _is(_fmt(declares, 2), _COLUMNS, len(declares) > 2)))


def _norm_backward(dy, x, weight, residual=None, *, eps, declares):
    return (dy, x, weight, residual), {"eps": eps, "fmt": _fmt(declares, 2), "column_fmt": _fmt(declares, 4)}


norm_backward_p = _operator(
    "jetrl_norm_backward", "norm_backward", "fused_backward", _norm_backward,
    lambda dy, x, weight, *residual, declares, **_: (_plain(dy, x, *residual) and x.shape[-1] <= LONGEST // 4
                                                     and _is(_fmt(declares, 2), _ROWS, len(declares) > 2)
                                                     and _is(_fmt(declares, 4), _COLUMNS, len(declares) > 4)))


def _silu_backward(dh, g, u=None, *, declares, features=None):
    return (dh, g, u), {"features": features, "fmt": _fmt(declares, 0), "column_fmt": _fmt(declares, 2), "bf16": len(declares) > 4}


silu_backward_p = _operator(
    "jetrl_silu_backward", "silu_backward_quantize", "fused_backward", _silu_backward,
    lambda *xs, declares, **_: _plain(*xs) and _is(_fmt(declares, 0), _ROWS) and _is(_fmt(declares, 2), _COLUMNS))
