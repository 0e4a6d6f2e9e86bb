"""The product kernels on the GPU: against a float64 reference, and bitwise against each other over tiles, token counts and repeats."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.gpu
F8 = jnp.float8_e4m3fn
TOKENS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256)
count = itertools.count()


def payload(*shape):
    return jax.random.normal(jax.random.key(next(count)), shape).astype(F8)


def scales(*shape):
    return jax.random.uniform(jax.random.key(next(count)), shape, jnp.float32, 0.01, 0.1)


def operands(m, n, k, layers=None):
    blocks = (-(-n // 128), -(-k // 128))
    lead = () if layers is None else (layers,)
    return payload(m, k), scales(blocks[1], m), payload(*lead, n, k), scales(*lead, *blocks)


def reference(a, sa, w, sw):
    """Float64, on dequantized operands."""
    a, sa, w, sw = (np.asarray(x.astype(jnp.float32), np.float64) for x in (a, sa, w, sw))
    a = a * np.repeat(sa.T, 128, 1)[:, :a.shape[1]]
    return a @ (w * np.repeat(np.repeat(sw, 128, 0), 128, 1)[:w.shape[0], :w.shape[1]]).T


def error(y, want):
    y = np.asarray(y.astype(jnp.float32), np.float64)
    assert np.isfinite(y).all()
    return np.linalg.norm(y - want) / np.linalg.norm(want)


def bits(y):
    return np.asarray(jax.lax.bitcast_convert_type(y, jnp.uint16 if y.dtype == jnp.bfloat16 else jnp.uint32))


def equal(*ys):
    for y in ys[1:]:
        np.testing.assert_array_equal(bits(y), bits(ys[0]))


@pytest.mark.parametrize("m,n,k", [(1, 16, 16), (65, 200, 336), (200, 384, 128), (513, 640, 2048), (300, 1000, 1168)])
def test_every_tile_gives_the_same_bits_and_they_are_right(m, n, k):
    from jetrl_jax.kernels import gemm

    args = operands(m, n, k)
    configs = dict.fromkeys(gemm.candidates(8192, n, k) + gemm.candidates(64, n, k))
    ys = [jax.jit(functools.partial(gemm.product, config=c))(*args) for c in configs]
    assert error(ys[0], reference(*args)) < 3e-3  # bf16 rounding
    equal(*ys)


def test_decode_gives_the_bits_of_the_training_tile_at_every_token_count():
    from jetrl_jax.kernels import decode, gemm

    layers, n, k = 3, 640, 1152
    a, sa, w, sw = operands(256, n, k, layers)
    whole = jax.jit(functools.partial(gemm.product, config=gemm.Config()))(a, sa, w[2], sw[2])
    layer = jnp.array([2], jnp.int32)
    for m in TOKENS:
        configs = decode.candidates(m, 24576, k)[:3] if m in (16, 64, 129) else [None]
        for c in configs:
            y = jax.jit(functools.partial(decode.product, config=c))(a[:m], sa[:, :m], w, sw, layer)
            assert y.shape == (m, n)
            equal(y, whole[:m])


def test_a_layer_is_read_in_place():
    """No slice or copy of the stack in the compiled loop."""
    from jetrl_jax.kernels import decode

    a, sa, w, sw = operands(64, 512, 512, 5)

    def steps(a, sa, w, sw):
        zero = jnp.zeros((64, 512), jnp.bfloat16)
        return jax.lax.scan(lambda c, i: (c + decode.product(a, sa, w, sw, i[None]), None), zero, jnp.arange(5))[0]

    text = jax.jit(steps).lower(a, sa, w, sw).compile().as_text()
    made = re.findall(r"= f8e4m3fn\[[\d,]*512,512\]\S* (?:copy|fusion|dynamic-slice|slice|transpose)\(.*", text)
    assert not made, made


@pytest.mark.parametrize("n,k,t", [(16, 16, 128), (200, 336, 640), (384, 1000, 1024)])
def test_wgrad_is_right_adds_in_place_and_has_one_result(n, k, t):
    from jetrl_jax.kernels import wgrad

    a, sa, b, sb = payload(n, t), scales(t // 128, n), payload(k, t), scales(t // 128, k)
    f64 = [np.asarray(x.astype(jnp.float32), np.float64) for x in (a, sa, b, sb)]
    want = (f64[0] * np.repeat(f64[1].T, 128, 1)) @ (f64[2] * np.repeat(f64[3].T, 128, 1)).T
    old = jax.random.normal(jax.random.key(next(count)), (n, k))
    configs = wgrad.candidates(n, k, t)
    ys = [jax.jit(functools.partial(wgrad.product, config=c))(a, sa, b, sb) for c in configs]
    assert error(ys[0], want) < 1e-3  # the tensor core rounds inside a block
    equal(*ys)
    into = jax.jit(wgrad.product, donate_argnums=4)
    compiled = into.lower(a, sa, b, sb, old).compile()
    assert "may-alias" in compiled.as_text() or "must-alias" in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < old.size  # no second gradient
    expected = ys[0] + old
    equal(into(a, sa, b, sb, old), expected)


def test_zeros_nan_and_repeats():
    from jetrl_jax.kernels import gemm

    a, sa, w, sw = operands(300, 384, 512)
    a = a.at[7].set(0)
    sa = sa.at[2, 11].set(jnp.nan)
    run = jax.jit(gemm.product)
    y = run(a, sa, w, sw)
    assert (y[7] == 0).all() and jnp.isnan(y[11]).all() and jnp.isfinite(jnp.delete(y, 11, 0)).all()
    for _ in range(20):
        equal(run(a, sa, w, sw), y)


@pytest.mark.parametrize("saved", ["requantize", "dual", "bf16"])
@pytest.mark.parametrize("tokens", [(2, 128), (3, 100), (1, 300)])
def test_dot_by_kernels_is_close_to_the_oracle(saved, tokens):
    """Forward and all gradients of one linear layer, two projections side by side, ragged widths."""
    import dataclasses

    from jetrl_jax.linear import DotSpec, dot
    from jetrl_jax.models.qparams import quantize_weight
    from jetrl_jax.precision import make_policy

    p = dataclasses.replace(make_policy("jet_fp8").train.base, saved_activation=saved)
    masters = [jax.random.normal(jax.random.key(next(count)), (n, 576)) * 0.05 for n in (192, 80)]
    x = jax.random.normal(jax.random.key(next(count)), (*tokens, 576), jnp.bfloat16)
    ct = [jax.random.normal(jax.random.key(next(count)), (*tokens, n), jnp.bfloat16) for n in (192, 80)]

    def both(kernels, transposed):
        spec = DotSpec("here", p, (192, 80), "auto", kernels)

        def f(x, masters):
            w = jax.tree.map(lambda v: v[0], quantize_weight([m[None] for m in masters], "here", p, transposed))
            y, vjp = jax.vjp(lambda x, taps: dot(x, w, taps, spec), x, tuple(masters))
            return y, vjp(tuple(ct))

        return jax.jit(f)(x, masters)

    oracle, ours, by_view = both("off", False), both("required", True), both("required", False)
    for a, b, c in zip(*map(jax.tree.leaves, (oracle, ours, by_view)), strict=True):
        assert error(b, np.asarray(a.astype(jnp.float32), np.float64)) < 4e-3
        equal(b, c)  # the transposed payload is the same bytes


def test_wgrad_at_full_size_is_the_same_every_time_alone_and_in_place():
    """Scales that TMA overwrites while a slow warp still reads them show here, not at small sizes."""
    from jetrl_jax.kernels import wgrad

    n, k, t = 6144, 4096, 8192
    a, sa, b, sb = payload(n, t), scales(t // 128, n), payload(k, t), scales(t // 128, k)
    alone, into = jax.jit(wgrad.product), jax.jit(wgrad.product, donate_argnums=4)
    y = alone(a, sa, b, sb)
    for seed in range(6):
        old = jax.random.normal(jax.random.key(seed), (n, k))
        assert int((alone(a, sa, b, sb) != y).sum()) == 0
        assert int((y + old != into(a, sa, b, sb, old + 0)).sum()) == 0
