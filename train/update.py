"""The jitted update: micro-batches scanned, gradients summed in float32, one clipped AdamW step on the float32 master.

Every micro-batch reads the payloads that rollout read (`qparams`, quantized once for this step); only the optimizer touches the master.
"""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import lax

from jetrl_jax.errors import UserError, unknown
from jetrl_jax.models.head import HeadSpec, token_logprobs
from jetrl_jax.models.transformer import Transformer, weight_of_head
from jetrl_jax.train import mismatch
from jetrl_jax.train.losses import Objective, finish_metrics, normaliser, policy_loss


@flax.struct.dataclass
class TrainState:
    """Everything a run goes on from. step: int32; params: float32 master; opt_state: optax's; key: the run's key, never changed;
    data_position: int32, prompts consumed so far."""

    step: jax.Array
    params: Any
    opt_state: Any
    key: jax.Array
    data_position: jax.Array


@flax.struct.dataclass
class Batch:
    """What an update learns from, B sequences.

    tokens [B, T] int32, prompt and completion joined, right-padded; prompt_lengths [B]; completions [B, N] int32; logprobs, tau [B, N]
    from the rollout; mask [B, N] float32, 1 on completion tokens (stop token included); advantages [B] float32; ref_logprobs [B, N] under
    the reference, or None.
    """

    tokens: jax.Array
    prompt_lengths: jax.Array
    completions: jax.Array
    logprobs: jax.Array
    tau: jax.Array
    mask: jax.Array
    advantages: jax.Array
    ref_logprobs: jax.Array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """AdamW (arXiv 1711.05101) with warm-up, a schedule and a clip of the global norm. Norms and biases are not decayed."""

    learning_rate: float = 1e-6
    schedule: str = "constant"  # constant | linear | cosine, to 0 at `steps`
    warmup_steps: int = 0
    steps: int = 1
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    def learning_rates(self) -> optax.Schedule:
        """Optimizer step -> learning rate."""
        after = max(self.steps - self.warmup_steps, 1)
        schedules = {
            "constant": lambda: optax.constant_schedule(self.learning_rate),
            "linear": lambda: optax.linear_schedule(self.learning_rate, 0.0, after),
            "cosine": lambda: optax.cosine_decay_schedule(self.learning_rate, after),
        }
        if self.schedule not in schedules:
            raise unknown("optimizer.schedule", self.schedule, schedules)
        main = schedules[self.schedule]()
        # the first step already moves: warm-up counts from 1 / warmup_steps
        return lambda count: main(jnp.maximum(count - self.warmup_steps, 0)) * jnp.minimum(1.0, (count + 1) / max(self.warmup_steps, 1))


@functools.lru_cache(maxsize=8)
def make_optimizer(spec: OptimizerSpec) -> optax.GradientTransformation:
    """Steps with a NaN or infinity in the gradient leave everything as it was and are counted (`total_notfinite` of its state)."""

    def decayed(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: "norm" not in path[-1].key and "bias" not in path[-1].key, params)

    adamw = optax.adamw(spec.learning_rates(), spec.b1, spec.b2, spec.eps, weight_decay=spec.weight_decay, mask=decayed)
    return optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(spec.max_grad_norm), adamw), max_consecutive_errors=2**30)


def run_key(seed: int) -> jax.Array:
    """A run's key. Always threefry: others draw other numbers in another batch, and requests would not be reproducible."""
    return jax.random.key(seed, impl="threefry2x32")


def init_state(params: Any, spec: OptimizerSpec, seed: int) -> TrainState:
    """The state before the first step."""
    return TrainState(jnp.int32(0), params, make_optimizer(spec).init(params), jax.random.key_data(run_key(seed)), jnp.int32(0))


@dataclasses.dataclass(frozen=True)
class UpdateSpec:
    """What is static in an update."""

    model: Transformer
    optimizer: OptimizerSpec
    objective: Objective
    micro_batch: int
    temperature: float = 1.0
    filtered: bool = False  # whether the rollout cut its distribution (top-k, top-p, min-p)
    vocab_chunk: int = 4096


def completion_logprobs(model: Transformer, variables: dict, batch: Batch, spec: HeadSpec) -> tuple[jax.Array, jax.Array]:
    """The training forward: log-probabilities of the completion tokens and entropies, float32 [B, N]."""
    hidden, _ = model.apply(variables, batch.tokens)
    (b, n), t = batch.completions.shape, batch.tokens.shape[1]
    at = jnp.minimum(batch.prompt_lengths[:, None] - 1 + jnp.arange(n), t - 1)  # the row that predicts completion token i
    rows = jnp.take_along_axis(hidden, at[..., None], 1).reshape(b * n, -1)
    w, tap = weight_of_head(variables, model.flow)
    logp, entropy = token_logprobs(rows, w, tap, batch.completions.reshape(-1), batch.tau.reshape(-1), spec)
    return logp.reshape(b, n), entropy.reshape(b, n)


def _split(batch: Any, micro: int) -> Any:
    return jax.tree.map(lambda x: x.reshape(-1, micro, *x.shape[1:]), batch)


def score(spec: UpdateSpec, qparams: dict, batch: Batch) -> jax.Array:
    """Log-probabilities [B, N] by the training forward without gradients: of a reference model, or of the policy."""
    head = HeadSpec.of(spec.model.flow, spec.temperature, spec.vocab_chunk, spec.filtered)
    out = lax.map(lambda m: completion_logprobs(spec.model, {"q": qparams}, m, head)[0], _split(batch, spec.micro_batch))
    return out.reshape(batch.completions.shape)


def update(spec: UpdateSpec, state: TrainState, qparams: dict, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimizer step. Pure; `spec` is static, `state` may be donated.

    Returns the state after it and float32 scalars: loss, gradient norm, learning rate, entropy, the objective's means
    (`losses.policy_loss`), and the mismatch between rollout and this forward (`mismatch.finish`; design.md "Numerics" 9).
    """
    if batch.tokens.shape[0] % spec.micro_batch:
        raise UserError(f"train.micro_batch={spec.micro_batch} does not divide the {batch.tokens.shape[0]} sequences of a step")
    head = HeadSpec.of(spec.model.flow, spec.temperature, spec.vocab_chunk, spec.filtered)
    by = normaliser(batch.mask, spec.objective)

    def loss(params, micro):
        logp, entropy = completion_logprobs(spec.model, {"params": params, "q": qparams}, micro, head)
        share, sums = policy_loss(logp, micro.logprobs, micro.advantages, micro.mask, spec.objective, by, ref_logp=micro.ref_logprobs)
        sums["entropy"] = lax.stop_gradient(jnp.where(micro.mask > 0, entropy, 0).sum())
        return share, (sums, mismatch.measure(lax.stop_gradient(logp), micro.logprobs, micro.mask))

    def one(carry, micro):
        grads, total, sums, tallies = carry
        (share, (s, m)), g = jax.value_and_grad(loss, has_aux=True)(state.params, micro)
        sums = jax.tree.map(jnp.add, sums, s)
        return (jax.tree.map(jnp.add, grads, g), total + share, sums, mismatch.combine(tallies, m)), None

    micro = _split(batch, spec.micro_batch)
    shapes = jax.eval_shape(lambda: loss(state.params, jax.tree.map(lambda x: x[0], micro)))
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (jax.eval_shape(lambda: state.params), *shapes[:1], shapes[1][0]))
    (grads, total, sums, tallies), _ = lax.scan(one, (*zero, mismatch.zeros()), micro)

    optimizer = make_optimizer(spec.optimizer)
    count = state.step  # counts every call; the schedule inside counts the applied ones
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    metrics = {
        "loss": total,
        "grad_norm": optax.tree.norm(grads),
        "learning_rate": spec.optimizer.learning_rates()(count - state.opt_state.total_notfinite),
        "skipped_steps": opt_state.total_notfinite,
        **finish_metrics(sums),
        **mismatch.finish(tallies),
    }
    new = dataclasses.replace(state, step=count + 1, params=optax.apply_updates(state.params, updates), opt_state=opt_state)
    return new, metrics
