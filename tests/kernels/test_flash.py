"""Which attention is taken where, and how cuDNN's is called (traced: it runs on a GPU alone)."""

import types

import jax
import jax.numpy as jnp
import pytest
from tiny import CONFIG

from jetrl_jax import flow
from jetrl_jax.errors import UserError
from jetrl_jax.kernels import flash, launch
from jetrl_jax.precision import make_policy


@pytest.fixture
def hopper(monkeypatch):
    """As if traced on Hopper with cuDNN."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(launch, "missing", lambda: "")
    monkeypatch.setattr(fused_attention_stablehlo, "cuda_versions", types.SimpleNamespace(cudnn_get_version=lambda: 91300))


def test_never_without_hopper():
    assert not flash.native(32, 8, 128, jnp.bfloat16)
    with pytest.raises(UserError, match="kernels='required'"):
        flash.native(32, 8, 128, jnp.bfloat16, kernels="required")


@pytest.mark.usefixtures("hopper")
def test_choice_on_hopper():
    assert flash.native(32, 8, 128, jnp.bfloat16) and flash.native(14, 2, 64, jnp.bfloat16, "float32", "required")
    assert not flash.native(32, 8, 128, jnp.bfloat16, kernels="off")
    assert not flash.native(32, 8, 128, jnp.bfloat16, "float64")
    for heads, kv, hd, dtype in ((32, 8, 256, jnp.bfloat16), (32, 8, 72, jnp.bfloat16), (32, 1, 64, jnp.bfloat16), (8, 8, 64, jnp.float64)):
        assert not flash.native(heads, kv, hd, dtype)
        with pytest.raises(UserError, match=f"{heads} heads of {hd} over {kv}"):
            flash.native(heads, kv, hd, dtype, kernels="required")


def names(jaxpr):
    found = []
    for eqn in jaxpr.eqns:
        found.append((eqn.primitive.name, eqn.invars[0].aval.shape if eqn.invars else None))
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            found += names(inner) if hasattr(inner, "eqns") else []
    return found


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("t, whole", [(100, 128), (1, 64), (256, 256)])
def test_cudnn_sees_whole_blocks(t, whole):
    q, kv = jax.ShapeDtypeStruct((2, t, 4, 64), jnp.bfloat16), jax.ShapeDtypeStruct((2, t, 2, 64), jnp.bfloat16)
    found = names(jax.make_jaxpr(flash.full)(q, kv, kv).jaxpr)
    assert (flash.FULL, (2, whole, 4, 64)) in found  # a new jax that renames it would empty the flow graph of attention
    assert jax.eval_shape(flash.full, q, kv, kv).shape == q.shape
    grads = jax.eval_shape(jax.grad(lambda *a: flash.full(*a).astype(jnp.float32).sum(), (0, 1, 2)), q, kv, kv)
    assert [g.shape for g in grads] == [q.shape, kv.shape, kv.shape]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name, kv", [("bf16", "bf16"), ("jet_fp8", "bf16"), ("jet_fp8_kv8", "e4m3 1xall float32")])
def test_rollout_and_update_have_the_same_edges_on_hopper(name, kv):
    found = flow.verdict(make_policy(name), CONFIG)
    assert found.holds
    attention = {(e.path, e.operand, str(e.fmt)) for e in found.rollout if e.operator == "attention"}
    assert attention == {("layers/attn/scores", "q", "bf16"), ("layers/attn/scores", "k", kv), ("layers/attn/values", "v", kv)}
    assert attention == {(e.path, e.operand, str(e.fmt)) for e in found.train if e.operator == "attention"}
