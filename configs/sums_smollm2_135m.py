"""SmolLM2-135M-Instruct learns one-digit sums, graded by the last number in its answer: the quickest real run.

Before training it answers 17-19 % of the samples right at temperature 1, and 18 of 24 groups of 8 hold both right and wrong
answers, which is what GRPO learns from. On a CPU take a few steps; on one H200, 150 and more (docs/ has the curves).
  jetrl train --config sums_smollm2_135m --config.model.path=FOLDER --config.steps=3
"""

from ml_collections import config_dict

from jetrl_jax.configs import base


def get_config() -> config_dict.ConfigDict:
    """64 completions a step, chat format, 32 new tokens."""
    c = base.get_config()
    c.out = "runs/sums_smollm2_135m"
    c.steps = 150

    # Task
    c.data.name = "sums"
    c.data.digits = 1
    c.data.max_prompt_length = 64
    c.reward.name = "last_number"

    # Rollout: 8 prompts, 8 answers each.
    c.rollout.prompts_per_step = 8
    c.rollout.group_size = 8
    c.rollout.max_new_tokens = 32

    # Update
    c.optimizer.learning_rate = 2e-6
    c.optimizer.warmup_steps = 5
    c.train.micro_batch = 16
    c.checkpoint.every = 25
    return c
