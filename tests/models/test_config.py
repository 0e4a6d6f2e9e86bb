"""ModelConfig: what config.json means, what is refused, and what transformers makes of what we write."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest

from jetrl_jax.errors import UserError
from jetrl_jax.models.config import ModelConfig, RopeScaling

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures" / "models"
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SCALINGS = {
    "default": None,
    "linear": RopeScaling(kind="linear", factor=2.0),
    "llama3": RopeScaling(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192),
}


def raw(family: str = "llama", **changes: Any) -> dict[str, Any]:
    """A config.json without RoPE's fields; a change to `...` removes the field."""
    content: dict[str, Any] = {
        "model_type": family,
        "vocab_size": 160,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    } | changes
    return {field: value for field, value in content.items() if value is not ...}


def test_fields_are_read():
    config = ModelConfig.from_hf(raw(rope_theta=500000))
    assert config == ModelConfig(
        family="llama", vocab_size=160, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32,
        rms_norm_eps=1e-5, rope_theta=500000.0, rope_scaling=None, max_position=131072, qkv_bias=False, qk_norm=False, tie_embeddings=True,
    )  # fmt: skip
    assert isinstance(config.rope_theta, float)
    assert hash(config) == hash(dataclasses.replace(config))  # a static argument of jit


def test_families_differ_where_they_must():
    marks = {family: (c.qkv_bias, c.qk_norm) for family in ("llama", "qwen2", "qwen3") if (c := ModelConfig.from_hf(raw(family)))}
    assert marks == {"llama": (False, False), "qwen2": (True, False), "qwen3": (False, True)}


def test_defaults_are_those_of_transformers():
    bare: dict[str, Any] = {"head_dim": ..., "num_key_value_heads": ..., "rms_norm_eps": ..., "tie_word_embeddings": ..., "hidden_act": ...}
    config = ModelConfig.from_hf(raw(**bare))
    found = (config.head_dim, config.num_kv_heads, config.rms_norm_eps, config.tie_embeddings, config.rope_theta)
    assert found == (16, 4, 1e-6, False, 10000.0)
    assert ModelConfig.from_hf(raw("qwen2", head_dim=None)).head_dim == 16
    assert ModelConfig.from_hf(raw("qwen3", head_dim=...)).head_dim == 128


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("type_key", ["rope_type", "type"])
def test_rope_under_the_old_and_the_new_key(kind, type_key):
    scaling = {type_key: kind} | {"default": {}, "linear": {"factor": 2.0}, "llama3": LLAMA3}[kind]
    old = ModelConfig.from_hf(raw(rope_theta=500000.0, rope_scaling=scaling))
    new = ModelConfig.from_hf(raw(rope_parameters={**scaling, "rope_theta": 500000.0}))
    both = ModelConfig.from_hf(raw(rope_theta=500000.0, rope_scaling=scaling, rope_parameters={**scaling, "rope_theta": 500000.0}))
    assert old == new == both
    assert (new.rope_theta, new.rope_scaling) == (500000.0, SCALINGS[kind])


def test_rope_null_and_missing_original_length():
    assert ModelConfig.from_hf(raw(rope_theta=7.0, rope_scaling=None)).rope_theta == 7.0
    scaling = {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"} | {"rope_type": "llama3"}
    found = ModelConfig.from_hf(raw(rope_scaling=scaling)).rope_scaling
    assert found is not None and found.original_max_position == 131072


@pytest.mark.parametrize("changes", [
    {"sliding_window": None},
    {"sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 1},
    {"layer_types": ["full_attention", "full_attention"]},
])
def test_a_sliding_window_that_is_not_in_force_is_fine(changes):
    assert ModelConfig.from_hf(raw("qwen2", **changes)) == ModelConfig.from_hf(raw("qwen2"))


BAD: dict[str, tuple[dict[str, Any], list[str]]] = {  # changes -> words that the message must hold: the field, the value and a remedy
    "unknown family": ({"model_type": "qwen"}, ["model_type", "'qwen'", "did you mean"]),
    "no family": ({"model_type": ...}, ["model_type", "missing"]),
    "llama attention bias": ({"attention_bias": True}, ["attention_bias = True", "checkpoint without it"]),
    "llama mlp bias": ({"mlp_bias": True}, ["mlp_bias = True"]),
    "qwen3 attention bias": ({"model_type": "qwen3", "attention_bias": True}, ["attention_bias = True", "qwen3"]),
    "activation": ({"hidden_act": "gelu"}, ["hidden_act = 'gelu'", "silu"]),
    "quantized": ({"quantization_config": {"quant_method": "awq"}}, ["quantization_config", "awq", "bf16"]),
    "missing size": ({"hidden_size": ...}, ["hidden_size", "missing"]),
    "null size": ({"num_hidden_layers": None}, ["num_hidden_layers", "missing"]),
    "text for a number": ({"vocab_size": "160"}, ["vocab_size = '160'", "must be an integer"]),
    "fraction for a number": ({"intermediate_size": 96.5}, ["intermediate_size = 96.5", "must be an integer"]),
    "true for a number": ({"num_hidden_layers": True}, ["num_hidden_layers = True", "must be an integer"]),
    "number for a truth": ({"tie_word_embeddings": 1}, ["tie_word_embeddings = 1", "must be true or false"]),
    "zero layers": ({"num_hidden_layers": 0}, ["num_hidden_layers = 0", "greater than 0"]),
    "negative heads": ({"num_attention_heads": -4, "head_dim": ...}, ["num_attention_heads = -4"]),
    "infinite eps": ({"rms_norm_eps": math.inf}, ["rms_norm_eps = inf", "finite"]),
    "not a number": ({"rope_theta": math.nan}, ["rope_theta = nan"]),
    "uneven groups": ({"num_key_value_heads": 3}, ["num_key_value_heads = 3", "num_attention_heads = 4"]),
    "heads that do not divide": ({"num_attention_heads": 5, "head_dim": ...}, ["hidden_size = 64", "heads = 5", "head_dim"]),
    "odd head": ({"head_dim": 31}, ["head_dim = 31", "even"]),
    "window in force": ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64}, ["use_sliding_window = True", "set"]),
    "window of a llama": ({"sliding_window": 4096}, ["sliding_window = 4096", "use_sliding_window"]),
    "window by layer": ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 2}, ["layer_types", "sliding_attention"]),
    "layer types no list": ({"layer_types": 3}, ["layer_types = 3"]),
    "yarn": ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["rope_scaling", "'yarn'", "llama3"]),
    "dynamic": ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, ["rope_parameters", "'dynamic'"]),
    "longrope": ({"rope_scaling": {"rope_type": "longrope"}}, ["'longrope'"]),
    "rope no object": ({"rope_scaling": "linear"}, ["rope_scaling = 'linear'", "must be an object"]),
    "no factor": ({"rope_scaling": {"rope_type": "linear"}}, ["rope_scaling", "factor", "missing"]),
    "factor zero": ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, ["factor = 0", "greater than 0"]),
    "llama3 incomplete": ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor", "missing"]),
    "llama3 turned round": ({"rope_scaling": {**LLAMA3, "type": "llama3", "high_freq_factor": 0.5}}, ["high_freq_factor = 0.5"]),
    "partial rotation": ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ["partial_rotary_factor = 0.5"]),
    "rope by layer": ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["full_attention", "one object"]),
    "two ropes": ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}}, ["disagree", "remove"]),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_refused_is_named(case, tmp_path):
    changes, words = BAD[case]
    (tmp_path / "config.json").write_text(json.dumps(raw(**changes)))
    with pytest.raises(UserError) as caught:
        ModelConfig.from_hf(tmp_path)
    for word in [str(tmp_path / "config.json"), *words]:
        assert word in str(caught.value)
    assert str(caught.value).count(str(tmp_path)) == 1


@pytest.mark.parametrize("content, words", [
    (None, ["does not exist", "Hugging Face"]),
    ("{\"model_type\": ", ["not valid JSON"]),
    ("[1]", ["holds a JSON list"]),
    (b"\xff\xfe\x00", ["not valid JSON"]),
])
def test_a_missing_or_broken_file(content, words, tmp_path):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        ModelConfig.from_hf(tmp_path)
    for word in [str(path), *words]:
        assert word in str(caught.value)


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "model").write_text("")
    with pytest.raises(UserError, match="does not exist"):
        ModelConfig.from_hf(tmp_path / "model")


def test_a_config_made_by_hand_is_checked_too():
    config = ModelConfig.from_hf(raw())
    for change in ({"num_kv_heads": 3}, {"head_dim": 7}, {"family": "gpt2"}, {"vocab_size": 0}):
        with pytest.raises(UserError):
            dataclasses.replace(config, **change)
    with pytest.raises(UserError, match="yarn"):
        RopeScaling(kind="yarn", factor=2.0)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", SCALINGS)
def test_transformers_reads_what_we_write(family, kind):
    from transformers import CONFIG_MAPPING

    head_dim = 16 if family == "qwen2" else 32
    config = dataclasses.replace(ModelConfig.from_hf(raw(family, head_dim=head_dim)), rope_scaling=SCALINGS[kind], rope_theta=12345.0)
    written = json.loads(json.dumps(config.to_hf()))
    assert ModelConfig.from_hf(written) == config
    assert ModelConfig.from_hf({k: v for k, v in written.items() if k != "rope_parameters"}) == config  # an older reader's view

    theirs = CONFIG_MAPPING[family].from_dict(written)
    assert ModelConfig.from_hf(theirs.to_dict()) == config  # nothing changed on the way through theirs
    assert theirs.rope_parameters["rope_type"] == kind and theirs.rope_parameters["rope_theta"] == 12345.0
    assert theirs.eos_token_id is None  # rather than Llama 2's


@pytest.mark.parametrize("name", ["llama_llama3", "llama_tied", "qwen2_tied", "qwen3"])
def test_configs_written_by_transformers(name):
    config = ModelConfig.from_hf(FIXTURES / name)
    assert ModelConfig.from_hf(config.to_hf()) == config
    assert config.tie_embeddings == name.endswith("tied")
    assert (config.rope_scaling is not None) == name.startswith("llama")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_param_shapes(family, tied):
    shapes = ModelConfig.from_hf(raw(family, tie_word_embeddings=tied)).param_shapes()
    attn: dict[str, tuple[int, ...]] = {"q": (2, 128, 64), "k": (2, 64, 64), "v": (2, 64, 64), "o": (2, 64, 128)}
    attn |= {"q_bias": (2, 128), "k_bias": (2, 64), "v_bias": (2, 64)} if family == "qwen2" else {}
    attn |= {"q_norm": (2, 32), "k_norm": (2, 32)} if family == "qwen3" else {}
    mlp = {"gate": (2, 96, 64), "up": (2, 96, 64), "down": (2, 64, 96)}
    layers = {"attn_norm": (2, 64), "mlp_norm": (2, 64), "attn": attn, "mlp": mlp}
    expected: dict[str, Any] = {"embed": (160, 64), "final_norm": (64,), "layers": layers}
    expected |= {} if tied else {"lm_head": (160, 64)}
    assert jax.tree.map(lambda leaf: leaf.shape, shapes) == expected
    chex.assert_type(jax.tree.leaves(shapes), jnp.float32)
