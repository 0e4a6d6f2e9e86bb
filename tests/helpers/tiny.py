"""Tiny models and the short runs on them that several test files look at; FP8 programs compile slowly, so each is compiled once.

The model is awkward on purpose: sizes that are no multiples of 128, two blocks along a contracted axis, grouped KV heads, ragged prompts.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jetrl_jax.compile import EXACT_OPTIONS, compile
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.models.head import HeadSpec, logits
from jetrl_jax.models.qparams import quantize_params
from jetrl_jax.models.transformer import Transformer, weight_of_head
from jetrl_jax.precision import Flow, PrecisionPolicy, make_policy
from jetrl_jax.rollout.decode import Rollout, generate
from jetrl_jax.rollout.sampling import Sampling
from jetrl_jax.train.losses import Objective, mask_of
from jetrl_jax.train.update import Batch, OptimizerSpec, TrainState, UpdateSpec, init_state, score, update

CONFIG = ModelConfig(
    family="qwen3", vocab_size=80, hidden_size=160, intermediate_size=136, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32,
    rms_norm_eps=1e-6, rope_theta=10000.0, rope_scaling=None, max_position=64, qkv_bias=True, qk_norm=True, tie_embeddings=True,
)  # fmt: skip
PROMPT_LENGTHS, WIDTH, GROUP, NEW = (3, 8, 5, 1), 8, 2, 10  # P = 4 prompts, G = 2 samples of at most 10 tokens
SAMPLING = Sampling(max_new_tokens=NEW, temperature=0.8, stop_ids=(7, 8, 9))
OPTIMIZER = OptimizerSpec(learning_rate=4e-3, schedule="linear", warmup_steps=2, steps=50)


def random_params(config: ModelConfig = CONFIG, seed: int = 0) -> dict:
    """Master parameters with nothing at zero or one: a forgotten bias or norm shows."""
    rng = np.random.default_rng(seed)

    def leaf(path, s):
        name, noise = path[-1].key, rng.normal(size=s.shape).astype(np.float32)
        if "norm" in name:
            return jnp.asarray(1 + 0.2 * noise)
        scale = 0.3 if "bias" in name else 0.15 if name in ("embed", "lm_head") else 1.2 / s.shape[-1] ** 0.5
        return jnp.asarray(scale * noise)

    return jax.tree_util.tree_map_with_path(leaf, config.param_shapes())


quantize = compile(quantize_params, static_argnums=(0, 1))
any_generate = compile(generate, static_argnums=(0, 6, 7))
any_score = compile(score, static_argnums=0)
# Where bits do not matter, LLVM may spare its passes: half the compile time.
QUICK = {**EXACT_OPTIONS, "xla_backend_optimization_level": 0}
quick_update = jax.jit(update, static_argnums=0, compiler_options=QUICK)


class Programs(NamedTuple):
    """The two programs of a flow at the runs' shapes, compiled as the loop compiles them. A second trace of either raises."""

    generate: Any
    update: Any  # its state is donated


def _once(fun: Any, name: str) -> Any:
    def traced(*args):
        return fun(*args)

    traced.__name__ = name  # by which chex tells functions apart
    return chex.assert_max_traces(traced, 1)


@functools.cache
def programs(flow: Flow) -> Programs:
    """Shared by all tests."""
    return Programs(compile(_once(generate, f"generate_{hash(flow) % 2**32:x}"), static_argnums=(0, 6, 7)),
                    compile(_once(update, f"update_{hash(flow) % 2**32:x}"), static_argnums=0, donate_argnums=1))


@functools.partial(compile, static_argnums=0)
def next_logits(model: Transformer, q: dict, tokens: jax.Array, at: jax.Array) -> jax.Array:
    """Logits after rows `at` [B, N] of the full forward of tokens [B, T]: [B, N, V]."""
    hidden = model.apply({"q": q}, tokens)[0]
    rows = jnp.take_along_axis(hidden, at[..., None], 1)
    return logits(rows.reshape(-1, rows.shape[-1]), weight_of_head({"q": q}, model.flow)[0], HeadSpec.of(model.flow)).reshape(*at.shape, -1)


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a program, loops, branches and rules included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for v in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(v, "jaxpr", v)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def prompts(seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """Right-padded prompts [P, WIDTH] and lengths [P]; the padding is noise, which nothing may read."""
    tokens = np.random.default_rng(seed).integers(10, CONFIG.vocab_size, (len(PROMPT_LENGTHS), WIDTH))
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(PROMPT_LENGTHS)


def joined(tokens: jax.Array, lengths: jax.Array, rollout: Rollout) -> tuple[jax.Array, jax.Array]:
    """Prompts and completions as the update reads them: tokens [B, WIDTH + N], prompt lengths [B]."""
    copies, n = rollout.tokens.shape[0] // tokens.shape[0], rollout.tokens.shape[1]
    both, at = np.pad(np.repeat(tokens, copies, 0), [(0, 0), (0, n)]), np.repeat(lengths, copies)
    np.put_along_axis(both, at[:, None] + np.arange(n), np.asarray(rollout.tokens), 1)
    return jnp.asarray(both), jnp.asarray(at)


def batch_of(tokens: jax.Array, lengths: jax.Array, rollout: Rollout, seed: int = 0) -> Batch:
    """The update's batch, with drawn advantages."""
    both, at = joined(tokens, lengths, rollout)
    mask = mask_of(rollout.lengths, ~rollout.stopped, rollout.tokens.shape[1], False)
    advantages = jnp.asarray(np.random.default_rng(seed).normal(size=len(at)), jnp.float32)
    return Batch(both, at, rollout.tokens, rollout.logprobs, rollout.tau, mask, advantages)


def update_spec(policy: PrecisionPolicy, micro_batch: int = 4, **changes: Any) -> UpdateSpec:
    """The update of the runs: two micro-batches, a vocabulary chunk that does not divide V."""
    given = {"optimizer": OPTIMIZER, "objective": Objective(), "temperature": SAMPLING.temperature, "vocab_chunk": 48, **changes}
    return UpdateSpec(Transformer(CONFIG, policy.train), given.pop("optimizer"), given.pop("objective"), micro_batch, **given)


class Step(NamedTuple):
    params: Any  # the master before the step, numpy
    rollout: Rollout
    batch: Batch
    metrics: dict[str, float]
    donated: bool  # whether the update gave up the state's buffers


class Run(NamedTuple):
    policy: PrecisionPolicy
    steps: list[Step]
    state: TrainState  # after the last step


def start(policy_name: str) -> tuple[PrecisionPolicy, TrainState]:
    return make_policy(policy_name), init_state(random_params(), OPTIMIZER, 3)


@functools.cache
def run(policy_name: str, steps: int = 4) -> Run:
    """`steps` times quantize, generate, update, as the loop does it."""
    policy, state = start(policy_name)
    sampler, spec, done = Transformer(CONFIG, policy.rollout), update_spec(policy), []
    for i in range(steps):
        before = jax.tree.map(np.array, state.params)
        q = quantize(policy.rollout, CONFIG, state.params)
        trained = q if policy.unified else quantize(policy.train, CONFIG, state.params)
        tokens, lengths = prompts(i)
        ids = jnp.arange(len(PROMPT_LENGTHS) * GROUP) + 100 * i
        out = programs(policy.rollout).generate(sampler, q, tokens, lengths, ids, jax.random.wrap_key_data(state.key), SAMPLING, False)
        batch, old = batch_of(tokens, lengths, out, i), state.params["embed"]
        state, metrics = programs(policy.train).update(spec, state, trained, batch)
        done.append(Step(before, out, batch, {k: float(v) for k, v in metrics.items()}, old.is_deleted()))
    return Run(policy, done, state)
