"""`jetrl bench kernels`: every kernel at the layer shapes of four models, against others' and against the floor.

On a GPU, in one call:

    python3 -m jetrl_jax.cli bench kernels --only=fprop,decode --shapes=qwen3-8b --out=docs/bench/kernels.json

Ours are compiled first, by as many processes as there are cores. Rows are written after each work, so that a run that is cut short keeps
what it measured; what cannot run is told in one line and stops nothing.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from jetrl_jax.bench import decoding, layers, passes, precompile, products, works
from jetrl_jax.bench import rows as figures
from jetrl_jax.bench.others import TRITON
from jetrl_jax.bench.shapes import MODELS, Shapes, select

GROUPS: dict[str, Callable[[Shapes], Iterator[works.Work]]] = {
    "fprop": products.fprop, "dgrad": products.dgrad, "wgrad": products.wgrad, "passes": passes.passes, "linear": layers.linear,
    "lm_head": layers.lm_head, "decode": decoding.products, "attention": decoding.attention,
}


def chosen(only: str, shapes: str) -> Iterator[works.Work]:
    """The works of the groups in `only`, at the models in `shapes` (comma-separated; all for "")."""
    groups = select("group in --only", only, GROUPS)
    for model in select("model in --shapes", shapes, MODELS):
        for group in groups:
            yield from group(model)


def tasks(only: str, shapes: str) -> Iterator[Callable]:
    """What `precompile` builds: ours and plain Triton's programs, the others are not ours to compile."""
    for work in chosen(only, shapes):
        yield from (build for name, build in work.contestants.items() if name in (works.OURS, TRITON))


def check(only: str, shapes: str) -> None:
    """Raises UserError for a wrong name, before anything is compiled."""
    select("group in --only", only, GROUPS)
    select("model in --shapes", shapes, MODELS)


def measure(only: str, shapes: str, out: str | Path | None, run: works.Run, seconds: float = 0.0) -> int:
    """Measure, print and write rows to `out`; no work is begun after `seconds` (0: no end). Exit code 1 if nothing could be measured."""
    start, made, late = time.perf_counter(), 0, 0
    print(precompile.report(precompile.run("kernels", only, shapes)), flush=True)
    for work in chosen(only, shapes):
        if seconds and time.perf_counter() - start > seconds:
            late += 1
            continue
        found, failed = works.measure(work)
        new = works.rows_of(work, found, run)
        if out and new:
            figures.put(out, new)
        made += len(new)
        print(f"[{time.perf_counter() - start:.0f} s]", "\n".join(works.lines_of(work, found, new, failed)), flush=True)
    print(f"{made} rows" + (f" in {out}" if out else "") + (f"; {late} works left out after {seconds:g} s" if late else ""))
    return 0 if made else 1
