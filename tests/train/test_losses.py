"""Losses against a float64 loop oracle: values, gradients by finite differences, chex variants, micro-batches and shards."""

import itertools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_oracle import AGGREGATIONS, BATCH, BOUNDS, CONTEXTS, CORRECTIONS, KLS, LENGTHS, B, N, V, objective, oracle

from jetrl_jax.train import losses
from jetrl_jax.train.losses import Normaliser, finish_metrics, mask_of, normaliser, policy_loss


@pytest.mark.parametrize("correction", CORRECTIONS, ids="-".join)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("kind", sorted(BOUNDS))
def test_value_and_gradient_in_float64(kind, aggregation, correction):
    """Every objective x aggregation x correction x KL; the model's chain rule included."""
    for kl in KLS:
        o = objective(kind, aggregation, correction, kl)
        margins: list[float] = []
        expected = oracle(o, BATCH, BATCH.theta, BATCH.theta, margins)
        assert min(map(abs, margins)) > 1e-4 and min(margins) < 0 < max(margins)  # off the kinks, on both sides of them
        with jax.enable_x64(True):
            arrays, optional = BATCH.arrays(jnp.float64)
            by = normaliser(arrays[2], o)

            def loss(theta, arrays=arrays, optional=optional, o=o, by=by):
                return policy_loss(BATCH.model(theta, jnp), *arrays, o, by, **optional)[0]

            value, gradient = (np.asarray(x) for x in jax.value_and_grad(loss)(jnp.asarray(BATCH.theta)))
        assert value.dtype == np.float64
        np.testing.assert_allclose(value, expected, rtol=1e-12)
        step = 1e-6
        for direction in np.random.default_rng(0).standard_normal((6, CONTEXTS, V)):
            up, down = (oracle(o, BATCH, BATCH.theta + sign * step * direction, BATCH.theta) for sign in (1, -1))
            np.testing.assert_allclose(np.vdot(gradient, direction), (up - down) / (2 * step), rtol=1e-6, atol=1e-9)
        assert np.abs(gradient).max() > 1e-3


def test_gspo_without_token_weights_is_the_sequence_objective():
    """Then the token form has the very gradient of eq. 10, that of the loss with nothing frozen."""
    o = objective("gspo", "sequence_mean")
    with jax.enable_x64(True):
        arrays, _ = BATCH.arrays(jnp.float64)
        gradient = jax.grad(lambda t: policy_loss(BATCH.model(t, jnp), *arrays, o, normaliser(arrays[2], o))[0])(jnp.asarray(BATCH.theta))

    def value(theta):
        """Eq. 5, one term for each sequence."""
        logp, terms = BATCH.model(theta, np), []
        for b in range(B):
            if LENGTHS[b]:
                s = math.exp(sum(logp[b, n] - BATCH.rollout[b, n] for n in range(LENGTHS[b])) / LENGTHS[b])
                a = BATCH.advantages[b]
                terms.append(min(s * a, min(max(s, 1 - o.clip_low), 1 + o.clip_high) * a))
        return -sum(terms) / len(terms)

    for at in np.ndindex(BATCH.theta.shape):
        shift = np.zeros_like(BATCH.theta)
        shift[at] = 1e-6
        np.testing.assert_allclose(gradient[at], (value(BATCH.theta + shift) - value(BATCH.theta - shift)) / 2e-6, rtol=1e-6, atol=1e-9)


class PolicyLossTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_pmap=True)
    def test_variants_agree_with_the_oracle_in_float32(self):
        for kind, correction in (("dapo", ("tis", "token")), ("gspo", ("mis", "sequence"))):
            o = objective(kind, "sequence_mean", correction, (0.3, "k3"))

            def loss(logp, rollout, advantages, mask, old, ref, o=o):
                return policy_loss(logp, rollout, advantages, mask, o, normaliser(mask, o), old_logp=old, ref_logp=ref)

            (rollout, advantages, mask), optional = BATCH.arrays()
            logp = jnp.asarray(BATCH.logp, jnp.float32)
            value, sums = self.variant(loss)(logp, rollout, advantages, mask, optional["old_logp"], optional["ref_logp"])
            chex.assert_shape([value, *sums.values()], ())
            chex.assert_type(value, jnp.float32)
            np.testing.assert_allclose(value, oracle(o, BATCH, BATCH.theta, BATCH.theta), rtol=1e-5)

    @chex.variants(with_jit=True, without_jit=True, with_pmap=True)
    def test_mask_of(self):
        lengths, truncated = jnp.array([3, 0, 4, 2]), jnp.array([False, False, True, False])
        keep = [[1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]]
        drop = [*keep[:2], [0, 0, 0, 0], keep[3]]
        for flag, expected in ((False, keep), (True, drop)):
            got = self.variant(lambda a, b, flag=flag: mask_of(a, b, 4, flag))(lengths, truncated)
            chex.assert_type(got, jnp.float32)
            np.testing.assert_array_equal(got, expected)

    @chex.variants(with_jit=True, without_jit=True, with_pmap=True)
    def test_kl_reward_penalty(self):
        for estimator in ("k1", "k2", "k3"):
            got = self.variant(lambda p, r, m, e=estimator: losses.kl_reward_penalty(p, r, m, e, 0.7))(
                jnp.asarray(np.where(BATCH.mask > 0, BATCH.rollout, np.nan)), jnp.asarray(BATCH.ref), jnp.asarray(BATCH.mask)
            )
            expected = np.zeros(B)
            for b, n in itertools.product(range(B), range(N)):
                if n < LENGTHS[b]:
                    x = BATCH.ref[b, n] - BATCH.rollout[b, n]
                    expected[b] += 0.7 * {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[estimator]
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("kind", ["dapo", "gspo"])
def test_micro_batches_add_up(kind, aggregation):
    o = objective(kind, aggregation, ("tis", "sequence"), (0.3, "k3"))
    (rollout, advantages, mask), optional = BATCH.arrays()
    by = normaliser(mask, o)

    def graded(rows):
        r = np.array(rows)
        share = {k: v[r] for k, v in optional.items()}

        def loss(p):
            return policy_loss(p, rollout[r], advantages[r], mask[r], o, by, **share)

        return jax.value_and_grad(loss, has_aux=True)(logp[r])

    logp = jnp.asarray(BATCH.logp, jnp.float32)
    (whole, metrics), gradient = graded(range(B))
    split = ([0, 1, 3, 3, 3], [2, 3, 3, 3, 3], [4, 3, 3, 3, 3])  # row 3 has no token: it pads the micro-batches to one shape
    parts = [graded(rows) for rows in split]
    np.testing.assert_allclose(sum(p[0][0] for p in parts), whole, rtol=1e-5)
    gathered = np.zeros((B, N), np.float32)
    for rows, (_, g) in zip(split, parts, strict=True):
        np.add.at(gathered, rows, np.asarray(g))
    chex.assert_trees_all_close(gathered, np.asarray(gradient), rtol=1e-6, atol=1e-9)
    added = jax.tree.map(lambda *xs: sum(xs), *[p[0][1] for p in parts])
    chex.assert_trees_all_close(finish_metrics(added), finish_metrics(metrics), rtol=1e-6)


def test_normalisers_of_shards_add_up_by_psum():
    o = objective(aggregation="constant")
    mask = jnp.asarray(BATCH.mask[:4], jnp.float32)
    shards = jax.vmap(lambda m: jax.lax.psum(normaliser(m, o), "data"), axis_name="data")(mask.reshape(2, 2, N))
    whole = normaliser(mask, o)
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x[0], shards), whole)
    chex.assert_trees_all_equal(whole, Normaliser(*(np.float32(x) for x in (14, 3, 27))))
