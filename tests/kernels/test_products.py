"""The product kernels compile for sm_90a: on the FP8 tensor core, without spills, wgmmas in flight; and the operators' oracles."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.kernels import products
from jetrl_jax.kernels.inspect import SHARED_LIMIT, compiled
from jetrl_jax.linear import scaled_product
from jetrl_jax.precision import Format
from jetrl_jax.quantize import quantize

S, F8, F32 = jax.ShapeDtypeStruct, jnp.float8_e4m3fn, jnp.float32
WEIGHT = Format(block=(128, 128))


def sound(kernels):
    for k in kernels:
        assert k.uses("QGMMA") and not k.spilled and not k.serialized and k.shared <= SHARED_LIMIT, k.name
        assert k.threads * k.registers <= 65536


def operands(m, n, k, layers=None):
    blocks, lead = (-(-n // 128), -(-k // 128)), () if layers is None else (layers,)
    return S((m, k), F8), S((blocks[1], m), F32), S((*lead, n, k), F8), S((*lead, *blocks), F32)


def gemm_configs():
    from jetrl_jax.kernels import gemm

    return gemm.candidates(8192, 6144, 4096)


@pytest.mark.parametrize("i", range(len(gemm_configs())))
def test_every_candidate_of_the_large_product(i):
    from jetrl_jax.kernels import gemm

    sound(compiled(functools.partial(gemm.product, config=gemm_configs()[i]), *operands(8192, 6144, 4096)))


def tuned_configs():
    """Each configuration of the packaged table once, at one of its shapes."""
    from jetrl_jax.kernels import tuned

    found = {}
    for kernels in tuned.merged({}).values():
        for kernel, shapes in kernels.items():
            for key, fields in shapes.items():
                found[kernel, tuple(fields.items())] = tuple(map(int, key.split("x")))
    products = ("gemm", "wgrad", "decode", "decode_wide")
    return [(kernel, dict(fields), sizes) for (kernel, fields), sizes in found.items() if kernel in products]


@pytest.mark.parametrize("i", range(len(tuned_configs())))
def test_every_tuned_configuration(i):
    from jetrl_jax.kernels import decode, gemm, wgrad

    kernel, fields, (m, n, k) = tuned_configs()[i]
    if kernel == "wgrad":
        args = (S((n, m), F8), S((m // 128, n), F32), S((k, m), F8), S((m // 128, k), F32))
        sound(compiled(functools.partial(wgrad.product, config=wgrad.Config(**fields)), *args))
    elif kernel == "gemm":
        sound(compiled(functools.partial(gemm.product, config=gemm.Config(**fields)), *operands(m, n, k)))
    else:
        config = (decode.Config if kernel == "decode" else gemm.Config)(**fields)
        sound(compiled(functools.partial(decode.product, config=config), *operands(m, n, k, 4), S((1,), jnp.int32)))


def test_a_gradient_in_e5m2():
    from jetrl_jax.kernels import gemm, wgrad

    a, sa, w, sw = operands(256, 384, 512)
    e5m2 = S(a.shape, jnp.float8_e5m2)
    turned = S((256, 512), jnp.float8_e5m2), S((4, 256), F32), S((384, 512), F8), S((4, 384), F32)
    for k in (*compiled(gemm.product, e5m2, sa, w, sw), *compiled(wgrad.product, *turned)):
        sound([k])
        assert "E5M2.E4M3" in k.sass


def test_ragged_sizes_and_the_odd_number_of_blocks():
    from jetrl_jax.kernels import gemm

    for c in (gemm.config_for(130, 200, 336), gemm.config_for(8192, 200, 336)):
        sound(compiled(functools.partial(gemm.product, config=c), *operands(130, 200, 336)))


def test_wgrad_alone_and_into_a_buffer():
    from jetrl_jax.kernels import wgrad

    args = (S((1000, 640), F8), S((5, 1000), F32), S((336, 640), F8), S((5, 336), F32))
    for c in wgrad.candidates(1, 1, 1)[1:]:
        sound(compiled(functools.partial(wgrad.product, config=c), *args))
    sound(compiled(wgrad.product, *args, S((1000, 336), F32)))


@pytest.mark.parametrize("m", [16, 100])
def test_decode_at_a_shape_that_is_not_in_the_table(m):
    from jetrl_jax.kernels import decode

    sound(compiled(decode.product, *operands(m, 1000, 1168, 4), S((1,), jnp.int32)))


def test_more_rows_than_a_tile_are_refused():
    from jetrl_jax.kernels import decode

    with pytest.raises(ValueError, match="at most 64 rows, and x has 65"):
        jax.eval_shape(functools.partial(decode.product, config=decode.Config()), *operands(65, 128, 128, 2), S((1,), jnp.int32))


def drawn(seed, shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), F32)


def test_the_operators_oracles_are_the_canonical_product():
    a = quantize(drawn(0, (2, 3, 256)), "a", Format())
    stack = quantize(drawn(1, (4, 256, 256)), "w", WEIGHT)
    one = jax.tree.map(lambda w: w[2], stack)
    want = scaled_product(a, one).astype(jnp.bfloat16)
    got = products.product(a, stack, jnp.int32(2), jnp.bfloat16, "auto", "auto")
    assert got.dtype == jnp.bfloat16 and (got == want).all()
    assert (products.product(a, one, None, jnp.bfloat16, "auto", "auto") == want).all()
    x, y = (quantize(drawn(s, (n, 384)), "x", Format()) for s, n in ((2, 70), (3, 50)))
    assert (products.wgrad(x, y, "auto", "auto") == scaled_product(x, y)).all()


@pytest.mark.parametrize("a,w,fit", [
    ("e4m3 1x128", "e4m3 128x128", True), ("e5m2 1x128", "e4m3 128x128", True), ("e4m3 1x128", "e5m2 128x128", False),
    ("e4m3 1xall", "e4m3 1xall", False),
    ("bf16", "e4m3 128x128", False), ("e4m3 1x128 pow2", "e4m3 128x128 pow2", True),
])
def test_which_formats_are_the_kernels(a, w, fit):
    assert products.fits(Format.parse(a), Format.parse(w)) is fit
