"""Decoding: every step gives the bits of the full forward, and requests depend on nothing but themselves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import (
    CONFIG,
    GROUP,
    NEW,
    PROMPT_LENGTHS,
    QUICK,
    SAMPLING,
    WIDTH,
    any_generate,
    any_score,
    batch_of,
    joined,
    programs,
    prompts,
    quantize,
    random_params,
    update_spec,
)  # fmt: skip

from jetrl_jax.compile import compile
from jetrl_jax.models.transformer import Transformer
from jetrl_jax.precision import make_policy
from jetrl_jax.rollout.decode import decode_step, generate, prefill
from jetrl_jax.rollout.sampling import Sampling

LENGTHS = np.repeat(PROMPT_LENGTHS, GROUP)
IDS = jnp.arange(len(LENGTHS)) + 40
KEY = jax.random.key(11)


@functools.cache
def served(policy_name: str):
    """A sampler of the policy and what it reads."""
    flow = make_policy(policy_name).rollout
    return Transformer(CONFIG, flow), quantize(flow, CONFIG, random_params())


@functools.cache
def sampled(seed: int = 0):
    """A rollout of the runs' shape under jet_fp8."""
    model, q = served("jet_fp8")
    return programs(model.flow).generate(model, q, *prompts(seed), IDS, KEY, SAMPLING, False)


def same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def stepwise(model, q, tokens, lengths):
    """Last hidden states by prefill and then a decode step for each further token of tokens [B, T]: [B, NEW, D]."""
    b, t = tokens.shape
    caches, first = prefill(model, q, tokens[:, :WIDTH], lengths, t)

    def step(caches, i):
        at = lengths + i
        return decode_step(model, q, tokens[jnp.arange(b), at], at, caches)

    _, rest = jax.lax.scan(step, caches, jnp.arange(NEW - 1))
    return jnp.concatenate([first[:, None], rest.swapaxes(0, 1)], 1)


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def whole(model, q, tokens, lengths):
    """The same by one full forward."""
    hidden = model.apply({"q": q}, tokens)[0]
    return jnp.take_along_axis(hidden, (lengths[:, None] - 1 + jnp.arange(NEW))[..., None], 1)


@pytest.mark.parametrize("policy", ["bf16", "jet_fp8", "jet_fp8_kv8", "jet_fp8_pow2", "fp8_rowwise"])
def test_every_decode_step_is_the_full_forward_to_the_bit(policy):
    """Ragged prompts. (The forward of `jet_fp8_hybrid` is that of `jet_fp8`, which tests/test_flow.py checks.)"""
    model, q = served(policy)
    lengths = jnp.asarray(PROMPT_LENGTHS)
    rng = np.random.default_rng(2)
    tokens = jnp.asarray(rng.integers(0, CONFIG.vocab_size, (len(PROMPT_LENGTHS), WIDTH + NEW)), jnp.int32)
    got, want = (np.asarray(f(model, q, tokens, lengths), np.float32) for f in (stepwise, whole))
    assert np.isfinite(want).all() and want.std() > 0.1
    np.testing.assert_array_equal(got, want)


def test_lengths_stops_and_what_an_ended_sequence_leaves():
    out = jax.tree.map(np.asarray, sampled())
    stop = np.isin(out.tokens, SAMPLING.stop_ids)
    for b, n in enumerate(out.lengths):
        assert out.stopped[b] == stop[b, n - 1] and not stop[b, : n - 1].any()
        assert out.stopped[b] or n == NEW
        assert not out.tokens[b, n:].any() and not out.logprobs[b, n:].any() and (out.tau[b, n:] == -np.inf).all()
        assert (out.logprobs[b, :n] < 0).all()
    assert out.stopped.any() and not out.stopped.all()  # both kinds of end were seen
    assert 0 < out.lengths.min() < NEW


def test_an_ended_sequence_writes_nothing():
    """Its slots past the end keep their zeros: position S is outside the cache, and the write is dropped."""
    model, q = served("bf16")
    tokens, lengths = prompts()
    slots = WIDTH + 2

    @compile
    def step(tokens, lengths, at):
        caches, _ = prefill(model, q, tokens, lengths, slots)
        return caches, decode_step(model, q, tokens[:, 0], at, caches)[0]

    before, after = step(tokens, lengths, jnp.asarray([slots, WIDTH, slots, slots]))
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        changed = np.asarray(old, np.float32) != np.asarray(new, np.float32)
        if changed.ndim == 5 and changed.shape[2] == slots:
            assert changed[:, 1, WIDTH].any() and changed.sum() == changed[:, 1, WIDTH].sum()


def test_scan_of_fixed_length_gives_the_tokens_of_the_while_loop():
    model, q = served("jet_fp8")
    same(any_generate(model, q, *prompts(), IDS, KEY, SAMPLING, True), sampled())


def test_samples_of_a_group_are_the_prompts_alone():
    """One prompt and one sample at a time, with the same request ids: neither the shared prefill nor company changes a bit."""
    model, q = served("jet_fp8")
    tokens, lengths = prompts()
    for b in range(len(LENGTHS)):
        p = b // GROUP
        alone = any_generate(model, q, tokens[p : p + 1], lengths[p : p + 1], IDS[b : b + 1], KEY, SAMPLING, False)
        same(alone, jax.tree.map(lambda x, b=b: x[b : b + 1], sampled()))
    first, second = np.asarray(sampled().tokens).reshape(-1, GROUP, NEW).swapaxes(0, 1)
    assert (first != second).any(1).sum() >= 3  # samples of a group differ


def test_neighbours_padding_and_place_do_not_matter():
    """The first prompt in other company, the others' noise changed too, and the prompts in reverse order."""
    model, q = served("jet_fp8")
    (tokens, lengths), (others, _) = prompts(), prompts(9)
    run = functools.partial(programs(model.flow).generate, model, q)
    mixed = run(others.at[0, : PROMPT_LENGTHS[0]].set(tokens[0, : PROMPT_LENGTHS[0]]), lengths, IDS, KEY, SAMPLING, False)
    same(jax.tree.map(lambda x: x[:GROUP], mixed), jax.tree.map(lambda x: x[:GROUP], sampled()))
    assert (np.asarray(mixed.tokens) != np.asarray(sampled().tokens)).any()
    turned = run(tokens[::-1], lengths[::-1], IDS[::-1], KEY, SAMPLING, False)
    same(jax.tree.map(lambda x: x[::-1], turned), sampled())


def test_another_request_id_or_key_gives_other_tokens():
    model, q = served("jet_fp8")
    run = functools.partial(programs(model.flow).generate, model, q, *prompts())
    for other in (run(IDS + 1000, KEY, SAMPLING, False), run(IDS, jax.random.key(12), SAMPLING, False)):
        assert (np.asarray(other.tokens)[:, 0] != np.asarray(sampled().tokens)[:, 0]).sum() > len(LENGTHS) // 2


def test_filters_store_tau_and_the_update_evaluates_the_same_distribution():
    """Top-k, top-p and min-p at once: the stored cut-off excludes tokens, and both phases give the same log-probabilities to the bit."""
    policy, (tokens, lengths) = make_policy("jet_fp8"), prompts()
    model, q = served("jet_fp8")
    sampling = Sampling(max_new_tokens=NEW, temperature=SAMPLING.temperature, top_k=9, top_p=0.9, min_p=0.01, stop_ids=SAMPLING.stop_ids)
    out = any_generate(model, q, tokens, lengths, IDS, KEY, sampling, False)
    batch = batch_of(tokens, lengths, out)
    on = np.asarray(batch.mask) > 0
    assert np.isfinite(np.asarray(out.tau)[on]).all()
    logp = np.asarray(any_score(update_spec(policy, filtered=True), q, batch))
    np.testing.assert_array_equal(logp[on], np.asarray(out.logprobs)[on])
    # over all tokens, and not over the kept ones, they are less probable
    everything = np.asarray(any_score(update_spec(policy), q, batch))
    assert (everything[on] <= logp[on]).all() and (everything[on] < logp[on] - 0.01).mean() > 0.5


def test_score_is_the_rollouts_own_log_probability():
    """The update's forward in micro-batches, over tokens joined from prompts and completions."""
    model, q = served("jet_fp8")
    batch = batch_of(*prompts(), sampled())
    tokens, at = joined(*prompts(), sampled())
    assert tokens.shape == (len(LENGTHS), WIDTH + NEW) and (np.asarray(at) == LENGTHS).all()
    on = np.asarray(batch.mask) > 0
    logp = any_score(update_spec(make_policy("jet_fp8")), q, batch)
    np.testing.assert_array_equal(np.asarray(logp)[on], np.asarray(sampled().logprobs)[on])


def test_tensorwise_scales_see_the_neighbours_and_stay_finite():
    """The documented exception: finite all the same after sequences have ended."""
    model, q = served("fp8_tensorwise")
    quick = jax.jit(generate, static_argnums=(0, 6, 7), compiler_options=QUICK)
    out = quick(model, q, *prompts(), IDS, KEY, SAMPLING, False)
    on = np.arange(NEW) < np.asarray(out.lengths)[:, None]
    assert np.asarray(out.stopped).any() and np.isfinite(np.asarray(out.logprobs)).all() and (np.asarray(out.logprobs)[on] < 0).all()


def test_request_ids_must_fit_the_prompts():
    model, q = served("jet_fp8")
    with pytest.raises(ValueError, match="7 request_ids for 4 prompts"):
        jax.eval_shape(functools.partial(generate, model, sampling=SAMPLING), q, *prompts(), IDS[:7], KEY)
