"""What `make demo` needs: the shipped model loads everywhere, its config is valid, and the task fits it. The run itself is not here."""

import json
import string
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import AutoConfig, AutoTokenizer, Qwen3Config

from jetrl_jax import config, config_check
from jetrl_jax.compile import compile
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.models.head import HeadSpec, token_logprobs
from jetrl_jax.models.qparams import quantize_params
from jetrl_jax.models.tokenizer import load_tokenizer
from jetrl_jax.models.transformer import Transformer, weight_of_head
from jetrl_jax.models.weights import load_params
from jetrl_jax.precision import make_policy
from jetrl_jax.rollout.collect import pad_prompts
from jetrl_jax.train.setup import prompts_of, setup

FOLDER = Path(__file__).parent.parent / "models" / "demo"
FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def demo():
    return config.load("demo")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(FOLDER)


def test_the_folder_is_small_and_holds_what_it_should():
    assert {path.name for path in FOLDER.iterdir()} == FILES
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 4e6


def test_weights_have_the_shapes_of_the_config_and_are_finite():
    model = ModelConfig.from_hf(FOLDER)
    assert (model.family, model.qk_norm, model.tie_embeddings) == ("qwen3", True, True)
    assert model.num_kv_heads < model.num_heads
    params, shapes = load_params(FOLDER, model), model.param_shapes()
    assert jax.tree.map(lambda a: (a.shape, a.dtype), params) == jax.tree.map(lambda a: (a.shape, a.dtype), shapes)
    assert all(bool(jnp.isfinite(a).all()) for a in jax.tree.leaves(params))


def test_transformers_reads_config_and_tokenizer():
    theirs = AutoConfig.from_pretrained(FOLDER)
    assert isinstance(theirs, Qwen3Config)
    assert (theirs.eos_token_id, theirs.pad_token_id) == (1, 0)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (1, 0, theirs.vocab_size)
    assert json.loads((FOLDER / "generation_config.json").read_text())["eos_token_id"] == 1


def test_a_token_is_a_character(tokenizer):
    text = "".join(c for c in string.printable if c not in "\t\r\x0b\x0c")
    ids = tokenizer.encode(text)
    assert len(ids) == len(set(ids)) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("é") == [tokenizer.inner.unk_token_id]
    assert (tokenizer.stop_ids, tokenizer.pad_id) == ((1,), 0)


def test_the_config_can_train_and_names_the_shipped_model(demo):
    config_check.check_training(demo)
    assert Path(demo.model.path).samefile(FOLDER)
    assert demo.policy == "jet_fp8"
    parts = setup(demo)
    assert parts.policy.unified
    assert parts.sampling.stop_ids == (1,)


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_prompt_and_every_answer_fit_without_room_to_spare(demo, tokenizer, split):
    """Padding would cost time: the limits are those of the task."""
    stream = prompts_of(demo, tokenizer, split, shuffle=False)
    assert stream.counts.dropped == stream.counts.truncated == 0
    prompts = [prompt for _, prompt in stream.batch(0, len(stream))]
    assert max(len(p.ids) for p in prompts) == demo.data.max_prompt_length
    assert max(len(tokenizer.encode(p.answer)) + 1 for p in prompts) == demo.rollout.max_new_tokens


def test_it_starts_with_something_to_learn(demo, tokenizer):
    """Held-out answers: sampled right between 5 % and 60 % of the time, though the right one is mostly the likeliest."""
    model, flow = ModelConfig.from_hf(FOLDER), make_policy("bf16", reductions="float32").rollout
    prompts = [prompt for _, prompt in prompts_of(demo, tokenizer, "test", shuffle=True).batch(0, 64)]
    questions, _ = pad_prompts([p.ids for p in prompts], demo.data.max_prompt_length, tokenizer.pad_id)
    answers, lengths = pad_prompts([[*tokenizer.encode(p.answer), 1] for p in prompts], demo.rollout.max_new_tokens, tokenizer.pad_id)
    head = HeadSpec.of(flow)

    def probabilities(params, tokens, answers):
        variables = {"q": quantize_params(flow, model, params)}
        hidden, _ = Transformer(model, flow).apply(variables, tokens)
        rows = hidden[:, -answers.shape[1] - 1 : -1].reshape(-1, model.hidden_size)
        logp, _ = token_logprobs(rows, weight_of_head(variables, flow)[0], None, answers.reshape(-1), jnp.zeros(answers.size), head)
        return jnp.exp(logp).reshape(answers.shape)

    tokens = jnp.asarray(np.concatenate([questions, answers], 1))
    of_tokens = compile(probabilities)(load_params(FOLDER, model), tokens, jnp.asarray(answers))
    of_tokens = np.where(np.arange(answers.shape[1]) < lengths[:, None], of_tokens, 1.0)
    assert 0.15 < of_tokens.prod(1).mean() < 0.45
    assert (of_tokens > 0.4).all(1).mean() > 0.6
