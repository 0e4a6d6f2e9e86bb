"""lm_head in chunks of the vocabulary against the dense log-softmax: values, entropies, gradients, and what is never held."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from tiny import CONFIG, SAMPLING, batch_of, prompts, random_params

from jetrl_jax.models.head import HeadSpec, logits, token_logprobs
from jetrl_jax.models.qparams import quantize_params
from jetrl_jax.models.transformer import Transformer
from jetrl_jax.precision import BF16, FLOAT32, make_policy
from jetrl_jax.quantize import quantize
from jetrl_jax.rollout.decode import Rollout
from jetrl_jax.rollout.sampling import Sampling, cutoff, masked_logprob
from jetrl_jax.train.update import completion_logprobs

R, D, V = 24, 8, 80


def inputs(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    hidden, w = (jnp.asarray(rng.normal(size=s), dtype) for s in ((R, D), (V, D)))
    return hidden, w, jnp.asarray(rng.integers(0, V, R), jnp.int32)


def dense(hidden, w, targets, tau, temperature):
    """Log-probabilities and entropies [R] over {z >= tau} and the target, everything held, float64."""
    z = hidden @ w.T / temperature
    own = jnp.arange(V) == targets[:, None]
    z = jnp.where((z.astype(jnp.float32) >= tau[:, None]) | own, z, -1e30)
    logp = jax.nn.log_softmax(z)
    return logp[jnp.arange(R), targets], -(jnp.exp(logp) * logp).sum(-1)


def shapes_in(f, *args):
    """Shapes of all arrays of a lowered program."""
    text = jax.jit(f).lower(*args).as_text()
    return {tuple(int(n) for n in found.split("x")[:-1]) for found in re.findall(r"tensor<([0-9x]+x[a-z][a-z0-9]*)>", text)}


class TokenLogprobsTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.parameters((V, False, 1.0), (33, True, 0.7), (7, False, 0.7))
    def test_is_the_dense_log_softmax(self, chunk, filtered, temperature):
        hidden, w, targets = inputs()
        spec = HeadSpec(FLOAT32, temperature, chunk, filtered)
        q = quantize(w, "lm_head.w", FLOAT32)
        sampling = Sampling(max_new_tokens=1, temperature=temperature, top_k=11 if filtered else 0, top_p=0.8 if filtered else 1.0)
        tau = cutoff(logits(hidden, q, spec), sampling)
        weights = jnp.asarray(np.random.default_rng(1).normal(size=(2, R)), jnp.float32)

        def ours(hidden, tap):
            return token_logprobs(hidden, q, tap, targets, tau, spec)

        def loss(hidden, tap):  # log-probabilities and entropies, each row with a weight of its own
            return sum((a * b).sum() for a, b in zip(weights, ours(hidden, tap), strict=True))

        logp, entropy = self.variant(ours)(hidden, w)
        grads = self.variant(jax.grad(loss, (0, 1)))(hidden, w)
        chex.assert_shape([logp, entropy], (R,))
        with jax.enable_x64(True):
            wide = [x.astype(jnp.float64) for x in (hidden, w)]
            want, back = jax.vjp(lambda h, w: dense(h, w, targets, tau, temperature), *wide)
            want_grads = back(tuple(weights.astype(jnp.float64)))
        for got, right in zip((logp, entropy, *grads), (*want, *want_grads), strict=True):
            assert got.dtype == jnp.float32
            np.testing.assert_allclose(got, right, rtol=2e-6, atol=2e-6)
        if filtered:  # the rollout's own function, to the bit
            np.testing.assert_array_equal(logp, masked_logprob(logits(hidden, q, spec), targets, tau))

    @chex.variants(with_jit=True, without_jit=True, with_pmap=True)
    def test_logits_are_float32_over_the_temperature(self):
        hidden, w, _ = inputs(jnp.bfloat16)
        spec = HeadSpec(BF16, 0.7)
        z = self.variant(lambda h, w: logits(h, quantize(w, "lm_head.w", BF16), spec))(hidden, w)
        chex.assert_shape(z, (R, V))
        assert z.dtype == jnp.float32
        np.testing.assert_allclose(z, np.asarray(hidden, np.float64) @ np.asarray(w, np.float64).T / 0.7, rtol=1e-6, atol=1e-6)


def test_chunks_do_not_change_a_bit():
    hidden, w, targets = inputs(jnp.bfloat16)
    q, tau = quantize(w, "lm_head.w", BF16), jnp.full(R, -jnp.inf)
    want = masked_logprob(logits(hidden, q, HeadSpec(BF16)), targets, tau)
    for chunk in (V, 32, 7, 1):
        np.testing.assert_array_equal(token_logprobs(hidden, q, None, targets, tau, HeadSpec(BF16, chunk=chunk))[0], want)


@pytest.mark.parametrize("chunk, held", [(16, False), (V, True)])
def test_the_logits_of_all_rows_are_never_held(chunk, held):
    """Forward and backward; with one chunk for the whole vocabulary the walk does find them, so it would."""
    hidden, w, targets = inputs()
    q, tau, spec = quantize(w, "lm_head.w", FLOAT32), jnp.full(R, -jnp.inf), HeadSpec(FLOAT32, chunk=chunk, filtered=True)
    found = shapes_in(jax.grad(lambda h, t: token_logprobs(h, q, t, targets, tau, spec)[0].sum(), (0, 1)), hidden, w)
    assert (max(int(np.prod(s)) for s in found) >= R * V) == held


def test_the_update_never_holds_logits_of_the_whole_vocabulary():
    policy = make_policy("bf16")
    model, params, (tokens, lengths) = Transformer(CONFIG, policy.train), random_params(), prompts()
    q = jax.eval_shape(lambda p: quantize_params(policy.train, CONFIG, p), params)
    n, zeros = SAMPLING.max_new_tokens, jnp.zeros((4, SAMPLING.max_new_tokens))
    batch = batch_of(tokens, lengths, Rollout(zeros.astype(jnp.int32), zeros, zeros, jnp.full(4, n), jnp.ones(4, bool)))

    def widest(chunk):
        spec = HeadSpec.of(policy.train, chunk=chunk)
        loss = jax.grad(lambda p, q: completion_logprobs(model, {"params": p, "q": q}, batch, spec)[0].sum())
        return [s for s in shapes_in(loss, params, q) if len(s) > 1 and s[-1] == CONFIG.vocab_size]

    assert not widest(48)
    assert widest(CONFIG.vocab_size)
