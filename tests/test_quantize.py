"""The quantizer, bit for bit against loops in numpy with ml_dtypes' casts, and what QTensor and the primitive promise."""

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_jax.flow import untagged_float8_casts
from jetrl_jax.precision import BF16, Format
from jetrl_jax.quantize import TINY, QTensor, dequantize, expand_scales, quantize, quantize_p, scale_of, straight_through

CASTS = {"e4m3": (ml_dtypes.float8_e4m3fn, 448.0), "e5m2": (ml_dtypes.float8_e5m2, 57344.0)}
FORMATS = {
    "1x128": Format(),
    "128x1": Format(block=(128, 1)),
    "128x128": Format(block=(128, 128)),
    "rowwise": Format(block=(1, 0)),
    "tensorwise": Format(block=(0, 0)),
    "e5m2": Format("e5m2"),
    "pow2": Format(scale="pow2"),
    "e5m2 pow2 2x3": Format("e5m2", (2, 3), "pow2"),
}


def oracle(x, fmt):
    """(payload, scales) of x [n, k] float32, a block at a time."""
    cast, limit = CASTS[fmt.dtype]
    (n, k), (br, bc) = x.shape, fmt.block
    br, bc = (n if br == 0 or br >= n else br), (k if bc == 0 or bc >= k else bc)
    rows, cols = -(-n // br), -(-k // bc)
    values, scales = np.zeros((rows * br, cols * bc), cast), np.zeros((rows, cols), np.float32)
    for r in range(rows):
        for c in range(cols):
            block = x[r * br:(r + 1) * br, c * bc:(c + 1) * bc]
            if not np.isfinite(block).all():
                scales[r, c] = np.nan
                continue
            scale = np.float32(max(np.abs(block).max(), np.float32(TINY))) * np.float32(1 / limit)
            if fmt.scale == "pow2":
                mantissa, exponent = np.frexp(scale)
                scale = np.float32(2.0 ** (exponent - (mantissa == 0.5)))
            scaled = block * (np.float32(1) / scale)
            values[r * br:r * br + block.shape[0], c * bc:c * bc + block.shape[1]] = np.clip(scaled, -limit, limit).astype(cast)
            scales[r, c] = scale
    return values, scales


def same_bits(got, want):
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype and got.shape == want.shape
    nan = np.isnan(got.astype(np.float32))
    np.testing.assert_array_equal(nan, np.isnan(want.astype(np.float32)))
    unsigned = np.uint8 if got.itemsize == 1 else np.uint32
    np.testing.assert_array_equal(np.where(nan, 0, got.view(unsigned)), np.where(nan, 0, want.view(unsigned)))


def check(x, fmt):
    q = quantize(jnp.asarray(x), "here", fmt)
    values, scales = oracle(np.asarray(x, np.float32), fmt)
    same_bits(q.values, values)
    same_bits(q.scales, scales)
    return q


def drawn(seed, shape, magnitudes=(-30, 30)):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * np.exp2(rng.uniform(*magnitudes, size=shape))).astype(np.float32)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(5, 200), (130, 257)])
def test_bit_for_bit_on_ragged_shapes(name, shape):
    q = check(drawn(0, shape), FORMATS[name])
    assert not np.isnan(np.asarray(q.values, np.float32)).any()


kinds = st.sampled_from(["normal", "zero", "huge", "tiny", "floor", "nan", "inf", "-inf"])


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.lists(kinds, min_size=3, max_size=3), st.sampled_from(["1x128", "128x1", "pow2", "e5m2"]))
def test_bit_for_bit_in_every_kind_of_block(seed, kinds, name):
    x = drawn(seed, (2, 3, 128), (-4, 4))
    where = np.random.default_rng(seed).integers(128)
    for i, kind in enumerate(kinds):
        if kind in ("nan", "inf", "-inf"):
            x[0, i, where] = float(kind)
        else:
            x[0, i] *= np.float32({"normal": 1, "zero": 0, "huge": 2.0**120, "tiny": 2.0**-110, "floor": 2.0**-104}[kind])
    check(x.reshape(2, 384), FORMATS[name])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["1x128", "e5m2"]))
def test_rounding_is_to_nearest_even_also_among_subnormals(seed, name):
    fmt = FORMATS[name]
    cast, limit = CASTS[fmt.dtype]
    points = np.arange(256, dtype=np.uint8).view(cast).astype(np.float32)
    points = np.unique(points[np.isfinite(points)])
    middles = (points[1:] + points[:-1]) / 2
    near = np.concatenate([points[:-1], middles, np.nextafter(middles, np.float32(np.inf)), np.nextafter(middles, np.float32(-np.inf))])
    x = np.random.default_rng(seed).choice(near, (8, 128)).astype(np.float32)
    x[:, 0] = limit  # makes the scale 1, or its neighbour
    check(x, fmt)


def test_a_subnormal_input_counts_as_zero():
    x = np.full((1, 128), 1e-40, np.float32)
    for fmt in (Format(), Format("e5m2")):
        q = quantize(jnp.asarray(x), "here", fmt)
        assert not np.asarray(q.values, np.float32).any()
        np.testing.assert_array_equal(q.scales, np.float32(TINY) * np.float32(1 / CASTS[fmt.dtype][1]))


@pytest.mark.parametrize("top", [448.0, 463.9, 464.0, 464.1, 1e30, 3e38])
@pytest.mark.parametrize("scale", ["float32", "pow2"])
def test_the_largest_value_saturates_and_never_becomes_nan(top, scale):
    x = np.linspace(-top, top, 128, dtype=np.float32)[None]
    q = check(x, Format(scale=scale))
    assert np.isfinite(np.asarray(dequantize(q))).all()
    if scale == "float32":
        assert np.abs(np.asarray(q.values, np.float32)).max() == 448


def test_a_block_with_nan_or_infinity_is_marked_and_its_neighbours_are_not():
    clean = drawn(1, (256, 384), (-3, 3))
    for bad in (np.nan, np.inf, -np.inf):
        x = clean.copy()
        x[130, 200] = bad
        for fmt, block in ((Format(), (130, 1)), (Format(block=(128, 1)), (1, 200)), (Format(block=(128, 128)), (1, 1))):
            q, reference = check(x, fmt), quantize(jnp.asarray(clean), "here", fmt)
            marked = np.isnan(np.asarray(q.scales))
            assert marked.sum() == 1 and marked[block]
            inside = np.repeat(np.repeat(marked, 256 // marked.shape[0], 0), 384 // marked.shape[1], 1)
            assert not np.asarray(q.values, np.float32)[inside].any()
            same_bits(np.asarray(q.values)[~inside], np.asarray(reference.values)[~inside])
            same_bits(np.asarray(q.scales)[~marked], np.asarray(reference.scales)[~marked])
            np.testing.assert_array_equal(np.isnan(np.asarray(dequantize(q))), inside)


def test_all_zero_has_the_floor_as_scale():
    q = check(np.zeros((3, 256), np.float32), Format())
    np.testing.assert_array_equal(q.scales, np.full((3, 2), np.float32(TINY) * np.float32(1 / 448)))
    assert not np.asarray(dequantize(q)).any()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.floats(0, 2.0**127, width=32), st.sampled_from(["e4m3", "e5m2"]))
def test_a_power_of_two_scale_is_the_smallest_that_holds_the_largest_value(amax, dtype):
    scale = float(_pow2[dtype](np.float32(amax)))
    mantissa, _ = np.frexp(scale)
    plain = float(np.float32(max(np.float32(amax), np.float32(TINY))) * np.float32(1 / CASTS[dtype][1]))
    assert mantissa == 0.5 and plain <= scale < 2 * plain


_pow2 = {d: jax.jit(lambda a, d=d: scale_of(a, Format(d, scale="pow2"))) for d in CASTS}


class QuantizeTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_pmap=True)
    @parameterized.parameters("1x128", "e5m2 pow2 2x3")
    def test_the_same_bits_however_it_is_run(self, name):
        fmt = FORMATS[name]
        x = jnp.asarray(drawn(2, (3, 130, 140)), jnp.bfloat16)

        def f(x):
            q = quantize(x.astype(jnp.float32) * 3, "here", fmt)  # beside other operations, which XLA may fuse with it
            return q, dequantize(q, (130, 140), jnp.bfloat16)

        q, back = self.variant(f)(x)
        tripled = np.asarray(x, np.float32) * np.float32(3)
        for i in range(3):
            values, scales = oracle(tripled[i], fmt)
            same_bits(q.values[i], values)
            same_bits(q.scales[i], scales)
        chex.assert_shape(back, (3, 130, 140))
        chex.assert_type(back, jnp.bfloat16)

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.parameters((0, "1x128"), (2, "tensorwise"))
    def test_vmap_equals_a_loop(self, axis, name):
        x = jnp.asarray(drawn(3, (3, 4, 5, 20)))
        mapped = self.variant(jax.vmap(lambda x: quantize(x, "here", FORMATS[name]), axis))(x)
        assert (mapped.site, mapped.fmt) == ("here", FORMATS[name])
        for i in range(x.shape[axis]):
            one = quantize(jnp.take(x, i, axis), "here", FORMATS[name])
            same_bits(mapped.values[i], one.values)
            same_bits(mapped.scales[i], one.scales)

    @chex.variants(with_jit=True, without_jit=True, with_pmap=True)
    def test_straight_through_gradient_is_the_identity(self):
        x, ct = jnp.asarray(drawn(4, (2, 3, 8), (-2, 2)), jnp.bfloat16), jnp.asarray(drawn(5, (2, 3, 8)), jnp.bfloat16)

        def f(x, ct):
            y, vjp = jax.vjp(lambda x: straight_through(x, "kv", Format(block=(1, 0))), x)
            return y, vjp(ct)[0]

        y, grad = self.variant(f)(x, ct)
        chex.assert_trees_all_equal(grad, ct)
        chex.assert_type(y, jnp.bfloat16)
        chex.assert_trees_all_equal(y, dequantize(quantize(x, "kv", Format(block=(1, 0))), dtype=jnp.bfloat16))
        assert bool((y != x).any())


@pytest.mark.parametrize("name", ["1x128", "128x1", "128x128", "rowwise", "tensorwise", "e5m2", "pow2"])
def test_dequantized_is_within_half_a_step(name):
    fmt = FORMATS[name]
    x = drawn(6, (130, 140), (-6, 6))
    q = check(x, fmt)
    back, scales = np.asarray(dequantize(q, x.shape), np.float64), np.asarray(expand_scales(q), np.float64)[:130, :140]
    relative, least = {"e4m3": (2.0**-4, 2.0**-10), "e5m2": (2.0**-3, 2.0**-17)}[fmt.dtype]  # half a step of normals, of subnormals
    assert (np.abs(back - x) <= np.maximum(relative * np.abs(x), least * scales) * (1 + 1e-6)).all()
    assert np.abs(back - x).max() > 0


def test_padding_adds_zeros_and_changes_nothing_else():
    x = drawn(7, (131, 300), (-3, 3))
    for fmt in (Format(), Format(block=(128, 128)), Format(block=(128, 1))):
        q = check(x, fmt)
        rows, cols = q.values.shape
        padded = quantize(jnp.pad(jnp.asarray(x), ((0, rows - 131), (0, cols - 300))), "here", fmt)
        same_bits(padded.values, q.values)
        same_bits(padded.scales, q.scales)
        rest = np.asarray(q.values, np.float32).copy()
        rest[:131, :300] = 0
        assert not rest.any()
    assert check(x[:5, :20], Format(block=(128, 128))).values.shape == (5, 20)  # shorter than a block: one block of its own


def test_an_operand_that_stays_unquantized_passes_as_the_identity():
    x = jnp.asarray(drawn(8, (2, 3, 5)), jnp.bfloat16)
    q = quantize(x, "here", BF16)
    chex.assert_trees_all_equal((q.values, q.scales), (x, jnp.ones((2, 1, 1))))
    chex.assert_trees_all_equal(dequantize(q, (2, 4), jnp.float32), x[:, :2, :4].astype(jnp.float32))
    (eqn,) = jax.make_jaxpr(lambda x: quantize(x, "here", BF16))(x).eqns
    assert eqn.primitive is quantize_p and eqn.params == {"site": "here", "fmt": BF16}


def test_a_qtensor_is_a_pytree_with_static_site_and_format():
    q = quantize(jnp.ones((2, 256)), "mlp/down.w", Format(block=(128, 128)))
    leaves, tree = jax.tree.flatten(q)
    assert len(leaves) == 2 and jax.tree.unflatten(tree, leaves).site == "mlp/down.w"
    other = jax.tree.structure(quantize(jnp.ones((2, 256)), "mlp/up.w", Format(block=(128, 128))))
    assert other not in [tree]
    stacked = jax.tree.map(lambda a: jnp.stack([a, a]), q)
    assert isinstance(stacked, QTensor) and stacked.fmt == q.fmt and stacked.values.shape == (2, 2, 256)
    traced = chex.assert_max_traces(lambda q: q.values.astype(jnp.float32).sum(), n=2)
    f = jax.jit(traced)
    for site in ("a", "b", "a"):  # the label is part of the trace
        f(QTensor(q.values, q.scales, site, q.fmt))


def test_the_transpose_reads_the_same_payload():
    q = quantize(jnp.asarray(drawn(9, (2, 130, 300))), "w", Format(block=(128, 64), scale="pow2"))
    assert q.T.fmt == Format(block=(64, 128), scale="pow2") and q.T.site == "w"
    chex.assert_trees_all_equal(dequantize(q.T), jnp.swapaxes(dequantize(q), -1, -2))
    chex.assert_trees_all_equal(q.T.T, q)


def test_the_primitive_has_no_derivative_and_no_cast_escapes_it():
    with pytest.raises(NotImplementedError, match="jetrl_quantize"):
        jax.grad(lambda x: dequantize(quantize(x, "here", Format())).sum())(jnp.ones((2, 4)))
    tagged = jax.make_jaxpr(lambda x: dequantize(quantize(x, "here", Format())))(jnp.ones((2, 4)))
    assert not untagged_float8_casts(tagged.jaxpr)
    bare = jax.make_jaxpr(jax.jit(lambda x: x.astype(jnp.float8_e4m3fn)))(jnp.ones((2, 4)))
    assert len(untagged_float8_casts(bare.jaxpr)) == 1
