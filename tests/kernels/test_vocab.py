"""The vocabulary's operators: the oracle against dense float64 and finite differences, and what the Hopper kernels compile to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.kernels import vocab

R, D, V = 23, 16, 83
SHAPE = jax.ShapeDtypeStruct


def inputs(dtype=jnp.float32):
    rng = np.random.default_rng()
    x, w = (rng.normal(size=s) for s in ((R, D), (V, D)))
    targets, inverse = rng.integers(0, V, R), 1 / rng.uniform(0.3, 2.0, R)
    x[0], inverse[0] = 2.2 * w[targets[0]], 1.0  # a near-certain token
    tau = np.where(rng.random(R) < 0.3, -np.inf, rng.normal(size=R))
    with jax.enable_x64(True):
        arrays = [jnp.asarray(a, t) for a, t in ((x, dtype), (w, dtype), (targets, jnp.int32), (tau, jnp.float32), (inverse, jnp.float64))]
    return arrays, rng


def forward(arrays, chunk=20, filtered=True):
    with jax.enable_x64(True):
        return vocab.forward_p.bind(*arrays, chunk=chunk, filtered=filtered, reductions="float64", kernels="auto")


def dense(x, w, targets, tau, inverse, filtered=True):
    """Log-probabilities, entropies [R] and p [R, V], z, in float64 of float32 logits."""
    x, w, tau, inverse = (np.asarray(a, np.float64) for a in (x, w, tau, inverse))
    z = ((x @ w.T) * inverse[:, None]).astype(np.float32).astype(np.float64)
    own = np.arange(w.shape[0]) == np.asarray(targets)[:, None]
    kept = (z >= tau[:, None]) | own if filtered else np.ones_like(own)
    m = np.where(kept, z, -np.inf).max(1, keepdims=True)
    e = np.where(kept, np.exp(z - m), 0)
    p = e / e.sum(1, keepdims=True)
    others = np.where(own, 0, e).sum(1)
    chosen = z[own]
    logp = np.where(chosen == m[:, 0], -np.log1p(others), chosen - m[:, 0] - np.log(e.sum(1)))
    return logp, -(p * np.where(p > 0, np.log(np.where(p > 0, p, 1)), 0)).sum(1), p, z


@pytest.mark.parametrize("filtered", [False, True])
def test_oracle_is_the_dense_softmax(filtered):
    arrays, _ = inputs()
    logp, entropy, lse, mean_z = forward(arrays, filtered=filtered)
    want_logp, want_entropy, p, z = dense(*arrays, filtered)
    np.testing.assert_allclose(logp, want_logp, rtol=1e-12)
    np.testing.assert_allclose(entropy, want_entropy, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(mean_z, (p * z).sum(1), rtol=1e-10, atol=1e-12)


def test_chunks_and_the_decode_side_agree_to_the_bit():
    arrays, _ = inputs(jnp.bfloat16)
    x, w, targets, tau, inverse = arrays
    with jax.enable_x64(True):
        z, = vocab.logits_p.bind(x, w, inverse, reductions="float64", kernels="auto")
    want, = vocab.of_logits_p.bind(z, targets, tau, reductions="float64", kernels="auto")
    for chunk in (V, 32, 7, 1):
        np.testing.assert_array_equal(forward(arrays, chunk)[0].astype(jnp.float32), want)


def test_gradient_against_finite_differences():
    with jax.enable_x64(True):
        (x, w, targets, tau, inverse), rng = inputs(jnp.float64)
        tau = jnp.where(jnp.arange(R) < 4, tau, -jnp.inf)
        ct = [jnp.asarray(rng.normal(size=R)) for _ in range(2)]
        params = {"chunk": 20, "filtered": True, "reductions": "float64", "kernels": "auto"}

        def loss(x, w):
            logp, entropy, *_ = vocab.forward_p.bind(x, w, targets, tau, inverse, **params)
            return float((logp * ct[0] + entropy * ct[1]).sum())

        logp, entropy, lse, mean_z = vocab.forward_p.bind(x, w, targets, tau, inverse, **params)
        grads = vocab.backward_p.bind(x, w, targets, tau, inverse, logp, entropy, lse, mean_z, *ct, weight="float64", **params)
        for _ in range(4):
            dx, dw = (jnp.asarray(rng.normal(size=a.shape)) for a in (x, w))
            h = 1e-6
            numeric = (loss(x + h * dx, w + h * dw) - loss(x - h * dx, w - h * dw)) / (2 * h)
            exact = float((grads[0] * dx).sum() + (grads[1] * dw).sum())
            assert abs(numeric - exact) < 1e-6 * (1 + abs(exact))
        only, = vocab.backward_p.bind(x, w, targets, tau, inverse, logp, entropy, lse, mean_z, *ct, weight=None, **params)
        np.testing.assert_array_equal(only, grads[0])


def check(fun, *shapes, tensor_core=True):
    pytest.importorskip("jax_triton")
    from jetrl_jax.kernels import inspect

    first, *rest = inspect.compiled(fun, *shapes)
    assert first.uses("HGMMA") == tensor_core
    for k in (first, *rest):
        assert k.spilled == 0, (k.name, k.spilled)
        assert k.shared <= inspect.SHARED_LIMIT
    return [first, *rest]


@pytest.mark.parametrize("index", range(6))
def test_ordered_dot_compiles(index):
    pytest.importorskip("triton")
    from jetrl_jax.kernels import ordered_dot

    config = ordered_dot.CONFIGS[index]
    assert len(ordered_dot.CONFIGS) == 6
    r, dtype = (64, jnp.float32) if config.cm == 1 else (8192, jnp.bfloat16) if index % 2 else (1000, jnp.float32)
    kernel, = check(lambda x, w: ordered_dot.product(x, w, dtype=dtype, config=config), SHAPE((r, 4096), jnp.bfloat16),
                    SHAPE((151936, 4096), jnp.bfloat16))
    assert kernel.threads == 128 * (config.cm * config.cn + 1)
    assert kernel.uses("UTMALDG")


@pytest.mark.parametrize("r, v, d, filtered", [(8192, 151936, 4096, False), (100, 1003, 200, True)])
def test_vocabulary_compiles(r, v, d, filtered):
    pytest.importorskip("triton")
    from jetrl_jax.kernels import vocab_kernels

    x, w, row, ids = SHAPE((r, d), jnp.bfloat16), SHAPE((v, d), jnp.bfloat16), SHAPE((r,), jnp.float32), SHAPE((r,), jnp.int32)
    check(lambda *a: vocab_kernels.forward(*a, filtered), x, w, ids, row, row)
    if filtered:
        check(lambda *a: vocab_kernels.statistics(*a, filtered), SHAPE((r, v), jnp.float32), ids, row, tensor_core=False)
        check(lambda *a: vocab_kernels.gradient(*a, min(v, 8192), filtered), x, w, SHAPE((7, r), jnp.float32), ids, SHAPE((1,), jnp.int32))


def test_tiles_chosen():
    pytest.importorskip("triton")
    from jetrl_jax.kernels import ordered_dot

    for rows in (1, 64, 65, 128, 129, 8192):
        for cols in (1, 500, 32000, 151936):
            config = ordered_dot.config_for(rows, cols, 4096)
            assert (config.cm == 1) == (rows <= 64)
        assert all((c.cm == 1) == (rows <= 64) for c in ordered_dot.candidates(rows))
