"""The quantization kernels on the GPU against `canonical_quantize` on the CPU, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized import FORMATS, nasty, on_cpu, same

from jetrl_jax.compile import compile
from jetrl_jax.kernels import launch, operators
from jetrl_jax.kernels import reference_fused as reference
from jetrl_jax.precision import Format
from jetrl_jax.quantize import canonical_quantize

pytestmark = pytest.mark.gpu
ROWS, COLUMNS, BLOCKS = Format(), Format(block=(128, 1)), Format(block=(128, 128))
SHAPE = (2, 130, 200)


@pytest.fixture(scope="module", autouse=True)
def hopper():
    if launch.missing():
        pytest.skip(launch.missing())


@compile
def ours(x):
    from jetrl_jax.kernels import quantizers

    return [quantizers.native_quantize(x, site="", fmt=f) for f in FORMATS]


@on_cpu
def oracles(x):
    return [canonical_quantize(x, site="", fmt=f) for f in FORMATS]


@compile
def both_layouts(x):
    from jetrl_jax.kernels import quantizers

    both = quantizers.quantize_both(x, ROWS, COLUMNS)
    return [*both, *quantizers.requantize(both[0], both[1], COLUMNS), *quantizers.blocks(x, BLOCKS, transposed=True)]


@on_cpu
def both_oracles(x):
    q = canonical_quantize(x, site="", fmt=ROWS)
    return [*q, *canonical_quantize(x, site="", fmt=COLUMNS), *reference.requantize(*q, COLUMNS), *reference.quantize_blocks(x, BLOCKS)]


def bits(x):
    return jax.lax.bitcast_convert_type(x, jnp.uint8 if x.dtype.itemsize == 1 else jnp.uint32)


def check(x):
    for got, want in zip(ours(x), oracles(x), strict=True):
        same(got, want)
    same(both_layouts(x), both_oracles(x))


@pytest.mark.parametrize("shape,dtype", [((3, 7, 70), jnp.bfloat16), ((2, 384, 640), jnp.bfloat16), ((1, 1, 4096), jnp.bfloat16),
                                         ((2, 256, 384), jnp.float32)], ids=str)
def test_every_format_and_shape(shape, dtype):
    check(nasty(shape, dtype, subnormals=True))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(-42, 38), st.integers(0, 30), st.lists(st.sampled_from(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 3.3e38, 1e-44, 448.0, 464.0, 57344.0, 61440.0, 2.0**-100, 2.0**-109]), max_size=12))
def test_drawn_values(seed, exponent, spread, specials):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=SHAPE) * 10.0 ** (exponent + spread * rng.uniform(-1, 0, SHAPE))
    for v in specials:
        x[tuple(rng.integers(n) for n in SHAPE)] = v
    with np.errstate(over="ignore"):
        check(jnp.asarray(x.astype(np.float32)).astype(jnp.bfloat16))


def test_large_and_always_the_same():
    x = nasty((2048, 4096), jnp.bfloat16)
    first = both_layouts(x)
    same(first, both_oracles(x))
    for _ in range(10):
        again = both_layouts(x)
        assert all(bool(jnp.all(bits(a) == bits(b))) for a, b in zip(first, again, strict=True))


def test_stacked_weights():
    w = nasty((3, 300, 520), jnp.float32)
    declares = (("w", BLOCKS), None, ("w", BLOCKS))
    got = compile(lambda w: operators.quantize_blocks_p.bind(w, declares=declares, kernels="required"))(w)
    same(got, on_cpu(lambda w: reference.quantize_blocks(w, BLOCKS))(w))


def test_rows_of_a_decode_step_are_those_of_the_whole():
    from jetrl_jax.kernels import quantizers

    x = jnp.asarray(np.random.default_rng().normal(size=(300, 4096)), jnp.bfloat16)
    whole = compile(lambda x: quantizers.rows(x, ROWS))(x)
    for m in (1, 3, 64):
        same(compile(lambda x: quantizers.rows(x, ROWS))(x[:m]), [t[:m] for t in whole])


def test_operators_take_the_kernel():
    x = nasty(SHAPE)
    declares = (("a", ROWS), None, ("aT", COLUMNS), None)
    f = compile(lambda x: operators.quantize_both_p.bind(x, declares=declares, kernels="required"))
    assert "triton_kernel_call" in f.lower(x).as_text()
    same(f(x), on_cpu(lambda x: reference.quantize_both(x, ROWS, COLUMNS))(x))
    q = compile(lambda *q: operators.requantize_p.bind(*q, declares=(("aT", COLUMNS), None), kernels="required"))(*f(x)[:2])
    same(q, on_cpu(lambda *q: reference.requantize(*q, COLUMNS))(*f(x)[:2]))
