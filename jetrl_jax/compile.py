"""The one way in which every program that computes logits is compiled.

XLA may skip bf16 roundings between operators (`xla_allow_excess_precision`, on by default), and not the same ones in two programs:
rollout and update would then disagree by far more than FP8 itself costs (measured, design.md "Numerics" 1). The option exists only on
the outermost `jit`; under `pmap` it must stand in XLA_FLAGS: call `check_pmap_flags` before a program of your own under it.
"""

import os
from collections.abc import Callable
from typing import Any

import jax

from jetrl_jax.errors import UserError

EXACT_OPTIONS = {"xla_allow_excess_precision": False}
PMAP_FLAG = "--xla_allow_excess_precision=false"


def compile(fun: Callable, **options: Any) -> Any:
    """`jax.jit(fun, **options)` with every bf16 rounding kept. Takes jit's own arguments (static_argnums, donate_argnums, shardings)."""
    return jax.jit(fun, compiler_options=EXACT_OPTIONS, **options)


def pmap_flag_set() -> bool:
    """Whether XLA_FLAGS carries the option, as programs under `jax.pmap` need it."""
    return PMAP_FLAG in os.environ.get("XLA_FLAGS", "").lower().split()


def check_pmap_flags() -> None:
    """Raises `UserError` unless `jax.pmap` programs will keep their roundings."""
    if not pmap_flag_set():
        raise UserError(f"XLA_FLAGS={os.environ.get('XLA_FLAGS', '')!r} lacks {PMAP_FLAG}: under pmap rollout and update would round "
                        f"differently; start again with XLA_FLAGS={PMAP_FLAG}")
