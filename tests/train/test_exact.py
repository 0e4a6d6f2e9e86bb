"""Exact on-policy: the update recomputes the log-probabilities that rollout reported, bit for bit, after real optimizer updates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG, GROUP, PROMPT_LENGTHS, SAMPLING, any_score, batch_of, programs, prompts, quantize, run, update_spec

from jetrl_jax.models.transformer import Transformer

UNIFIED = ("jet_fp8", "bf16", "jet_fp8_kv8")


@pytest.mark.parametrize("policy", UNIFIED)
def test_update_recomputes_the_bits_of_rollout_after_real_updates(policy):
    steps = run(policy).steps
    for a, b in zip(steps, steps[1:], strict=False):  # every update moved the parameters, by far more than a rounding of theirs
        moved = [np.abs(x - y).max() for x, y in zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True)]
        assert min(moved) > 1e-3
    seen = set()
    for step in steps:
        m = step.metrics
        assert m["mismatch_equal_share"] == 1 and m["mismatch_max_abs"] == 0 and m["mismatch_k1"] == 0
        assert m["ess_token"] == m["ess_sequence"] == pytest.approx(1, abs=1e-6) and m["ratio"] == pytest.approx(1, abs=1e-6)
        assert m["skipped_steps"] == 0 and m["grad_norm"] > 0
        seen.add(np.asarray(step.rollout.logprobs)[0, 0].item())
    assert len(steps) >= 4 and len(seen) == len(steps)


def test_the_baseline_is_off_policy():
    """Rollout in FP8, training in bf16: what the paper attacks. The mismatch is of FP8's size, not of a rounding's."""
    steps = run("fp8_rollout_only").steps
    assert all(s.metrics["mismatch_mean_abs"] > 1e-2 and s.metrics["mismatch_equal_share"] < 0.2 for s in steps)
    assert all(s.metrics["ess_token"] < 0.9999 for s in steps)
    first, unified = steps[0].rollout, run("jet_fp8").steps[0].rollout
    np.testing.assert_array_equal(first.tokens, unified.tokens)  # the very rollout of jet_fp8: only training differs


def many(policy_name: str, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities [R, N] of fresh requests by rollout and by the training forward, under a run's last parameters; 0 off the mask."""
    done = run(policy_name)
    policy, params = done.policy, done.steps[-1].params
    sampler, spec = Transformer(CONFIG, policy.rollout), update_spec(policy)
    q, trained = quantize(policy.rollout, CONFIG, params), quantize(policy.train, CONFIG, params)
    rows = []
    for i in range(rounds):
        tokens, lengths = prompts(0)
        ids = 1000 + jnp.arange(len(PROMPT_LENGTHS) * GROUP) + 100 * i
        out = programs(policy.rollout).generate(sampler, q, tokens, lengths, ids, jax.random.key(9), SAMPLING, False)
        batch = batch_of(tokens, lengths, out)
        logp = any_score(spec, trained, batch)
        rows.append((np.where(batch.mask > 0, out.logprobs, 0), np.where(batch.mask > 0, logp, 0)))
    return tuple(np.concatenate(x) for x in zip(*rows, strict=True))


def test_importance_ratios_average_one():
    """Under the unified policy every ratio is 1. Where the flows differ the ratios scatter, and their mean over rollout's samples still has
    to be 1, as E over rollout of p_train / p_rollout: both report true distributions, and tokens are drawn from the one rollout reports."""
    rollout, update = many("jet_fp8", 2)
    np.testing.assert_array_equal(rollout, update)
    rollout, update = many("fp8_rollout_only", 60)
    ratio = np.exp((update - rollout).sum(-1))  # of whole sequences, [480]
    error = ratio.std() / len(ratio) ** 0.5
    assert ratio.std() > 0.02 and abs(ratio.mean() - 1) < 4 * error and error < 0.02, (ratio.mean(), error)
