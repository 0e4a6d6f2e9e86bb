"""What a kernel compiles to for sm_90a, without a GPU: registers, spills, shared memory, and the instructions it uses.

`compiled(fun, *shapes)` traces a kernel's wrapper and puts every launch in it through jax-triton's own path down to machine code. CI
holds every tuned configuration to it.
"""

import dataclasses
import os
import re
import subprocess
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax import tree_util

from jetrl_jax.kernels import launch

SHARED_LIMIT = 227 * 1024  # bytes that one block may use on Hopper


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One launch: its kernel's name, threads a block, registers a thread, bytes spilled, bytes of shared memory, PTX and SASS."""

    name: str
    threads: int
    registers: int
    spilled: int
    shared: int
    ptx: str
    sass: str
    serialized: bool  # ptxas could not keep wgmmas in flight and waits after each

    def uses(self, instruction: str) -> bool:
        """Whether the machine code has an instruction, such as QGMMA (FP8 tensor core) or HGMMA (bf16)."""
        return re.search(rf"\b{instruction}\b", self.sass) is not None


def _calls(jaxpr: Any) -> list[Any]:
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "triton_kernel_call":
            found.append(eqn)
        for value in eqn.params.values():
            for v in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(v, "jaxpr", v)
                if hasattr(inner, "eqns"):
                    found += _calls(inner)
    return found


def compiled(fun: Callable, *shapes: Any, sass: bool = True) -> list[Compiled]:
    """Every kernel launch of `fun(*shapes)` (ShapeDtypeStructs, or arrays), compiled for sm_90a."""
    launch.mended_jax_triton()
    return [_compile(eqn, sass) for eqn in _calls(jax.make_jaxpr(fun)(*shapes).jaxpr)]


def _compile(eqn: Any, sass: bool) -> Compiled:
    import triton
    import triton.compiler.compiler as tc
    from jax_triton import triton_lib as lib

    p = eqn.params
    leaves, tree = tree_util.tree_flatten_with_path(
        p["in_tree"].unflatten([v.aval for v in eqn.invars]),
        is_leaf=lambda a: isinstance(a, lib._StaticArg | lib._OutputPlaceholder | lib.TensorDescriptor))
    outs = [v.aval for v in eqn.outvars]
    args: list[Any] = []
    for _, leaf in leaves:
        if isinstance(leaf, lib._OutputPlaceholder):
            args.append(outs[leaf.ordinal])
        else:
            args.append(leaf.value if isinstance(leaf, lib._StaticArg) else leaf)
    target = tc.GPUTarget("cuda", 90, 32)
    backend = triton.compiler.make_backend(target)
    function = lib.TritonFunction(p["fn"])
    spec = lib.KernelSpecialization.build(function.non_constexpr_param_names, args, [lib.get_type_id(a) for a in args], tree,
                                          [tuple(k.idx for k in path) for path, _ in leaves], dict(p["metaparams"]), backend)
    library = lib.triton_kernel_call_lib  # makes the launchable kernel, which needs a GPU's jaxlib
    lib.triton_kernel_call_lib = types.SimpleNamespace(TritonKernel=lambda *a: None)
    try:
        _, _, _, result = function._compile_kernel(spec, target, backend, dict(p["backend_options"]))
    finally:
        lib.triton_kernel_call_lib = library
    ptx = result.binary
    registers, spilled, serialized, text = _assemble(ptx, sass)
    return Compiled(result.name, launch.threads(ptx), registers, spilled, result.shared_mem_bytes, ptx, text, serialized)


def _tool(name: str) -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _assemble(ptx: str, sass: bool) -> tuple[int, int, bool, str]:
    """Registers, bytes spilled (stores), whether wgmmas were serialized, and SASS of a PTX module."""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = os.path.join(folder, "k.ptx"), os.path.join(folder, "k.cubin")
        Path(source).write_text(ptx)
        run = subprocess.run([_tool("ptxas"), "-v", "-arch=sm_90a", source, "-o", cubin], capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(f"ptxas refused a kernel: {run.stderr}")
        used, spills = (list(map(int, re.findall(p, run.stderr))) for p in (r"Used (\d+) registers", r"(\d+) bytes spill stores"))
        text = subprocess.run([_tool("cuobjdump"), "-sass", cubin], capture_output=True, text=True, check=True).stdout if sass else ""
    return max(used, default=0), sum(spills), "serialized" in run.stderr, text
