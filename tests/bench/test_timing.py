"""The timing harness, on the CPU with toy operations and a clock of our own."""

import jax
import jax.numpy as jnp
import pytest

from jetrl_jax.bench import data, timing, works
from jetrl_jax.bench.rows import Row
from jetrl_jax.bench.timing import Contestant, Timing


class Clock:
    """A clock that runs only while a contestant works."""

    def __init__(self):
        self.now, self.order = 0.0, []

    def __call__(self):
        return self.now

    def contestant(self, name, *seconds, operations=1):
        times = iter(seconds)
        last = [seconds[-1]]

        def call():
            last[0] = next(times, last[0])
            self.now += last[0]
            self.order.append(name)

        return Contestant(name, call, operations, wait=lambda _: None)


def test_medians_an_operation_interleaved_and_turned():
    clock = Clock()
    found, failed = timing.measure([clock.contestant("a", 0.5, operations=5), clock.contestant("b", 0.2)], 4, 1.0, clock)
    assert failed == {}
    assert found["a"] == Timing(*[pytest.approx(0.1)] * 3) and found["b"] == Timing(*[pytest.approx(0.2)] * 3)
    assert clock.order[:6] == list("aaabbb")  # compile, warm up, estimate
    rounds = clock.order[6:]
    assert rounds == (["a"] * 2 + ["b"] * 5 + ["b"] * 5 + ["a"] * 2) * 2


def test_warm_up_is_left_out_and_the_spread_is_told():
    clock = Clock()
    found, _ = timing.measure([clock.contestant("a", 9.0, 9.0, 1.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0)], 3, 1.0, clock)
    assert found["a"] == Timing(2.0, 1.0, 3.0) and found["a"].spread == 1.0


def test_one_that_fails_stops_nobody():
    def broken():
        raise ValueError("no kernel for this\nand a second line")

    clock = Clock()
    found, failed = timing.measure([Contestant("x", broken, 1), clock.contestant("a", 1.0)], 3, 1.0, clock)
    assert list(found) == ["a"] and failed == {"x": "ValueError: no kernel for this"}


def test_without_the_needed_one_nobody_runs():
    def broken():
        raise ValueError("no")

    clock = Clock()
    found, failed = timing.measure([Contestant("x", broken, 1), clock.contestant("a", 1.0)], 3, 1.0, clock, needed="x")
    assert (found, failed, clock.order) == ({}, {"x": "ValueError: no"}, [])


def test_a_program_runs_its_operation_on_every_set_and_returns_all():
    sets = [(data.normal((8, 4), i), data.normal((4,), i + 9)) for i in range(3)]
    c = timing.program(lambda x, w: x @ w, sets)
    assert c.operations == 3
    outs = c.call()
    assert [o.shape for o in outs] == [(8,)] * 3 and not jnp.array_equal(outs[0], outs[1])
    found, failed = timing.measure([c], 2, 1e-4)
    assert failed == {} and found[""].seconds > 0


def test_as_many_sets_as_exceed_the_cache_and_fill_a_program():
    assert timing.number_of_sets(timing.SPAN, 1.0) == 1
    assert timing.number_of_sets(timing.SPAN // 3 - 1, 1.0) == 4
    assert timing.number_of_sets(timing.SPAN, timing.PROGRAM_SECONDS / 7) == 7
    assert timing.number_of_sets(1, 1e-6) == timing.MOST_SETS


def test_operands_are_random_and_of_the_right_kind():
    p, s, x = data.payload((64, 128), 1), data.scales((64, 1), 2, 3.0), data.normal((64, 128), 3, 2.0)
    assert (p.dtype, s.dtype, x.dtype) == (jnp.float8_e4m3fn, jnp.float32, jnp.bfloat16)
    assert 100 < p.astype(jnp.float32).std() < 140 and 1.8 < x.astype(jnp.float32).std() < 2.2
    assert (s >= 1.5 / data.SPREAD).all() and (s <= 4.5 / data.SPREAD).all()
    assert not jnp.array_equal(x, data.normal((64, 128), 4, 2.0))
    with data.abstract():
        assert data.payload((4, 2)) == jax.ShapeDtypeStruct((4, 2), jnp.float8_e4m3fn)
        assert data.made(lambda x: x.sum(0), data.normal((4, 2))).shape == (2,)
    assert isinstance(data.normal((4,)), jax.Array)


RUN = works.Run("jetrl bench x", "toy", {"jax": "1"})
WORK = works.Work("w", "TFLOP/s", {}, amount=2e12, amounts={"copy": 4e12}, floor=0.5, targets={"other": (1.4, 1.6)})


def test_rows_against_each_other_one_and_the_floor():
    found = {"ours": Timing(1.0, 0.9, 1.1), "other": Timing(1.5, 1.5, 1.5), "copy": Timing(1.0, 1.0, 1.0)}
    other, copied, floor = works.rows_of(WORK, found, RUN)
    assert other == Row("w", "TFLOP/s", 2.0, "other", 1.333, 1.5, "higher", 1.4, 1.6, "jetrl bench x", "toy", {"jax": "1"})
    assert (copied.against_value, copied.ratio, copied.must) == (4.0, 0.5, None)
    assert (floor.against, floor.against_value, floor.ratio) == ("floor", 4.0, 0.5)
    assert works.rows_of(WORK, {"other": found["other"]}, RUN) == []


def test_a_time_is_better_when_it_is_shorter():
    work = works.Work("d", "µs", {}, targets={"other": (1.6, 1.9)})
    [row] = works.rows_of(work, {"ours": Timing(65e-6, 0, 0), "other": Timing(117e-6, 0, 0)}, RUN)
    assert (row.value, row.against_value, row.ratio, row.better) == (65.0, 117.0, 1.8, "lower")
    assert works.verdict(row) == ", must 1.6 met, aim 1.9 MISSED"


def test_a_contestant_that_cannot_be_built_is_told_in_a_line():
    def refuse():
        raise RuntimeError("torch is not installed here")

    work = works.Work("w", "µs", {"ours": lambda: timing.jitted(lambda x: x + 1, jnp.ones(3), operations=1), "torch": refuse})
    found, failed = works.measure(work, rounds=2, seconds=1e-4)
    assert list(found) == ["ours"] and failed == {"torch": "RuntimeError: torch is not installed here"}
    assert works.lines_of(work, found, [], failed)[-1] == "  not run: w: torch: RuntimeError: torch is not installed here"
