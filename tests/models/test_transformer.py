"""Each model family against `transformers` on tiny random checkpoints (fixtures made by scripts/make_reference_fixtures.py)."""

import dataclasses
import functools
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG, any_generate, next_logits, quantize, random_params

from jetrl_jax.compile import compile
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.models.rope import tables
from jetrl_jax.models.transformer import Block, Transformer
from jetrl_jax.models.weights import load_params
from jetrl_jax.precision import make_policy
from jetrl_jax.rollout.sampling import Sampling

FIXTURES = Path(__file__).parents[1] / "fixtures" / "models"
FAMILIES = ("llama_llama3", "llama_tied", "qwen2_tied", "qwen3")
BF16_TOLERANCE = 0.03  # of the largest logit, after two layers of bf16 roundings (8 significant bits: 0.004 each)


@functools.cache
def reference(name: str) -> dict[str, np.ndarray]:
    with np.load(FIXTURES / name / "reference.npz") as file:
        return {k: file[k] for k in ("tokens", "logits", "greedy", "greedy_gap")}


@functools.cache
def loaded(name: str):
    config = ModelConfig.from_hf(FIXTURES / name)
    return config, load_params(FIXTURES / name, config)


def all_logits(name: str, policy: str) -> np.ndarray:
    """[2, 12, V] logits of the reference's tokens by our full forward."""
    (config, params), flow = loaded(name), make_policy(policy).train
    tokens = jnp.asarray(reference(name)["tokens"])
    at = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return np.asarray(next_logits(Transformer(config, flow), quantize(flow, config, params), tokens, at))


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_in_float64_are_those_of_transformers(name):
    """Against float32 there: nothing but its rounding between us. Llama 3.1's RoPE runs past its 8 original positions here."""
    with jax.enable_x64(True):
        got = all_logits(name, "float64")
    np.testing.assert_allclose(got, reference(name)["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_in_bf16(name):
    want = reference(name)["logits"]
    got = all_logits(name, "bf16")
    assert np.abs(got - want).max() < BF16_TOLERANCE * np.abs(want).max()
    assert np.abs(got - want).mean() < 0.1 * BF16_TOLERANCE * np.abs(want).max()
    assert np.abs(got - want).max() > 1e-4  # it was bf16 that ran


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_decoding_gives_the_tokens_of_transformers(name):
    """A row may leave the reference only at a near tie, and at least one row of the two follows it to the end."""
    (config, params), flow, want = loaded(name), make_policy("bf16").rollout, reference(name)
    tokens, n = jnp.asarray(want["tokens"]), want["greedy"].shape[1]
    sampling = Sampling(max_new_tokens=n, temperature=0.0)
    model, q, lengths = Transformer(config, flow), quantize(flow, config, params), jnp.full(2, tokens.shape[1])
    out = any_generate(model, q, tokens, lengths, jnp.arange(2), jax.random.key(0), sampling, False)
    differs = np.asarray(out.tokens) != want["greedy"]
    first = np.where(differs.any(1), differs.argmax(1), n)
    for row, at in enumerate(first):
        if at < n:  # a near tie went the other way
            assert want["greedy_gap"][row, at] < 2 * BF16_TOLERANCE * np.abs(want["logits"]).max(), (row, at)
    assert (first == n).any() and not np.asarray(out.stopped).any() and (np.asarray(out.lengths) == n).all()


def test_a_live_transformers_model_agrees(tmp_path):
    for module in ("torch", "transformers"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}, which is no test dependency; the stored references stand in for it")
    import torch
    import transformers

    folder = FIXTURES / "qwen3"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        want = model(torch.from_numpy(reference("qwen3")["tokens"].astype(np.int64))).logits.numpy()
    with jax.enable_x64(True):
        np.testing.assert_allclose(all_logits("qwen3", "float64"), want, rtol=0, atol=1e-4)


def test_sharded_and_single_file_checkpoints_are_one_model():
    for a, b in zip(jax.tree.leaves(loaded("llama_tied")), jax.tree.leaves(loaded("llama_tied_sharded")), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": False, "qkv_bias": False}, {"qk_norm": False, "qkv_bias": True}])
def test_init_makes_the_tree_that_checkpoints_have(changes):
    config = dataclasses.replace(CONFIG, **changes)
    made = jax.eval_shape(Transformer(config, make_policy("jet_fp8").train).init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
    want = config.param_shapes()
    assert jax.tree.map(lambda a: (a.shape, a.dtype), made["params"]) == jax.tree.map(lambda a: (a.shape, a.dtype), want)


def test_jitted_bits_are_the_bits_of_one_operation_at_a_time():
    """A layer: XLA may not skip a rounding between operators; `compile` sees to it (design.md, "Numerics" 1)."""
    flow = make_policy("bf16").train
    q = jax.tree.map(lambda w: w[0], quantize(flow, CONFIG, random_params())["segments"][0])
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 9, CONFIG.hidden_size)), jnp.bfloat16)
    rope = tuple(jnp.asarray(t)[None] for t in tables(CONFIG, 9))

    def layer(q, x):
        return Block(CONFIG, flow, (0, CONFIG.num_layers)).apply({"q": q}, x, rope)[0]

    np.testing.assert_array_equal(compile(layer)(q, x), layer(q, x))


def test_a_future_token_changes_nothing_before_it():
    flow = make_policy("jet_fp8").train
    model, q = Transformer(CONFIG, flow), quantize(flow, CONFIG, random_params())
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 9)), jnp.int32)
    at = jnp.broadcast_to(jnp.arange(9), tokens.shape)
    a, b = next_logits(model, q, tokens, at), next_logits(model, q, tokens.at[:, 6].set(1), at)
    np.testing.assert_array_equal(a[:, :6], b[:, :6])
    assert (np.asarray(a[:, 6:]) != np.asarray(b[:, 6:])).any(-1).all()
