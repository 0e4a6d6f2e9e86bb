"""`jetrl generate`: text in, text out, by the rollout that training uses."""

import numpy as np
from ml_collections import ConfigDict

from jetrl_jax.models.weights import load_params
from jetrl_jax.rollout.collect import Sampler, quantize


def generate_text(config: ConfigDict, prompts: list[str]) -> list[str]:
    """One completion of each prompt under `config.rollout` and policy.rollout, in the config's template, system text and chat format.

    Prompt number i is request i, so its text depends on seed, prompt and number, not on the others.
    """
    from jetrl_jax.train.data import PromptStream
    from jetrl_jax.train.setup import check_length, setup
    from jetrl_jax.train.tasks import Example
    from jetrl_jax.train.update import run_key

    parts = setup(config)
    check_length(config, parts.model)
    d, r = config.data, config.rollout
    stream = PromptStream(
        [Example(p, "") for p in prompts],
        parts.tokenizer,
        max_prompt_length=d.max_prompt_length,
        too_long="truncate" if d.too_long == "truncate" else "stop",
        template=d.template,
        system=d.system,
        chat=d.chat,
        shuffle=False,
    )
    params = load_params(config.model.path, parts.model)
    qparams = quantize(parts.policy.rollout, parts.model, params)
    del params
    rows = min(len(prompts), r.prompts_per_step)
    sampler = Sampler(
        parts.sampler,
        parts.tokenizer,
        parts.sampling,
        rows=rows,
        width=d.max_prompt_length,
        stop_strings=r.stop_strings,
        fixed_length=r.fixed_length,
    )
    key, texts = run_key(config.seed), []
    for first in range(0, len(prompts), rows):
        batch = stream.batch(first, min(rows, len(prompts) - first))
        ids = np.array([position for position, _ in batch])
        texts += sampler(qparams, [p.ids for _, p in batch], ids, key).texts
    return texts
