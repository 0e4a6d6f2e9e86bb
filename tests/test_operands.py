"""What a product multiplies: each operand quantized once, no stray casts, sequences alone, and norm or SiLU·mul fused with it."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dots import JET, LONG, QUICK, SHORT, drawn, forward_and_gradients, policy, spec_of, weight
from jax.extend import core as jex

from jetrl_jax import operands
from jetrl_jax.compile import compile
from jetrl_jax.flow import untagged_float8_casts
from jetrl_jax.linear import DotSpec, dot, dot_after
from jetrl_jax.numerics import rms_norm, silu_mul
from jetrl_jax.precision import PRESETS, Format, make_policy
from jetrl_jax.quantize import quantize_p

# --- read from the programs ---

def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jex.jaxprs_in_params(eqn.params):
            yield from equations(inner)


def sites_in(jaxpr):
    """Where a program quantizes: by the primitive, or by a fused operator that declares it."""
    single = [e.params["site"] for e in equations(jaxpr) if e.primitive is quantize_p]
    return single + [d[0] for e in equations(jaxpr) for d in e.params.get("declares", ()) if d]


def sites(f, *args):
    return sites_in(jax.make_jaxpr(f)(*args).jaxpr)


def gradient_of_dot(p, t=130):
    x, m = jnp.asarray(drawn(0, (2, t, 48)), jnp.bfloat16), jnp.asarray(drawn(1, (20, 48)))
    w, spec = jax.eval_shape(lambda m: weight([m], p), m), spec_of([m], p)
    return jax.make_jaxpr(jax.grad(lambda x, taps, w: dot(x, w, taps, spec)[0].astype(jnp.float32).sum(), (0, 1)))(x, (m,), w).jaxpr


@pytest.mark.parametrize("name", [p for p in PRESETS if p != "float64"])
def test_the_gradient_reads_the_payload_of_the_weight_and_casts_nothing_to_fp8(name):
    for flow in {make_policy(name).rollout, make_policy(name).train}:
        for p in (flow.base, dataclasses.replace(flow.base, saved_activation="dual")):
            jaxpr = gradient_of_dot(p)
            assert not untagged_float8_casts(jaxpr)
            found = sites_in(jaxpr)
            assert sorted(found) == ["here.dy", "here.dyT", "here.x", "here.xT"]  # each once; here.w was quantized before


def test_a_stray_cast_is_found():
    jaxpr = jax.make_jaxpr(jax.grad(jax.jit(lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.float32).sum())))(jnp.ones(4)).jaxpr
    assert len(untagged_float8_casts(jaxpr)) == 2  # the value, and its cotangent: the crushed gradient


def test_without_taps_only_the_input_has_a_gradient():
    x, m, dy = drawn(0, (1, 3, 16)), drawn(1, (8, 16)), drawn(2, (1, 3, 8))
    w, spec = weight([m], JET), spec_of([m], JET)

    def both(taps):
        return jax.vjp(lambda x: dot(x, w, taps, spec), jnp.asarray(x))[1]((jnp.asarray(dy),))[0]

    quick = jax.jit(both, compiler_options=QUICK)
    chex.assert_trees_all_equal(quick(None), quick((jnp.asarray(m),)))
    assert {"here.xT", "here.dyT"}.isdisjoint(sites(lambda: both(None)))


# --- the bits ---

@pytest.mark.parametrize("before", ["norm", "silu"])
@pytest.mark.parametrize("shape", [LONG, SHORT], ids=str)
def test_what_stands_before_a_product_may_be_fused_with_it(before, shape):
    """The bits of norm (or SiLU·mul), then product; and the gradients of all inputs."""
    eps, k = 1e-6, shape[-1]
    x = jnp.asarray(drawn(0, shape), jnp.bfloat16)
    inputs = (x, jnp.asarray(drawn(1, (k,)))) if before == "norm" else (x, jnp.asarray(drawn(1, shape), jnp.bfloat16))
    masters = [drawn(2, (70, k)), drawn(3, (20, k))]
    ct = tuple(jnp.asarray(drawn(4 + i, (*shape[:-1], len(m))), jnp.bfloat16) for i, m in enumerate(masters))
    fused = dataclasses.replace(spec_of(masters, JET), before=before, eps=eps)
    assert fused.fuses
    assert not any(dataclasses.replace(fused, **change).fuses for change in ({"kernels": "off"}, {"reductions": "float32"}))
    assert not any(DotSpec("here", p, (1,), before=before).fuses for p in (policy("bf16"), policy("fp8_rowwise"), policy("float64")))

    def apart(inputs, w, taps):
        x = rms_norm(*inputs, eps, "auto") if before == "norm" else silu_mul(*inputs, "auto")
        return dot(x, w, taps, spec_of(masters, JET))

    def run(f):
        y, vjp = jax.vjp(lambda inputs, taps: f(inputs, weight(masters, JET), taps), inputs, tuple(map(jnp.asarray, masters)))
        return y, vjp(ct)

    together, one_by_one = (compile(functools.partial(run, f))() for f in (lambda *a: dot_after(*a, fused), apart))
    for a, b in zip(jax.tree.leaves(together[0]), jax.tree.leaves(one_by_one[0]), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    for a, b in zip(jax.tree.leaves(together[1]), jax.tree.leaves(one_by_one[1]), strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.linalg.norm(a - b) <= 1e-3 * np.linalg.norm(b)


def test_the_split_into_micro_batches_changes_no_bit_of_a_sequence():
    x, m, dy = drawn(5, (4, 130, 48)), drawn(6, (20, 48)), drawn(7, (4, 130, 20))
    (y,), dx, (dw,) = forward_and_gradients(x, [m], [dy], JET)
    halves = [forward_and_gradients(x[i:i + 2], [m], [dy[i:i + 2]], JET) for i in (0, 2)]
    np.testing.assert_array_equal(y, np.concatenate([h[0][0] for h in halves]))
    np.testing.assert_array_equal(dx, np.concatenate([h[1] for h in halves]))
    chex.assert_trees_all_close(dw, sum(h[2][0] for h in halves), rtol=1e-5, atol=1e-4)
    along_tokens = jax.jit(lambda x: operands.tokens_last(x, "", Format().along_tokens, JET))
    whole, parts = along_tokens(x), [along_tokens(x[i:i + 1]) for i in range(4)]
    np.testing.assert_array_equal(whole.values, np.concatenate([q.values for q in parts], -1))
    np.testing.assert_array_equal(whole.scales, np.concatenate([q.scales for q in parts], -1))
