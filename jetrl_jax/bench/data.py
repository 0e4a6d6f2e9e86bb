"""Random operands of any size, made on the device from one pool of normal numbers: a new shape compiles in a tenth of a second."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

POOL = 2**26 - 5  # of bf16, more than the L2 cache; odd, so that rows do not line up with it
SPREAD = 120.0  # standard deviation of a payload: a block's largest of 128 is then near E4M3's 448


_abstract = False


@contextlib.contextmanager
def abstract() -> Iterator[None]:
    """Within it nothing is made: every operand is its ShapeDtypeStruct, enough to compile a program that will run elsewhere."""
    global _abstract
    before, _abstract = _abstract, True
    try:
        yield
    finally:
        _abstract = before


def made(fun: Callable, *args: Any) -> Any:
    """`fun(*args)`, jitted, of operands made here."""
    return jax.eval_shape(fun, *args) if _abstract else jax.jit(fun)(*args)


@functools.cache
def _pool() -> jax.Array:
    return jax.jit(lambda: jax.random.normal(jax.random.key(20250601, impl="rbg"), (POOL,), jnp.bfloat16))()


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "positive"))
def _cut(pool, start, scale, shape, dtype, positive):
    x = pool[(jnp.arange(math.prod(shape), dtype=jnp.uint32) + start) % jnp.uint32(pool.size)].astype(jnp.float32).reshape(shape)
    x = (1 + 0.5 * jnp.tanh(x)) * scale if positive else x * scale
    return (jnp.clip(x, -448, 448) if jnp.finfo(dtype).bits == 8 else x).astype(dtype)


def normal(shape: tuple[int, ...], seed: int = 0, scale: float = 1.0, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Normal numbers of standard deviation `scale`; another seed starts elsewhere in the pool."""
    return _operand(shape, seed, scale, dtype, False)


def payload(shape: tuple[int, ...], seed: int = 0) -> jax.Array:
    """An E4M3 payload as the quantizer makes it of normal numbers."""
    return normal(shape, seed, SPREAD, jnp.float8_e4m3fn)


def scales(shape: tuple[int, ...], seed: int = 0, scale: float = 1.0) -> jax.Array:
    """float32 scales between 0.5 and 1.5 times `scale` / SPREAD, so that payload · scale has a standard deviation near `scale`."""
    return _operand(shape, seed, scale / SPREAD, jnp.float32, True)


def _operand(shape: tuple[int, ...], seed: int, scale: float, dtype: Any, positive: bool) -> Any:
    if _abstract:
        return jax.ShapeDtypeStruct(shape, dtype)
    return _cut(_pool(), jnp.uint32(seed * 1_000_003 % POOL), jnp.float32(scale), tuple(shape), jnp.dtype(dtype).type, positive)
