"""`jetrl bench tune`: times the configurations that each kernel lists and keeps the fastest of every shape in `kernels/tuned.json`.

    python3 -m jetrl_jax.cli bench tune --only=gemm,decode --shapes=qwen3-8b --out=tuned.json

A configuration changes a product's speed and never its bits; decode attention's may change them (the order of its sums). Shapes that were
not measured keep what the table had; a configuration that does not run on this GPU is told and passed over. The table is written after each
shape.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jetrl_jax.bench import data, decoding, precompile, products, timing
from jetrl_jax.bench.shapes import MODELS, ROWS, Shapes, select
from jetrl_jax.bench.works import Run
from jetrl_jax.kernels import tuned

DECODE_ROWS = (64, 128, 256)
MOST_LAYERS = 256


@dataclasses.dataclass(frozen=True)
class Case:
    """One entry of the table: a kernel at rows m of [n, k], what it may be run with, and how a program is built with one of those."""

    kernel: str
    m: int
    n: int
    k: int
    candidates: Sequence[Any]  # frozen dataclasses
    build: Callable[[Any], timing.Contestant]

    @property
    def key(self) -> str:
        return tuned.shape_key(self.m, self.n, self.k)


def gemm(shapes: Shapes) -> Iterator[Case]:
    """FProp's shapes, and DGrad's: the same turned."""
    from jetrl_jax.kernels import gemm as kernel

    for n, k in dict.fromkeys(size for pair in shapes.products.values() for size in (pair, pair[::-1])):
        def build(config, n=n, k=k):
            sets = products.fp8_operands(ROWS, n, k, products.costs(ROWS, n, k)[3])
            return timing.program(lambda a, sa, w, sw: kernel.product(a, sa, w, sw, config=config), sets)

        yield Case("gemm", ROWS, n, k, kernel.candidates(ROWS, n, k), build)


def wgrad(shapes: Shapes) -> Iterator[Case]:
    from jetrl_jax.kernels import wgrad as kernel

    for n, k in dict.fromkeys(shapes.products.values()):
        def build(config, n=n, k=k):
            sets = products.token_groups(n, k, ROWS, products.costs(n, k, ROWS, out_bytes=4)[3])
            return timing.program(lambda a, sa, b, sb: kernel.product(a, sa, b, sb, None, config), sets)

        yield Case("wgrad", ROWS, n, k, kernel.candidates(n, k, ROWS), build)


def decode(shapes: Shapes) -> Iterator[Case]:
    """`decode` up to 64 rows, `decode_wide` above, over a stack of layers that exceeds the L2 cache."""
    from jetrl_jax.kernels import decode as kernel

    for m in DECODE_ROWS:
        for n, k in dict.fromkeys(shapes.products.values()):
            def build(config, m=m, n=n, k=k):
                layers = min(MOST_LAYERS, math.ceil(timing.SPAN / (n * k)))

                def run(operands, at):
                    x, sx, w, sw = operands
                    return [kernel.product(x, sx, w, sw, i, config) for i in at]

                return timing.jitted(run, decoding.operands(m, n, k, layers=layers), decoding.layer_indices(layers), operations=layers)

            yield Case("decode" if m <= kernel.ROWS else "decode_wide", m, n, k, kernel.candidates(m, n, k), build)


def lm_head(shapes: Shapes) -> Iterator[Case]:
    """`ordered_dot` by few rows and by many."""
    from jetrl_jax.kernels import ordered_dot as kernel

    v, d = shapes.vocabulary, shapes.hidden
    for m in (DECODE_ROWS[0], ROWS):
        def build(config, m=m):
            operands = data.normal((m, d), 1), data.normal((v, d), 2, d**-0.5)
            return timing.program(lambda x, w: kernel.product(x, w, config=config), [operands])

        yield Case("ordered_dot", m, v, d, kernel.candidates(m), build)


def attention(shapes: Shapes) -> Iterator[Case]:
    from jetrl_jax.kernels import decode_attention as kernel

    for fp8 in (False, True):
        name = "decode_attention_fp8" if fp8 else "decode_attention"
        yield Case(name, decoding.SLOTS, shapes.kv_heads * shapes.head_dim, shapes.head_dim, kernel.candidates(fp8),
                   functools.partial(decoding.attention_program, shapes, fp8))


KERNELS: dict[str, Callable[[Shapes], Iterator[Case]]] = {
    "gemm": gemm, "wgrad": wgrad, "decode": decode, "lm_head": lm_head, "attention": attention,
}


def check(only: str, shapes: str) -> None:
    """Raises UserError for a wrong name, before anything is compiled."""
    select("kernel in --only", only, KERNELS)
    select("model in --shapes", shapes, MODELS)


def cases(only: str, shapes: str) -> Iterator[Case]:
    """The cases of the kernels in `only` at the models in `shapes`, each shape once."""
    seen = set()
    for model in select("model in --shapes", shapes, MODELS):
        for kernel in select("kernel in --only", only, KERNELS):
            for case in kernel(model):
                if (case.kernel, case.key) not in seen:
                    seen.add((case.kernel, case.key))
                    yield case


def tasks(only: str, shapes: str) -> Iterator[Callable]:
    """What `precompile` builds."""
    for case in cases(only, shapes):
        yield from ((lambda case=case, c=c: case.build(c)) for c in case.candidates)


def fastest(case: Case, rounds: int = 5, seconds: float = 0.008) -> tuple[dict[str, Any] | None, list[str]]:
    """(fields of the fastest candidate, None if none ran; lines that say how they did)."""
    contestants, refused = [], {}
    for c in case.candidates:
        try:
            contestants.append(dataclasses.replace(case.build(c), name=repr(c)))
        except Exception as e:
            refused[repr(c)] = timing.one_line(e)
    found, failed = timing.measure(contestants, rounds, seconds)
    lines = [f"  not run: {name}: {why}" for name, why in (refused | failed).items()]
    ranked = sorted(found, key=lambda name: found[name].seconds)
    lines = [f"  {found[name].seconds * 1e6:9.2f} µs (spread {found[name].spread:.1%}) {name}" for name in ranked] + lines
    best = next((c for c in case.candidates if ranked and repr(c) == ranked[0]), None)
    return (None if best is None else dataclasses.asdict(best)), lines


def measure(only: str, shapes: str, out: str | Path | None, run: Run, seconds: float = 0.0) -> int:
    """Tune, print, and write the packaged table with what was found to `out` (itself if not given). Exit code 1 if nothing ran."""
    start, path, late = time.perf_counter(), Path(out) if out else tuned.PATH, 0
    entries: dict[str, dict[str, Any]] = {}
    before = tuned.merged({})
    print(precompile.report(precompile.run("tune", only, shapes)), flush=True)
    for case in cases(only, shapes):
        if seconds and time.perf_counter() - start > seconds:
            late += 1
            continue
        best, lines = fastest(case) if case.candidates else (None, ["  the kernel lists no candidates"])
        print(f"[{time.perf_counter() - start:.0f} s] {case.kernel} {case.key}", *lines, sep="\n", flush=True)
        if best is not None:
            entries.setdefault(case.kernel, {})[case.key] = best
            tuned.save(tuned.merged({run.device: entries}, before), path)
    count = sum(map(len, entries.values()))
    print(f"{count} shapes in {path}" + (f"; {late} left out after {seconds:g} s" if late else ""))
    return 0 if count else 1
