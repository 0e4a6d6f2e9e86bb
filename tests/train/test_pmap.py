"""Rollout and update under `jax.pmap` on two devices: the bits of `jit`. In a process of its own, since XLA_FLAGS are read once."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
from tiny import run

from jetrl_jax.compile import PMAP_FLAG

SCRIPT = """
import sys
import jax, jax.numpy as jnp, numpy as np
from tiny import *
from jetrl_jax.compile import check_pmap_flags
check_pmap_flags()
policy, state = start("bf16")
model, spec, b = Transformer(CONFIG, policy.rollout), update_spec(policy), len(PROMPT_LENGTHS) * GROUP
both = lambda tree: jax.tree.map(lambda x: jnp.stack([x, x]), tree)
stack = lambda *trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)
key = jax.random.wrap_key_data(state.key)
rollout = lambda q, tokens, lengths, ids: generate(model, q, tokens, lengths, ids, key, SAMPLING, False)
q = both(quantize(policy.train, CONFIG, state.params))  # replicated; each device has prompts of its own
ids = jnp.stack([jnp.arange(b), jnp.arange(b) + 100])
out = jax.pmap(rollout)(q, *stack(prompts(0), prompts(1)), ids)
batches = [batch_of(*prompts(i), jax.tree.map(lambda x: np.asarray(x[i]), out), i) for i in (0, 1)]
state, metrics = jax.pmap(lambda s, q, batch: update(spec, s, q, batch))(both(state), q, stack(*batches))
np.savez(sys.argv[1], tokens=out.tokens, logprobs=out.logprobs, **{k: v for k, v in metrics.items()},
         **{f"p{i}": x for i, x in enumerate(jax.tree.leaves(state.params))})
"""


def test_pmap_gives_the_bits_of_jit(tmp_path):
    helpers = Path(__file__).parents[1] / "helpers"
    flags = f"--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0 {PMAP_FLAG}"  # the level: it compiles faster
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(helpers), "XLA_FLAGS": flags}
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / "out.npz")], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    got, steps = np.load(tmp_path / "out.npz"), run("bf16").steps
    np.testing.assert_array_equal(got["tokens"][0], steps[0].rollout.tokens)
    np.testing.assert_array_equal(got["logprobs"][0], steps[0].rollout.logprobs)
    assert (got["tokens"][1] != got["tokens"][0]).any()
    assert (got["mismatch_equal_share"] == 1).all()  # on both devices, rollout and update agree
    np.testing.assert_allclose(got["loss"][0], steps[0].metrics["loss"], rtol=1e-6)
    np.testing.assert_allclose(got["grad_norm"][0], steps[0].metrics["grad_norm"], rtol=1e-5)
    for i, x in enumerate(jax.tree.leaves(steps[1].params)):  # the parameters after that step
        np.testing.assert_allclose(got[f"p{i}"][0], x, rtol=0, atol=1e-6)
