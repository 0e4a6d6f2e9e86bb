"""The sampler draws from the distribution whose log-probabilities it reports, and the filters keep what an independent oracle keeps."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from jetrl_jax.errors import UserError
from jetrl_jax.rollout.sampling import Sampling, cutoff, masked_logprob, request_key, sample

V = 41  # not a power of two
DRAWS = 20_000
LOGITS = np.random.default_rng(5).normal(0.0, 1.5, V).astype(np.float32)
LOGITS[7] = -np.inf  # a forbidden token
LOGITS[11] = LOGITS[12]  # a tie

SETTINGS = {
    "plain": Sampling(max_new_tokens=1),
    "cold": Sampling(max_new_tokens=1, temperature=0.7),
    "hot": Sampling(max_new_tokens=1, temperature=1.3),
    "top_k": Sampling(max_new_tokens=1, top_k=9),
    "top_p": Sampling(max_new_tokens=1, top_p=0.8),
    "min_p": Sampling(max_new_tokens=1, min_p=0.1),
    "all": Sampling(max_new_tokens=1, temperature=1.3, top_k=20, top_p=0.9, min_p=0.05),
}


def tempered(sampling: Sampling) -> jax.Array:
    return jnp.asarray(LOGITS / np.float32(sampling.temperature))


@functools.cache
def all_draws() -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """For each setting (tokens [requests, positions], reported probabilities [V], kept [V]) of many draws from the one distribution.

    One program for all settings: XLA then makes their common noise once, and compiling is what takes the time here.
    """
    requests, positions = (jnp.asarray(x) for x in np.divmod(np.arange(DRAWS), 100))

    @jax.jit
    def program(key, zs):
        result = {}
        for name, sampling in SETTINGS.items():
            z = zs[name]
            tokens, tau = sample(key, jnp.broadcast_to(z, (DRAWS, V)), requests, positions, sampling)
            result[name] = z, tokens, tau, masked_logprob(jnp.broadcast_to(z, (V, V)), jnp.arange(V), tau[:V])
        return result

    drawn = jax.device_get(program(jax.random.key(20), {name: tempered(sampling) for name, sampling in SETTINGS.items()}))
    draws = {}
    for name, (z, tokens, tau, logprobs) in drawn.items():
        assert np.unique(tau).size == 1
        kept = z >= tau[0]
        draws[name] = tokens.reshape(-1, 100), np.where(kept, np.exp(logprobs.astype(np.float64)), 0.0), kept
    return draws


def fit(tokens: np.ndarray, probabilities: np.ndarray) -> float:
    """p-value of the chi-square test; tokens expected fewer than 5 times share one bin."""
    counts, expected = np.bincount(tokens.ravel(), minlength=V), probabilities / probabilities.sum() * tokens.size
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] == 0:
        assert counts[-1] == 0
        counts, expected = counts[:-1], expected[:-1]
    return stats.chisquare(counts, expected).pvalue


@pytest.mark.parametrize("name", SETTINGS)
def test_draws_follow_the_reported_distribution(name):
    tokens, reported, kept = all_draws()[name]
    assert abs(reported.sum() - 1) < 1e-5
    assert not np.isin(tokens, np.flatnonzero(~kept)).any()
    assert not (tokens == 7).any()
    assert fit(tokens, reported) > 1e-4


@pytest.mark.parametrize("name", [n for n in SETTINGS if n != "plain"])
def test_draws_do_not_follow_the_plain_distribution(name):
    tokens, _, _ = all_draws()[name]
    plain = np.exp(LOGITS.astype(np.float64))
    assert fit(tokens, plain / plain.sum()) < 1e-6


def test_draws_of_neighbouring_positions_and_requests_are_independent():
    tokens = (all_draws()["plain"][0] > V // 2).astype(int)
    for here, there in [(tokens[:, :-1], tokens[:, 1:]), (tokens[:-1], tokens[1:]), (tokens[:-1, 1:], tokens[1:, :-1])]:
        table = np.histogram2d(here.ravel(), there.ravel(), bins=2)[0]
        assert stats.chi2_contingency(table).pvalue > 1e-4


def oracle(z, top_k: int, top_p: float, min_p: float) -> tuple[set[int], float]:
    """The kept set, token by token in float64, and how close the nearest token came to top-p's edge."""
    z = [float(v) for v in z]
    kept = [v for v in range(len(z)) if top_k == 0 or sum(other > z[v] for other in z) < top_k]
    weight = {v: math.exp(z[v] - max(z)) for v in kept}
    edge = math.inf
    if top_p < 1:
        total = math.fsum(weight.values())
        # With ties kept, the mass before a token is the mass of all that are strictly more probable.
        before = {v: math.fsum(weight[o] for o in kept if z[o] > z[v]) / total for v in kept}
        edge = min(abs(b - top_p) for b in before.values())
        kept = [v for v in kept if before[v] < top_p]
    return {v for v in kept if weight[v] >= min_p}, edge


FILTERS = [
    {"top_k": 1}, {"top_k": 4}, {"top_k": 14}, {"top_p": 1e-60}, {"top_p": 0.3}, {"top_p": 0.9}, {"min_p": 1e-4}, {"min_p": 0.2},
    {"min_p": 1.0}, {"top_k": 3, "top_p": 0.9}, {"top_k": 4, "top_p": 0.5}, {"top_p": 0.8, "min_p": 0.1}, {"top_k": 4, "min_p": 0.02},
    {"top_k": 5, "top_p": 0.95, "min_p": 0.1},
]  # fmt: skip


def check_against_oracle(rows, filters) -> None:
    taus = cutoff(jnp.asarray(rows, jnp.float32), Sampling(max_new_tokens=1, **filters))
    for z, tau in zip(rows, np.asarray(taus), strict=True):
        expected, edge = oracle(z, **{"top_k": 0, "top_p": 1.0, "min_p": 0.0, **filters})
        if edge < 1e-9:  # rounding decides
            continue
        # Tokens of probability zero may stand in the set; they can never be drawn.
        possible = {v for v in range(len(z)) if z[v] > -math.inf}
        assert {v for v in range(len(z)) if z[v] >= tau} & possible == expected & possible
        assert tau <= max(z)
        assert tau == -math.inf or tau in z


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_cutoff_keeps_what_the_oracle_keeps(filters):
    rng = np.random.default_rng(6)
    coarse = rng.integers(-4, 5, (60, 11)) * rng.choice([0.25, 0.5, 1.0], (60, 1))  # nearly every row has ties
    coarse[rng.random(coarse.shape) < 0.1] = -np.inf
    coarse[:, 5] = np.maximum(coarse[:, 5], -2.0)
    check_against_oracle(coarse.tolist(), filters)


eighths = st.integers(-40, 40).map(lambda i: i / 8) | st.just(-math.inf)
row = st.lists(eighths, min_size=11, max_size=11).filter(lambda z: max(z) > -math.inf)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(rows=st.lists(row, min_size=2, max_size=2), filters=st.sampled_from(FILTERS))
def test_cutoff_keeps_what_the_oracle_keeps_on_drawn_logits(rows, filters):
    check_against_oracle(rows, filters)


def test_cutoff_is_minus_infinity_without_a_filter():
    z = jnp.asarray(LOGITS)
    for sampling in (SETTINGS["hot"], Sampling(max_new_tokens=1, top_k=V), Sampling(max_new_tokens=1, temperature=0, top_k=3, min_p=0.5)):
        assert cutoff(z, sampling) == -jnp.inf


def test_only_top_p_sorts():
    def has_sort(name):
        return "sort" in str(jax.make_jaxpr(lambda z: cutoff(z, SETTINGS[name]))(jnp.asarray(LOGITS)))

    assert has_sort("top_p")
    assert not any(has_sort(name) for name in ("plain", "hot", "top_k", "min_p", "all"))


def test_a_request_does_not_see_its_neighbours():
    sampling, key = SETTINGS["all"], jax.random.key(3)
    z = jax.random.normal(jax.random.key(1), (30, 1009)) * 2
    ids, positions = jnp.arange(30) * 17 + 5, jnp.arange(30) % 6

    @jax.jit
    def step(z, ids, positions):
        tokens, tau = sample(key, z, ids, positions, sampling)
        return tokens, tau, masked_logprob(z, tokens, tau)

    def in_batches(size, order):
        parts = [step(z[at], ids[at], positions[at]) for at in np.split(order, len(order) // size)]
        return jax.tree.map(lambda *x: np.concatenate(x)[np.argsort(order)], *parts)

    alone = in_batches(1, np.arange(30))
    assert len(set(alone[0].tolist())) > 10
    chex.assert_trees_all_equal(alone, in_batches(5, np.arange(30)))
    chex.assert_trees_all_equal(alone, in_batches(5, np.random.default_rng(4).permutation(30)))  # other neighbours, other slots
    ids = ids + 1
    assert (in_batches(5, np.arange(30))[0] != alone[0]).sum() > 10


def test_request_key_is_the_documented_double_fold():
    key = jax.random.key(9)
    expected = jax.random.fold_in(jax.random.fold_in(key, 4), 2)
    assert (jax.random.key_data(request_key(key, 4, 2)) == jax.random.key_data(expected)).all()
    assert (jax.random.key_data(request_key(key, 2, 4)) != jax.random.key_data(expected)).any()


def test_greedy_takes_the_first_of_equal_tokens_and_reports_temperature_one():
    sampling = Sampling(max_new_tokens=1, temperature=0, top_k=2)
    z = jnp.asarray([[0.0, 3.0, -1.0, 3.0], [5.0, 3.0, 4.0, -jnp.inf]])
    tokens, tau = sample(jax.random.key(0), z, jnp.arange(2), jnp.zeros(2, int), sampling)
    assert tokens.tolist() == [1, 0]
    np.testing.assert_allclose(masked_logprob(z, tokens, tau), jax.nn.log_softmax(z)[jnp.arange(2), tokens], rtol=1e-6)


def test_the_drawn_token_belongs_to_the_set_even_below_the_cutoff():
    z = jnp.asarray([2.0, 1.0, 0.5, -3.0])
    logprob = masked_logprob(z, jnp.asarray(2), jnp.float32(0.75))
    np.testing.assert_allclose(logprob, 0.5 - np.log(np.exp([2.0, 1.0, 0.5]).sum()), rtol=1e-6)


@pytest.mark.parametrize("tau", [-np.inf, 0.3])
def test_gradient_of_masked_logprob_against_finite_differences(tau):
    rng = np.random.default_rng(8)
    z, token = np.append(rng.normal(size=12), -np.inf).astype(np.float32), 4

    def by_hand(z):
        kept = (z >= tau) | (np.arange(z.size) == token)
        return z[token] - np.log(np.exp(z[kept]).sum())

    steps = np.eye(z.size) * 1e-5
    numeric = [(by_hand(z + s) - by_hand(z - s)) / 2e-5 if np.isfinite(v) else 0.0 for s, v in zip(steps, z.astype(float), strict=True)]
    gradient = jax.grad(masked_logprob)(jnp.asarray(z), jnp.asarray(token), jnp.float32(tau))
    np.testing.assert_allclose(gradient, numeric, atol=1e-6)
    assert (gradient[(z < tau) & (np.arange(z.size) != token)] == 0).all()


@functools.cache
def drawer(name: str):
    """One function object for each setting, so that its variants share what JAX caches."""

    def draw(key_data, z, ids, positions):
        tokens, tau = sample(jax.random.wrap_key_data(key_data), z, ids, positions, SETTINGS[name])
        return tokens, tau, masked_logprob(z, tokens, tau)

    return draw


class SamplingVariantsTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_pmap=True)
    @parameterized.parameters("cold", "all")
    def test_shapes_types_and_values(self, name):
        z = jnp.tile(tempered(SETTINGS[name]), (3, 1))
        draw, arguments = drawer(name), (jax.random.key_data(jax.random.key(2)), z, jnp.asarray([4, 9, 4]), jnp.ones(3, jnp.int32))
        tokens, tau, logprobs = result = self.variant(draw)(*arguments)
        chex.assert_shape(result, (3,))
        chex.assert_type(result, [jnp.int32, jnp.float32, jnp.float32])
        chex.assert_trees_all_close(result, jax.jit(draw)(*arguments), atol=1e-6)
        chex.assert_tree_all_finite((tokens, logprobs))
        assert tokens[0] == tokens[2]

    @chex.variants(with_jit=True, with_pmap=True)
    def test_kept_probabilities_sum_to_one_under_vmap(self):
        z = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, V)), jnp.float32)

        def mass(z):
            tau = cutoff(z, SETTINGS["all"])
            chex.assert_shape(tau, (2, 3))
            every = jax.vmap(lambda v: masked_logprob(z, jnp.full((2, 3), v), tau))(jnp.arange(V))  # [V, 2, 3]
            return jnp.sum(jnp.where(jnp.moveaxis(z, -1, 0) >= tau, jnp.exp(every), 0), axis=0)

        chex.assert_trees_all_close(self.variant(mass)(z), jnp.ones((2, 3)), atol=1e-5)


def test_one_trace_per_setting_and_shape():
    @functools.partial(jax.jit, static_argnums=3)
    @chex.assert_max_traces(n=2)
    def step(z, ids, positions, sampling):
        return sample(jax.random.key(0), z, ids, positions, sampling)

    z = jnp.tile(jnp.asarray(LOGITS), (2, 1))
    for position in range(3):
        step(z, jnp.arange(2), jnp.full(2, position), Sampling(max_new_tokens=4, temperature=1, stop_ids=(1, 2)))
        step(z, jnp.arange(2), jnp.full(2, position), Sampling(max_new_tokens=4, temperature=np.float64(1), stop_ids=[1, np.int32(2)]))
        step(z, jnp.arange(2), jnp.full(2, position), Sampling(max_new_tokens=4, top_k=3))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0), ("max_new_tokens", 2.0), ("max_new_tokens", True),
        ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "1"), ("temperature", 1e-30),
        ("top_k", -1), ("top_k", 1.5), ("top_k", False),
        ("top_p", 0.0), ("top_p", 1.01), ("top_p", math.nan), ("top_p", None),
        ("min_p", -0.01), ("min_p", 1.5), ("min_p", math.nan),
        ("stop_ids", (-1,)), ("stop_ids", (1.0,)), ("stop_ids", 2), ("stop_ids", "2"),
    ],
)  # fmt: skip
def test_bad_settings_name_field_and_value(field, value):
    with pytest.raises(UserError, match=f"rollout.{field} = "):
        Sampling(**{"max_new_tokens": 4, field: value})
