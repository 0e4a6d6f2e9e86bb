"""A work: one operation, ours and others' versions of it, and the rows that a measurement of them makes."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from jetrl_jax.bench import timing
from jetrl_jax.bench.rows import HIGHER, LOWER, Row, ratio_of

OURS = "ours"
FLOOR = "floor"
Targets = tuple[float | None, float | None]
UNITS = {"TFLOP/s": 1e12, "GB/s": 1e9}  # of rates; "µs" is a time


@dataclasses.dataclass(frozen=True)
class Work:
    """One line of a table.

    contestants: how each version is built, by name, OURS first; what cannot be built raises, and is told in one line. measure: "TFLOP/s" or
    "GB/s", of the `amount` that an operation computes or moves (`amounts`: where a contestant's differs), or "µs". floor: seconds of the
    fastest conceivable operation, 0 if there is none. targets: (must, aim) of the ratio, by contestant.
    """

    name: str
    measure: str
    contestants: Mapping[str, Callable[[], timing.Contestant]]
    amount: float = 0.0
    amounts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    floor: float = 0.0
    targets: Mapping[str, Targets] = dataclasses.field(default_factory=dict)

    def beside(self, others: Mapping[str, Callable[[], timing.Contestant]], targets: Mapping[str, Targets]) -> "Work":
        """The same work with others' versions of it, and what ours must reach against them."""
        return dataclasses.replace(self, contestants={**self.contestants, **others}, targets={**self.targets, **targets})

    @property
    def better(self) -> str:
        return HIGHER if self.measure in UNITS else LOWER

    def value(self, name: str, seconds: float) -> float:
        """A time in the work's measure."""
        if self.measure in UNITS:
            return self.amounts.get(name, self.amount) / seconds / UNITS[self.measure]
        return seconds * 1e6


@dataclasses.dataclass(frozen=True)
class Run:
    """What the rows of one run share."""

    command: str
    device: str
    versions: dict[str, str]


def measure(work: Work, **how) -> tuple[dict[str, timing.Timing], dict[str, str]]:
    """Build and time a work's contestants: (timings, reasons of those that did not run)."""
    built, failed = [], {}
    for name, build in work.contestants.items():
        try:
            built.append(dataclasses.replace(build(), name=name))
        except Exception as e:  # a library that is not there, a kernel that does not cover the shape
            failed[name] = timing.one_line(e)
            if name == OURS:
                return {}, failed
    found, more = timing.measure(built, needed=OURS, **how)
    return found, failed | more


def rows_of(work: Work, found: Mapping[str, timing.Timing], run: Run) -> list[Row]:
    """A row of ours against each other contestant and the floor; none if ours did not run."""
    if OURS not in found:
        return []
    seconds = {name: t.seconds for name, t in found.items() if name != OURS} | ({FLOOR: work.floor} if work.floor else {})
    mine, rows = work.value(OURS, found[OURS].seconds), []
    for name, s in seconds.items():
        other = work.value(name, s)
        must, aim = work.targets.get(name, (None, None))
        rows.append(Row(work=work.name, measure=work.measure, value=_short(mine), against=name, against_value=_short(other),
                        ratio=_short(ratio_of(mine, other, work.better)), better=work.better, must=must, aim=aim, command=run.command,
                        device=run.device, versions=run.versions))
    return rows


def _short(x: float) -> float:
    """Four digits: more than the spread of any timing here."""
    return float(f"{x:.4g}")


def lines_of(work: Work, found: Mapping[str, timing.Timing], rows: Sequence[Row], failed: Mapping[str, str]) -> list[str]:
    """What is printed when a work has been measured."""
    lines = []
    if OURS in found:
        lines.append(f"{work.name}: {work.value(OURS, found[OURS].seconds):.4g} {work.measure} (spread {found[OURS].spread:.1%})")
    for row in rows:
        spread = f", spread {found[row.against].spread:.1%}" if row.against in found else ""
        lines.append(f"  {row.ratio:.3f} x {row.against} ({row.against_value:.4g}{spread}){verdict(row)}")
    return lines + [f"  not run: {work.name}: {name}: {why}" for name, why in failed.items()]


def verdict(row: Row) -> str:
    """", must 1.4 met, aim 1.6 MISSED", "" where there are no targets."""
    words = []
    for name, target in (("must", row.must), ("aim", row.aim)):
        if target is not None:
            words.append(f", {name} {target:g} {'met' if row.meets(target) else 'MISSED'}")
    return "".join(words)
