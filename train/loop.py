"""The loop: quantize once, generate, score, update; one line a step, everything in `config.out`, and it resumes bit for bit."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from jetrl_jax import config as configs
from jetrl_jax import flow
from jetrl_jax.compile import compile
from jetrl_jax.kernels import launch
from jetrl_jax.metrics import MetricsWriter, step_line
from jetrl_jax.models.weights import check_folder, load_params
from jetrl_jax.rollout.collect import Sampler, Samples, quantize
from jetrl_jax.rollout.stopping import check_stop_strings
from jetrl_jax.train.advantages import ADVANTAGES, useful_groups
from jetrl_jax.train.data import Prompt, PromptStream
from jetrl_jax.train.evaluate import evaluate
from jetrl_jax.train.losses import kl_reward_penalty, mask_of
from jetrl_jax.train.report import summary
from jetrl_jax.train.resume import open_run
from jetrl_jax.train.rewards import overlong_penalty
from jetrl_jax.train.rewards import score as reward_of
from jetrl_jax.train.setup import Setup, check_length, prompts_of, setup
from jetrl_jax.train.update import Batch, TrainState, init_state, score, update

compiled_update: Any = compile(update, static_argnums=0, donate_argnums=1)
compiled_score: Any = compile(score, static_argnums=0)


class Scored(NamedTuple):
    """Whole groups with their rewards [P·G], before any penalty, and which groups teach something [P]."""

    samples: Samples
    rewards: np.ndarray
    useful: np.ndarray


def train(config: ConfigDict) -> dict[str, Any]:
    """Runs `config` to its last step, or goes on from the newest checkpoint in `config.out`; returns the summary that it prints.

    Raises UserError for the user's mistakes, before the first step wherever that is possible.
    """
    parts = setup(config)
    check_length(config, parts.model)
    print(flow.require(parts.policy, parts.model), flush=True)
    stream = prompts_of(config, parts.tokenizer, config.data.split, config.data.shuffle)
    check_stop_strings(config.rollout.stop_strings)
    c, limit = stream.counts, config.data.max_prompt_length
    print(
        f"data: {c.total} prompts, {c.kept} kept ({c.truncated} truncated), {c.dropped} dropped as longer than {limit} tokens", flush=True
    )
    if config.algorithm.kl_coefficient and (config.algorithm.kl_place, config.algorithm.kl_estimator) == ("loss", "k1"):
        print("note: the gradient of k1 averages to zero in the loss; take k2 or k3 there, or algorithm.kl_place=reward", flush=True)
    check_folder(config.model.path, parts.model)  # before anything is written
    run = open_run(config)
    master = load_params(config.model.path, parts.model) if run.step is None or config.algorithm.kl_coefficient else None
    reference = quantize(parts.policy.train, parts.model, master) if config.algorithm.kl_coefficient else None
    if run.step is None:
        state = init_state(master, parts.spec.optimizer, config.seed)
    else:
        abstract = jax.eval_shape(lambda p: init_state(p, parts.spec.optimizer, config.seed), parts.model.param_shapes())
        state = run.checkpoints.restore(run.step, abstract)
        print(f"resumed from step {run.step} in {config.out}", flush=True)
    del master
    writer = MetricsWriter(run.metrics, after=run.step)
    sampler = Sampler(
        parts.sampler,
        parts.tokenizer,
        parts.sampling,
        rows=config.rollout.prompts_per_step,
        width=config.data.max_prompt_length,
        group=config.rollout.group_size,
        stop_strings=config.rollout.stop_strings,
        fixed_length=config.rollout.fixed_length,
    )
    before = run.evaluation("before")
    if before is None and run.step is None:
        before = evaluate(config, parts, state.params, run, "before")

    step = int(state.step)
    while step < config.steps:
        state, metrics = one_step(config, parts, sampler, stream, state, reference)
        step = metrics["step"]
        writer.write(metrics)
        print(step_line(metrics, config.steps), flush=True)
        if step == config.steps or (config.checkpoint.every and step % config.checkpoint.every == 0):
            run.checkpoints.save(step, state, configs.to_json(config))
    after = run.evaluation("after") or evaluate(config, parts, state.params, run, "after")
    run.checkpoints.close()
    return summary(config, run, before, after)


def one_step(
    config: ConfigDict, parts: Setup, sampler: Sampler, stream: PromptStream, state: TrainState, reference: dict | None
) -> tuple[TrainState, dict[str, Any]]:
    """One optimizer step: rollout and update read the same payloads, quantized here once for each distinct view of the policy."""
    clock = [time.perf_counter()]
    flow, unified = parts.policy.train, parts.policy.unified
    # DGrad's kernel reads a transposed payload, made in the same pass.
    kernels = not launch.missing() and flow.kernels != "off" and flow.reductions != "float64"
    rolled = quantize(parts.policy.rollout, parts.model, state.params, unified and kernels)
    scored, position, measured = collect(config, parts, sampler, stream, state, rolled)
    clock.append(time.perf_counter())
    trained = rolled if unified else quantize(flow, parts.model, state.params, kernels)
    del rolled
    batch, shaped = make_batch(config, parts, scored, reference)
    state, device = compiled_update(parts.spec, state, trained, batch)
    state = dataclasses.replace(state, data_position=jnp.int32(position))
    metrics = {k: v.item() for k, v in jax.device_get(device).items()}
    clock.append(time.perf_counter())
    if reference is None:
        del metrics["kl"]
    rollout_s, update_s = np.diff(clock)
    return state, {
        "step": int(state.step),
        **measured,
        "reward_shaped": shaped.mean(),
        **metrics,
        "seconds": rollout_s + update_s,
        "seconds_rollout": rollout_s,
        "seconds_update": update_s,
        "tokens_per_second": measured["tokens"] / (rollout_s + update_s),
    }


def collect(
    config: ConfigDict, parts: Setup, sampler: Sampler, stream: PromptStream, state: TrainState, qparams: dict
) -> tuple[Scored, int, dict[str, Any]]:
    """A step's groups, the data position after them, and what was measured on all that was drawn.

    With dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) groups whose rewards are all alike are replaced by further prompts, for
    a number of rounds; what is still missing then is filled up with such groups, which carry no gradient.
    """
    r, a = config.rollout, config.algorithm
    want, group = r.prompts_per_step, r.group_size
    position, key = int(state.data_position), jax.random.wrap_key_data(state.key, impl="threefry2x32")
    rounds: list[Scored] = []
    for _ in range(a.dynamic_sampling_rounds if a.dynamic_sampling else 1):
        prompts: list[Prompt] = [p for _, p in stream.batch(position, want)]
        # Unique to (data position, sample), for 2**32 samples.
        ids = (np.arange(position * group, (position + want) * group, dtype=np.uint64) % 2**32).astype(np.uint32)
        position += want
        samples = sampler(qparams, [p.ids for p in prompts], ids, key)
        answers = [p.answer for p in prompts for _ in range(group)]
        rewards = reward_of(config.reward.name, samples.texts, answers)
        rounds.append(Scored(samples, rewards, np.asarray(useful_groups(jnp.asarray(rewards.reshape(want, group))))))
        if sum(s.useful.sum() for s in rounds) >= want:
            break
    drawn = _join(rounds)
    lengths = drawn.samples.rollout.lengths
    measured = {
        "reward": drawn.rewards.mean(),
        "reward_std": drawn.rewards.std(),
        "completion_length": lengths.mean(),
        "completion_length_min": lengths.min(),
        "completion_length_max": lengths.max(),
        "truncated": 1 - drawn.samples.rollout.stopped.mean(),
        "tokens": lengths.sum(),
        "groups_drawn": len(drawn.useful),
        "groups_without_signal": (~drawn.useful).sum(),
        "prompts_consumed": position,
    }
    if not a.dynamic_sampling:
        return drawn, position, measured
    return _groups(drawn, np.argsort(~drawn.useful, kind="stable")[:want], group), position, measured


def _groups(scored: Scored, which: np.ndarray, group: int) -> Scored:
    s, rows = scored.samples, (which[:, None] * group + np.arange(group)).reshape(-1)
    rollout = jax.tree.map(lambda x: x[rows], s.rollout)
    kept = Samples(s.prompts[which], s.prompt_lengths[which], rollout, [s.texts[i] for i in rows])
    return Scored(kept, scored.rewards[rows], scored.useful[which])


def _join(parts: Sequence[Scored]) -> Scored:
    samples = [p.samples for p in parts]
    rollout = jax.tree.map(lambda *x: np.concatenate(x), *(s.rollout for s in samples))
    return Scored(
        Samples(
            np.concatenate([s.prompts for s in samples]),
            np.concatenate([s.prompt_lengths for s in samples]),
            rollout,
            [t for s in samples for t in s.texts],
        ),
        np.concatenate([p.rewards for p in parts]),
        np.concatenate([p.useful for p in parts]),
    )


def make_batch(config: ConfigDict, parts: Setup, scored: Scored, reference: dict | None) -> tuple[Batch, np.ndarray]:
    """What the update learns from, and the rewards [P·G] after penalties, from which the advantages come."""
    a, out = config.algorithm, scored.samples.rollout
    group, n = config.rollout.group_size, parts.slots
    prompts, lengths = (np.repeat(x, group, 0) for x in (scored.samples.prompts, scored.samples.prompt_lengths))
    tokens = np.pad(prompts, [(0, 0), (0, n)])
    np.put_along_axis(tokens, lengths[:, None] + np.arange(n), out.tokens, 1)
    mask = mask_of(jnp.asarray(out.lengths), jnp.asarray(~out.stopped), n, a.mask_truncated)
    batch = Batch(
        tokens=jnp.asarray(tokens),
        prompt_lengths=jnp.asarray(lengths),
        completions=jnp.asarray(out.tokens),
        logprobs=jnp.asarray(out.logprobs),
        tau=jnp.asarray(out.tau),
        mask=mask,
        advantages=jnp.zeros(len(tokens)),
    )
    rewards = jnp.asarray(scored.rewards)
    if a.overlong_penalty:
        rewards = rewards + overlong_penalty(jnp.asarray(out.lengths), n, a.overlong_buffer, a.overlong_penalty)
    if reference is not None:
        ref = compiled_score(parts.spec, reference, batch)
        if a.kl_place == "reward":
            rewards = rewards - kl_reward_penalty(batch.logprobs, ref, mask, a.kl_estimator, a.kl_coefficient)
        batch = dataclasses.replace(batch, ref_logprobs=ref)
    advantages = ADVANTAGES[a.advantage](rewards.reshape(-1, group))
    if a.dynamic_sampling:  # groups that only fill the batch carry no gradient, whatever the penalties make of them
        advantages = jnp.where(jnp.asarray(scored.useful)[:, None], advantages, 0)
    advantages = advantages.reshape(-1)
    return dataclasses.replace(batch, advantages=advantages), np.asarray(rewards)
