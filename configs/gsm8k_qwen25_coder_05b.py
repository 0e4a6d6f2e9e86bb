"""Qwen2.5-Coder-0.5B-Instruct on GSM8K (shipped with the package), graded by the last number: the smallest real maths run.

It starts at about 22 % with 256 new tokens, half of the answers cut off there; 512 let most of them end. For one GPU: a CPU
needs minutes for each step. Grade by `\\boxed{}` with --config.reward.name=boxed (13 % at the start). It takes `####` for a
heading, so the `hash` reward gives it no signal.
  jetrl train --config gsm8k_qwen25_coder_05b --config.model.path=FOLDER
"""

from ml_collections import config_dict

from jetrl_jax.configs import base


def get_config() -> config_dict.ConfigDict:
    """128 completions a step, 512 new tokens, asymmetric clip."""
    c = base.get_config()
    c.out = "runs/gsm8k_qwen25_coder_05b"
    c.steps = 200

    # Task
    c.data.name = "gsm8k"
    c.data.max_prompt_length = 256
    c.reward.name = "last_number"

    # Rollout
    c.rollout.prompts_per_step = 16
    c.rollout.group_size = 8
    c.rollout.max_new_tokens = 512

    # Algorithm: DAPO's asymmetric clip; an answer that was cut off teaches nothing about its end.
    c.algorithm.objective = "dapo"
    c.algorithm.clip_high = 0.28
    c.algorithm.mask_truncated = True

    # Update
    c.optimizer.learning_rate = 1e-6
    c.optimizer.warmup_steps = 10
    c.train.micro_batch = 16
    c.train.vocab_chunk = 8192
    c.checkpoint.every = 25
    return c
