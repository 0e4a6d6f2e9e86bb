"""Wide reductions: the dtype they run in, bits that no order changes, and gradients that stay wide."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jetrl_jax.numerics import wide, wide_dot, wide_dtype

ADVERSARIAL = np.array([1e8, *[0.25] * 64, -1e8], np.float32)  # float32 loses the quarters, float64 does not


def norm(x, w):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * w


def test_auto_is_float64_on_the_cpu_only(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert wide_dtype() == jnp.float64 and wide_dtype("float32") == jnp.float32
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert wide_dtype("auto") == jnp.float32 and wide_dtype("float64") == jnp.float64


class WideTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_pmap=True)
    @parameterized.parameters(jnp.float32, jnp.bfloat16)
    def test_a_norm_is_the_float64_one_rounded_once(self, dtype):
        x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 40)), jnp.bfloat16)
        w = jnp.linspace(0.5, 2, 40, dtype=jnp.float32)
        got = self.variant(wide(norm, "float64", dtype))(x, w)
        chex.assert_shape(got, (3, 40))
        chex.assert_type(got, dtype)
        x64, w64 = np.asarray(x, np.float64), np.asarray(w, np.float64)
        want = x64 / np.sqrt((x64 * x64).mean(-1, keepdims=True) + 1e-6) * w64
        chex.assert_trees_all_close(np.asarray(got, np.float64), want, rtol=2.0**-24 if dtype == jnp.float32 else 2.0**-8)
        assert not jax.config.jax_enable_x64

    @chex.variants(with_jit=True, without_jit=True)
    def test_float32_really_runs_float32(self):
        def total(reductions):
            return float(self.variant(wide(jnp.sum, reductions))(ADVERSARIAL))

        assert total("float64") == math.fsum(ADVERSARIAL) == 16
        assert total("float32") != 16


_total = jax.jit(wide(jnp.sum, "float64"))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(hnp.arrays(np.float32, 37, elements=st.floats(-1e6, 1e6, width=32)), st.randoms(use_true_random=False))
def test_the_order_changes_no_bit(x, random):
    total = _total(x)
    permuted = list(x)
    random.shuffle(permuted)
    assert _total(np.array(permuted, np.float32)) == total
    assert total == np.float32(math.fsum(x.astype(np.float64)))


def test_gradients_of_arrays_against_finite_differences():
    rng = np.random.default_rng(1)
    x, w = (rng.normal(size=s).astype(np.float32) for s in ((2, 5), (5,)))
    c = rng.normal(size=(2, 5))
    grads = jax.jit(jax.grad(lambda x, w: (wide(norm, "float64")(x, w) * c.astype(np.float32)).sum(), (0, 1)))(x, w)
    chex.assert_trees_all_equal_shapes_and_dtypes(grads, (x, w))

    def loss(x, w):
        return (x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w * c).sum()

    full = [x.astype(np.float64), w.astype(np.float64)]
    for which, grad in enumerate(grads):
        for at in np.ndindex(grad.shape):
            ends = []
            for step in (1e-6, -1e-6):
                moved = [a.copy() for a in full]
                moved[which][at] += step
                ends.append(loss(*moved))
            assert float(grad[at]) == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-6)


def test_the_backward_pass_is_wide_too():
    # d/dw of sum(w · x) · 1 is sum(x): float32 inside the backward would give another number.
    grad = jax.grad(lambda w: wide(lambda w, x: (w * x).sum(), "float64")(w, ADVERSARIAL))(jnp.float32(1))
    assert float(grad) == 16
    narrow = jax.grad(lambda w: wide(lambda w, x: (w * x).sum(), "float32")(w, ADVERSARIAL))(jnp.float32(1))
    assert float(narrow) != 16


def test_integers_pass_and_trees_come_out():
    def f(x, i, keep):
        return {"picked": jnp.where(keep, x[i], 0), "where": i, "sum": (x.sum(), x.dtype == jnp.float64)}

    x, i, keep = jnp.arange(4, dtype=jnp.bfloat16), jnp.array([2, 0, 3]), jnp.array([True, True, False])
    out = jax.jit(wide(f, "float64"))(x, i, keep)
    chex.assert_trees_all_equal(out, {"picked": jnp.array([2.0, 0, 0]), "where": i, "sum": (jnp.float32(6), True)})
    chex.assert_type([out["picked"], out["where"], out["sum"][0]], [jnp.float32, jnp.int32, jnp.float32])

    def loss(x):
        out = wide(f, "float64")(x, i, keep)
        return 3 * out["picked"].sum() + out["sum"][0]

    grad = jax.grad(loss)(x)
    chex.assert_type(grad, jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(grad, np.float32), [4, 1, 4, 1])


class WideDotTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_pmap=True)
    def test_exact_where_float32_is_not(self):
        a = jnp.asarray(np.stack([ADVERSARIAL, ADVERSARIAL[::-1]]))
        b = jnp.ones((2, a.shape[-1]))
        got = self.variant(lambda a, b: wide_dot(a, b, "mk,nk->mn", "float64"))(a, b)
        chex.assert_type(got, jnp.float32)
        chex.assert_trees_all_equal(got, jnp.full((2, 2), 16.0))

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.parameters((jnp.float8_e4m3fn, jnp.bfloat16), (jnp.float8_e5m2, jnp.float8_e4m3fn), (jnp.float32, jnp.bfloat16))
    def test_the_float32_way_keeps_its_operands(self, left, right):
        rng = np.random.default_rng(2)
        a, b = jnp.asarray(rng.normal(size=(3, 8)), left), jnp.asarray(rng.normal(size=(2, 8)), right)
        got = self.variant(lambda a, b: wide_dot(a, b, "mk,nk->mn", "float32"))(a, b)
        want = np.asarray(a, np.float64) @ np.asarray(b, np.float64).T
        chex.assert_type(got, jnp.float32)
        chex.assert_trees_all_close(np.asarray(got, np.float64), want, rtol=1e-5, atol=1e-6)

    def test_float64_operands_stay_float64_or_fall_to_float32_but_not_to_bf16(self):
        with jax.enable_x64(True):
            a = jnp.asarray([[1 + 2.0**-30, 1.0]])
            full = wide_dot(a, jnp.asarray([[1.0, 2.0**-40]]), "mk,nk->mn", "float64")
            assert full.dtype == jnp.float64 and float(full[0, 0]) == 1 + 2.0**-30 + 2.0**-40
            third = wide_dot(a / 3, a, "mk,nk->mn", "float32")
            assert float(third[0, 0]) == pytest.approx(2 / 3, rel=1e-6)
