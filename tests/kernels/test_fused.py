"""RMSNorm and SiLU·mul with quantization, forward and backward, without a GPU: interpreted over numpy, and compiled for sm_90a."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")
from interpreted import patched, wrap
from quantized import near, same

from jetrl_jax.kernels import fused_backward, fused_forward, inspect, operators, quantizers, tiles
from jetrl_jax.kernels import reference_fused as reference
from jetrl_jax.numerics import rms_norm
from jetrl_jax.precision import Format

ROWS, COLUMNS = Format(), Format("e5m2", (128, 1), "pow2")
EPS = 1e-6
S, BF16 = jax.ShapeDtypeStruct, jnp.bfloat16


@pytest.fixture
def numpy():
    with patched(tiles, quantizers, fused_forward, fused_backward):
        yield


def normal(shape, dtype=BF16, scale=1.0):
    return jnp.asarray(np.random.default_rng().normal(size=shape) * scale, jnp.float32).astype(dtype)


def rows_of_every_size(shape):
    x = np.asarray(normal(shape, jnp.float32))
    x = x * 10.0 ** np.random.default_rng().integers(-30, 30, (*shape[:-1], 1))
    x[..., 0, :] = 0
    x[..., -1, 1], x[..., -1, 2] = 0.0, -0.0
    return jnp.asarray(x, jnp.float32).astype(BF16)


def test_the_oracle_is_the_models_norm():
    x, w = normal((3, 5, 96)), normal((96,), jnp.float32)
    same([reference.rms_norm(x, w, EPS)], [rms_norm(x, w, EPS, "float64")])


@pytest.mark.parametrize("weight", [BF16, jnp.float32], ids=["bf16", "float32"])
@pytest.mark.parametrize("shape", [(2, 130, 200), (1, 3, 640), (2, 3, 70)], ids=str)
def test_norm_is_float64s(numpy, shape, weight):
    x, w = rows_of_every_size(shape), normal(shape[-1:], weight)
    same(fused_forward.norm_quantize(x, w, eps=EPS, fmt=ROWS, y=True), reference.norm_quantize(x, w, eps=EPS, fmt=ROWS, y=True))
    same(fused_forward.norm_quantize(x, w, eps=EPS, fmt=ROWS, column_fmt=COLUMNS),
         reference.norm_quantize(x, w, eps=EPS, fmt=ROWS, column_fmt=COLUMNS))


def test_norm_in_chunks_and_of_rows_that_are_not_finite(numpy):
    x = np.array(rows_of_every_size((6, 640)))
    x[3] = np.asarray(normal((640,), jnp.float32)) * 1e36
    x[1, 7], x[2, 300], x[3, 5] = np.nan, np.inf, 3e38
    x, w = jnp.asarray(x), normal((640,))
    want = reference.norm_quantize(x, w, eps=EPS, fmt=ROWS, y=True)
    for config in ((2, 4, 2, 1), (1, 8, 1, 2), (4, 1, 5, 1)):
        same(fused_forward.norm_quantize(x, w, eps=EPS, fmt=ROWS, y=True, config=config), want)


def test_norm_alone(numpy):
    x, w = normal((4, 256)), normal((256,))
    same(fused_forward.norm_quantize(x, w, eps=EPS, fmt=None, y=True), [rms_norm(x, w, EPS, "float64")])


def test_silu_where_it_is_small_large_and_neither(numpy):
    g = jnp.concatenate([jnp.linspace(-100, 100, 512), jnp.array([0.0, -0.0, 3e38, -3e38])]).astype(BF16).reshape(4, -1)
    got = tiles.round_bf16(fused_forward.silu_mul(wrap(g.astype(jnp.float32)), np.float32(1)))
    near(got, reference.silu_mul(g, jnp.ones_like(g)), zero=2e-38)  # XLA's CPU has no subnormals


@pytest.mark.parametrize("shape,features", [((2, 130, 200), None), ((3, 256), 100), ((1, 1, 300), None)], ids=str)
def test_silu_then_quantize(numpy, shape, features):
    g, u = normal(shape, scale=4), normal(shape)
    f = features or shape[-1]
    h = np.asarray(tiles.round_bf16(fused_forward.silu_mul(wrap(g.astype(jnp.float32)), wrap(u.astype(jnp.float32)))))
    near(h, reference.silu_mul(g, u))
    h = jnp.asarray(h)[..., :f]
    same(fused_forward.silu_quantize(g, u, fmt=ROWS, features=features), reference.quantize(h, ROWS))
    same(fused_forward.silu_quantize(jnp.concatenate([g, u], -1), None, fmt=ROWS, column_fmt=COLUMNS, features=features),
         reference.quantize_both(h, ROWS, COLUMNS))


@pytest.mark.parametrize("shape,residual", [((2, 130, 200), True), ((1, 5, 640), False)], ids=str)
def test_norm_backward(numpy, shape, residual, monkeypatch):
    monkeypatch.setattr(fused_backward.launch, "multiprocessors", lambda: 2)
    dy, x, w = normal(shape), normal(shape, scale=3), normal(shape[-1:])
    r = normal(shape) if residual else None
    got = fused_backward.norm_backward(dy, x, w, r, eps=EPS, fmt=ROWS, column_fmt=COLUMNS)
    want = reference.norm_backward(dy, x, w, r, eps=EPS, fmt=ROWS, column_fmt=COLUMNS)
    near(got[0], want[0], zero=1e-4)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-4)
    same(got[2:], reference.quantize_both(got[0], ROWS, COLUMNS))


@pytest.mark.parametrize("shape,features", [((2, 130, 200), None), ((1, 3, 256), 70)], ids=str)
def test_silu_backward(numpy, shape, features):
    dh, g, u = normal(shape), normal(shape, scale=4), normal(shape)
    together = jnp.concatenate([g, u], -1)
    got = fused_backward.silu_backward_quantize(dh, together, None, fmt=ROWS, column_fmt=COLUMNS, features=features, bf16=True)
    want = reference.silu_backward_quantize(dh, together, None, fmt=ROWS, column_fmt=COLUMNS, features=features, bf16=True)
    near(got[-1], want[-1], zero=1e-5)
    same(got[:-1], reference.quantize_both(got[-1], ROWS, COLUMNS))


def test_operators_on_the_cpu_are_the_oracles():
    x, w, gu = normal((2, 130, 200)), normal((200,)), normal((2, 130, 400))
    rows, columns = ("a", ROWS), ("aT", COLUMNS)
    same(operators.norm_quantize_p.bind(x, w, eps=EPS, declares=(rows, None, columns, None, None)),
         reference.norm_quantize(x, w, eps=EPS, fmt=ROWS, column_fmt=COLUMNS, y=True))
    same(operators.norm_quantize_p.bind(x, w, eps=EPS, declares=(None,)), [reference.rms_norm(x, w, EPS)])
    same(operators.silu_quantize_p.bind(gu, features=150, declares=(rows, None)), reference.silu_quantize(gu, None, fmt=ROWS, features=150))
    same(operators.norm_backward_p.bind(x, x, w, x, eps=EPS, declares=(None, None, rows, None, columns, None)),
         reference.norm_backward(x, x, w, x, eps=EPS, fmt=ROWS, column_fmt=COLUMNS))
    same(operators.silu_backward_p.bind(x, gu, declares=(rows, None, columns, None)),
         reference.silu_backward_quantize(x, gu, None, fmt=ROWS, column_fmt=COLUMNS))


def test_gradients_are_those_of_autodiff():
    x, w, dy = normal((4, 96), jnp.float32), normal((96,), jnp.float32), normal((4, 96), jnp.float32)
    dx, dw = jax.vjp(lambda x, w: rms_norm(x, w, EPS, "float64"), x, w)[1](dy)
    got = reference.norm_backward(dy, x, w, None, eps=EPS, fmt=None, column_fmt=None)
    np.testing.assert_allclose(got[0], dx, rtol=1e-6)
    np.testing.assert_allclose(got[1], dw, rtol=1e-6)
    dg, du = jax.vjp(lambda g, u: jax.nn.silu(g) * u, x, dy)[1](x)
    both = reference.silu_backward_quantize(x, x, dy, fmt=ROWS, column_fmt=COLUMNS, bf16=True)[-1]
    np.testing.assert_allclose(both[:, :96], dg, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(both[:, 128:224], du, rtol=1e-5, atol=1e-6)


def of(d):
    return S((8192, d), BF16)


@pytest.mark.parametrize("fun,shapes,pairs", [
    (lambda x, w: fused_forward.norm_quantize(x, w, eps=EPS, fmt=ROWS, column_fmt=COLUMNS), [of(4096), S((4096,), BF16)], True),
    (lambda x, w: fused_forward.norm_quantize(x, w, eps=EPS, fmt=ROWS), [of(5120), S((5120,), jnp.float32)], True),
    (lambda x, w: fused_forward.norm_quantize(x, w, eps=EPS, fmt=ROWS), [S((1, 896), BF16), S((896,), BF16)], True),
    (lambda gu: fused_forward.silu_quantize(gu, None, fmt=ROWS), [of(24576)], True),
    (lambda gu: fused_forward.silu_quantize(gu, None, fmt=ROWS, column_fmt=COLUMNS), [of(24576)], True),
    (lambda dy, x, w: fused_backward.norm_backward(dy, x, w, x, eps=EPS, fmt=ROWS, column_fmt=COLUMNS),
     [of(4096), of(4096), S((4096,), BF16)], True),
    (lambda dy, x, w: fused_backward.norm_backward(dy, x, w, x, eps=EPS, fmt=ROWS, column_fmt=None),
     [of(8192), of(8192), S((8192,), BF16)], False),
    (lambda dh, gu: fused_backward.silu_backward_quantize(dh, gu, None, fmt=ROWS, column_fmt=COLUMNS), [of(12288), of(24576)], False),
], ids=range(8))
def test_compiles_for_hopper(fun, shapes, pairs):
    for c in inspect.compiled(fun, *shapes):
        assert c.spilled == 0 and c.shared <= inspect.SHARED_LIMIT and c.registers * c.threads * (1 + pairs) <= 65536, c.name
        assert c.name == "sum_kernel" or c.uses("LDG.E.128")
