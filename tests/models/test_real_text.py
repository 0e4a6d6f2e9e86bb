"""Greedy text of real models against `transformers` in bf16: set JETRL_SMOLLM2 and JETRL_QWEN05 to their Hugging Face folders.

    JETRL_SMOLLM2=/folder/of/SmolLM2-135M-Instruct python -m pytest tests/models/test_real_text.py -s

A CPU takes a minute or two for the small model. JETRL_TEXT_PROMPTS limits the number of prompts.
"""

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import any_generate, next_logits, quantize

from jetrl_jax.models.config import ModelConfig
from jetrl_jax.models.tokenizer import load_tokenizer
from jetrl_jax.models.transformer import Transformer
from jetrl_jax.models.weights import load_params
from jetrl_jax.precision import make_policy
from jetrl_jax.rollout.sampling import Sampling

TEXTS = Path(__file__).parents[1] / "fixtures" / "text"
NEW_TOKENS = 24
MODELS = {"smollm2_135m_instruct": "JETRL_SMOLLM2", "qwen25_coder_05b_instruct": "JETRL_QWEN05"}


def bf16_step(x: float) -> float:
    """The distance of neighbouring bf16 numbers (8 significant bits) at x."""
    return 2.0 ** (np.floor(np.log2(abs(x))) - 7)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_is_that_of_transformers(name):
    """Token for token; where transformers' two best logits lie within one bf16 step, either may come first."""
    if not os.environ.get(MODELS[name]):
        pytest.skip(f"set {MODELS[name]} to the model's Hugging Face folder")
    folder = Path(os.environ[MODELS[name]])
    prompts = json.loads((TEXTS / f"{name}.json").read_text())["prompts"][: int(os.environ.get("JETRL_TEXT_PROMPTS", "99"))]
    config, tokenizer, flow = ModelConfig.from_hf(folder), load_tokenizer(folder), make_policy("bf16").rollout
    for prompt in prompts:
        assert tokenizer.render_chat(prompt["messages"]) == prompt["prompt_ids"]
    model = Transformer(config, flow)
    q = quantize(flow, config, load_params(folder, config))
    width = max(len(p["prompt_ids"]) for p in prompts)
    tokens = np.zeros((len(prompts), width), np.int32)
    forced = np.zeros((len(prompts), width + NEW_TOKENS), np.int32)
    for row, both, p in zip(tokens, forced, prompts, strict=True):
        row[: len(p["prompt_ids"])] = p["prompt_ids"]
        both[: len(p["prompt_ids"]) + len(p["tokens"])] = p["prompt_ids"] + p["tokens"]
    lengths = jnp.asarray([len(p["prompt_ids"]) for p in prompts])
    sampling = Sampling(max_new_tokens=NEW_TOKENS, temperature=0.0, stop_ids=tokenizer.stop_ids)
    out = any_generate(model, q, jnp.asarray(tokens), lengths, jnp.arange(len(prompts)), jax.random.key(0), sampling, False)
    at = lengths[:, None] - 1 + jnp.arange(NEW_TOKENS)
    logits = np.asarray(next_logits(model, q, jnp.asarray(forced), at), np.float64)  # [P, N, V], the reference's tokens forced
    for i, p in enumerate(prompts):
        n, want = len(p["tokens"]), np.array(p["tokens"])
        z, top2 = logits[i, :n], np.array(p["top2_logits"])
        tied = top2[:, 0] - top2[:, 1] <= [bf16_step(x) for x in top2[:, 0]]
        differs = z.argmax(-1) != want
        got = np.asarray(out.tokens[i])[: int(out.lengths[i])]
        same = int(np.argmax(np.append(got[:n] != want[: len(got)], True)))
        print(f"\n{name} {p['messages'][-1]['content']!r}: {same} of {n} tokens alike, then {tokenizer.decode(got[same:].tolist())!r}; "
              f"{tied.sum()} ties in the reference, forced argmax differs at {np.flatnonzero(differs).tolist()}")
        assert not (differs & ~tied).any(), f"argmax differs without a tie at {np.flatnonzero(differs & ~tied)}"
        assert same == n or tied[same]
        logp = z[np.arange(n), want] - np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1)) - z.max(-1)
        exact = np.array(p["logprobs_float32"])  # of the same weights in float32
        theirs = np.array([a[b.index(w)] for a, b, w in zip(p["top2_logprobs"], p["top2_tokens"], p["tokens"], strict=True)])
        print(f"log-probabilities: from float32 {np.abs(logp - exact).max():.3f} (transformers' bf16: {np.abs(theirs - exact).max():.3f})")
        assert (np.abs(logp - exact) <= np.array([bf16_step(x) for x in top2[:, 0]])).all()
