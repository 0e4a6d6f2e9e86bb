"""Log-probability, entropy and their gradients without [R, V] in memory, against float64. JETRL_TEST_PLATFORM=cuda,cpu."""

import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.kernels import vocab

pytestmark = pytest.mark.gpu

R, D, V = 200, 520, 5003
PARAMS = {"chunk": 512, "reductions": "float32", "kernels": "required"}


def rows(seed=None):
    """Hidden states whose targets are certain to 1e-3 … 1e-9 in the first 20 rows, random elsewhere; a temperature and a τ each."""
    rng = np.random.default_rng(seed)
    w = rng.normal(size=(V, D)) * 0.05
    x = rng.normal(size=(R, D)) * rng.uniform(0.5, 3, (R, 1))
    targets = rng.integers(0, V, R)
    targets[20] = V - 1
    inverse = 1 / rng.uniform(0.3, 2.0, R)
    x[:20] = w[targets[:20]] / (w[targets[:20]] ** 2).sum(1, keepdims=True) * np.linspace(16, 30, 20)[:, None]
    inverse[:20] = 1
    tau = np.where(rng.random(R) < 0.3, -np.inf, rng.normal(size=R) * 0.5)
    return (jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16), jnp.asarray(targets, jnp.int32), jnp.asarray(tau, jnp.float32),
            jnp.asarray(inverse, jnp.float32)), rng


def dense(z, targets, tau, filtered):
    """Log-probabilities, entropies [R] and p [R, V] of float32 logits z, in float64; a certain token keeps its digits."""
    z, tau = np.asarray(z, np.float64), np.asarray(tau, np.float64)
    own = np.arange(V) == np.asarray(targets)[:, None]
    kept = (z >= tau[:, None]) | own if filtered else np.ones_like(own)
    m = np.where(kept, z, -np.inf).max(1, keepdims=True)
    e = np.where(kept, np.exp(z - m), 0)
    others, chosen = np.where(own, 0, e).sum(1), z[own]
    logp = np.where(chosen == m[:, 0], -np.log1p(others), chosen - m[:, 0] - np.log(e.sum(1)))
    p = e / e.sum(1, keepdims=True)
    log_p = np.where(kept, z - m - np.log(e.sum(1, keepdims=True)), 0)
    return logp, -(p * log_p).sum(1), p


@pytest.mark.parametrize("filtered", [False, True])
def test_forward_and_backward_against_float64(filtered):
    (x, w, targets, tau, inverse), rng = rows()
    params = {**PARAMS, "filtered": filtered}
    z = np.asarray(vocab.logits_p.bind(x, w, inverse, reductions="float32", kernels="required")[0])
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T * np.asarray(inverse, np.float64)[:, None]
    np.testing.assert_allclose(z, exact, atol=2e-5 * np.abs(exact).max())
    logp, entropy, lse, mean_z = vocab.forward_p.bind(x, w, targets, tau, inverse, **params)
    want_logp, want_entropy, p = dense(z, targets, tau, filtered)
    assert (np.asarray(tau)[:, None] > z)[np.arange(V) == np.asarray(targets)[:, None]].any(), "no target below its cut-off was drawn"
    np.testing.assert_allclose(logp, want_logp, rtol=3e-5)
    np.testing.assert_allclose(entropy, want_entropy, rtol=3e-5, atol=1e-8)
    np.testing.assert_allclose(mean_z, (p * z).sum(1), rtol=1e-5, atol=1e-5)
    # the decode side: the same logits in memory, a few rows, the same bits
    few, = vocab.logits_p.bind(x[10:27], w, inverse[10:27], reductions="float32", kernels="required")
    np.testing.assert_array_equal(np.asarray(few), z[10:27])
    cut = tau[10:27] if filtered else jnp.full(17, -jnp.inf)
    of_logits, = vocab.of_logits_p.bind(few, targets[10:27], cut, reductions="float32", kernels="required")
    np.testing.assert_array_equal(np.asarray(of_logits), np.asarray(logp)[10:27])

    g_logp, g_entropy = (jnp.asarray(rng.normal(size=R), jnp.float32) for _ in range(2))
    given = x, w, targets, tau, inverse, logp, entropy, lse, mean_z, g_logp, g_entropy
    dx, dw = vocab.backward_p.bind(*given, weight="float32", **params)
    only, = vocab.backward_p.bind(*given, weight=None, **params)
    np.testing.assert_array_equal(np.asarray(only), np.asarray(dx))
    own = np.arange(V) == np.asarray(targets)[:, None]
    a, b, f = (np.asarray(v, np.float64)[:, None] for v in (g_logp, g_entropy, inverse))
    dz = (a * (own - p) - b * p * (z - (p * z).sum(1, keepdims=True))) * f
    for got, want in ((dx, dz @ np.asarray(w, np.float64)), (dw, dz.T @ np.asarray(x, np.float64))):
        error = np.linalg.norm(np.asarray(got, np.float64) - want, axis=1)
        scale = np.linalg.norm(dz, axis=1) * 0.05 * D**0.5 if got is dx else np.abs(want).max() * D**0.5
        assert (error <= 6e-3 * scale + 1e-10).all(), (error / scale).max()


def test_certain_tokens_keep_their_digits_and_their_gradient():
    (x, w, targets, tau, inverse), _ = rows()
    logp, entropy, lse, mean_z = vocab.forward_p.bind(x, w, targets, tau, inverse, filtered=False, **PARAMS)
    assert -1e-6 < float(logp[19]) < 0
    one, none = jnp.ones(R), jnp.zeros(R)
    given = x, w, targets, tau, inverse, logp, entropy, lse, mean_z, one, none
    dx, = vocab.backward_p.bind(*given, weight=None, filtered=False, **PARAMS)
    z = np.asarray(vocab.logits_p.bind(x, w, inverse, reductions="float32", kernels="required")[0])
    p = dense(z, targets, tau, False)[2]
    own = np.arange(V) == np.asarray(targets)[:, None]
    off = np.where(own, 0, p).sum(1)
    want = np.where(own, off[:, None], -p) @ np.asarray(w, np.float64)
    error = np.linalg.norm(np.asarray(dx, np.float64) - want, axis=1) / np.linalg.norm(want, axis=1)
    assert error[:20].max() < 2e-2, error[:20]


def test_oracle_and_kernel_agree_and_nan_is_seen():
    (x, w, targets, tau, inverse), _ = rows()
    out = vocab.forward_p.bind(x, w, targets, tau, inverse, filtered=True, **PARAMS)
    oracle = vocab.forward_p.bind(x, w, targets, tau, inverse, filtered=True, chunk=512, reductions="float32", kernels="off")
    # logits of XLA's order may fall on the other side of a cut-off: a token more or less
    for got, want in zip(out, oracle, strict=True):
        assert np.median(np.abs(np.asarray(got) - np.asarray(want))) < 3e-5
    logp, entropy, *_ = vocab.forward_p.bind(x.at[3, 0].set(jnp.nan), w, targets, tau, inverse, filtered=False, **PARAMS)
    assert np.isnan(logp[3]) and np.isnan(entropy[3]) and np.isfinite(np.delete(np.asarray(logp), 3)).all()
