"""The shapes of the 32B rollout comparison: 64 sequences of Qwen3-32B at a fixed length, so that only speed is measured.

Every sequence runs to max_new_tokens (`fixed_length`), which makes two policies do the same work. FP8 payloads take about 35 GB, bf16
weights 66 GB, but both are made from the float32 weights, 131 GB, which must fit too. Not run by us yet.
Give it 64 prompts, one JSON text a line; timing is the caller's until `jetrl bench` comes:
  jetrl generate --config bench_qwen3_32b --config.model.path=FOLDER --prompts=PROMPTS.jsonl
  jetrl generate --config bench_qwen3_32b --config.model.path=FOLDER --config.policy=bf16 --prompts=PROMPTS.jsonl
"""

from ml_collections import config_dict

from jetrl_jax.configs import base


def get_config() -> config_dict.ConfigDict:
    """64 sequences, 512 + 1024 tokens, no early end."""
    c = base.get_config()
    c.out = "runs/bench_qwen3_32b"
    c.steps = 3

    # Rollout
    c.data.max_prompt_length = 512
    c.rollout.prompts_per_step = 64
    c.rollout.group_size = 8
    c.rollout.max_new_tokens = 1024
    c.rollout.fixed_length = True

    # Update
    c.train.micro_batch = 1
    c.train.vocab_chunk = 8192
    return c
