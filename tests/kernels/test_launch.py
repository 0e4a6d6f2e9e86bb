"""The launch seam: what jax-triton still gets wrong, and how an operator chooses between kernel and oracle."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jetrl_jax.bench.precompile import for_hopper
from jetrl_jax.errors import UserError
from jetrl_jax.kernels import launch, selfcheck
from jetrl_jax.kernels.inspect import compiled

S, F8, F32 = jax.ShapeDtypeStruct, jnp.float8_e4m3fn, jnp.float32


def gemm():
    from jetrl_jax.kernels import gemm

    args = S((256, 256), F8), S((2, 256), F32), S((256, 256), F8), S((2, 2), F32)
    return functools.partial(gemm.product, config=gemm.Config(consumers=2, stages=6, registers=240)), args


def test_a_warp_specialised_kernel_needs_more_warps_than_its_call_says():
    """Trap 1: when this fails, jax-triton may have learnt to read .reqntid, and `launch.mended_jax_triton` can go."""
    fun, args = gemm()
    (kernel,) = compiled(fun, *args, sass=False)
    assert kernel.threads == 384 != 32 * 4
    assert launch.threads(kernel.ptx) == 384 and launch.threads("no such line") == 0
    import inspect

    from jax_triton import triton_lib

    made = getattr(triton_lib.TritonFunction._compile_kernel, "keeps", triton_lib.TritonFunction._compile_kernel)
    assert 'num_warps = backend_options["num_warps"]' in inspect.getsource(made)


def test_the_ptx_is_one_that_cuda_12_9_and_later_take_and_fusion_is_pinned():
    fun, args = gemm()
    (kernel,) = compiled(fun, *args, sass=False)
    assert ".version 8.8" in kernel.ptx and "fma.rn.f32" in kernel.ptx


def double(name, fits=lambda *_, **__: True):
    return launch.operator(name, lambda x, **_: [x * 2], lambda x, **_: [x * 3], fits)


def test_an_operator_runs_its_oracle_here_jitted_and_not_and_under_vmap():
    p = double("double")
    x = jnp.arange(6.0).reshape(2, 3)
    runs = (lambda x: p.bind(x, kernels="auto")[0], jax.jit(lambda x: p.bind(x)[0]), jax.vmap(lambda x: p.bind(x)[0], 1, 1))
    for got in (run(x) for run in runs):
        assert (got == 2 * x).all()
    both = launch.operator("sum", lambda x, y: [x + y], lambda x, y: [x], lambda *_: True)
    assert (jax.vmap(lambda x: both.bind(x, x[0] * jnp.ones(3))[0])(x) == x + x[:, :1]).all()
    assert (jax.vmap(lambda y: both.bind(x, y)[0], out_axes=1)(jnp.stack([x, -x]))[:, 1] == 0).all()


def sharded(f, *out):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P(*out)))


def test_an_operator_keeps_what_varies_under_shard_map():
    p, x = double("sharded"), jnp.arange(8.0).reshape(4, 2)
    assert (sharded(lambda x: p.bind(x)[0], "data")(x) == 2 * x).all()
    assert (sharded(lambda x: jax.lax.scan(lambda c, _: (p.bind(c)[0], None), x, length=3)[0], "data")(x) == 8 * x).all()
    with pytest.raises(ValueError, match="out_specs"):
        sharded(lambda x: p.bind(x)[0])(x)


def test_the_gradient_of_a_product_under_shard_map():
    from jetrl_jax.linear import DotSpec, dot
    from jetrl_jax.models.qparams import quantize_weight
    from jetrl_jax.precision import make_policy

    x, m = jax.random.normal(jax.random.key(0), (2, 128, 128), jnp.bfloat16), jax.random.normal(jax.random.key(1), (1, 128, 128))
    p = make_policy("jet_fp8").train.base
    w = jax.tree.map(lambda a: a[0], quantize_weight([m], "here", p))

    def gradient(x):
        return jax.grad(lambda x: dot(x, w, None, DotSpec("here", p, (128,)))[0].astype(F32).sum())(x)

    assert (sharded(gradient, "data")(x) == jax.jit(gradient)(x)).all()


def lowered(p, monkeypatch, missing="", **params):
    """For CUDA, from here."""
    monkeypatch.setattr(launch, "missing", lambda: missing)
    return jax.jit(lambda x: p.bind(x, **params)[0]).trace(S((4,), F32)).lower(lowering_platforms=("cuda",)).as_text()


def test_on_hopper_the_kernel_is_chosen_where_it_fits_and_the_policy_wants_it(monkeypatch):
    p, narrow = double("chosen"), double("narrow", lambda x, **_: x.shape[0] > 4)
    three, two = "3.000000e+00", "2.000000e+00"
    assert three in lowered(p, monkeypatch, kernels="auto") and three in lowered(p, monkeypatch, kernels="required")
    assert two in lowered(p, monkeypatch, kernels="off") and two in lowered(p, monkeypatch, "no Hopper", kernels="auto")
    assert two in lowered(narrow, monkeypatch, kernels="auto")
    with pytest.raises(UserError, match="narrow has no kernel"):
        lowered(narrow, monkeypatch, kernels="required")
    with pytest.raises(UserError, match="kernels='required', but no Hopper"):
        lowered(p, monkeypatch, "no Hopper", kernels="required")


def test_a_policy_that_demands_kernels_is_refused_here():
    with pytest.raises(UserError, match=r"policy_overrides.kernels='required', but the kernels are for Hopper GPUs, and jax runs on cpu"):
        launch.require()


@pytest.mark.parametrize("i", range(16))
def test_a_check_of_doctors_runs_a_kernel_of_its_oracles_shapes(i):
    name, kernel, oracle, operands, tolerance = list(selfcheck.checks())[i]
    want = jax.jit(oracle)(*operands)
    with for_hopper():
        assert jax.tree.map(lambda x: (x.shape, x.dtype), list(jax.eval_shape(kernel, *operands))) == [(x.shape, x.dtype) for x in want]
        lowered = jax.jit(kernel).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert "triton_kernel_call" in lowered, name
    assert len(list(selfcheck.checks())) == 16


def test_the_error_of_a_check_sees_a_bit_a_sign_of_zero_and_a_nan():
    want = [jnp.array([0.0, 1.0, jnp.nan]), jnp.array([1.0], jnp.bfloat16)]
    assert selfcheck.error(want, want) == 0
    for i, value in ((0, -0.0), (1, 1.0000001), (1, jnp.nan), (2, 0.0)):
        assert selfcheck.error([want[0].at[i].set(value), want[1]], want) > 0
