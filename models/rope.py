"""Rotary position embedding (RoFormer, arXiv 2104.09864) with Llama 3.1's and linear scaling, as tables made on the host."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jetrl_jax.models.config import ModelConfig
from jetrl_jax.numerics import wide


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Angle per position of each pair of channels, float64 [head_dim / 2], after `config.rope_scaling`."""
    inv = config.rope_theta ** -(np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    s = config.rope_scaling
    if s is None:
        return inv
    if s.kind == "linear":
        return inv / s.factor
    # Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between interpolated.
    wavelength = 2 * math.pi / inv
    low, high = s.original_max_position / s.low_freq_factor, s.original_max_position / s.high_freq_factor
    keep = np.clip((s.original_max_position / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0, 1)
    return np.where(wavelength > low, inv / s.factor, np.where(wavelength < high, inv, (1 - keep) * inv / s.factor + keep * inv))


@functools.lru_cache(maxsize=32)
def tables(config: ModelConfig, length: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, float32 [length, head_dim / 2]. From the host's float64, so that every program reads the same bits."""
    angle = np.arange(length, dtype=np.float64)[:, None] * inverse_frequencies(config)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, reductions: str = "auto") -> jax.Array:
    """x [B, T, H, hd], cos and sin [B or 1, T, hd / 2] -> x with channel i turned against i + hd / 2 (Hugging Face's layout), x's dtype."""

    def f(x, cos, sin):
        a, b = jnp.split(x, 2, -1)
        cos, sin = cos[:, :, None], sin[:, :, None]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    return wide(f, reductions, x.dtype)(x, cos, sin)
