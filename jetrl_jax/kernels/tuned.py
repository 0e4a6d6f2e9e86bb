"""The table of tuned configurations, `tuned.json` beside this file, which `jetrl bench tune` makes.

{"NVIDIA H200": {"gemm": {"8192x6144x4096": {"consumers": 2, …}}}}: device, kernel, rows (the next power of two) x N x K, and the fields of
the kernel's `Config`. Rows are the tokens of the product: M of `gemm` and `decode`, T of `wgrad`.
"""

import functools
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jetrl_jax.errors import UserError
from jetrl_jax.files import write_whole

PATH = Path(__file__).with_name("tuned.json")
FAR = 4.0  # in powers of two, over rows, N and K together: beyond it a neighbour's configuration says nothing

Fields = dict[str, Any]
Table = dict[str, dict[str, dict[str, Fields]]]


def bucket(m: int) -> int:
    """The power of two at or above m, under which a number of rows stands in the table."""
    return 1 << max(m - 1, 0).bit_length()


def shape_key(m: int, n: int, k: int) -> str:
    """The table's name of a shape."""
    return f"{bucket(m)}x{n}x{k}"


def lookup(
    kernel: str, m: int, n: int, k: int, default: Mapping[str, Any], fits: Callable[[Fields], bool] | None = None, device: str = "",
) -> Fields:
    """The fields of the configuration for m rows of N x K, or `default`'s.

    The shape itself if it is in the table; else the nearest one by |log2| of rows, N and K together, N and K counted twice (a tile depends
    on them more than on the rows), ties to the larger shape, up to FAR; else `default`. Those that `fits` refuses are passed over. Fields
    that the table lacks are `default`'s, and those that `default` lacks are dropped, so that an older table serves a newer kernel. A device
    that is not in the table takes the entries of its first one: all are Hopper, and they differ in memory more than in arithmetic.
    """
    devices = _load(str(PATH))
    shapes = (devices.get(device or _device()) or next(iter(devices.values()), {})).get(kernel, {})
    wanted = (bucket(m), n, k)
    ranked = sorted((_distance(wanted, _sizes(name)), [-s for s in _sizes(name)], name) for name in shapes)
    for distance, _, name in ranked:
        found = {field: _hashable(shapes[name].get(field, value)) for field, value in default.items()}
        if distance <= FAR and (fits is None or fits(found)):
            return found
    return dict(default)


def merged(found: Table, into: Table | None = None) -> Table:
    """`into` (the packaged table if not given) with the shapes of `found` put in or replaced; neither is changed."""
    table = json.loads(json.dumps(_load(str(PATH)) if into is None else into))
    for device, kernels in found.items():
        for kernel, shapes in kernels.items():
            table.setdefault(device, {}).setdefault(kernel, {}).update(shapes)
    return table


def save(table: Table, path: str | Path | None = None) -> None:
    """Write a table (the packaged one if no path is given), whole; OSError where that cannot be done."""
    lines = []
    for device in sorted(table):
        kernels = [f'  {json.dumps(kernel)}: {{\n{_rows(table[device][kernel])}\n  }}' for kernel in sorted(table[device])]
        lines.append(f" {json.dumps(device)}: {{\n" + ",\n".join(kernels) + "\n }")
    write_whole(path or PATH, "{\n" + ",\n".join(lines) + "\n}\n")
    _load.cache_clear()


def _rows(shapes: dict[str, Fields]) -> str:
    """One line a shape, in order of size: a diff shows what a new run changed."""
    names = sorted(shapes, key=lambda name: (*_sizes(name)[1:], _sizes(name)[0]))
    return ",\n".join(f"   {json.dumps(name)}: {json.dumps(shapes[name])}" for name in names)


@functools.cache
def _load(path: str) -> Table:
    if not Path(path).exists():
        return {}
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
        for kernels in table.values():
            for shapes in kernels.values():
                for name, fields in shapes.items():
                    _sizes(name), dict(fields)
    except (OSError, ValueError, AttributeError, TypeError) as e:
        raise UserError(f"{path}: not a table of tuned configurations ({e}); delete it, or make it anew with jetrl bench tune") from None
    return table


def _sizes(name: str) -> tuple[int, int, int]:
    m, n, k = (int(s) for s in name.split("x"))
    return m, n, k


def _distance(a: tuple[int, int, int], b: tuple[int, int, int]) -> float:
    m, n, k = (abs(math.log2(x / y)) for x, y in zip(a, b, strict=True))
    return m + 2 * (n + k)


def _hashable(value: Any) -> Any:
    return tuple(_hashable(v) for v in value) if isinstance(value, list) else value


@functools.cache
def _device() -> str:
    """Name of the first GPU, "" where there is none (kernels compile without one)."""
    import jax

    try:
        return str(jax.devices("gpu")[0].device_kind)
    except RuntimeError:
        return ""
