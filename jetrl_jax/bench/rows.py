"""Figures as data: the rows of docs/bench/NAME.json, and how a new run goes into them.

A file is a JSON list of rows. A run replaces the rows that it measured anew on a GPU of the same name; all others stay.
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jetrl_jax.errors import UserError
from jetrl_jax.files import write_whole

HIGHER, LOWER = "higher", "lower"


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure of ours beside one of another: a work, what is measured of it, and against what.

    ratio says how many times better `value` is than `against_value` (above 1 is better, whichever way `better` points), None for an exact
    count or a figure that stands alone. must and aim are of the ratio where there is one, else of the value.
    """

    work: str
    measure: str
    value: float
    against: str
    against_value: float | None
    ratio: float | None
    better: str
    must: float | None
    aim: float | None
    command: str
    device: str
    versions: dict[str, str]

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Rows of one key replace each other."""
        return self.work, self.measure, self.against, self.device

    def meets(self, target: float | None) -> bool | None:
        """Whether the figure reaches `must` or `aim`; None where there is no target."""
        if target is None:
            return None
        if self.ratio is not None:
            return self.ratio >= target
        return self.value >= target if self.better == HIGHER else self.value <= target


def ratio_of(value: float, against: float, better: str) -> float:
    """How many times better `value` is than `against`."""
    return value / against if better == HIGHER else against / value


def read(path: str | Path) -> list[Row]:
    """The rows of a file, none if there is no file; UserError for one that is broken."""
    path = Path(path)
    if not path.exists():
        return []
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise UserError(f"{path}: not JSON ({e}); correct it, or delete it and measure again") from None
    if not isinstance(data, list):
        raise UserError(f"{path}: a list of rows was expected, and it holds {type(data).__name__}; delete it and measure again")
    rows = [_row(path, i, d) for i, d in enumerate(data)]
    if twice := sorted(key for key, n in Counter(r.key for r in rows).items() if n > 1):
        raise UserError(f"{path}: two rows of {' / '.join(twice[0])}; delete one")
    return rows


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _row(path: Path, index: int, data: Any) -> Row:
    where = f"{path}: row {index}"
    if not isinstance(data, dict):
        raise UserError(f"{where} is {data!r}, and an object was expected")
    names = [f.name for f in dataclasses.fields(Row)]
    if wrong := sorted(set(names) ^ set(data)):
        raise UserError(f"{where}: missing or unknown: {', '.join(wrong)}; a row has {', '.join(names)}")
    for name, value in data.items():
        if name == "versions":
            good = isinstance(value, dict) and all(isinstance(v, str) for v in value.values())
        elif name == "better":
            good = value in (HIGHER, LOWER)
        elif name in ("value", "against_value", "ratio", "must", "aim"):
            good = _number(value) or (value is None and name != "value")
        else:
            good = isinstance(value, str) and bool(value or name == "against")
        if not good:
            raise UserError(f"{where}: {name}={value!r} is not what a row holds there (docs/bench.md is made from it)")
    return Row(**data)


def merge(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """`old` with `new` put in: a row takes the place of that of its key (the GPU's name is part of it), or comes after the others."""
    found = {r.key: r for r in old}
    found.update((r.key, r) for r in new)
    return list(found.values())


def write(path: str | Path, rows: Sequence[Row]) -> None:
    """Write a file whole: one row a line, so that a diff shows what changed."""
    lines = ",\n".join(json.dumps(dataclasses.asdict(r), ensure_ascii=False, allow_nan=False) for r in rows)
    write_out(path, f"[\n{lines}\n]\n")


def write_out(path: str | Path, text: str) -> None:
    """Write the file that --out names, whole; UserError where that cannot be done."""
    try:
        write_whole(path, text)
    except OSError as e:
        raise UserError(f"--out={path}: cannot be written: {e}") from None


def put(path: str | Path, new: Sequence[Row]) -> list[Row]:
    """Merge a run's rows into a file, and return all of its rows."""
    rows = merge(read(path), new)
    write(path, rows)
    return rows
