"""The update step: micro-batches, gradients of every objective and straight through FP8, optimizer, skipped steps, one trace, donation."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import (
    CONFIG,
    GROUP,
    NEW,
    OPTIMIZER,
    PROMPT_LENGTHS,
    QUICK,
    SAMPLING,
    WIDTH,
    Step,
    programs,
    prompts,
    quantize,
    quick_update,
    random_params,
    run,
    start,
    update_spec,
)  # fmt: skip

from jetrl_jax.errors import UserError
from jetrl_jax.models.head import HeadSpec
from jetrl_jax.models.transformer import Transformer
from jetrl_jax.precision import FLOAT64, Flow, make_policy
from jetrl_jax.train.losses import Objective
from jetrl_jax.train.update import Batch, OptimizerSpec, UpdateSpec, completion_logprobs, init_state, make_optimizer, score, update


def first(name: str) -> tuple[Step, dict]:
    """The first step of a run, and the payloads that it read."""
    policy, _ = start(name)
    return run(name).steps[0], quantize(policy.train, CONFIG, run(name).steps[0].params)


def gradient(state):
    """What the optimizer saw, from Adam's first moment after one step: (1 - b1) times the clipped gradient."""
    return optax.tree.get(state.opt_state, "mu")


# --- one step


@pytest.mark.parametrize("count", [1, 4])
def test_the_number_of_micro_batches_changes_a_rounding_at_most(count):
    """Against the run's two. FP8 scales are per token or per block of a sequence's tokens: one that saw the split would change 1e-2."""
    step, q = first("jet_fp8")
    policy, state = start("jet_fp8")
    want, metrics = programs(policy.train).update(update_spec(policy), state, q, step.batch)
    got, others = quick_update(update_spec(policy, len(step.batch.tokens) // count), start("jet_fp8")[1], q, step.batch)
    np.testing.assert_allclose(others["loss"], metrics["loss"], rtol=1e-6)
    np.testing.assert_allclose(others["grad_norm"], metrics["grad_norm"], rtol=1e-5)
    assert others["mismatch_equal_share"] == 1
    for a, b in zip(jax.tree.leaves(gradient(got)), jax.tree.leaves(gradient(want)), strict=True):
        assert np.abs(b).max() > 0
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(b).max())


@pytest.mark.parametrize("name", ["jet_fp8", "bf16"])
def test_metrics_of_the_runs(name):
    for i, step in enumerate(run(name).steps):
        mask, advantages = np.asarray(step.batch.mask), np.asarray(step.batch.advantages)
        np.testing.assert_allclose(step.metrics["loss"], -(mask * advantages[:, None]).sum() / mask.sum(), rtol=1e-5)  # ratios are 1
        np.testing.assert_allclose(step.metrics["learning_rate"], OPTIMIZER.learning_rates()(i), rtol=1e-6)
        assert step.metrics["clip_fraction"] == 0 and 0 < step.metrics["entropy"] < np.log(CONFIG.vocab_size)
    assert int(run(name).state.step) == len(run(name).steps)


def test_a_gradient_that_is_not_finite_is_skipped_and_counted():
    policy, state = start("jet_fp8")
    step, q = first("jet_fp8")
    one = functools.partial(programs(policy.train).update, update_spec(policy))
    broken = step.batch.replace(advantages=step.batch.advantages.at[3].set(jnp.nan))
    skipped, metrics = one(state, q, broken)
    _, fresh = start("jet_fp8")
    assert int(skipped.step) == 1 and metrics["skipped_steps"] == 1 and not np.isfinite(metrics["grad_norm"])
    np.testing.assert_allclose(metrics["learning_rate"], OPTIMIZER.learning_rates()(0))
    for a, b in zip(jax.tree.leaves((skipped.params, gradient(skipped))), jax.tree.leaves((fresh.params, gradient(fresh))), strict=True):
        np.testing.assert_array_equal(a, b)
    after, metrics = one(skipped, q, step.batch)  # the next good step is the first one
    assert int(after.step) == 2 and metrics["skipped_steps"] == 1
    np.testing.assert_allclose(metrics["learning_rate"], OPTIMIZER.learning_rates()(0))
    for a, b in zip(jax.tree.leaves(after.params), jax.tree.leaves(run("jet_fp8").steps[1].params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_nothing_recompiles_from_step_to_step_and_the_state_is_donated():
    """`programs` lets each be traced once (chex.assert_max_traces): four steps did not trace again, another shape does."""
    done = run("jet_fp8")
    assert len(done.steps) == 4 and all(s.donated for s in done.steps)
    p = programs(done.policy.train)
    q = quantize(done.policy.train, CONFIG, random_params())
    tokens, lengths = prompts()
    ids = jnp.arange(len(PROMPT_LENGTHS) * GROUP)
    p.generate(Transformer(CONFIG, done.policy.rollout), q, tokens, lengths, ids, jax.random.key(1), SAMPLING, False)
    with pytest.raises(AssertionError, match="traced > 1 times"):
        p.generate(Transformer(CONFIG, done.policy.rollout), q, tokens, lengths, ids[:4], jax.random.key(1), SAMPLING, False)
    batch = jax.tree.map(lambda x: x[:4], done.steps[0].batch)
    with pytest.raises(AssertionError, match="traced > 1 times"):
        p.update(update_spec(done.policy), start("jet_fp8")[1], q, batch)


def test_a_micro_batch_that_does_not_divide_is_refused():
    policy, state = start("bf16")
    with pytest.raises(UserError, match="train.micro_batch=3 does not divide the 8 sequences"):
        update(update_spec(policy, 3), state, {}, run("bf16").steps[0].batch)


# --- the optimizer


@pytest.mark.parametrize("schedule, want", [("constant", [1, 1, 1, 1]), ("linear", [1, 0.75, 0.5, 0]), ("cosine", [1, 0.853553, 0.5, 0])])
def test_schedules_after_warm_up(schedule, want):
    rates = OptimizerSpec(learning_rate=0.2, schedule=schedule, warmup_steps=4, steps=12).learning_rates()
    np.testing.assert_allclose([rates(i) for i in range(4)], [0.05, 0.1, 0.15, 0.2], rtol=1e-6)
    np.testing.assert_allclose([rates(i) for i in (4, 6, 8, 12)], 0.2 * np.array(want), rtol=1e-5, atol=1e-8)


def test_an_unknown_schedule_is_refused():
    with pytest.raises(UserError, match="cosin"):
        OptimizerSpec(schedule="cosin").learning_rates()


class OptimizerTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_clip_and_decay(self):
        """AdamW's second step by hand; norms and biases are not decayed."""
        spec = OptimizerSpec(learning_rate=0.1, b1=0.5, b2=0.75, eps=1e-3, weight_decay=0.3, max_grad_norm=2.0)
        optimizer = make_optimizer(spec)
        names = ("q", "q_bias", "q_norm", "final_norm", "embed")
        params = {n: jnp.asarray([1.0, -2.0]) for n in names}
        rng = np.random.default_rng(0)  # the second gradient is too small to be clipped
        grads = [{n: jnp.asarray(size * rng.normal(size=2), jnp.float32) for n in names} for size in (3.0, 0.01)]
        state, step = optimizer.init(params), self.variant(optimizer.update)
        m = v = 0.0
        for i, g in enumerate(grads, 1):
            updates, state = step(g, state, params)
            flat = np.concatenate([g[n] for n in names])
            norm = np.linalg.norm(flat)
            assert (norm > 2) == (i == 1)
            clipped = flat * min(1.0, 2 / norm)
            m, v = 0.5 * m + 0.5 * clipped, 0.75 * v + 0.25 * clipped**2
            want = m / (1 - 0.5**i) / (np.sqrt(v / (1 - 0.75**i)) + 1e-3)
            decay = np.concatenate([0.3 * params[n] * (n in ("q", "embed")) for n in names])
            np.testing.assert_allclose(np.concatenate([updates[n] for n in names]), -0.1 * (want + decay), rtol=1e-5)
            params = optax.apply_updates(params, updates)


# --- gradients of every objective against finite differences

SMALL = dataclasses.replace(CONFIG, vocab_size=30, hidden_size=16, intermediate_size=24, num_heads=2, num_kv_heads=1, head_dim=8)
OBJECTIVES = {
    "grpo": Objective(kind="grpo", aggregation="token_mean"),
    "dapo": Objective(kind="dapo", clip_low=0.1, clip_high=0.3, aggregation="constant", constant_length=6, kl_coefficient=0.2),
    "gspo": Objective(kind="gspo", clip_low=0.03, clip_high=0.04, aggregation="sequence_mean", kl_coefficient=0.1, kl_estimator="k2"),
}
PLAIN = OptimizerSpec(learning_rate=1e-3, b1=0.0, max_grad_norm=1e9)  # so that Adam's first moment is the gradient


@functools.cache
def problem(tied: bool):
    """A float64 model without quantization and a batch whose ratios lie in and out of the clip's range."""
    config, rng = dataclasses.replace(SMALL, tie_embeddings=tied), np.random.default_rng(1)
    params = jax.tree.map(lambda x: x.astype(jnp.float64), random_params(config))
    model, b, n = Transformer(config, make_policy("float64").train), 4, 6
    tokens, at = rng.integers(0, config.vocab_size, (b, 11)), np.array([2, 5, 3, 1])
    mask = (np.arange(n) < np.array([6, 3, 5, 1])[:, None]).astype(np.float64)
    completions = np.take_along_axis(tokens, at[:, None] + np.arange(n), 1)
    floats = jnp.zeros((b, n))
    batch = Batch(jnp.asarray(tokens, jnp.int32), jnp.asarray(at, jnp.int32), jnp.asarray(completions, jnp.int32), floats, floats - jnp.inf,
                  jnp.asarray(mask), jnp.asarray(rng.normal(size=b)))  # fmt: skip
    q = quantize(model.flow, config, params)
    logp = jax.jit(score, static_argnums=0, compiler_options=QUICK)(UpdateSpec(model, PLAIN, Objective(), 2, vocab_chunk=13), q, batch)
    noise = rng.normal(size=(2, b, n))
    return config, model, params, batch.replace(logprobs=logp - 0.25 * noise[0], ref_logprobs=logp + 0.3 * noise[1])


@functools.cache
def float64_update(kind: str, tied: bool, remat: str = "block"):
    """-> function of params: (loss, gradient, metrics)."""
    config, model, params, batch = problem(tied)
    spec = UpdateSpec(model.clone(remat=remat), PLAIN, OBJECTIVES[kind], 2, vocab_chunk=13)

    def at(params):
        state, metrics = quick_update(spec, init_state(params, PLAIN, 0), quantize(model.flow, config, params), batch)
        return float(metrics["loss"]), gradient(state), metrics

    return at


def inner(a, b) -> float:
    return sum(float(jnp.vdot(x, y)) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.parametrize("kind, tied", [("grpo", False), ("dapo", True), ("gspo", True)])
def test_gradient_of_every_objective_against_finite_differences(kind, tied):
    """The whole update in float64, along its own gradient, along a drawn direction, and along each kind of parameter alone."""
    with jax.enable_x64(True):
        params, at = problem(tied)[2], float64_update(kind, tied)
        _, grads, metrics = at(params)
        assert 0.05 < metrics["clip_fraction"] < 0.95 and metrics["kl"] > 0
        chex.assert_trees_all_equal_shapes_and_dtypes(grads, params)
        rng = np.random.default_rng(2)
        drawn = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), params)
        leaves, tree = jax.tree.flatten(drawn)
        alone = [jax.tree.unflatten(tree, [d * (i == j) for i, d in enumerate(leaves)]) for j in range(len(leaves))]
        for direction in (grads, drawn, *alone):
            size = 1e-6 / max(float(jnp.abs(x).max()) for x in jax.tree.leaves(direction))
            up, down = (at(jax.tree.map(lambda p, d, s=s: p + s * d, params, direction))[0] for s in (size, -size))
            np.testing.assert_allclose(inner(grads, direction), (up - down) / (2 * size), rtol=1e-5, atol=1e-8)


def test_remat_changes_no_gradient():
    with jax.enable_x64(True):
        params = problem(False)[2]
        (loss, grads, _), (other, others, _) = (float64_update("grpo", False, remat)(params) for remat in ("block", "none"))
        np.testing.assert_allclose(loss, other, rtol=1e-12)
        chex.assert_trees_all_close(grads, others, rtol=1e-9, atol=1e-12)


# --- the straight-through gradient against an independent dense computation


def fake_quantize(x, rows: int, cols: int):
    """x [..., n, k] to E4M3 with one scale a block, and back, in float64; straight from the definition."""
    n, k = x.shape[-2:]
    pad = [(0, 0)] * (x.ndim - 2) + [(0, -n % rows), (0, -k % cols)]
    blocks = jnp.pad(x.astype(jnp.float32), pad).reshape(*x.shape[:-2], -(-n // rows), rows, -(-k // cols), cols)
    scale = jnp.maximum(jnp.abs(blocks).max((-3, -1), keepdims=True), 2.0**-100) * np.float32(1 / 448)
    y = (blocks * (1 / scale)).astype(jnp.float8_e4m3fn).astype(jnp.float64) * scale.astype(jnp.float64)
    return y.reshape(*x.shape[:-2], n + -n % rows, k + -k % cols)[..., :n, :k]


def dense_logprobs(params, tokens):
    """log p [B, T, V] of the tiny model in float64, FP8 operands by x + stop_gradient(fq(x) - x)."""
    stop, c = jax.lax.stop_gradient, CONFIG
    b, t = tokens.shape

    def linear(x, w):
        rowwise = x + stop(fake_quantize(x, 1, 128) - x)
        kept = stop(fake_quantize(rowwise, t, 1))  # WGrad's operand: the saved payload again, in groups along the tokens
        return rowwise @ stop(fake_quantize(w, 128, 128)).T + kept @ (w - stop(w)).T

    def norm(x, w):
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + c.rms_norm_eps) * w

    def rope(x):
        angle = jnp.arange(t)[:, None] * c.rope_theta ** (-jnp.arange(0, c.head_dim, 2) / c.head_dim)
        turned = jnp.exp(1j * angle)[:, None] * (x[..., : c.head_dim // 2] + 1j * x[..., c.head_dim // 2 :])
        return jnp.concatenate([turned.real, turned.imag], -1)

    x = params["embed"][tokens]
    for i in range(c.num_layers):
        p = jax.tree.map(lambda w, i=i: w[i], params["layers"])
        y = norm(x, p["attn_norm"])
        q, k, v = ((linear(y, p["attn"][n]) + p["attn"][f"{n}_bias"]).reshape(b, t, -1, c.head_dim) for n in "qkv")
        q, k = rope(norm(q, p["attn"]["q_norm"])), rope(norm(k, p["attn"]["k_norm"]))
        k, v = (jnp.repeat(a, c.num_heads // c.num_kv_heads, 2) for a in (k, v))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / c.head_dim**0.5
        weights = jax.nn.softmax(jnp.where(jnp.tri(t, dtype=bool), scores, -jnp.inf), -1)
        x = x + linear(jnp.einsum("bhts,bshd->bthd", weights, v).reshape(b, t, -1), p["attn"]["o"])
        y = norm(x, p["mlp_norm"])
        x = x + linear(jax.nn.silu(linear(y, p["mlp"]["gate"])) * linear(y, p["mlp"]["up"]), p["mlp"]["down"])
    return jax.nn.log_softmax(norm(x, params["final_norm"]) @ params["embed"].T)


def test_straight_through_gradient_of_the_whole_model():
    """jet_fp8's weights and activations, everything else in float64, so that only the FP8 roundings, common to both, stand between."""
    wide = {"gradient": FLOAT64, "kv_cache": FLOAT64, "logits": FLOAT64, "operators": "float64"}
    base = dataclasses.replace(make_policy("jet_fp8").train.base, **wide)
    with jax.enable_x64(True):
        flow, rng = Flow(base), np.random.default_rng(3)
        model, params = Transformer(CONFIG, flow), jax.tree.map(lambda x: x.astype(jnp.float64), random_params())
        b, n = 2, WIDTH + NEW - 1
        tokens = jnp.asarray(rng.integers(0, CONFIG.vocab_size, (b, n + 1)), jnp.int32)
        floats, weights = jnp.zeros((b, n)), jnp.asarray(rng.normal(size=(b, n)))
        batch = Batch(tokens, jnp.ones(b, jnp.int32), tokens[:, 1:], floats, floats - jnp.inf, floats + 1, jnp.zeros(b))

        def ours(params, q):
            return (completion_logprobs(model, {"params": params, "q": q}, batch, HeadSpec.of(flow, chunk=48))[0] * weights).sum()

        def theirs(params):
            logp = dense_logprobs(params, tokens)[:, :-1]
            return (jnp.take_along_axis(logp, tokens[:, 1:, None], 2)[..., 0] * weights).sum()

        value, grads = jax.jit(jax.value_and_grad(ours), compiler_options=QUICK)(params, quantize(flow, CONFIG, params))
        want_value, want = jax.jit(jax.value_and_grad(theirs), compiler_options=QUICK)(params)
        np.testing.assert_allclose(value, want_value, rtol=1e-5)
        for (path, a), e in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, e, rtol=0, atol=1e-4 * np.abs(e).max(), err_msg=jax.tree_util.keystr(path))
