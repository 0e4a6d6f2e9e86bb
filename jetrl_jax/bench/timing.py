"""Timing on an accelerator: contestants take turns in one run, each call a program of many operations on inputs that no cache holds.

What makes the figures honest: random data, never zeros (a GPU multiplies zeros faster); several sets of inputs, together larger than
three L2 caches, used one after the other; every output is a result of the program, so nothing can be left out; many calls in flight
before the clock stops, so that the host's launches hide behind the device's work; contestants interleaved and their order turned, so that
a clock that drifts drifts for all; medians. Nothing is subtracted.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jetrl_jax.compile import compile

L2_BYTES = 64 * 2**20  # at least what a Hopper GPU has (50 to 60 MB)
SPAN = 3 * L2_BYTES  # bytes that the sets of inputs and outputs take together, at least
PROGRAM_SECONDS = 400e-6  # a program is at least so long, by the floor of its operations: a launch of a program costs the host 50 µs
MOST_SETS = 32
ROUNDS = 9
ROUND_SECONDS = 0.015  # of each contestant in a round


@dataclasses.dataclass(frozen=True)
class Contestant:
    """Something to time: `call()` starts `operations` operations and returns what `wait` waits for.

    lower: lowers the program for CUDA without running it, which compiles its kernels (`precompile`); None for what is not ours to compile.
    """

    name: str
    call: Callable[[], Any]
    operations: int
    wait: Callable[[Any], Any] = jax.block_until_ready
    lower: Callable[[], Any] | None = None


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one operation: the median over the rounds, and the lowest and highest."""

    seconds: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """(highest - lowest) / median."""
        return (self.high - self.low) / self.seconds


def number_of_sets(bytes_each: int, seconds_each: float) -> int:
    """How many sets of inputs an operation needs that moves `bytes_each` and takes `seconds_each` at best."""
    return max(1, min(MOST_SETS, max(math.ceil(SPAN / bytes_each), math.ceil(PROGRAM_SECONDS / seconds_each))))


def jitted(fun: Callable, *args: Any, operations: int, name: str = "") -> Contestant:
    """A program `fun(*args)` of so many operations, all of whose outputs are results."""
    run = compile(fun)
    return Contestant(name, lambda: run(*args), operations, lower=lambda: run.trace(*args).lower(lowering_platforms=("cuda",)))


def program(operation: Callable, sets: Sequence[tuple]) -> Contestant:
    """`operation(*set)` on each set, in one jitted program (on one stream, so one after the other)."""
    return jitted(lambda sets: [operation(*s) for s in sets], sets, operations=len(sets))


def measure(
    contestants: Sequence[Contestant], rounds: int = ROUNDS, seconds: float = ROUND_SECONDS, clock: Callable[[], float] = time.perf_counter,
    needed: str = "",
) -> tuple[dict[str, Timing], dict[str, str]]:
    """({name: timing}, {name: why it did not run}): one that fails at its first call leaves the race and stops nobody else.

    needed: the one without which there is nothing to compare; if it fails, no time is spent on those after it.
    """
    failed: dict[str, str] = {}
    calls: dict[str, int] = {}
    running: list[Contestant] = []
    for c in contestants:
        try:
            c.wait(c.call())  # compiles
            c.wait(c.call())
            start = clock()
            c.wait(c.call())
            calls[c.name] = max(2, math.ceil(seconds / max(clock() - start, 1e-6)))
        except Exception as e:  # a kernel that does not compile or does not launch, an operation that this library lacks, memory
            failed[c.name] = one_line(e)
            if c.name == needed:
                return {}, failed
            continue
        running.append(c)
    samples: dict[str, list[float]] = {c.name: [] for c in running}
    for i in range(rounds):
        for c in running if i % 2 == 0 else running[::-1]:
            start = clock()
            for _ in range(calls[c.name]):
                last = c.call()
            c.wait(last)
            samples[c.name].append((clock() - start) / (calls[c.name] * c.operations))
            del last
    return {name: Timing(statistics.median(s), min(s), max(s)) for name, s in samples.items()}, failed


def one_line(error: BaseException) -> str:
    """An error's type and the start of its first line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
