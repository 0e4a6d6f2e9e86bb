"""Compile a bench's kernels before it starts, in as many processes as there are cores, without touching the GPU.

Each process lowers its share of the programs for CUDA, from shapes alone; the kernels that this compiles are kept on disk
(`kernels/kept.py`), where the bench finds them. One process would spend minutes at it, most of them in LLVM.
"""

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from jetrl_jax.bench import data, timing


class _Nothing:
    """Stands for what a GPU's jaxlib makes of a compiled kernel."""

    def __init__(self, *_, **__):
        pass

    def to_proto(self, *_, **__):
        return b""


@contextlib.contextmanager
def for_hopper() -> Iterator[None]:
    """Within it programs lower for a Hopper GPU where there is none: kernels are compiled, and nothing can run."""
    from jax_triton import triton_lib

    from jetrl_jax.kernels import kept, launch

    names = ("TritonKernel", "TritonKernelCall", "create_tma_descriptor_parameter", "create_scalar_parameter", "create_array_parameter")
    launch.mended_jax_triton()
    kept.install()
    library, missing = triton_lib.triton_kernel_call_lib, launch.missing
    if not hasattr(library, "get_compute_capability"):
        triton_lib.triton_kernel_call_lib = types.SimpleNamespace(**dict.fromkeys(names, _Nothing), get_compute_capability=lambda _: 90)
    launch.missing = lambda: ""  # type: ignore[assignment]
    try:
        yield
    finally:
        launch.missing = missing
        triton_lib.triton_kernel_call_lib = library


def lower(tasks: Iterable[Callable[[], timing.Contestant]], claim: Callable[[int], bool]) -> tuple[int, list[str]]:
    """Build and lower the tasks that `claim` grants: (how many were, why others were not)."""
    done, failed = 0, []
    with for_hopper(), data.abstract():
        for i, task in enumerate(tasks):
            if not claim(i):
                continue
            try:
                contestant = task()
                if contestant.lower is not None:
                    contestant.lower()
                done += 1
            except Exception as e:  # it will be told where it is measured, too
                failed.append(timing.one_line(e))
    return done, failed


def run(name: str, *arguments: str, processes: int | None = None) -> dict[str, Any]:
    """Compile `tasks(*arguments)` of `jetrl_jax.bench.NAME` in processes of their own: {"seconds", "done", "failed"}."""
    from jetrl_jax.kernels import kept, launch

    launch.mended_jax_triton()
    kept.install()
    start = time.perf_counter()
    result: dict[str, Any] = {"done": 0, "failed": []}
    tasks = sum(1 for _ in importlib.import_module(f"jetrl_jax.bench.{name}").tasks(*arguments))
    count = min(tasks, processes if processes is not None else (os.cpu_count() or 1) - 1)
    if kept.folder() is not None and count > 1:
        with tempfile.TemporaryDirectory() as claims:
            command = [sys.executable, "-m", "jetrl_jax.bench.precompile", claims, name, *arguments]
            environment = {**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            workers = [subprocess.Popen(command, env=environment, **pipes) for _ in range(count)]
            for worker in workers:
                out, err = worker.communicate()
                try:
                    part = json.loads(out.splitlines()[-1])
                except (IndexError, ValueError):
                    part = {"done": 0, "failed": [(err.strip().splitlines() or [f"exit code {worker.returncode}"])[-1]]}
                result["done"] += part["done"]
                result["failed"] += part["failed"]
    return {**result, "seconds": time.perf_counter() - start}


def report(result: dict[str, Any]) -> str:
    """What a bench prints of it."""
    reasons = sorted(set(result["failed"]))
    text = f"compiled ahead: {result['done']} programs in {result['seconds']:.0f} s"
    return "\n".join([text, *(f"  not compiled: {reason}" for reason in reasons)])


def main(claims: str, name: str, *arguments: str) -> None:
    """One process: takes the tasks that no other has taken."""
    def claim(i: int) -> bool:
        try:
            (Path(claims) / str(i)).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    bench = importlib.import_module(f"jetrl_jax.bench.{name}")
    done, failed = lower(bench.tasks(*arguments), claim)
    print(json.dumps({"done": done, "failed": failed}))


if __name__ == "__main__":
    main(*sys.argv[1:])
