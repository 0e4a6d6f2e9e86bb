"""docs/bench.md: tables made from the rows in docs/bench/*.json, a section for each file, a part for each GPU."""

from collections.abc import Sequence
from pathlib import Path

from jetrl_jax.bench import rows as figures
from jetrl_jax.bench.rows import HIGHER, Row

PAGE = Path("docs/bench.md")
INTRODUCTION = """# Figures

Made by `jetrl bench page` from the rows in `docs/bench`; do not edit. Each cell says how many times better ours is (above 1), and the
other's figure; where there is a target, *must* is what has to be reached and *aim* what is hoped for. Contestants of a line took turns in
one run on the same GPU, on random data that no cache holds; figures are medians.
"""


def folder_of(page: str | Path) -> Path:
    """Where the rows of a page lie: the folder of its name."""
    return Path(page).with_suffix("")


def text(folder: str | Path) -> str:
    """The page of a folder of rows; UserError for a broken file."""
    parts = [INTRODUCTION]
    for path in sorted(Path(folder).glob("*.json")):
        rows = figures.read(path)
        for device in dict.fromkeys(r.device for r in rows):
            parts.append(_part(path.stem, device, [r for r in rows if r.device == device]))
    if len(parts) == 1:
        parts.append("No rows yet: `jetrl bench kernels --out=docs/bench/kernels.json` on a Hopper GPU measures some.\n")
    return "\n".join(parts)


def _part(name: str, device: str, rows: Sequence[Row]) -> str:
    tables: dict[tuple, list[Row]] = {}
    for works in _by_work(rows).values():  # lines of equal targets and measure share a table
        targets = tuple((r.against, r.must, r.aim) for r in works if r.must is not None or r.aim is not None)
        tables.setdefault((works[0].measure, works[0].better, targets), []).extend(works)
    lines = [f"## {name}, {device}", "", _count(rows), ""]
    for (measure, better, _), members in tables.items():
        lines += [*_table(measure, better, members), ""]
    commands = dict.fromkeys((r.command, ", ".join(f"{k} {v}" for k, v in sorted(r.versions.items()))) for r in rows)
    return "\n".join([*lines, *(f"Measured with `{command}`; {versions}." for command, versions in commands), ""])


def _by_work(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    found: dict[tuple[str, str], list[Row]] = {}
    for r in rows:
        found.setdefault((r.work, r.measure), []).append(r)
    return found


def _count(rows: Sequence[Row]) -> str:
    words = []
    for name in ("must", "aim"):
        met = [r.meets(getattr(r, name)) for r in rows if getattr(r, name) is not None]
        words.append(f"{name}: {sum(map(bool, met))} of {len(met)} met")
    return "; ".join(words) + "."


def _table(measure: str, better: str, rows: Sequence[Row]) -> list[str]:
    columns = list(dict.fromkeys(r.against for r in rows))
    heads = [f"{measure}, {'more' if better == HIGHER else 'less'} is better", "ours", *(f"against {c}" for c in columns)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for (work, _), members in _by_work(rows).items():
        cells = {r.against: _cell(r) for r in members}
        lines.append(f"| {work} | {members[0].value:g} | " + " | ".join(cells.get(c, "–") for c in columns) + " |")
    return lines


def _cell(row: Row) -> str:
    """"1.43× (803), must 1.4 met, aim 1.6 **missed**"."""
    if row.ratio is not None:
        words = [f"{row.ratio:.2f}×" + (f" ({row.against_value:g})" if row.against_value is not None else "")]
    else:
        words = ["–" if row.against_value is None else f"{row.against_value:g}"]
    for name, target in (("must", row.must), ("aim", row.aim)):
        if target is not None:
            words.append(f"{name} {target:g} {'met' if row.meets(target) else '**missed**'}")
    return ", ".join(words)


def main(page: str | Path) -> int:
    """Write the page of the rows beside it."""
    made = text(folder_of(page))
    figures.write_out(page, made)
    print(f"{page}: {made.count(chr(10))} lines from {folder_of(page)}")
    return 0
