"""Qwen3-8B on mathematics problems of your own (JSONL with `prompt` and `answer`), graded by `\\boxed{}`: the paper's 8B setting.

Float32 master weights, both moments and the gradient take 131 GB before any activation: more than one H200 holds, so training waits
for the update to be sharded over several GPUs. Not run by us yet.
  jetrl train --config math_qwen3_8b --config.model.path=FOLDER --config.data.path=problems.jsonl
"""

from ml_collections import config_dict

from jetrl_jax.configs import base


def get_config() -> config_dict.ConfigDict:
    """256 completions a step, 512 + 2048 tokens."""
    c = base.get_config()
    c.out = "runs/math_qwen3_8b"
    c.steps = 200

    # Task
    c.data.name = "jsonl"
    c.data.system = "Reason step by step and put the final answer in \\boxed{}."
    c.data.max_prompt_length = 512
    c.reward.name = "boxed"

    # Rollout
    c.rollout.prompts_per_step = 32
    c.rollout.group_size = 8
    c.rollout.max_new_tokens = 2048

    # Algorithm
    c.algorithm.objective = "dapo"
    c.algorithm.clip_high = 0.28
    c.algorithm.mask_truncated = True

    # Update
    c.optimizer.learning_rate = 1e-6
    c.optimizer.warmup_steps = 10
    c.optimizer.weight_decay = 0.01
    c.train.micro_batch = 4
    c.train.vocab_chunk = 8192
    c.checkpoint.every = 20
    return c
