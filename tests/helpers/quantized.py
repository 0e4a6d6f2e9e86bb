"""Inputs that a quantizer may stumble over, and comparison to the bit."""

import jax
import jax.numpy as jnp
import numpy as np

from jetrl_jax.compile import compile
from jetrl_jax.precision import Format

BLOCKS = ((1, 128), (128, 1), (128, 128))
FORMATS = [Format(d, b, s) for b in BLOCKS for d, s in (("e4m3", "float32"), ("e5m2", "pow2"))]


def nasty(shape: tuple[int, ...], dtype=jnp.bfloat16, subnormals: bool = False) -> jax.Array:
    """Normal numbers of every size, with some blocks of zeros, NaN and infinity, single huge and tiny ones, and negative zeros."""
    rng = np.random.default_rng()
    x = rng.normal(size=shape) * 10.0 ** rng.integers(-30, 30, (*shape[:-1], 1))
    x = x * 10.0 ** rng.integers(-2, 3, shape)
    flat = x.reshape(-1, shape[-1])
    rows, columns = flat.shape
    flat[: rows // 4] = rng.normal(size=(rows // 4, columns))
    flat[rng.integers(rows, size=3)] = 0
    flat[:, rng.integers(columns)] = -0.0
    for value in (np.nan, np.inf, -np.inf, 3e38, -2e-38):
        flat[rng.integers(rows), rng.integers(columns)] = value
    if subnormals:
        flat[rng.integers(rows)] = rng.normal(size=columns) * 2.0**-131
    return jnp.asarray(x.astype(np.float32)).astype(dtype)


def on_cpu(f):
    """f jitted on the CPU: XLA's GPU program of an oracle rounds a few ties in 10⁵ otherwise (docs/notes/kernels.md)."""
    def run(*xs):
        cpu = jax.devices("cpu")[0]
        with jax.default_device(cpu):
            return compile(f)(*(jax.device_put(x, cpu) for x in xs))

    return run


def same(got, want, skip_nan: bool = True) -> None:
    """Equal to the bit, but for which NaN."""
    got, want = list(got), list(want)
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype and a.shape == b.shape, (i, a.dtype, b.dtype, a.shape, b.shape)
        nan = np.isnan(b.astype(np.float32))
        np.testing.assert_array_equal(np.isnan(a.astype(np.float32)), nan, err_msg=f"output {i}")
        bits = {1: np.uint8, 2: np.uint16, 4: np.uint32}[a.itemsize]
        np.testing.assert_array_equal(np.where(nan, 0, a.view(bits)), np.where(nan, 0, b.view(bits)), err_msg=f"output {i}")


def near(got, want, zero: float = 0.0) -> None:
    """bf16 numbers that are equal or neighbours, or both within `zero` of each other."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape and got.dtype == want.dtype == jnp.bfloat16
    a, b = (np.where(v < 0, -(v & 0x7FFF), v & 0x7FFF) for v in (got.view(np.int16).astype(np.int32), want.view(np.int16).astype(np.int32)))
    off = (np.abs(a - b) > 1) & ~(np.abs(got.astype(np.float32) - want.astype(np.float32)) <= zero)
    off &= ~(np.isnan(got.astype(np.float32)) & np.isnan(want.astype(np.float32)))
    assert not off.any(), (got[off][:5], want[off][:5], int(off.sum()))
