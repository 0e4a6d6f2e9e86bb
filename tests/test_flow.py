"""The flow graph: followed through every kind of program, right for every preset, and negative when one quantization point is moved."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from tiny import CONFIG, NEW, WIDTH, update_spec

from jetrl_jax.errors import UserError
from jetrl_jax.flow import Edge, edges, report, require, untagged_float8_casts, verdict
from jetrl_jax.models import transformer
from jetrl_jax.models.qparams import quantize_params
from jetrl_jax.numerics import silu_mul
from jetrl_jax.precision import BF16, PRESETS, Format, PrecisionPolicy, make_policy
from jetrl_jax.quantize import QTensor, dequantize, quantize, straight_through
from jetrl_jax.train.update import Batch, init_state, update

FP8 = Format()
X = jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)


@functools.cache
def found(name: str, *paths: str):
    return verdict(make_policy(name, paths=paths), CONFIG)


def formats(graph, path: str, operand: str) -> set[str]:
    return {str(e.fmt) for e in graph if e.path == path and e.operand == operand}


# --- following the data


def product(q: QTensor) -> jax.Array:
    x = dequantize(q)
    return x @ x.T


def through_scan(q):
    return lax.scan(lambda c, i: (product(jax.tree.map(lambda a: a[None][0], q)), None), jnp.zeros((4, 4)), jnp.arange(3))[0]


def through_carry(q):
    """The payload is only carried, and consumed two turns later: one pass over the body does not see it."""
    first = (q.values, jnp.zeros_like(q.values), jnp.zeros_like(q.values))

    def body(c, _):
        x = c[2].astype(jnp.float32)
        return (c[0], c[0], c[1]), x @ x.T

    return lax.scan(body, first, None, length=4)[1]


def through_while(q):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, product(q)), (0, jnp.zeros((4, 4))))[1]


def through_while_condition(q):
    return lax.while_loop(lambda c: product(q).sum() > c, lambda c: c + 1, 0.0)


def through_cond(q):
    return lax.cond(q.scales.sum() > 0, lambda q: product(q), lambda q: jnp.zeros((4, 4)), q)


@jax.custom_vjp
def with_rule(q):
    return product(q)


with_rule.defvjp(lambda q: (product(q), None), lambda _, ct: (None,))


def through_layout(q):
    x = jnp.pad(jnp.concatenate([q.values.T, q.values.T]), [(0, 8), (0, 0)])[jnp.arange(8)].reshape(4, 8).astype(jnp.bfloat16)
    return lax.dot_general(x, x, (((1,), (1,)), ((), ())))


@pytest.mark.parametrize("consume", [
    product, through_scan, through_carry, through_while, through_while_condition, through_cond, with_rule, through_layout,
    jax.jit(product), jax.checkpoint(product),
])  # fmt: skip
def test_an_edge_is_followed_to_its_product(consume):
    want = {Edge("a/b", "dot_general", "x", FP8)}
    assert edges(lambda x: consume(quantize(x, "a/b.x", FP8)), X) == want
    payload = jax.eval_shape(lambda x: quantize(x, "a/b.x", FP8), X)  # and one that enters as an argument, by its static fields
    assert edges(consume, payload) == want


def test_two_edges_of_one_product_and_the_identity():
    def f(x):
        a, b = quantize(x, "m.x", BF16), quantize(x, "m.w", FP8)
        return dequantize(a) @ dequantize(b).T

    assert edges(f, X) == {Edge("m", "dot_general", "x", BF16), Edge("m", "dot_general", "w", FP8)}
    assert edges(jax.vmap(f), jax.ShapeDtypeStruct((2, 4, 8), jnp.bfloat16)) == edges(f, X)


def test_what_reaches_no_product_is_no_edge():
    assert not edges(lambda x: dequantize(quantize(x, "m.x", FP8)).sum(), X)
    assert edges(lambda x: x @ x.T, X) == {Edge("?", "dot_general", "unlabelled", BF16)}

    def after_a_product(x):  # its result is a new number, not the payload
        y = product(quantize(x, "m.x", FP8))
        return y @ y.T

    anonymous = Edge("?", "dot_general", "unlabelled", Format("float32", (0, 0)))
    assert edges(after_a_product, X) == {Edge("m", "dot_general", "x", FP8), anonymous}


def test_the_gradient_of_a_straight_through_edge():
    """Forward operand, and the backward's product that reads it too: one edge. The other operand has no label."""
    loss = jax.grad(lambda x: (straight_through(x, "m.k", FP8) @ jnp.ones((8, 2), jnp.bfloat16)).sum().astype(jnp.float32))
    labelled = {e for e in edges(loss, X) if e.operand != "unlabelled"}
    assert labelled == {Edge("m", "dot_general", "k", FP8)} and len(edges(loss, X)) > 1


# --- the presets


@pytest.mark.parametrize("name", PRESETS)
def test_verdict_of_every_preset(name):
    with jax.enable_x64(name == "float64"):
        v = found(name)
    policy = make_policy(name)
    assert v.holds == (name != "fp8_rollout_only") == policy.unified
    assert len(v.rollout) >= 13  # four products of two operands, three of attention, two of lm_head
    places = ("attn/qkv", "attn/o", "attn/scores", "attn/values", "mlp/gate_up", "mlp/down")
    assert {e.path for e in v.rollout} == {"lm_head", *(f"layers/{s}" for s in places)}
    for flow, graph in ((policy.rollout, v.rollout), (policy.train, v.train)):  # what the traced programs do is what the policy says
        for site in ("attn/qkv", "attn/o", "mlp/gate_up", "mlp/down"):
            assert formats(graph, f"layers/{site}", "x") == {str(flow.base.activation)}
            assert formats(graph, f"layers/{site}", "w") == {str(flow.base.weight)}
        assert formats(graph, "layers/attn/scores", "k") == formats(graph, "layers/attn/values", "v") == {str(flow.base.kv_cache)}
    assert formats(v.backward, "layers/mlp/down", "dy") == {str(policy.train.base.gradient)}
    assert formats(v.backward, "layers/mlp/down", "dyT") == {str(policy.train.base.gradient.along_tokens)}


def test_the_hybrid_differs_in_the_backward_only():
    hybrid, jet = found("jet_fp8_hybrid"), found("jet_fp8")
    assert (hybrid.rollout, hybrid.train) == (jet.rollout, jet.train) and hybrid.backward != jet.backward


def test_path_overrides_make_segments():
    v = found("jet_fp8", "layers/0/*=bf16", "layers/-1/mlp/down=activation:bf16")
    assert v.holds
    assert formats(v.train, "layers[0:1]/mlp/down", "w") == {"bf16"} and formats(v.train, "layers[0:1]/attn/qkv", "x") == {"bf16"}
    assert formats(v.train, "layers[1:2]/mlp/down", "w") == {"e4m3 128x128 float32"}
    assert formats(v.train, "layers[1:2]/mlp/down", "x") == {"bf16"}
    assert formats(v.rollout, "layers[1:2]/mlp/gate_up", "x") == {"e4m3 1x128 float32"}
    assert not any(e.path.startswith("layers/") for e in v.train)


# --- moved by hand


def moved(**train) -> PrecisionPolicy:
    """jet_fp8_kv8 with fields of the training view changed."""
    policy = make_policy("jet_fp8_kv8")
    base = {k: v for k, v in train.items() if k != "overrides"}
    flow = dataclasses.replace(policy.train, base=dataclasses.replace(policy.train.base, **base), overrides=train.get("overrides", ()))
    return PrecisionPolicy("moved", policy.rollout, flow)


MOVES = {
    "the weights' block": (moved(weight=Format(block=(0, 128))), "w", 4),
    "one site's activation": (moved(overrides=(("layers/*/mlp/down", "activation", BF16),)), "x", 1),
    "the scale type": (moved(activation=Format(scale="pow2")), "x", 4),
    "the KV cache": (moved(kv_cache=BF16), "k", 2),
}


@pytest.mark.parametrize("what", MOVES)
def test_one_moved_quantization_point_turns_the_verdict(what):
    policy, operand, count = MOVES[what]
    v = verdict(policy, CONFIG)
    assert not v.holds and len(v.extra) == count and v.extra[0].operand == operand
    text = report(policy, v)
    assert f"does NOT hold; first edge: {v.extra[0].path}.{operand} is {v.extra[0].fmt} in rollout, " in text
    assert "off-policy by design" in text  # the two views differ, and say so
    assert f"{count} rollout edges differ" in require(policy, CONFIG)


def skips_quantization(inputs, w, taps, spec, *, real=transformer.dot_after):
    """A product whose training side forgets to quantize the input of mlp/down."""
    if taps is None or not spec.site.endswith("mlp/down"):
        return real(inputs, w, taps, spec)
    x = silu_mul(*inputs, spec.reductions)
    n, k = spec.features[0], x.shape[-1]
    return ((x.astype(jnp.float32) @ dequantize(w.value.fprop, (n, k)).T).astype(x.dtype),)


def test_a_dot_that_skips_quantization_is_found_and_the_run_refuses_to_start(monkeypatch):
    policy = make_policy("jet_fp8")
    assert require(policy, CONFIG).startswith("precision flow: rollout's 14 edges all lie in training's forward")
    monkeypatch.setattr(transformer, "dot_after", skips_quantization)
    v = verdict(policy, CONFIG)
    assert v.extra == [Edge("layers/mlp/down", "dot_general", "x", FP8)]
    assert "layers/mlp/down.x is e4m3 1x128 float32 in rollout, absent in training" in report(policy, v)
    with pytest.raises(UserError, match=r"'jet_fp8' says it is unified.*layers/mlp/down.*dot_general.*e4m3 1x128"):
        require(policy, CONFIG)


def test_a_quantization_that_only_rollout_skips_is_found(monkeypatch):
    """A subset of labelled edges would hold: what enters a product unlabelled is an edge of its own."""

    def rollout_skips(inputs, w, taps, spec, *, real=transformer.dot_after):
        if spec.site.endswith("mlp/down"):
            return skips_quantization(inputs, w, () if taps is None else None, spec)
        return real(inputs, w, taps, spec)

    monkeypatch.setattr(transformer, "dot_after", rollout_skips)
    v = verdict(make_policy("jet_fp8"), CONFIG)
    assert [(e.path, e.operand) for e in v.extra] == [("layers/mlp/down", "unlabelled")]
    with pytest.raises(UserError, match="unlabelled"):
        require(make_policy("jet_fp8"), CONFIG)


def test_no_operand_of_the_forward_is_unlabelled():
    for name in PRESETS:
        assert all(e.operand in "xwqkvp" for e in found(name).rollout | found(name).train)


def test_an_operation_that_changes_numbers_ends_a_label():
    def through_relu(x):
        return product(dataclasses.replace(q := quantize(x, "a/b.x", FP8), values=jax.nn.relu(q.values.astype(jnp.float32))))

    assert {e.operand for e in edges(through_relu, X)} == {"unlabelled"}


def test_the_baseline_says_in_one_line_what_it_is():
    line = require(make_policy("fp8_rollout_only"), CONFIG)
    assert "off-policy by design" in line and "\n" not in line
    text = report(make_policy("fp8_rollout_only"), found("fp8_rollout_only"))
    assert "does NOT hold; first edge: layers/attn/o.w is e4m3 128x128 float32 in rollout, bf16 in training" in text


def test_the_report_of_a_unified_policy():
    text = report(make_policy("jet_fp8"), found("jet_fp8"))
    assert text.startswith("policy jet_fp8 (unified)") and text.endswith("G_rollout ⊆ G_train_forward: holds")
    lines = [line.split() for line in text.splitlines()]
    assert ["layers/attn/qkv", "dot_general", "w", "e4m3", "128x128", "float32"] in lines
    assert ["layers/mlp/down", "dot_general", "dyT", "e4m3", "128x1", "float32"] in lines


# --- nothing is quantized outside the primitive


@pytest.mark.parametrize("name", ["jet_fp8_kv8", "jet_fp8_hybrid"])
def test_the_update_has_no_untagged_cast_to_fp8(name):
    """Its whole gradient; a cast that autodiff sees would have an FP8 cotangent without a scale."""
    policy = make_policy(name)
    spec = update_spec(policy)
    b, ints = 8, jnp.int32
    state = jax.eval_shape(lambda p: init_state(p, spec.optimizer, 0), CONFIG.param_shapes())
    q = jax.eval_shape(lambda p: quantize_params(policy.train, CONFIG, p), CONFIG.param_shapes())
    shapes = ((b, WIDTH + NEW), ints), ((b,), ints), ((b, NEW), ints), *(((b, NEW), jnp.float32),) * 3, ((b,), jnp.float32)
    batch = Batch(*(jax.ShapeDtypeStruct(*s) for s in shapes))
    program = jax.make_jaxpr(functools.partial(update, spec))(state, q, batch)
    assert not untagged_float8_casts(program.jaxpr)
    assert "float8" in str(program) or "f8_e4m3" in str(program)  # it is there, in the primitive


def test_an_untagged_cast_is_found():
    def crushed(x):
        return (x.astype(jnp.float8_e4m3fn).astype(jnp.float32) ** 2).sum()

    looped = jax.grad(lambda x: lax.scan(lambda c, _: (c + crushed(x), None), 0.0, None, length=2)[0])
    for f in (crushed, jax.grad(crushed), jax.jit(crushed), looped):
        assert untagged_float8_casts(jax.make_jaxpr(f)(jnp.ones(3)).jaxpr)
    small = jax.grad(lambda x: 1e-4 * x.astype(jnp.float8_e4m3fn).astype(jnp.float32))(1.0)
    assert small == 0  # what such a cast does to a gradient of 1e-4
