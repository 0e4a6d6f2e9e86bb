"""Losses against a float64 loop oracle: values, gradients by finite differences, micro-batches, poison and the on-policy facts.

The oracle takes two points of the model: `theta`, where the loss is, and `frozen`, where everything under a stop_gradient is. So
central differences in theta alone are the gradient that the code should have, also for the token form of GSPO.
"""

import itertools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.errors import UserError
from jetrl_jax.train import losses
from jetrl_jax.train.losses import Normaliser, Objective, aggregate, finish_metrics, mask_of, normaliser, policy_loss, policy_ratio

B, N, CONTEXTS, V = 5, 6, 4, 5
LENGTHS = [6, 3, 5, 0, 1]  # full, ragged, empty, single
BOUNDS = {"grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "gspo": (0.1, 0.15)}
CORRECTIONS = [("none", "token"), ("tis", "token"), ("tis", "sequence"), ("mis", "token"), ("mis", "sequence")]
KLS = [(0.0, "k3"), (0.3, "k1"), (0.3, "k2"), (0.3, "k3")]
AGGREGATIONS = sorted(losses.AGGREGATIONS)


class Batch:
    """A tiny model, a table of logits theta [CONTEXTS, V], and a drawn batch on which clips and caps do and do not bite."""

    def __init__(self, seed: int = 1):
        rng = np.random.default_rng(seed)
        self.theta = rng.standard_normal((CONTEXTS, V))
        self.contexts = rng.integers(0, CONTEXTS, (B, N))
        self.tokens = rng.integers(0, V, (B, N))
        self.mask = (np.arange(N) < np.array(LENGTHS)[:, None]).astype(np.float64)
        self.logp = self.model(self.theta, np)
        self.old = self.logp + 0.25 * rng.standard_normal((B, N))
        self.rollout = self.old + 0.3 * rng.standard_normal((B, N)) - 0.1
        self.ref = self.logp + 0.5 * rng.standard_normal((B, N))
        self.advantages = np.array([1.3, -0.7, -1.1, 0.4, 0.9])

    def model(self, theta, xp):
        logits = theta[self.contexts]
        shifted = logits - logits.max(-1, keepdims=True)
        normal = shifted - xp.log(xp.exp(shifted).sum(-1, keepdims=True))
        return xp.take_along_axis(normal, self.tokens[..., None], axis=-1)[..., 0]

    def arrays(self, dtype=jnp.float32):
        """Positional and keyword arrays of policy_loss, without logp."""
        cast = [jnp.asarray(x, dtype) for x in (self.rollout, self.advantages, self.mask, self.old, self.ref)]
        return cast[:3], {"old_logp": cast[3], "ref_logp": cast[4]}


BATCH = Batch()


def objective(kind="grpo", aggregation="token_mean", correction=("none", "token"), kl=(0.0, "k3"), **changes) -> Objective:
    fields = {
        "kind": kind,
        "clip_low": BOUNDS[kind][0],
        "clip_high": BOUNDS[kind][1],
        "aggregation": aggregation,
        "constant_length": 9,
        "correction": correction[0],
        "correction_level": correction[1],
        "correction_cap": 1.2,
        "kl_coefficient": kl[0],
        "kl_estimator": kl[1],
    }
    return Objective(**(fields | changes))


def oracle(o: Objective, batch: Batch, theta: np.ndarray, frozen: np.ndarray, margins: list[float] | None = None) -> float:
    """The loss in plain Python; `margins` collects the distance of every quantity to its kink and, by sign, which side it is on."""
    logp, fixed = batch.model(theta, np), batch.model(frozen, np)
    margins = [] if margins is None else margins
    rows = []  # per sequence, its token losses
    for b in range(B):
        anchor = batch.rollout[b] if o.correction == "none" else batch.old[b]
        length = LENGTHS[b]
        drift = [anchor[n] - batch.rollout[b, n] for n in range(length)]
        row = []
        for n in range(length):
            if o.kind == "gspo":
                sequence = math.exp(sum(fixed[b, m] - anchor[m] for m in range(length)) / length)
                ratio = sequence * math.exp(logp[b, n] - fixed[b, n])
            else:
                ratio = math.exp(logp[b, n] - anchor[n])
            w = 1.0
            if o.correction != "none":
                w = math.exp(sum(drift) if o.correction_level == "sequence" else drift[n])
                margins.append(w - o.correction_cap)
                if w > o.correction_cap:
                    w = o.correction_cap if o.correction == "tis" else 0.0
            a = batch.advantages[b]
            margins += [ratio - (1 + o.clip_high), ratio - (1 - o.clip_low)]
            clipped = min(max(ratio, 1 - o.clip_low), 1 + o.clip_high)
            loss = -w * min(ratio * a, clipped * a)
            x = batch.ref[b, n] - logp[b, n]
            if o.kl_place == "loss":
                loss += o.kl_coefficient * {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[o.kl_estimator]
            row.append(loss)
        rows.append(row)
    filled = [row for row in rows if row]
    if o.aggregation == "token_mean":
        return sum(map(sum, filled)) / sum(map(len, filled))
    if o.aggregation == "sequence_mean":
        return sum(sum(row) / len(row) for row in filled) / len(filled)
    return sum(map(sum, filled)) / (len(filled) * o.constant_length)


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
