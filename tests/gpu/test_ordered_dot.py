"""The bf16 product of fixed order: one row's bits do not depend on the other rows, the tile or the slice. JETRL_TEST_PLATFORM=cuda,cpu."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.gpu

C, D = 1003, 1224  # ragged: no multiple of any tile; D of 8 but not of 64
MANY = 8200


@pytest.fixture(scope="module")
def operands():
    rng = np.random.default_rng()
    x, w = (jnp.asarray(rng.normal(size=s) * 10.0 ** rng.integers(-3, 3, (s[0], 1)), jnp.bfloat16) for s in ((MANY, D), (C, D)))
    return x, w, product(x, w)


def product(x, w, poison=True, **kwargs):
    from jetrl_jax.kernels import ordered_dot

    if poison:  # what is freed here is what the output is likely to be given
        jnp.full((x.shape[0], kwargs.get("cols") or w.shape[0]), jnp.nan, kwargs.get("dtype", jnp.float32)).block_until_ready()
    return np.asarray(jax.jit(lambda *a: ordered_dot.product(*a, **kwargs))(x, w))


def test_close_to_float64(operands):
    x, w, y = operands
    for rows in (slice(0, 100), slice(MANY - 100, MANY)):
        a, b = np.asarray(x[rows], np.float64), np.asarray(w, np.float64)
        assert (np.abs(y[rows] - a @ b.T) <= 3e-6 * (np.abs(a) @ np.abs(b).T)).all()


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 256])
def test_a_row_has_the_same_bits_in_any_company(operands, rows):
    x, w, y = operands
    first = int(np.random.default_rng().integers(0, MANY - rows))
    np.testing.assert_array_equal(product(x[first:first + rows], w), y[first:first + rows])


@pytest.mark.parametrize("index", range(6))
def test_every_tile_gives_the_same_bits(operands, index):
    from jetrl_jax.kernels import ordered_dot

    x, w, y = operands
    np.testing.assert_array_equal(product(x[:200], w, config=ordered_dot.CONFIGS[index]), y[:200])


def test_slice_factor_and_bf16(operands):
    from jetrl_jax.kernels import ordered_dot

    x, w, y = operands
    factor = jnp.asarray(np.random.default_rng().uniform(0.5, 3, 70), jnp.float32)
    sliced = jax.jit(lambda x, w, f, s: ordered_dot.product(x, w, f, s, 500))(x[:70], w, factor, jnp.full(1, 37, jnp.int32))
    np.testing.assert_array_equal(np.asarray(sliced), y[:70, 37:537] * np.asarray(factor)[:, None])
    narrow = jnp.asarray(y[:70], jnp.bfloat16)
    np.testing.assert_array_equal(product(x[:70], w, dtype=jnp.bfloat16).astype(np.float32), np.asarray(narrow, np.float32))


def test_repeating_finds_no_race(operands):
    from jetrl_jax.kernels import ordered_dot

    x, w, y = operands
    f = jax.jit(ordered_dot.product)
    for _ in range(20):
        np.testing.assert_array_equal(np.asarray(f(x, w)), y)


def test_nan_stays_in_its_row(operands):
    x, w, y = operands
    z = product(x[:65].at[3, 5].set(jnp.nan).at[64, 7].set(jnp.inf), w)
    assert np.isnan(z[3]).all() and not np.isfinite(z[64]).all()
    keep = np.setdiff1d(np.arange(64), [3])
    np.testing.assert_array_equal(z[keep], y[keep])
