"""Rotary embeddings: Llama 3.1's scaling, both keys of config.json, Hugging Face's layout, and tables that every program shares."""

import dataclasses
import json
import math
from pathlib import Path

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.models.config import ModelConfig, RopeScaling
from jetrl_jax.models.rope import inverse_frequencies, rotate, tables

FIXTURES = Path(__file__).parents[1] / "fixtures" / "models"
# Llama-3.1-8B's own numbers
LLAMA31 = RopeScaling(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)


def config(scaling=None, head_dim=128, theta=500000.0) -> ModelConfig:
    return dataclasses.replace(ModelConfig.from_hf(FIXTURES / "llama_tied"), head_dim=head_dim, rope_theta=theta, rope_scaling=scaling)


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones():
    plain, scaled = inverse_frequencies(config()), inverse_frequencies(config(LLAMA31))
    ratio = plain / scaled
    periods = 8192 * plain / (2 * math.pi)  # how often a channel turns within the original context
    assert (ratio[periods >= 4] == 1).all() and (ratio[periods < 1] == 8).all()
    blended = (periods < 4) & (periods >= 1)
    assert blended.sum() >= 5
    for turns, r in zip(periods[blended], ratio[blended], strict=True):  # linear in the number of turns, of the frequencies
        np.testing.assert_allclose(1 / r, 1 / 8 + (1 - 1 / 8) * (turns - 1) / (4 - 1), rtol=1e-12)


def test_linear_scaling_divides_every_position():
    linear = RopeScaling(kind="linear", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64)
    for got, want in zip(tables(config(linear), 40), tables(config(), 10), strict=True):
        np.testing.assert_allclose(got[::4], want, atol=1e-7)


@pytest.mark.parametrize("name", ["llama_llama3", "llama_tied", "qwen3"])
def test_both_keys_of_config_json_give_the_same_tables(name):
    """transformers 5 writes `rope_parameters`; before it, `rope_theta` stood alone beside `rope_scaling`."""
    new = json.loads((FIXTURES / name / "config.json").read_text())
    old = dict(new)
    rope = dict(old.pop("rope_parameters"))
    old["rope_theta"] = rope.pop("rope_theta")
    old["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    older = {**old, "rope_scaling": old["rope_scaling"] and {("type" if k == "rope_type" else k): v for k, v in rope.items()}}
    want = tables(ModelConfig.from_hf(new), 30)
    for hf in (old, older):
        for a, b in zip(tables(ModelConfig.from_hf(hf), 30), want, strict=True):
            np.testing.assert_array_equal(a, b)
    if name == "llama_llama3":  # beyond the original positions too, and scaled at all
        assert want[0].shape[0] > ModelConfig.from_hf(new).rope_scaling.original_max_position
        assert np.abs(want[0] - tables(dataclasses.replace(ModelConfig.from_hf(new), rope_scaling=None), 30)[0])[9:].max() > 0.5


def test_a_longer_table_begins_with_the_shorter_one():
    """Decode reads the table of the cache's length, the full forward that of the sequence's."""
    for a, b in zip(tables(config(LLAMA31), 9000), tables(config(LLAMA31), 17), strict=True):
        np.testing.assert_array_equal(a[:17], b)


class RotateTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_pmap=True)
    def test_turns_channel_i_against_channel_i_plus_half(self):
        x = np.random.default_rng(0).normal(size=(2, 5, 3, 8)).astype(np.float32)
        cos, sin = tables(config(head_dim=8, theta=100.0), 5)
        got = self.variant(lambda x, c, s: rotate(x, c[None], s[None]))(jnp.asarray(x), jnp.asarray(cos), jnp.asarray(sin))
        chex.assert_shape(got, x.shape)
        angle = np.arange(5)[:, None] * 100.0 ** (-np.arange(4) / 4)
        turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angle)[None, :, None]  # a pair of channels is one complex number
        np.testing.assert_allclose(got, np.concatenate([turned.real, turned.imag], -1), atol=1e-6)

    @chex.variants(with_jit=True, without_jit=True)
    def test_scores_see_only_distances(self):
        q, k = np.random.default_rng(1).normal(size=(2, 1, 1, 1, 8)).astype(np.float32)
        cos, sin = (jnp.asarray(t) for t in tables(config(head_dim=8, theta=100.0), 60))
        at = self.variant(lambda x, c, s: rotate(x, c[None, None], s[None, None]))
        scores = [float((at(q, cos[i + 3], sin[i + 3]) * at(k, cos[i], sin[i])).sum()) for i in (0, 7, 50)]
        np.testing.assert_allclose(scores, scores[0], rtol=1e-5)
