"""What can be said about a config before a model is loaded: names that exist, numbers in range, fields that fit together."""

import math
from typing import Any

from ml_collections import config_dict

from jetrl_jax.errors import UserError, unknown
from jetrl_jax.precision import PRESETS

POSITIVE = math.ulp(0.0)  # the smallest number above 0
BELOW_ONE = math.nextafter(1.0, 0.0)

# Field -> the values it may take.
CHOICES: dict[str, tuple[str, ...]] = {
    "policy": tuple(PRESETS),
    "data.name": ("sums", "gsm8k", "jsonl"),
    "data.split": ("train", "test"),
    "data.too_long": ("drop", "truncate", "stop"),
    "reward.name": ("last_number", "boxed", "hash"),
    "algorithm.advantage": ("grpo", "dr_grpo", "rloo"),
    "algorithm.objective": ("grpo", "dapo", "gspo"),
    "algorithm.aggregation": ("token_mean", "sequence_mean", "constant"),
    "algorithm.kl_estimator": ("k1", "k2", "k3"),
    "algorithm.kl_place": ("loss", "reward"),
    "algorithm.correction": ("none", "tis", "mis"),
    "algorithm.correction_level": ("token", "sequence"),
    "optimizer.schedule": ("constant", "cosine", "linear"),
    "train.remat": ("block", "none"),
    "evaluation.split": ("train", "test"),
}

# Field -> its smallest and largest value, both allowed.
RANGES: dict[str, tuple[float, float]] = {
    "seed": (0, 2**31 - 1),
    "steps": (1, math.inf),
    "data.digits": (1, 18),
    "data.terms": (2, 100),
    "data.size": (1, math.inf),
    "data.max_prompt_length": (1, math.inf),
    "rollout.prompts_per_step": (1, math.inf),
    "rollout.group_size": (1, math.inf),
    "rollout.max_new_tokens": (1, math.inf),
    "rollout.temperature": (0, math.inf),
    "rollout.top_k": (0, math.inf),
    "rollout.top_p": (POSITIVE, 1),
    "rollout.min_p": (0, 1),
    "algorithm.clip_low": (0, 1),
    "algorithm.clip_high": (0, math.inf),
    "algorithm.kl_coefficient": (0, math.inf),
    "algorithm.correction_cap": (POSITIVE, math.inf),
    "algorithm.dynamic_sampling_rounds": (1, math.inf),
    "algorithm.overlong_penalty": (0, math.inf),
    "algorithm.overlong_buffer": (0, math.inf),
    "optimizer.learning_rate": (0, math.inf),
    "optimizer.warmup_steps": (0, math.inf),
    "optimizer.b1": (0, BELOW_ONE),
    "optimizer.b2": (0, BELOW_ONE),
    "optimizer.eps": (0, math.inf),
    "optimizer.weight_decay": (0, math.inf),
    "optimizer.max_grad_norm": (POSITIVE, math.inf),
    "train.micro_batch": (1, math.inf),
    "train.vocab_chunk": (1, math.inf),
    "evaluation.prompts": (0, math.inf),
    "checkpoint.every": (0, math.inf),
    "checkpoint.keep": (1, math.inf),
}


def get(config: config_dict.ConfigDict, field: str) -> Any:
    """The value of a dotted field."""
    value: Any = config
    for part in field.split("."):
        value = value[part]
    return value


def check(config: config_dict.ConfigDict) -> None:
    """Raise UserError for the first field that cannot be right, naming it, its value and the remedy. Loads no model."""
    for field, choices in CHOICES.items():
        if get(config, field) not in choices:
            raise unknown(field, get(config, field), choices)
    for field, (low, high) in RANGES.items():
        value = get(config, field)
        if not low <= value <= high or math.isinf(value):  # NaN fails the comparison
            raise UserError(f"{field}={value}: expected {_range(low, high)}")
    if not config.model.path:
        raise UserError("model.path is empty: give the folder of a Hugging Face checkpoint, --config.model.path=FOLDER")


def check_training(config: config_dict.ConfigDict) -> None:
    """What `jetrl train` needs on top of `check`: groups that can differ, micro-batches that divide the step's sequences."""
    check(config)
    if config.data.name == "jsonl" and not config.data.path:
        raise UserError("data.path is empty and data.name=jsonl: give the file, --config.data.path=FILE.jsonl")
    r = config.rollout
    if config.algorithm.kl_coefficient and (r.top_k or r.top_p < 1 or r.min_p):
        raise UserError(
            f"algorithm.kl_coefficient={config.algorithm.kl_coefficient:g} with rollout.top_k={r.top_k}, top_p={r.top_p:g}, "
            f"min_p={r.min_p:g}: the policy's cut-offs mean nothing to the reference, so their distributions cannot be compared; "
            "switch one of the two off"
        )
    if config.evaluation.prompts and config.data.name == "jsonl":
        raise UserError(f"evaluation.prompts={config.evaluation.prompts}: a JSONL file has no held-out split; set it to 0")
    rollout, algorithm, micro = config.rollout, config.algorithm, config.train.micro_batch
    if rollout.group_size < 2:
        raise UserError(f"rollout.group_size={rollout.group_size}: the advantage compares samples of one prompt, so at least 2")
    if rollout.temperature == 0:
        raise UserError("rollout.temperature=0.0: greedy samples of one prompt are all alike and teach nothing; train with 1.0 or near it")
    sequences = rollout.prompts_per_step * rollout.group_size
    if sequences % micro:
        raise UserError(
            f"train.micro_batch={micro} does not divide the {sequences} sequences of a step (rollout.prompts_per_step="
            f"{rollout.prompts_per_step} times rollout.group_size={rollout.group_size}): "
            f"choose one of {', '.join(str(n) for n in range(1, sequences + 1) if sequences % n == 0)}"
        )
    if algorithm.overlong_penalty > 0 and not 0 < algorithm.overlong_buffer <= rollout.max_new_tokens:
        raise UserError(
            f"algorithm.overlong_buffer={algorithm.overlong_buffer}: with overlong_penalty={algorithm.overlong_penalty:g} it is the length "
            f"over which the penalty grows, between 1 and rollout.max_new_tokens={rollout.max_new_tokens}"
        )


def _range(low: float, high: float) -> str:
    least = "more than 0" if low == POSITIVE else f"at least {low:g}"
    if math.isinf(high):
        return f"a finite number, {least}"
    return f"a number, {least} and {'less than 1' if high == BELOW_ONE else f'at most {high:g}'}"
