"""SmolLM2-135M-Instruct learns one-digit sums, graded by the last number in its answer: the quickest real run.

Before training it answers 17-19 % of the samples right at temperature 1, and 18 of 24 groups of 8 hold both right and wrong
answers, which is what GRPO learns from. On one H200 it takes 150 steps in under three minutes (docs/sums_smollm2.md has the curves).
  jetrl train --config sums_smollm2_135m --config.model.path=FOLDER
On a CPU, a step of 16 completions takes minutes:
  jetrl train --config sums_smollm2_135m --config.model.path=FOLDER --config.steps=3 \\
    --config.rollout.prompts_per_step=4 --config.rollout.group_size=4 --config.train.micro_batch=8
"""

from ml_collections import config_dict

from jetrl_jax.configs import base


def get_config() -> config_dict.ConfigDict:
    """128 completions a step, chat format, 32 new tokens."""
    c = base.get_config()
    c.out = "runs/sums_smollm2_135m"
    c.steps = 150

    # Task
    c.data.name = "sums"
    c.data.digits = 1
    c.data.max_prompt_length = 64
    c.reward.name = "last_number"

    # Rollout: 16 prompts, 8 answers each.
    c.rollout.prompts_per_step = 16
    c.rollout.group_size = 8
    c.rollout.max_new_tokens = 32

    # Update
    c.optimizer.learning_rate = 1e-5
    c.optimizer.warmup_steps = 5
    c.train.micro_batch = 64
    c.checkpoint.every = 50
    return c
