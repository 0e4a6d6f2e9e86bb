"""On a CUDA device: JETRL_TEST_PLATFORM=cuda,cpu python -m pytest -m gpu -rA tests/gpu

The GPU's default reductions are float32, so rollout and update agree closely there and not to the bit; with `reductions=float64` they do.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG, GROUP, OPTIMIZER, PROMPT_LENGTHS, SAMPLING, batch_of, prompts, quantize, random_params, update_spec

from jetrl_jax import flow
from jetrl_jax.compile import compile
from jetrl_jax.linear import scaled_product
from jetrl_jax.models.transformer import Transformer
from jetrl_jax.precision import Format, make_policy
from jetrl_jax.quantize import dequantize
from jetrl_jax.quantize import quantize as quantize_tensor
from jetrl_jax.rollout.decode import generate
from jetrl_jax.train.update import init_state, update

pytestmark = pytest.mark.gpu


def mismatches(name: str, reductions: str, steps: int = 4) -> list[dict[str, float]]:
    policy = make_policy(name, reductions=reductions)
    state, sampler, spec = init_state(random_params(), OPTIMIZER, 3), Transformer(CONFIG, policy.rollout), update_spec(policy)
    sample, learn, found = compile(generate, static_argnums=(0, 6, 7)), compile(update, static_argnums=0, donate_argnums=1), []
    for i in range(steps):
        q = quantize(policy.rollout, CONFIG, state.params)
        trained = q if policy.unified else quantize(policy.train, CONFIG, state.params)
        tokens, lengths = prompts(i)
        ids = jnp.arange(len(PROMPT_LENGTHS) * GROUP) + 100 * i
        out = sample(sampler, q, tokens, lengths, ids, jax.random.wrap_key_data(state.key), SAMPLING, False)
        state, metrics = learn(spec, state, trained, batch_of(tokens, lengths, out, i))
        found.append({k: float(v) for k, v in metrics.items()})
    return found


@pytest.mark.parametrize("name", ["bf16", "jet_fp8", "jet_fp8_kv8"])
def test_float64_reductions_are_exact_on_the_gpu(name):
    assert all(m["mismatch_max_abs"] == 0 for m in mismatches(name, "float64"))


def test_the_baseline_is_far_off_and_the_unified_flow_is_not():
    unified, baseline = (np.mean([m["mismatch_mean_abs"] for m in mismatches(n, "auto")]) for n in ("jet_fp8", "fp8_rollout_only"))
    assert baseline > 5 * unified


def test_quantizer_gives_the_cpus_bits():
    rng = np.random.default_rng()
    x = (rng.normal(size=(3, 130, 200)) * 10.0 ** rng.integers(-8, 8, (3, 130, 1))).astype(np.float32)
    cpu = jax.devices("cpu")[0]
    for fmt in (Format(), Format(block=(128, 128)), Format(block=(128, 1)), Format("e5m2"), Format(scale="pow2"), Format(block=(1, 0))):
        here = quantize_tensor(jnp.asarray(x), "x", fmt)
        there = quantize_tensor(jax.device_put(x, cpu), "x", fmt)
        np.testing.assert_array_equal(np.asarray(here.scales), np.asarray(there.scales))
        np.testing.assert_array_equal(np.asarray(here.values).view(np.uint8), np.asarray(there.values).view(np.uint8))


def test_product_against_dense_float64():
    rng = np.random.default_rng()
    a = quantize_tensor(jnp.asarray(rng.normal(size=(70, 384)), jnp.float32), "a", Format())
    w = quantize_tensor(jnp.asarray(rng.normal(size=(256, 384)), jnp.float32), "w", Format(block=(128, 128)))
    dense = np.asarray(dequantize(a), np.float64) @ np.asarray(dequantize(w), np.float64).T
    for reductions in ("float32", "float64"):
        y = np.asarray(scaled_product(a, w, reductions))
        assert np.abs(y - dense).max() < 1e-4 * np.abs(dense).max()


def test_flow_verdict_is_that_of_the_cpu():
    assert flow.verdict(make_policy("jet_fp8"), CONFIG).holds and not flow.verdict(make_policy("fp8_rollout_only"), CONFIG).holds
