"""Group advantages against loops written from the papers, and the properties every baseline must have."""

import math

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_jax.errors import UserError
from jetrl_jax.train.advantages import ADVANTAGES, STD_EPSILON, useful_groups

REWARDS = np.array([[1, 0, 0, 1], [0.5, -1, 2, 0.25], [0, 0, 0, 1]], np.float32)


def oracle(name: str, group: list[float]) -> list[float]:
    """One group, in plain Python floats."""
    n = len(group)
    mean = sum(group) / n
    if name == "dr_grpo":
        return [r - mean for r in group]
    if name == "rloo":
        return [r - sum(other for j, other in enumerate(group) if j != i) / (n - 1) for i, r in enumerate(group)]
    std = math.sqrt(sum((r - mean) ** 2 for r in group) / (n - 1))
    return [(r - mean) / (std + STD_EPSILON) for r in group]


class AdvantagesTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_pmap=True)
    @parameterized.parameters("grpo", "dr_grpo", "rloo")
    def test_against_loops(self, name):
        got = self.variant(ADVANTAGES[name])(REWARDS)
        chex.assert_shape(got, (3, 4))
        chex.assert_type(got, jnp.float32)
        chex.assert_trees_all_close(got, np.array([oracle(name, g) for g in REWARDS.tolist()], np.float32), atol=1e-6, rtol=1e-6)

    @chex.variants(with_jit=True, without_jit=True, with_pmap=True)
    @parameterized.parameters("grpo", "dr_grpo", "rloo")
    def test_groups_without_signal_give_exactly_zero(self, name):
        # the float32 mean of several 0.1 need not be 0.1, so a test for std > 0 would let such groups through
        advantage = self.variant(ADVANTAGES[name])
        for group_size in (3, 7):
            for value in (0.0, 1.0, 0.1, 1 / 3, -0.7, 1e6):
                rewards = np.full((2, group_size), value, np.float32)
                rewards[1, 0] += 1
                got = advantage(rewards)
                np.testing.assert_array_equal(got[0], np.zeros(group_size, np.float32))
                assert np.abs(got[1]).max() > 0.1

    @chex.variants(with_jit=True, without_jit=True, with_pmap=True)
    def test_useful_groups(self):
        bad = np.array([[1, 0], [0.1, 0.1], [np.nan, 1], [np.inf, 1], [-3, -2]], np.float32)
        np.testing.assert_array_equal(self.variant(useful_groups)(bad), [True, False, False, False, True])
        for advantage in ADVANTAGES.values():
            got = np.asarray(self.variant(advantage)(bad))
            np.testing.assert_array_equal(got[1:4], 0)  # one bad score does not reach the loss as NaN
            assert (got[[0, 4]] != 0).all()


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_one_sample_is_refused(name):
    with pytest.raises(UserError, match="group_size is 1"):
        ADVANTAGES[name](jnp.ones((4, 1)))


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_a_flat_array_is_refused(name):
    with pytest.raises(ValueError, match=r"\[P, G\]"):
        ADVANTAGES[name](jnp.ones((4,)))


def test_the_std_of_grpo_is_the_sample_std():
    got = ADVANTAGES["grpo"](jnp.asarray(REWARDS))
    expected = (REWARDS - REWARDS.mean(1, keepdims=True)) / (REWARDS.std(1, ddof=1, keepdims=True) + 1e-4)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


# eighths are exact in float32, so a shift loses nothing and the tolerance can be tight
eighths = st.lists(st.integers(-40, 40), min_size=8, max_size=8).map(lambda xs: np.array(xs, np.float32).reshape(2, 4) / 8)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@settings(max_examples=40, deadline=None)
@given(rewards=eighths, shift=st.integers(-64, 64))
def test_properties(name, rewards, shift):
    got = np.asarray(ADVANTAGES[name](jnp.asarray(rewards)))
    np.testing.assert_allclose(got.mean(1), 0, atol=1e-5)
    np.testing.assert_allclose(ADVANTAGES[name](jnp.asarray(rewards + np.float32(shift))), got, atol=1e-5)
    order = np.argsort(rewards, axis=1, kind="stable")
    assert (np.diff(np.take_along_axis(got, order, axis=1), axis=1) >= -1e-6).all()  # a better reward, no smaller an advantage
    if name == "rloo":
        np.testing.assert_allclose(got, np.asarray(ADVANTAGES["dr_grpo"](jnp.asarray(rewards))) * 4 / 3, atol=1e-5)
    if name == "grpo":  # scale-free, up to the epsilon
        np.testing.assert_allclose(ADVANTAGES[name](jnp.asarray(rewards * 4)), got, rtol=2e-3, atol=1e-6)
