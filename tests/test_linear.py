"""The product: bit for bit against a loop, and FProp, DGrad, WGrad against a dense straight-through computation in numpy."""

import functools

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absl.testing import parameterized
from dots import JET, LONG, QUICK, SHORT, drawn, forward_and_gradients, policy, spec_of, weight
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_jax import linear
from jetrl_jax.linear import dot, lookup, scaled_product, through
from jetrl_jax.precision import BF16, Format
from jetrl_jax.quantize import QTensor, quantize

W128 = Format(block=(128, 128))


# --- the product in its canonical order ---

def loop(a: QTensor, w: QTensor) -> np.ndarray:
    """a [M, K] · w [N, K]ᵀ, an output and a block at a time, promoted as design.md "Numerics" 3 says."""
    av, wv, sa, sw = (np.asarray(v, np.float64) for v in (a.values, w.values, a.scales, w.scales))
    blocks = max(sa.shape[-1], sw.shape[-1])
    size, out = av.shape[-1] // blocks, np.zeros((av.shape[0], wv.shape[0]), np.float32)
    for m, n in np.ndindex(out.shape):
        for i in range(blocks):
            at = slice(i * size, (i + 1) * size)
            scales = [s[r // (v.shape[0] // s.shape[0]), min(i, s.shape[1] - 1)] for s, r, v in ((sa, m, av), (sw, n, wv))]
            p, s = np.float32((av[m, at] * wv[n, at]).sum()), np.float32(np.float32(scales[0]) * np.float32(scales[1]))
            out[m, n] = np.float32(np.float64(out[m, n]) + np.float64(p) * np.float64(s))
    return out


PAIRS = {
    "jet": (Format(), W128),
    "e5m2": (Format("e5m2"), W128),
    "rowwise": (Format(block=(1, 0)), Format(block=(1, 0))),
    "tensorwise": (Format(block=(0, 0)), Format(block=(0, 0))),
    "only the weight": (BF16, W128),
    "only the activation": (Format(), BF16),
}


@pytest.fixture(scope="module", params=PAIRS)
def product(request):
    fa, fw = PAIRS[request.param]
    return jax.jit(lambda x, w: (q := quantize(x, "x", fa), v := quantize(w, "w", fw), scaled_product(q, v)))


@settings(max_examples=8, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), spread=st.integers(0, 12))
def test_bit_for_bit_against_the_loop_on_ragged_shapes(product, seed, spread):
    a, w, y = product(drawn(seed, (3, 300), spread), drawn(seed + 1, (5, 300), spread))
    if a.values.shape != (3, w.values.shape[-1]):  # the operand without scales stretches with zeros
        k = max(a.values.shape[-1], w.values.shape[-1])
        a, w = (QTensor(jnp.pad(q.values, ((0, 0), (0, k - q.values.shape[-1]))), q.scales, q.site, q.fmt) for q in (a, w))
    np.testing.assert_array_equal(np.asarray(y), loop(a, w))


def test_unrolled_and_rolled_loops_give_the_same_bits(monkeypatch):
    a, w = quantize(drawn(0, (2, 4, 640), 9), "x", Format()), quantize(drawn(1, (5, 640), 9), "w", W128)
    unrolled = jax.jit(lambda a, w: scaled_product(a, w))(a, w)
    monkeypatch.setattr(linear, "UNROLLED_BLOCKS", 4)
    rolled = jax.jit(lambda a, w: scaled_product(a, w))
    assert "while" in str(rolled.trace(a, w).jaxpr) or "scan" in str(rolled.trace(a, w).jaxpr)
    np.testing.assert_array_equal(unrolled, rolled(a, w))
    np.testing.assert_array_equal(unrolled[1], loop(jax.tree.map(lambda v: v[1], a), w))


def test_a_row_has_the_same_bits_alone_and_in_company():
    x, w = drawn(2, (4, 7, 300), 9), quantize(drawn(3, (150, 300), 9), "w", W128)
    f = jax.jit(lambda x: scaled_product(quantize(x, "x", Format()), w))
    together = np.asarray(f(x))
    np.testing.assert_array_equal(together[2:3, 5:6], f(x[2:3, 5:6]))
    np.testing.assert_array_equal(together[::-1], f(x[::-1].copy()))


def test_different_contracted_axes_are_refused():
    with pytest.raises(ValueError, match="contracted axes differ"):
        scaled_product(quantize(jnp.ones((1, 128)), "x", Format()), quantize(jnp.ones((1, 256)), "w", W128))


# --- FProp, DGrad and WGrad ---

def qdq(x, fmt):
    """x [b, n, k] quantized and dequantized in float32, every leading index alone."""
    if not fmt.quantized:
        return np.asarray(x, ml_dtypes.bfloat16).astype(np.float64)
    cast, limit = {"e4m3": (ml_dtypes.float8_e4m3fn, 448), "e5m2": (ml_dtypes.float8_e5m2, 57344)}[fmt.dtype]
    b, n, k = x.shape
    br, bc = fmt.block[0] or n, fmt.block[1] or k
    full = np.pad(np.asarray(x, np.float32), ((0, 0), (0, -n % br), (0, -k % bc)))
    blocks = full.reshape(b, full.shape[1] // br, br, full.shape[2] // bc, bc)
    scale = np.maximum(np.abs(blocks).max((2, 4), keepdims=True), np.float32(2.0**-100)) * np.float32(1 / limit)
    if fmt.scale == "pow2":
        scale = np.exp2(np.ceil(np.log2(scale.astype(np.float64)))).astype(np.float32)
    q = np.clip(blocks * (np.float32(1) / scale), -limit, limit).astype(cast).astype(np.float32)
    return (q * scale).reshape(full.shape)[:, :n, :k].astype(np.float64)


def over_tokens(x, fmt):
    """qdq of x [B, T, C], where one scale over the rows spans the whole batch."""
    return qdq(x.reshape(1, -1, x.shape[-1]), fmt).reshape(x.shape) if fmt.quantized and fmt.block[0] == 0 else qdq(x, fmt)


def dense(x, masters, dys, p):
    """y, dx and dw by dense float64 products of what the policy leaves of each operand, and the sums of magnitudes that bound rounding."""
    pad = 128 if p.weight.quantized else 1
    sides = [np.pad(w, ((0, -w.shape[0] % pad), (0, 0))) for w in masters]
    w = np.concatenate([qdq(s[None], p.weight)[0] for s in sides])
    dy = np.concatenate([np.pad(d, ((0, 0), (0, 0), (0, s.shape[0] - d.shape[-1]))) for d, s in zip(dys, sides, strict=True)], -1)
    xq = over_tokens(x, p.activation)
    backward = w
    if p.weight.quantized and p.weight.block == (1, 0):  # the second quantization, per input channel
        backward = qdq(np.concatenate(sides).T[None], p.weight)[0].T
    kept = xq if p.activation.quantized and p.saved_activation == "requantize" else x
    dyq, dyt, xt = over_tokens(dy, p.gradient), over_tokens(dy, p.gradient.along_tokens), over_tokens(kept, p.activation.along_tokens)

    def products(f):
        y, dw, out, at = f(xq) @ f(w).T, np.einsum("btn,btk->nk", f(dyt), f(xt)), [], 0
        for m, s in zip(masters, sides, strict=True):
            out.append((y[..., at:at + len(m)], dw[at:at + len(m)]))
            at += len(s)
        return [o[0] for o in out], f(dyq) @ f(backward), [o[1] for o in out]

    return products(lambda v: v), products(np.abs)


POLICIES = {
    "jet_fp8": (JET, LONG),
    "jet_fp8, short": (JET, SHORT),
    "hybrid": (policy("jet_fp8_hybrid"), SHORT),
    "pow2": (policy("jet_fp8_pow2"), SHORT),
    "rowwise": (policy("fp8_rowwise"), LONG),
    "tensorwise": (policy("fp8_tensorwise"), LONG),
    "dual": (policy(saved_activation="dual"), LONG),
    "saved in bf16": (policy(saved_activation="bf16"), SHORT),
    "bf16": (policy("bf16"), SHORT),
    "activation bf16": (policy(activation="bf16"), LONG),
    "weight bf16": (policy(weight="bf16"), LONG),
    "gradient bf16": (policy(gradient="bf16"), LONG),
    "gradient tensorwise": (policy(gradient="e4m3 allxall"), LONG),
}


@pytest.mark.parametrize("name", POLICIES)
def test_all_three_products_against_a_dense_straight_through_computation(name):
    p, (b, t, k) = POLICIES[name]
    x, masters, dys = drawn(0, (b, t, k)), [drawn(1, (150, k)), drawn(2, (20, k))], [drawn(3, (b, t, 150)), drawn(4, (b, t, 20))]
    got = forward_and_gradients(x, masters, dys, p, functools.partial(jax.jit, compiler_options=QUICK))
    want, magnitudes = dense(x, masters, dys, p)
    for g, w, m in zip(jax.tree.leaves(got), jax.tree.leaves(want), jax.tree.leaves(magnitudes), strict=True):
        assert g.shape == w.shape and g.dtype == jnp.float32
        assert (np.abs(np.asarray(g, np.float64) - w) <= 1e-6 * m).all(), np.abs(g - w).max()


def test_the_dense_computation_tells_policies_apart():
    # The tolerance above is far below what separates any two of them: the test can fail.
    x, masters, dys = drawn(0, LONG), [drawn(1, (150, 200))], [drawn(3, (2, 130, 150))]
    results = {name: dense(x, masters, dys, p) for name, (p, _) in POLICIES.items() if name != "jet_fp8, short"}
    (_, dx, (dw,)), (_, mx, (mw,)) = results.pop("jet_fp8")
    for name, ((_, other_dx, (other_dw,)), _) in results.items():
        assert (np.abs(other_dw - dw) > 1e-5 * mw).any() or (np.abs(other_dx - dx) > 1e-5 * mx).any(), name


def test_gradients_have_the_dtypes_of_what_they_belong_to():
    x, m = jnp.asarray(drawn(0, (1, 3, 16)), jnp.bfloat16), drawn(1, (8, 16))
    (y,), dx, (dw,) = forward_and_gradients(x, [m], [jnp.ones((1, 3, 8), jnp.bfloat16)], JET)
    chex.assert_type([y, dx, dw], [jnp.bfloat16, jnp.bfloat16, jnp.float32])
    chex.assert_shape([y, dx, dw], [(1, 3, 8), (1, 3, 16), (8, 16)])


def test_dgrad_is_the_product_with_the_transposed_payload():
    x, m, dy = drawn(0, (1, 3, 200)), drawn(1, (150, 200)), drawn(2, (1, 3, 150))
    w = weight([m], JET)
    _, dx, _ = forward_and_gradients(x, [m], [dy], JET)
    by_hand = jax.jit(lambda dy: scaled_product(quantize(jnp.pad(dy, ((0, 0), (0, 0), (0, 106))), "", Format()), w.fprop.T))(dy)
    np.testing.assert_array_equal(dx, by_hand[..., :200])


# --- weights outside products, and the unquantized policy ---

class OutsideTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_pmap=True)
    def test_through(self):
        value, tap, ct = jnp.array([1, 2], jnp.bfloat16), jnp.array([1.001, 2.002]), jnp.array([3, 4], jnp.bfloat16)

        def f(value, tap, ct):
            y, vjp = jax.vjp(lambda tap: through(value, tap), tap)
            return y, vjp(ct)[0]

        y, grad = self.variant(f)(value, tap, ct)
        chex.assert_trees_all_equal((y, grad), (value, jnp.array([3.0, 4.0])))
        chex.assert_type([y, grad], [jnp.bfloat16, jnp.float32])
        chex.assert_trees_all_equal(through(value, None), value)

    @chex.variants(with_jit=True, without_jit=True, with_pmap=True)
    @parameterized.parameters(True, False)
    def test_lookup_sums_gradients_of_repeated_tokens_in_float32(self, tapped):
        tokens = jnp.array([[1, 3, 1], [0, 1, 3]])
        master = jnp.arange(10.0).reshape(5, 2)
        # 256 + 1 is not a bf16 number: a sum in bf16 would lose the ones.
        ct = jnp.array([[[256, 1], [2, 2], [1, 1]], [[5, 6], [1, 1], [3, 3]]], jnp.bfloat16)

        def f(master, tokens, ct):
            table = master.astype(jnp.bfloat16)
            y, vjp = jax.vjp(lambda tap: lookup(table, tap if tapped else None, tokens), master)
            return y, vjp(ct)[0]

        y, grad = self.variant(f)(master, tokens, ct)
        chex.assert_trees_all_equal(y, master.astype(jnp.bfloat16)[tokens])
        want = jnp.array([[5, 6], [258, 3], [0, 0], [5, 5], [0, 0]], jnp.float32)
        chex.assert_trees_all_equal(grad, want if tapped else jnp.zeros((5, 2)))


def test_float64_against_finite_differences():
    p = policy("float64")
    with jax.enable_x64(True):
        rng = np.random.default_rng(8)
        x, masters = rng.normal(size=(2, 3, 5)), tuple(rng.normal(size=(n, 5)) for n in (4, 2))
        c = [rng.normal(size=(2, 3, n)) for n in (4, 2)]

        @jax.jit
        def loss(x, masters):
            w = weight(jax.lax.stop_gradient(masters), p)
            return sum((jnp.sin(y) * ci).sum() for y, ci in zip(dot(x, w, masters, spec_of(masters, p)), c, strict=True))

        grads = jax.jit(jax.grad(loss, (0, 1)))(x, masters)
        for g, which in ((grads[0], None), (grads[1][0], 0), (grads[1][1], 1)):
            direction = rng.normal(size=g.shape)
            ends = []
            for step in (1e-5, -1e-5):
                moved = x + step * direction if which is None else x
                ends.append(loss(moved, tuple(m + step * direction if i == which else m for i, m in enumerate(masters))))
            assert float((g * direction).sum()) == pytest.approx(float(ends[0] - ends[1]) / 2e-5, rel=1e-8)
