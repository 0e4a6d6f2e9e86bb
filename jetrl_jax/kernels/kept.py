"""Compiled kernels kept on disk: Triton's part of a kernel, 2 to 4 seconds, is done once a machine instead of once a process.

jax-triton 0.4.1 keeps what it compiled in memory alone, and JAX's own compilation cache starts only behind it. Here the PTX of a kernel is
filed under a hash of all that it was made from: the source of the kernel and of what it calls, signature, constants, target, options, and
the versions of triton and jax-triton. JETRL_KERNEL_CACHE names the folder ("off": none); files can be deleted at any time.
"""

import dataclasses
import hashlib
import json
import os
import zlib
from pathlib import Path
from typing import Any

from jetrl_jax.files import write_whole

FIELDS = ("name", "shared_mem_bytes", "global_scratch_size", "global_scratch_align", "tensordesc_meta", "binary")


def folder() -> Path | None:
    """Where kernels are kept, None where they are not."""
    named = os.environ.get("JETRL_KERNEL_CACHE", "")
    if named == "off":
        return None
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(named or os.path.join(cache, "jetrl", "kernels"))


def install() -> None:
    """Have jax-triton look here before it compiles. Once a process; does nothing where jax-triton looks different than it did in 0.4.1."""
    from jax_triton import triton_lib

    function = triton_lib.TritonFunction
    made = getattr(function, "_compile_kernel", None)
    if made is None or hasattr(made, "keeps"):
        return

    def compile_kernel(self, spec, gpu_target, backend, backend_options):
        path = _path(self.fn, spec, gpu_target, backend_options)
        found = _read(path)
        if found is not None:
            result = triton_lib.CompilationResult(ttgir="", llir="", **found)
            scratch = (result.global_scratch_size, result.global_scratch_align) if result.global_scratch_size is not None else ()
            kernel = triton_lib.triton_kernel_call_lib.TritonKernel(
                result.name, backend_options["num_warps"], backend_options["num_ctas"], result.shared_mem_bytes, result.binary, "",
                gpu_target.arch, *scratch)
            return kernel, "", backend.parse_options(backend_options), result
        kernel, text, options, result = made(self, spec, gpu_target, backend, backend_options)
        _write(path, {name: getattr(result, name) for name in FIELDS})
        return kernel, text, options, result

    compile_kernel.keeps = made  # type: ignore[attr-defined]
    function._compile_kernel = compile_kernel


def _path(fn: Any, spec: Any, target: Any, options: Any) -> Path | None:
    """The file of a kernel; None where nothing is kept, or where the kernel cannot be described."""
    import jax_triton
    import triton
    from jax_triton import triton_lib

    where = folder()
    if where is None:
        return None
    passes = triton_lib.compile_ttir_to_ptx_inplace  # `launch.py` may have put its own here
    made_from = [sorted(map(repr, dict(d).items())) for d in (spec.signature, spec.constants, spec.attrs, options)]
    parts = [fn.cache_key, passes.__module__, passes.__qualname__, triton.__version__, jax_triton.__version__,
             repr(dataclasses.astuple(target)), repr(spec.specialization), *made_from]
    text = json.dumps(parts)
    return None if " at 0x" in text else where / f"{hashlib.sha256(text.encode()).hexdigest()[:40]}.z"


def _read(path: Path | None) -> dict[str, Any] | None:
    """What was kept, None if it is not there or not whole."""
    try:
        found = json.loads(zlib.decompress(path.read_bytes())) if path else None
        return found if isinstance(found, dict) and set(found) == set(FIELDS) else None
    except (OSError, ValueError, zlib.error):
        return None


def _write(path: Path | None, found: dict[str, Any]) -> None:
    """Keep a kernel; a folder that cannot be written keeps nothing."""
    if path is None:
        return
    try:
        write_whole(path, zlib.compress(json.dumps(found).encode()))
    except (OSError, TypeError):  # TypeError: a field that JSON has no word for
        return
