"""RMSNorm and SiLU·mul with quantization on the GPU against their float64 oracles on the CPU."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from quantized import near, on_cpu, same

from jetrl_jax.compile import compile
from jetrl_jax.kernels import launch, operators
from jetrl_jax.kernels import reference_fused as reference
from jetrl_jax.precision import Format
from jetrl_jax.quantize import QTensor, dequantize

pytestmark = pytest.mark.gpu
ROWS, COLUMNS, EPS, BF16 = Format(), Format(block=(128, 1)), 1e-6, jnp.bfloat16
LABELS = (("a", ROWS), None, ("aT", COLUMNS), None)


@pytest.fixture(scope="module", autouse=True)
def hopper():
    if launch.missing():
        pytest.skip(launch.missing())


def oracle(name, *xs, **static):
    return on_cpu(functools.partial(getattr(reference, name), **static))(*xs)


def normal(shape, dtype=BF16, scale=1.0):
    return jnp.asarray(np.random.default_rng().normal(size=shape) * scale, jnp.float32).astype(dtype)


def rows_of_every_size(shape):
    x = np.asarray(normal(shape, jnp.float32)) * 10.0 ** np.random.default_rng().integers(-30, 30, (*shape[:-1], 1))
    x = x.reshape(-1, shape[-1])
    x[0] = 0
    x[-1, :2] = 0.0, -0.0
    if len(x) > 8:
        x[4] = np.asarray(normal(shape[-1:], jnp.float32)) * 1e36
        x[2, 7], x[3, -1], x[4, 5] = np.nan, np.inf, 3e38
    return jnp.asarray(x.reshape(shape).astype(np.float32)).astype(BF16)


@pytest.mark.parametrize("shape,weight", [((2, 130, 200), jnp.float32), ((1, 300, 4096), BF16), ((1, 1, 5120), BF16),
                                          ((2, 200, 896), jnp.float32)], ids=str)
def test_norm_is_float64s_to_the_bit(shape, weight):
    x, w = rows_of_every_size(shape), normal(shape[-1:], weight)
    norm = functools.partial(operators.norm_quantize_p.bind, eps=EPS, kernels="required")
    want = oracle("norm_quantize", x, w, eps=EPS, fmt=ROWS, column_fmt=COLUMNS, y=True)
    same(compile(lambda x, w: norm(x, w, declares=(*LABELS, None)))(x, w), want)
    same(compile(lambda x, w: norm(x, w, declares=LABELS))(x, w), want[:4])
    same(compile(lambda x, w: norm(x, w, declares=(None,)))(x, w), want[4:])


def test_norm_of_a_decode_step_is_that_of_the_whole():
    from jetrl_jax.kernels import fused_forward

    x, w = normal((700, 4096)), normal((4096,))
    f = compile(lambda x, w: fused_forward.norm_quantize(x, w, eps=EPS, fmt=ROWS))
    whole = f(x, w)
    for m in (1, 17):
        same(f(x[:m], w), [t[:m] for t in whole])


@pytest.mark.parametrize("shape,features", [((2, 130, 400), 180), ((1, 256, 3072), None), ((1, 1, 2 * 12288), None)], ids=str)
def test_silu(shape, features):
    gu = normal(shape, scale=3)
    silu = functools.partial(operators.silu_quantize_p.bind, features=features, kernels="required")
    alone = compile(lambda gu: silu(gu, declares=LABELS[:2]))(gu)
    got = compile(lambda gu: silu(gu, declares=LABELS))(gu)
    same(alone, got[:2])
    g, u = reference.halves(gu, None, features)
    same(compile(lambda g, u: silu(g, u, declares=LABELS))(g, u), got)
    want = oracle("silu_quantize", gu, None, fmt=ROWS, column_fmt=COLUMNS, features=features)
    for i in (0, 2):
        assert np.mean(np.asarray(got[i]).view(np.uint8) == np.asarray(want[i]).view(np.uint8)) > 0.995
        a, b = (np.asarray(dequantize(QTensor(t[i], t[i + 1])), np.float64) for t in (got, want))
        np.testing.assert_allclose(a, b, rtol=2.0**-2, atol=np.abs(b).max() * 2.0**-9)


@pytest.mark.parametrize("shape", [(2, 130, 200), (1, 400, 4096)], ids=str)
def test_norm_backward(shape):
    dy, x, w, r = normal(shape), normal(shape, scale=3), normal(shape[-1:]), normal(shape)
    f = compile(functools.partial(operators.norm_backward_p.bind, eps=EPS, declares=(None, None, *LABELS), kernels="required"))
    got = f(dy, x, w, r)
    want = oracle("norm_backward", dy, x, w, r, eps=EPS, fmt=None, column_fmt=None)
    near(got[0], want[0], zero=1e-4)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-4 * np.abs(want[1]).max())
    same(got[2:], oracle("quantize_both", got[0], row_fmt=ROWS, column_fmt=COLUMNS))
    for _ in range(5):
        same(f(dy, x, w, r), got)
    alone = compile(functools.partial(operators.norm_backward_p.bind, eps=EPS, declares=(None, None), kernels="required"))(dy, x, w)
    near(alone[0], oracle("norm_backward", dy, x, w, None, eps=EPS, fmt=None, column_fmt=None)[0], zero=1e-4)


@pytest.mark.parametrize("shape,features", [((2, 130, 400), 180), ((1, 256, 3072), None)], ids=str)
def test_silu_backward(shape, features):
    gu, dh = normal(shape, scale=3), normal((*shape[:-1], features or shape[-1] // 2))
    f = functools.partial(operators.silu_backward_p.bind, features=features, kernels="required")
    got = compile(lambda dh, gu: f(dh, gu, declares=(*LABELS, None)))(dh, gu)
    want = oracle("silu_backward_quantize", dh, gu, None, fmt=ROWS, column_fmt=COLUMNS, features=features, bf16=True)
    near(got[4], want[4], zero=1e-5)
    same(got[:4], oracle("quantize_both", got[4], row_fmt=ROWS, column_fmt=COLUMNS))
    same(compile(lambda dh, gu: f(dh, gu, declares=LABELS))(dh, gu), got[:4])
