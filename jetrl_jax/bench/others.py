"""Others' matrix products, which ours are measured against: XLA's in bf16 and FP8, cuBLASLt's block-scaled one by way of torch."""

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jetrl_jax.bench import timing

XLA_BF16 = "XLA bf16"
XLA_FP8 = "XLA FP8 per-tensor"
CUBLASLT = "cuBLASLt block-scaled (torch)"
TRITON = "plain Triton"


def xla_bf16(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [M, K] · w [N, K]ᵀ -> bf16 [M, N]."""
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())))


def xla_bf16_dgrad(dy: jax.Array, w: jax.Array) -> jax.Array:
    """dy [M, N] · w [N, K] -> bf16 [M, K]: no transposed copy, cuBLAS reads either layout in bf16."""
    return lax.dot_general(dy, w, (((1,), (0,)), ((), ())))


def xla_bf16_wgrad(dy: jax.Array, x: jax.Array) -> jax.Array:
    """dy [T, N]ᵀ · x [T, K] -> float32 [N, K]."""
    return lax.dot_general(dy, x, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def xla_fp8(a: jax.Array, b: jax.Array) -> jax.Array:
    """a [M, K] · b [N, K]ᵀ -> bf16 [M, N] of E4M3 payloads; XLA hands cuBLASLt one scale a matrix, of 1 here, which changes no speed."""
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)


def in_8_bits(text: str) -> bool:
    """Whether a compiled program multiplies FP8: by cuBLASLt's FP8 call, or in a Triton fusion that takes FP8 operands."""
    return "matmul$f8" in text or any("triton_gemm" in line and "f8e4m3fn[" in line for line in text.splitlines())


def xla_fp8_program(sets: Sequence[tuple[jax.Array, jax.Array]]) -> timing.Contestant:
    """XLA's FP8 product on sets (a, b); refused where XLA did not keep it in 8 bits, which would time something else.

    With XLA's own options: under ours (`compile.EXACT_OPTIONS`), and where the payloads are widened and scaled first, some versions
    multiply in bf16.
    """
    compiled: Any = jax.jit(lambda sets: [xla_fp8(*s) for s in sets]).lower(sets).compile()
    if not in_8_bits(compiled.as_text()):
        raise RuntimeError("XLA widened the FP8 payloads and multiplied in bf16")
    return timing.Contestant(XLA_FP8, functools.partial(compiled, sets), len(sets))  # no `lower`: XLA's alone


def torch() -> Any:
    """torch, which jetrl does not depend on: imported by name where it happens to be."""
    try:
        found = importlib.import_module("torch")
    except ImportError:
        raise RuntimeError("torch is not installed here") from None
    if not found.cuda.is_available():
        raise RuntimeError("torch sees no GPU")
    return found


def cublaslt(m: int, n: int, k: int, sets: int) -> timing.Contestant:
    """cuBLASLt's product with 1x128 scales of a [m, k] and 128x128 ones of b [n, k], bf16 out, on `sets` sets of random operands.

    torch wants the row scales with consecutive rows side by side; newer versions also the block scales' rows a multiple of four long.
    """
    t = torch()
    blocks = -(-k // 128)

    def one(wide: int) -> tuple:
        a, b = (t.randn(r, k, device="cuda").mul_(120).clamp_(-448, 448).to(t.float8_e4m3fn) for r in (m, n))
        sa = t.rand(blocks, m, device="cuda").add_(0.5).t()
        sb = t.rand(-(-n // 128), wide, device="cuda").add_(0.5)[:, :blocks]
        return a, b.t(), sa, sb.t()

    def product(a, b, sa, sb):
        return t._scaled_mm(a, b, scale_a=sa, scale_b=sb, out_dtype=t.bfloat16)

    wide = -(-blocks // 4) * 4
    try:
        product(*one(wide))
    except (RuntimeError, ValueError):
        wide = blocks
    operands = [one(wide) for _ in range(sets)]

    def call():
        for o in operands:
            y = product(*o)
        return y

    return timing.Contestant(CUBLASLT, call, sets, lambda _: t.cuda.synchronize())
