"""metrics.jsonl: whole lines, nothing twice after a resume, NaN and back, the line for a person, the curve."""

import math
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax import metrics
from jetrl_jax.errors import UserError


def run(path, steps, after=None):
    writer = metrics.MetricsWriter(path, after)
    for step in steps:
        writer.write({"step": step, "reward": step / 10})


def steps(path):
    return [m["step"] for m in metrics.read(path)]


def test_a_resumed_run_has_every_step_once(tmp_path):
    path = tmp_path / "runs" / "metrics.jsonl"
    run(path, [1, 2, 3])
    with path.open("a") as file:
        file.write('{"step": 4, "rew')  # killed in the middle of a line
    assert steps(path) == [1, 2, 3]
    run(path, [3, 4], after=2)  # the checkpoint was of step 2
    assert steps(path) == [1, 2, 3, 4]
    assert [p.name for p in path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_new_run_starts_empty_and_a_resume_without_a_file_too(tmp_path):
    path = tmp_path / "metrics.jsonl"
    run(path, [1, 2])
    run(path, [1])
    assert steps(path) == [1]
    run(tmp_path / "lost.jsonl", [3], after=2)
    assert steps(tmp_path / "lost.jsonl") == [3]


def test_values_come_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    given = {"step": jnp.int32(1), "a": np.float32(0.5), "b": jnp.float32(2), "c": "text", "d": None}
    given |= {"inf": -math.inf, "nan": jnp.float32(math.nan)}
    metrics.MetricsWriter(path).write(given)
    assert "NaN" in path.read_text() and ": NaN" not in path.read_text()  # valid JSON
    [found] = metrics.read(path)
    assert math.isnan(found.pop("nan"))
    assert found == {"step": 1, "a": 0.5, "b": 2.0, "c": "text", "d": None, "inf": -math.inf}


@pytest.mark.parametrize("line", ["{", "[]", "3", "{}", '{"step": "x"}', ""])
def test_a_broken_line_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl:2: not a JSON object with a number 'step'"):
        metrics.read(path)


def test_the_line_for_a_person():
    mismatch = {"mismatch_mean_abs": jnp.float32(0), "mismatch_max_abs": 1.5e-7}
    line = metrics.step_line({"step": 3, **mismatch, "reward": 0.3125, "loss": math.nan, "unknown": 1}, steps=10)
    assert line == "step 3/10  reward 0.312  loss +nan  mismatch mean 0  max 1.5e-07"
    assert metrics.step_line({"step": 4}) == "step 4"


def test_smoothing_keeps_a_constant_and_skips_nan():
    assert metrics.smooth([0.5, math.nan, 0.5]) == pytest.approx([0.5, 0.5, 0.5])
    assert math.isnan(metrics.smooth([math.nan, 1.0])[0])
    values = metrics.smooth([0.0] + [1.0] * 50)
    assert values == sorted(values) and values[-1] == pytest.approx(1, abs=1e-4)


def test_the_curve_is_a_picture(tmp_path):
    run(tmp_path / "metrics.jsonl", [1, 2, 3])
    assert metrics.plot(tmp_path / "metrics.jsonl", tmp_path / "curve.png") == tmp_path / "curve.png"
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_no_curve(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it raises ImportError
    run(tmp_path / "metrics.jsonl", [1])
    assert metrics.plot(tmp_path / "metrics.jsonl", tmp_path / "curve.png") is None
    assert not (tmp_path / "curve.png").exists()
