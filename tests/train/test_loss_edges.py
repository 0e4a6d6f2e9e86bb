"""Losses at their edges: poison off the mask, huge ratios, the on-policy facts, metrics by hand, what is refused."""

import itertools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_oracle import AGGREGATIONS, BATCH, BOUNDS, CORRECTIONS, B, N, V, objective

from jetrl_jax.errors import UserError
from jetrl_jax.train import losses
from jetrl_jax.train.losses import Objective, aggregate, finish_metrics, normaliser, policy_loss, policy_ratio


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38])
def test_poison_off_the_mask_reaches_nothing(poison):
    mask = jnp.asarray(BATCH.mask, jnp.float32)

    def dirty(x):
        return jnp.where(mask > 0, jnp.asarray(x, jnp.float32), poison)

    (rollout, advantages, _), optional = BATCH.arrays()
    logp = jnp.asarray(BATCH.logp, jnp.float32)
    bad_advantages = advantages.at[3].set(poison)  # the sequence without a token
    for (kind, aggregation), correction in itertools.product([("grpo", "token_mean"), ("gspo", "sequence_mean")], CORRECTIONS):
        o = objective(kind, aggregation, correction, (0.3, "k3"))

        def loss(logp, rollout, advantages, optional, o=o):
            return policy_loss(logp, rollout, advantages, mask, o, normaliser(mask, o), **optional)

        clean = jax.value_and_grad(loss, has_aux=True)(logp, rollout, advantages, optional)
        poisoned = {k: dirty(v) for k, v in optional.items()}
        got = jax.value_and_grad(loss, has_aux=True)(dirty(logp), dirty(rollout), bad_advantages, poisoned)
        chex.assert_trees_all_equal(got, clean)
        np.testing.assert_array_equal(np.where(BATCH.mask > 0, 0, got[1]), 0)


@pytest.mark.parametrize("correction", CORRECTIONS, ids="-".join)
@pytest.mark.parametrize("kind", ["grpo", "gspo"])
def test_huge_log_ratios_stay_finite(kind, correction):
    o = objective(kind, "token_mean", correction, (0.3, "k3"))
    mask, wide = jnp.asarray(BATCH.mask, jnp.float32), jnp.ones((B, N))
    for size, old in itertools.product((90.0, 1e4), (0.0, None)):
        logp = jnp.array([[-1.0], [-size], [-1.0], [-1.0], [-size]]) * wide
        rollout = jnp.array([[-size], [-1.0], [-size], [-1.0], [-1.0]]) * wide
        for advantages in (jnp.zeros(B), jnp.array([1.0, 1.0, -1.0, 0.0, -1.0])):

            def loss(p, rollout=rollout, old=old, advantages=advantages):
                anchor = None if old is None else rollout - old
                return policy_loss(p, rollout, advantages, mask, o, normaliser(mask, o), old_logp=anchor, ref_logp=rollout)

            chex.assert_tree_all_finite(jax.value_and_grad(loss, has_aux=True)(logp))


@pytest.mark.parametrize("kind", sorted(BOUNDS))
@pytest.mark.parametrize("correction", CORRECTIONS, ids="-".join)
def test_on_policy_the_first_step_is_reinforce(kind, correction):
    """logp == rollout_logp: ratio and weight are 1 to the bit, nothing is clipped, and the gradient is that of -A logp."""
    logp, mask = jnp.asarray(BATCH.logp, jnp.float32), jnp.asarray(BATCH.mask, jnp.float32)
    advantages = jnp.asarray(BATCH.advantages, jnp.float32)
    for clip in (0.2, 0.0):  # with 0 the ratio stands on both bounds, and no gradient may be lost there
        o = objective(kind, "token_mean", correction, clip_low=clip, clip_high=clip)
        by = normaliser(mask, o)
        ratio, weight = policy_ratio(logp, None, logp, mask, o)
        np.testing.assert_array_equal(ratio, 1)
        np.testing.assert_array_equal(weight, 1)
        gradient, sums = jax.grad(lambda p, o=o, by=by: policy_loss(p, logp, advantages, mask, o, by), has_aux=True)(logp)
        reinforce = jax.grad(lambda p: aggregate(-advantages[:, None] * p, mask, "token_mean", by))(logp)  # noqa: B023
        chex.assert_trees_all_close(gradient, reinforce, rtol=1e-6)
        metrics = finish_metrics(sums)
        assert float(metrics["ratio"]) == float(metrics["weight"]) == 1.0 and float(metrics["clip_fraction"]) == 0.0


@pytest.mark.parametrize("correction", CORRECTIONS[1:], ids="-".join)
def test_no_old_log_probability_means_the_first_forward(correction):
    """old_logp None: the anchor is logp itself, held constant, in value and gradient."""
    o = objective("grpo", "token_mean", correction)
    (rollout, advantages, mask), _ = BATCH.arrays()
    logp = jnp.asarray(BATCH.logp, jnp.float32)

    def loss(p, old):
        return policy_loss(p, rollout, advantages, mask, o, normaliser(mask, o), old_logp=old)

    got = jax.value_and_grad(loss, has_aux=True)(logp, None)
    chex.assert_trees_all_equal(got, jax.value_and_grad(loss, has_aux=True)(logp, logp))
    assert float(finish_metrics(got[0][1])["ratio"]) == 1.0 and float(finish_metrics(got[0][1])["weight"]) != 1.0


def test_metrics_by_hand():
    """Six tokens: ratios 1.5, 0.5, 1.0 under either sign of the advantage, bounds 0.8 and 1.2."""
    ratios, mask = np.full((B, N), 9.0, np.float32), np.zeros((B, N), np.float32)
    ratios[:2, :3], mask[:2, :3] = [[1.5, 0.5, 1.0], [1.5, 1.5, 0.5]], 1
    logp, advantages = jnp.log(ratios), jnp.array([1.0, -1.0, 1.0, 1.0, 1.0])
    o = Objective(kl_estimator="k1")
    _, sums = policy_loss(logp, jnp.zeros((B, N)), advantages, mask, o, normaliser(mask, o), ref_logp=logp - jnp.float32(0.25))
    got = finish_metrics(sums)
    by_hand = {"above_positive": 1, "below_positive": 1, "above_negative": 2, "below_negative": 1, "clip_fraction": 2}
    chex.assert_trees_all_close(got, {k: v / 6 for k, v in by_hand.items()} | {"ratio": 6.5 / 6, "weight": 1.0, "kl": 0.25}, rtol=1e-6)


def test_expected_kl_gradients_are_what_the_docstring_says():
    """Over all tokens of one position, weighted by the policy: k2 gives the KL's gradient, k1 nothing, k3 that of the other KL."""
    theta, ref = BATCH.theta[0], BATCH.theta[1] - np.log(np.exp(BATCH.theta[1]).sum())

    def expected(estimator):
        def f(t):
            logp = jax.nn.log_softmax(t)
            return jnp.sum(jax.lax.stop_gradient(jnp.exp(logp)) * losses.kl_estimate(logp, ref, jnp.ones(V), estimator))

        return jax.jit(jax.grad(f))(theta)

    with jax.enable_x64(True):
        policy_to_ref = jax.jit(jax.grad(lambda t: jnp.sum(jax.nn.softmax(t) * (jax.nn.log_softmax(t) - ref))))(theta)
        ref_to_policy = jax.jit(jax.grad(lambda t: jnp.sum(np.exp(ref) * (ref - jax.nn.log_softmax(t)))))(theta)
        for estimator, gradient in (("k1", np.zeros(V)), ("k2", policy_to_ref), ("k3", ref_to_policy)):
            np.testing.assert_allclose(expected(estimator), gradient, atol=1e-6)


def test_kl_in_the_reward_leaves_the_loss_alone():
    (rollout, advantages, mask), optional = BATCH.arrays()
    logp = jnp.asarray(BATCH.logp, jnp.float32)
    plain, reward = objective(), objective(kl=(0.3, "k3"), kl_place="reward")
    values = [policy_loss(logp, rollout, advantages, mask, o, normaliser(mask, o), **optional)[0] for o in (plain, reward)]
    assert float(values[0]) == float(values[1])
    with pytest.raises(ValueError, match="ref_logp"):
        policy_loss(logp, rollout, advantages, mask, objective(kl=(0.3, "k3")), normaliser(mask, plain))


def test_an_empty_batch_gives_zero():
    (rollout, advantages, mask), optional = BATCH.arrays()
    empty, logp = jnp.zeros_like(mask), jnp.asarray(BATCH.logp, jnp.float32)
    for aggregation in AGGREGATIONS:
        o = objective("gspo", aggregation, kl=(0.3, "k3"))
        by = normaliser(empty, o)
        loss, gradient = jax.value_and_grad(lambda p, o=o, by=by: policy_loss(p, rollout, advantages, empty, o, by, **optional)[0])(logp)
        assert float(loss) == 0.0
        np.testing.assert_array_equal(gradient, 0)


def test_equal_objectives_share_one_trace():
    (rollout, advantages, mask), _ = BATCH.arrays()
    chex.clear_trace_counter()

    @chex.assert_max_traces(n=1)
    def loss(logp, o):
        return policy_loss(logp, rollout, advantages, mask, o, normaliser(mask, o))[0]

    jitted = jax.jit(loss, static_argnums=1)
    for _ in range(3):
        jitted(jnp.asarray(BATCH.logp, jnp.float32), objective())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "gspp"}, "unknown algorithm.objective 'gspp': did you mean 'gspo'"),
        ({"aggregation": "token_sum"}, "algorithm.aggregation 'token_sum': did you mean 'token_mean'"),
        ({"kl_estimator": "k4"}, "algorithm.kl_estimator"),
        ({"kl_place": "rewards"}, "did you mean 'reward'"),
        ({"correction": "tiss"}, "did you mean 'tis'"),
        ({"correction_level": "tokens"}, "did you mean 'token'"),
        ({"clip_low": 1.5}, "clip_low is 1.5"),
        ({"clip_high": math.nan}, "clip_high is nan"),
        ({"kl_coefficient": -0.1}, "kl_coefficient is -0.1"),
        ({"correction_cap": 0.5}, "correction_cap is 0.5"),
        ({"aggregation": "constant"}, "constant_length is 0"),
    ],
)
def test_a_bad_field_is_named(changes, message):
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        Objective(**changes)
