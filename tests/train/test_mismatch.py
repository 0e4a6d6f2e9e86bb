"""Mismatch figures against float64 loops, over micro-batches, on poisoned padding and on huge differences."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jetrl_jax.train import mismatch

B, N = 5, 7
IDEAL_ONE = {"mismatch_mean_exp_abs", "mismatch_equal_share", "ess_token", "ess_sequence"}


def draw(seed: int = 0, scale: float = 0.3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    rollout = -rng.exponential(1.0, (B, N)).astype(np.float32)
    update = (rollout + scale * rng.standard_normal((B, N))).astype(np.float32)
    mask = (np.arange(N) < np.array([7, 3, 0, 1, 5])[:, None]).astype(np.float32)
    update[0, :2] = rollout[0, :2]  # some tokens agree exactly
    return update, rollout, mask


def oracle(update: np.ndarray, rollout: np.ndarray, mask: np.ndarray) -> dict[str, float]:
    ds, sequences, equal = [], [], 0
    for b in range(B):
        row = []
        for n in range(N):
            if mask[b, n]:
                row.append(float(update[b, n]) - float(rollout[b, n]))
                equal += update[b, n] == rollout[b, n]
        ds += row
        if row:
            sequences.append(math.exp(sum(row)))
    w = [math.exp(d) for d in ds]
    n = len(ds)
    return {
        "mismatch_k1": sum(-d for d in ds) / n,
        "mismatch_k3": sum(math.exp(d) - 1 - d for d in ds) / n,
        "mismatch_mean_abs": sum(abs(d) for d in ds) / n,
        "mismatch_max_abs": max(abs(d) for d in ds),
        "mismatch_mean_exp_abs": sum(math.exp(abs(d)) for d in ds) / n,
        "mismatch_equal_share": equal / n,
        "ess_token": sum(w) ** 2 / (n * sum(x * x for x in w)),
        "ess_sequence": sum(sequences) ** 2 / (len(sequences) * sum(x * x for x in sequences)),
    }


def figures(update, rollout, mask):
    return mismatch.finish(mismatch.measure(update, rollout, mask))


class MismatchTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_pmap=True)
    def test_against_loops(self):
        got = self.variant(figures)(*draw())
        chex.assert_tree_shape_prefix(got, ())
        chex.assert_trees_all_close({k: float(v) for k, v in got.items()}, oracle(*draw()), rtol=1e-5)
        assert 0 < oracle(*draw())["mismatch_equal_share"] < 1

    @chex.variants(with_jit=True, without_jit=True, with_pmap=True)
    def test_equal_log_probabilities_are_ideal_to_the_bit(self):
        _, rollout, mask = draw()
        for name, value in self.variant(figures)(rollout, rollout, mask).items():
            assert float(value) == (1.0 if name in IDEAL_ONE else 0.0), name

    @chex.variants(with_jit=True, without_jit=True, with_pmap=True)
    def test_poisoned_padding_changes_nothing(self):
        update, rollout, mask = draw()
        clean = self.variant(figures)(update, rollout, mask)
        for poison in (np.nan, np.inf, -np.inf, 3e38):
            dirty = self.variant(figures)(np.where(mask > 0, update, poison), np.where(mask > 0, rollout, -poison), mask)
            chex.assert_trees_all_equal(dirty, clean)


def test_micro_batches_add_up():
    update, rollout, mask = draw()
    whole = figures(update, rollout, mask)
    tallies = mismatch.zeros()
    for rows in ([0, 1], [2, 2], [3, 4]):  # the second is all padding
        tallies = mismatch.combine(tallies, mismatch.measure(update[rows], rollout[rows], mask[rows]))
    chex.assert_trees_all_close(mismatch.finish(tallies), whole, rtol=1e-6)
    chex.assert_trees_all_equal_shapes_and_dtypes(tallies, mismatch.zeros())  # so that it can be the carry of a scan


def test_an_empty_batch_has_no_figures_but_no_nan_either():
    for value in mismatch.finish(mismatch.zeros()).values():
        assert float(value) == 0.0


def test_huge_differences_stay_finite_and_look_broken():
    update, rollout, mask = draw()
    update = np.where(np.arange(B)[:, None] == 0, update + 500, update).astype(np.float32)
    update[4, 0] = -1e4
    got = {k: float(v) for k, v in figures(update, rollout, mask).items()}
    assert all(math.isfinite(v) for v in got.values()), got
    assert got["mismatch_max_abs"] > 9e3 and got["mismatch_k3"] > 1e9
    assert got["ess_token"] < 0.5 and 0 < got["ess_sequence"] <= 0.26  # one sequence of four carries all the weight


def test_nan_on_a_token_is_seen():
    update, rollout, mask = draw()
    update[0, 3] = np.nan
    got = figures(update, rollout, mask)
    for name in ("mismatch_k1", "mismatch_k3", "mismatch_mean_abs", "mismatch_max_abs", "ess_token", "ess_sequence"):
        assert math.isnan(float(got[name])), name


def test_no_gradient_flows_into_the_loss():
    update, rollout, mask = draw()
    gradient = jax.grad(lambda u: sum(mismatch.finish(mismatch.measure(u, rollout, mask)).values()))(jnp.asarray(update))
    np.testing.assert_array_equal(gradient, 0)
