"""Decode attention and flash attention on the GPU, against float64 and against jnp."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import case

from jetrl_jax.kernels import flash, launch
from jetrl_jax.models.attention import attend
from jetrl_jax.precision import Format
from jetrl_jax.quantize import QTensor

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def kernels():
    if why := launch.missing():
        pytest.skip(why)


def decode(operands, config=None):
    from jetrl_jax.kernels import decode_attention

    return np.asarray(jax.jit(lambda *a: decode_attention.attention(*a, config=config))(*operands), np.float64)


def rows(operands, at):
    """The operands of some rows alone."""
    q, k, v, layer, positions, *scales = operands
    return [q[at], k[:, at], v[:, at], layer, positions[at], *(x[:, at] for x in scales)]


# shape: sequences, slots, KV heads, group, head size; config: heads, warps, slots, stages, segment
@pytest.mark.parametrize("fmt, shape, config", [
    ("bf16", (9, 700, 2, 4, 128), None),
    ("e4m3", (9, 700, 2, 4, 128), None),
    ("bf16", (6, 333, 2, 8, 64), (1, 2, 16, 3, 128)),
    ("e4m3", (6, 333, 1, 7, 64), (1, 2, 32, 3, 128)),
    ("bf16", (4, 1100, 4, 1, 128), (4, 1, 16, 3, 1024)),
    ("e4m3", (4, 1100, 4, 2, 128), (4, 1, 32, 3, 256)),
    ("e4m3", (4, 300, 4, 4, 128), (1, 4, 32, 2, 512)),
    ("bf16", (3, 90, 3, 2, 80), None),
    ("e5m2", (3, 90, 2, 4, 32), None),
])
def test_decode_against_float64(fmt, shape, config):
    from jetrl_jax.kernels.decode_attention import Config

    operands, exact, tolerance = case(fmt, *shape)
    out = decode(operands, Config(*config) if config else None)
    assert np.isfinite(out).all()  # NaN in unseen slots and in another layer has not leaked
    assert (np.abs(out - exact) <= tolerance).all(), np.max(np.abs(out - exact) / tolerance)


@pytest.mark.parametrize("fmt", ["bf16", "e4m3"])
def test_a_row_is_the_same_alone_and_in_company(fmt):
    operands, _, _ = case(fmt, 9, 1100, 2, 4, 64)
    together = decode(operands)
    for at in (slice(0, 1), slice(3, 5), slice(2, 7), slice(1, 9)):
        np.testing.assert_array_equal(decode(rows(operands, at)), together[at])


@pytest.mark.parametrize("fmt", ["bf16", "e4m3"])
def test_repeated_runs_agree(fmt):
    operands, _, _ = case(fmt, 64, 1500, 8, 4, 128)
    operands = jax.device_put(operands)
    from jetrl_jax.kernels import decode_attention

    run = jax.jit(decode_attention.attention)
    first = run(*operands)
    assert jnp.isfinite(first).all() and all((run(*operands) == first).all() for _ in range(50))


@pytest.mark.parametrize("fmt", ["bf16", "e4m3"])
def test_layers_are_read_in_place(fmt):
    operands, exact, tolerance = case(fmt, 3, 200, 2, 4, 64)
    q, k, v, _, positions, *scales = operands
    fmt = Format("bf16", (0, 0)) if fmt == "bf16" else Format(fmt, (1, 0))
    ks, vs = scales or (jnp.ones((2, 3, 200, 1, 1)),) * 2

    def layers(q, k, v, positions):
        return jax.lax.scan(lambda c, i: (c, flash.decode(q, k, v, i, positions)), 0, jnp.arange(2))[1]

    run = jax.jit(layers).lower(q, QTensor(k, ks, "k", fmt), QTensor(v, vs, "v", fmt), positions).compile()
    out = run(q, QTensor(k, ks, "k", fmt), QTensor(v, vs, "v", fmt), positions)
    assert (np.abs(np.asarray(out[1], np.float64) - exact) <= tolerance).all()
    stack = f"[{','.join(map(str, k.shape))}]"
    lines = [line for line in run.as_text().splitlines() if stack in line]
    assert any("custom-call(" in line for line in lines)
    assert not [line for line in lines if re.search(r" (copy|copy-start|dynamic-slice|fusion)\(", line)]


@pytest.mark.parametrize("t, h, kv, hd", [(100, 4, 2, 64), (256, 8, 2, 128)])
def test_flash_against_jnp(t, h, kv, hd):
    rng = np.random.default_rng()
    q, k, v, dy = (jnp.asarray(rng.normal(size=(3, t, n, hd)), jnp.bfloat16) for n in (h, kv, kv, h))

    def reference(q, k, v):
        return attend(*(x.astype(jnp.float32) for x in (q, k, v)), None, "float32")

    @functools.partial(jax.jit, static_argnums=0)
    def both(f, q, k, v, dy):
        y, vjp = jax.vjp(f, q, k, v)
        return y, *vjp(dy)

    for a, b in zip(both(flash.full, q, k, v, dy), both(reference, q, k, v, dy.astype(jnp.float32)), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape and np.abs(a - b).max() < 2e-2 * np.abs(b).max()
        assert np.linalg.norm(a - b) < 1e-2 * np.linalg.norm(b)
