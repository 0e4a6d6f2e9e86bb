"""What `jetrl bench NAME` runs: checks the machine, measures, writes rows."""

import importlib.metadata
import shlex
from collections.abc import Callable
from typing import Any

from jetrl_jax.bench.works import Run
from jetrl_jax.errors import UserError, unknown

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "triton", "jax-triton", "torch")


def versions() -> dict[str, str]:
    """Installed versions of what a figure depends on."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def this_run(name: str, flags: dict[str, str]) -> Run:
    """The run's command, device and versions; UserError where there is no Hopper GPU to measure on."""
    import jax

    from jetrl_jax.kernels import launch

    if why := launch.missing():
        raise UserError(f"jetrl bench {name} measures kernels: {why}; run it on a machine with an H100 or H200")
    words = [f"--{key}={shlex.quote(value)}" for key, value in flags.items() if value]
    return Run(" ".join(["jetrl", "bench", name, *words]), jax.devices()[0].device_kind, versions())


def kernels(flags: Any) -> int:
    """Time every kernel against others' and the floor."""
    from jetrl_jax.bench import kernels

    kernels.check(flags.only, flags.shapes)
    run = this_run("kernels", {"only": flags.only, "shapes": flags.shapes})
    return kernels.measure(flags.only, flags.shapes, flags.out, run, flags.seconds)


def tune(flags: Any) -> int:
    """Try the configurations that kernels list and keep the fastest of each shape."""
    from jetrl_jax.bench import tune

    tune.check(flags.only, flags.shapes)
    run = this_run("tune", {})
    return tune.measure(flags.only, flags.shapes, flags.out, run, flags.seconds)


def page(flags: Any) -> int:
    """Make the page of figures from the rows in docs/bench."""
    from jetrl_jax.bench import page

    return page.main(flags.out or page.PAGE)


BENCHES: dict[str, Callable[[Any], int]] = {"kernels": kernels, "tune": tune, "page": page}


def main(name: str, flags: Any) -> int:
    """Run one bench; raises UserError for a name that is none."""
    if not name:
        raise UserError(f"jetrl bench needs a name: {', '.join(BENCHES)}; jetrl bench --help says more")
    if name not in BENCHES:
        raise unknown("bench", name, BENCHES)
    return BENCHES[name](flags)
