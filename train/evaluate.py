"""Held-out accuracy before and after training, sampled exactly as in training."""

import jax
import numpy as np
from ml_collections import ConfigDict

from jetrl_jax.rollout.collect import Sampler, quantize
from jetrl_jax.train.resume import Run
from jetrl_jax.train.rewards import score
from jetrl_jax.train.setup import Setup, prompts_of
from jetrl_jax.train.update import run_key


def evaluate(config: ConfigDict, parts: Setup, params: dict, run: Run, name: str) -> dict | None:
    """Mean reward of `rollout.group_size` samples of each of `evaluation.prompts` prompts, stored in the run's folder, or None.

    Prompts and noise depend on the seed alone: before and after differ only by the parameters.
    """
    count = config.evaluation.prompts
    if not count:
        return None
    stream = prompts_of(config, parts.tokenizer, config.evaluation.split, shuffle=True, size=count)
    count = min(count, len(stream))
    rows, group = config.rollout.prompts_per_step, config.rollout.group_size
    # The training rollout's shape, so that nothing is compiled twice; it gives a group of samples for each prompt.
    sampler = Sampler(
        parts.sampler,
        parts.tokenizer,
        parts.sampling,
        rows=rows,
        width=config.data.max_prompt_length,
        group=group,
        stop_strings=config.rollout.stop_strings,
        fixed_length=config.rollout.fixed_length,
    )
    key = jax.random.fold_in(run_key(config.seed), 1)  # apart from training's noise
    qparams = quantize(parts.policy.rollout, parts.model, params)
    rewards: list[np.ndarray] = []
    for first in range(0, count, rows):
        batch = [p for _, p in stream.batch(first, min(rows, count - first))]
        ids = np.arange(first * group, (first + len(batch)) * group)
        samples = sampler(qparams, [p.ids for p in batch], ids, key)
        rewards.append(score(config.reward.name, samples.texts, [p.answer for p in batch for _ in range(group)]))
    found = np.concatenate(rewards)
    result = {"reward": float(found.mean()), "prompts": count, "samples": len(found), "split": config.evaluation.split}
    run.store_evaluation(name, result)
    print(f"{name} training: reward {result['reward']:.3f} on {count} {config.evaluation.split} prompts, {group} samples each", flush=True)
    return result
