"""From a config to what a run is made of: policy, model, tokenizer, sampling, objective, optimizer. All static and hashable."""

import dataclasses
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jetrl_jax.errors import UserError
from jetrl_jax.kernels import launch
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.models.qparams import check_paths
from jetrl_jax.models.tokenizer import Tokenizer, load_tokenizer
from jetrl_jax.models.transformer import Transformer
from jetrl_jax.precision import PrecisionPolicy, make_policy
from jetrl_jax.rollout.sampling import Sampling
from jetrl_jax.train.data import PromptStream
from jetrl_jax.train.losses import Objective
from jetrl_jax.train.rewards import check_answers
from jetrl_jax.train.tasks import load_task
from jetrl_jax.train.update import OptimizerSpec, UpdateSpec


def policy_of(config: ConfigDict, model: ModelConfig) -> PrecisionPolicy:
    """The precision policy that a config names, checked against the model's layers."""
    overrides = config.policy_overrides.to_dict()
    reductions = overrides.pop("reductions") or "auto"
    kernels = overrides.pop("kernels") or "auto"
    policy = make_policy(config.policy, reductions=reductions, kernels=kernels, paths=tuple(overrides.pop("paths")), **overrides)
    for flow in (policy.rollout, policy.train):
        check_paths(flow, model)
    if kernels == "required":
        launch.require()
    return policy


def sampling_of(config: ConfigDict, tokenizer: Tokenizer) -> Sampling:
    """The sampling of rollout; stop ids come from the model's folder."""
    r = config.rollout
    return Sampling(
        max_new_tokens=r.max_new_tokens, temperature=r.temperature, top_k=r.top_k, top_p=r.top_p, min_p=r.min_p, stop_ids=tokenizer.stop_ids
    )


def objective_of(config: ConfigDict) -> Objective:
    """`config.algorithm`'s part that the loss reads."""
    a = config.algorithm
    names = {f.name for f in dataclasses.fields(Objective)} - {"kind", "constant_length"}
    return Objective(kind=a.objective, constant_length=config.rollout.max_new_tokens, **{n: a[n] for n in names})


def optimizer_of(config: ConfigDict) -> OptimizerSpec:
    """The optimizer; a constant schedule does not know the last step, so that going on for longer compiles nothing anew."""
    steps = 1 if config.optimizer.schedule == "constant" else config.steps
    return OptimizerSpec(steps=steps, **config.optimizer.to_dict())


def prompts_of(config: ConfigDict, tokenizer: Tokenizer, split: str, shuffle: bool, size: int | None = None) -> PromptStream:
    """The prompts of one split, in the config's template and order; `size` limits a generated task."""
    d = config.data
    examples = load_task(
        d.name,
        seed=config.seed,
        split=split,
        digits=d.digits,
        terms=d.terms,
        size=size or d.size,
        path=d.path,
        prompt_column=d.prompt_column,
        answer_column=d.answer_column,
    )
    check_answers(config.reward.name, [e.answer for e in examples])
    return PromptStream(
        examples,
        tokenizer,
        max_prompt_length=d.max_prompt_length,
        too_long=d.too_long,
        template=d.template,
        system=d.system,
        chat=d.chat,
        shuffle=shuffle,
        seed=config.seed,
    )


@dataclasses.dataclass(frozen=True)
class Setup:
    """What stays the same through a run."""

    model: ModelConfig
    policy: PrecisionPolicy
    tokenizer: Tokenizer
    sampling: Sampling
    sampler: Transformer  # the model under policy.rollout
    spec: UpdateSpec  # the update, with the model under policy.train

    @property
    def slots(self) -> int:
        """N, the longest completion."""
        return self.sampling.max_new_tokens


def setup(config: ConfigDict) -> Setup:
    """Reads the model's folder (not its weights) and builds everything static. Raises UserError for what does not fit."""
    folder = Path(config.model.path)
    model = ModelConfig.from_hf(folder)
    policy, tokenizer = policy_of(config, model), load_tokenizer(folder)
    sampling = sampling_of(config, tokenizer)
    filtered = bool(sampling.top_k or sampling.top_p < 1 or sampling.min_p)
    spec = UpdateSpec(
        Transformer(model, policy.train, config.train.remat),
        optimizer_of(config),
        objective_of(config),
        config.train.micro_batch,
        sampling.temperature,
        filtered,
        config.train.vocab_chunk,
    )
    return Setup(model, policy, tokenizer, sampling, Transformer(model, policy.rollout), spec)


def check_length(config: ConfigDict, model: ModelConfig) -> None:
    """Raises UserError if prompt and completion can outgrow the positions that the model knows."""
    total: Any = config.data.max_prompt_length + config.rollout.max_new_tokens
    if total > model.max_position:
        raise UserError(
            f"data.max_prompt_length={config.data.max_prompt_length} plus rollout.max_new_tokens={config.rollout.max_new_tokens} "
            f"is {total}, more than the {model.max_position} positions of the model; lower one of them"
        )
