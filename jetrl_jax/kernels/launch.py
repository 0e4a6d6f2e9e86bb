"""The one launch seam: which platform runs a kernel, how it is launched, and what jax-triton needs to be told.

An operator of ours is a JAX primitive (`operator`): its oracle in jnp is the lowering everywhere, and a Triton or Gluon kernel replaces it
on a Hopper GPU. So the same traced program runs on a CPU and on an H200, and the flow graph reads one jaxpr. Kernel modules import triton;
they are imported only where a kernel is built, so that a CPU install needs neither triton nor jax-triton.
"""

import contextlib
import functools
import importlib.util
import os
import re
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jax.interpreters import batching, mlir

from jetrl_jax.compile import compile
from jetrl_jax.errors import UserError
from jetrl_jax.kernels import kept

KERNELS = ("auto", "off", "required")
"""A policy's `kernels`: on Hopper where a kernel exists; never; or an error where there is none."""

# The bits of a product depend on whether a multiplication and an addition are fused. Triton 3.10 changes its default.
FP_FUSION = True
# Triton 3.9 takes its PTX version from a ptxas of CUDA 13.4 that it ships, which the driver of CUDA 13.0 refuses; 8.8 is CUDA 12.9's.
PTX_VERSION = 88
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


@functools.cache
def missing() -> str:
    """Why kernels cannot run here, or "" on a Hopper GPU with triton and jax-triton."""
    try:
        devices = jax.devices()
    except RuntimeError as e:
        return f"jax found no device: {e}"
    if devices[0].platform != "gpu":
        return f"the kernels are for Hopper GPUs, and jax runs on {devices[0].platform}"
    capability = str(getattr(devices[0], "compute_capability", ""))
    if capability != "9.0":
        return f"the kernels are for Hopper (compute capability 9.0); {devices[0].device_kind} has {capability or 'none'}"
    lacking = [m for m in ("triton", "jax_triton") if importlib.util.find_spec(m) is None]
    return f"{' and '.join(lacking)} not installed; pip install 'jetrl-jax[cuda]'" if lacking else ""


def require() -> None:
    """Raises `UserError` where `kernels="required"` cannot be kept."""
    if why := missing():
        raise UserError(f"policy_overrides.kernels='required', but {why}; run on a Hopper GPU, or write 'auto'")


@functools.cache
def mended_jax_triton() -> Any:
    """jax_triton, with two faults of 0.4.1 mended; tests/kernels/test_launch.py fails when a new one makes this unnecessary.

    1. It passes the call's num_warps as the number of warps to launch. A warp-specialised kernel needs those of all its partitions, which
       its PTX names in `.reqntid`.
    2. It sends Gluon kernels through Triton's own layout passes (`make_ttgir`), which rewrite the descriptors that a partition captures;
       Triton has `gluon_to_ttgir` for them.
    """
    import jax_triton
    from jax_triton import triton_lib

    if jax_triton.__version__ == "0.4.1" and triton_lib.triton_kernel_call_lib is not None:
        library = triton_lib.triton_kernel_call_lib

        def kernel(name, num_warps, num_ctas, shared, ptx, *rest):
            return library.TritonKernel(name, threads(ptx) // 32 or num_warps, num_ctas, shared, ptx, *rest)

        compile_ptx = triton_lib.compile_ttir_to_ptx_inplace

        def compile_gluon(module, backend, options, capability):
            if module.get_int_attr("ttg.num-warps") is None:  # plain Triton: layouts are still to be chosen
                return compile_ptx(module, backend, options, capability)
            stages = {"make_ttir": lambda m, *a: m, "make_ttgir": backend.gluon_to_ttgir}
            proxy = types.SimpleNamespace(**stages, make_llir=backend.make_llir, make_ptx=backend.make_ptx)
            return compile_ptx(module, proxy, options, capability)

        triton_lib.compile_ttir_to_ptx_inplace = compile_gluon
        names = {n: getattr(library, n) for n in dir(library) if not n.startswith("__")}
        triton_lib.triton_kernel_call_lib = types.SimpleNamespace(**{**names, "TritonKernel": kernel})
    kept.install()
    return jax_triton


def threads(ptx: str) -> int:
    """Threads of a block by its PTX, 0 where that does not say."""
    found = re.search(r"\.reqntid (\d+)", ptx)
    return int(found[1]) if found else 0


def call(
    *args: Any, kernel: Any, out: Any, grid: tuple[int, ...], num_warps: int = 4, flops: int = 0,
    bytes_accessed: int = 0, aliases: dict[int, int] | None = None, registers: int | None = None, **constants: Any,
) -> Any:
    """Launches a Triton or Gluon kernel on arrays and `descriptor`s; `out` is a (tree of) ShapeDtypeStruct.

    flops, bytes_accessed: the estimate by which XLA schedules. registers: at most so many a thread. aliases: operand -> output that is
    written in place of it. constants: the kernel's constexprs. The kernel's parameters are the operands, then the outputs that alias none,
    then the constants.
    """
    jt = mended_jax_triton()
    return jt.triton_call(
        *args, kernel=kernel, out_type=out, grid=grid, num_warps=num_warps, input_output_aliases=aliases, name=kernel.fn.__name__,
        backend_options={"enable_fp_fusion": FP_FUSION, "ptx_version": PTX_VERSION, **({"maxnreg": registers} if registers else {})},
        cost_estimate={"flops": flops, "bytes_accessed": bytes_accessed}, **constants)


def descriptor(x: jax.Array, block: tuple[int, ...], swizzle: int = 128) -> Any:
    """A host-side TMA descriptor for a Gluon kernel: tiles of `block`, zeros outside x. The row of x must be a multiple of 16 bytes."""
    import triton.experimental.gluon.language as gl

    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * x.dtype.itemsize, rank=len(block))
    return mended_jax_triton().TensorDescriptor.from_array(x, block, layout=layout)


@functools.cache
def multiprocessors() -> int:
    """Multiprocessors of the GPU, an H100's or H200's 132 where there is none (kernels compile without one)."""
    with contextlib.suppress(RuntimeError):
        return int(getattr(jax.devices("gpu")[0], "core_count", 132) or 132)
    return 132


def abstract(oracle: Callable, *avals: Any, **params: Any) -> list[Any]:
    """Shapes and dtypes of an oracle's results, and over which axes of a `shard_map` they vary."""
    results = jax.eval_shape(functools.partial(oracle, **params), *[jax.ShapeDtypeStruct.like(a) for a in avals])

    def manual(s):  # None outside a shard_map, and in one that does not check (pmap's)
        varying = getattr(s, "manual_axis_type", None)
        return {} if varying is None or s.sharding is None else {"sharding": s.sharding, "manual_axis_type": varying}

    return [jax.core.ShapedArray(s.shape, s.dtype, **manual(s)) for s in results]


def operator(name: str, oracle: Callable, native: Callable, supported: Callable[..., bool]) -> jex.Primitive:
    """A primitive with several results: `oracle(*arrays, **params)` everywhere, `native` with the same signature on Hopper.

    supported(*avals, **params) says whether `native` covers this case. A param named `kernels` ("auto", "off", "required") is the policy's
    wish. No derivative (callers own a custom_vjp); vmap runs one after the other.
    """
    primitive = jex.Primitive(name)
    primitive.multiple_results = True

    @functools.cache
    def jitted(params):
        return compile(functools.partial(primitive.bind, **dict(params)))

    primitive.def_impl(lambda *xs, **params: jitted(tuple(sorted(params.items())))(*xs))

    primitive.def_abstract_eval(functools.partial(abstract, oracle))
    mlir.register_lowering(primitive, mlir.lower_fun(oracle, multiple_results=True))

    def lower_cuda(ctx, *args, **params):
        wish, native_here = params.get("kernels", "auto"), not missing()
        fits = native_here and supported(*ctx.avals_in, **params)
        if wish == "required" and not fits:
            why = missing() or f"{name} has no kernel for {[str(a) for a in ctx.avals_in]}"
            raise UserError(f"policy_overrides.kernels='required', but {why}; write 'auto'")
        chosen = native if fits and wish != "off" else oracle
        return mlir.lower_fun(chosen, multiple_results=True)(ctx, *args, **params)

    mlir.register_lowering(primitive, lower_cuda, platform="cuda")

    def batch(args, dims, **params):
        held = [d is None for d in dims]
        mapped = [jnp.moveaxis(a, d, 0) for a, d, h in zip(args, dims, held, strict=True) if not h]

        def one(xs):
            left = iter(xs)
            return primitive.bind(*[a if h else next(left) for a, h in zip(args, held, strict=True)], **params)

        outs = jax.lax.map(one, mapped)
        return outs, [0] * len(outs)

    batching.primitive_batchers[primitive] = batch
    return primitive
