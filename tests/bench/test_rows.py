"""Rows of figures: what a file must hold, and how a run's rows go into it."""

import dataclasses
import json

import pytest
from bench_rows import ROW, changed

from jetrl_jax.bench import rows
from jetrl_jax.bench.rows import Row
from jetrl_jax.errors import UserError


def test_a_file_comes_back_as_it_was_written(tmp_path):
    path = tmp_path / "bench" / "kernels.json"
    both = [ROW, changed(against="tokens", ratio=None, against_value=None, must=None, aim=None)]
    rows.write(path, both)
    assert rows.read(path) == both
    assert path.read_text().count("\n") == 4  # one row a line
    assert [p.name for p in path.parent.iterdir()] == ["kernels.json"]


def test_a_row_has_the_fields_of_the_design():
    names = ["work", "measure", "value", "against", "against_value", "ratio", "better", "must", "aim", "command", "device", "versions"]
    assert [f.name for f in dataclasses.fields(Row)] == names


def test_a_run_replaces_its_rows_of_the_same_gpu_alone(tmp_path):
    path = tmp_path / "k.json"
    elsewhere, other = changed(device="NVIDIA H100"), changed(work="fprop o")
    rows.write(path, [ROW, elsewhere, other])
    better, fresh = changed(value=1200.0, command="again"), changed(against="plain Triton")
    assert rows.put(path, [better, fresh]) == [better, elsewhere, other, fresh]
    assert rows.read(path) == [better, elsewhere, other, fresh]
    from_h100 = changed(device="NVIDIA H100", value=900.0)
    assert rows.put(path, [from_h100]) == [better, from_h100, other, fresh]


def test_no_file_is_no_rows(tmp_path):
    assert rows.read(tmp_path / "none.json") == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value": "fast"}, "row 0: value='fast'"),
        ({"value": None}, "row 0: value=None"),
        ({"value": True}, "row 0: value=True"),
        ({"ratio": "1"}, "row 0: ratio='1'"),
        ({"better": "faster"}, "row 0: better='faster'"),
        ({"work": ""}, "row 0: work=''"),
        ({"device": 3}, "row 0: device=3"),
        ({"versions": {"jax": 1}}, "row 0: versions={'jax': 1}"),
        ({"note": "x"}, "row 0: missing or unknown: note"),
    ],
)
def test_a_broken_row_is_named(tmp_path, change, message):
    path = tmp_path / "k.json"
    path.write_text(json.dumps([{**dataclasses.asdict(ROW), **change}]))
    with pytest.raises(UserError) as e:
        rows.read(path)
    assert f"{path}: {message}" in str(e.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "not JSON"),
        ("{}", "a list of rows was expected, and it holds dict"),
        ("[3]", "row 0 is 3"),
        ("[{}]", "missing or unknown: against, against_value, aim"),
        (json.dumps([dataclasses.asdict(ROW)] * 2), "two rows of fprop qkv / TFLOP/s / XLA bf16 / NVIDIA H200"),
        ('[{"value": NaN}]', "missing or unknown"),
    ],
)
def test_a_broken_file_is_named_and_left_as_it_is(tmp_path, text, message):
    path = tmp_path / "k.json"
    path.write_text(text)
    with pytest.raises(UserError, match=None) as e:
        rows.put(path, [ROW])
    assert message in str(e.value) and str(path) in str(e.value)
    assert path.read_text() == text


def test_a_row_that_is_no_number_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        rows.write(tmp_path / "k.json", [changed(value=float("nan"))])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_one_message(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        rows.write(tmp_path / "file" / "k.json", [ROW])


def test_targets_are_of_the_ratio_where_there_is_one():
    assert (ROW.meets(ROW.must), ROW.meets(ROW.aim), ROW.meets(None)) == (True, False, None)
    count = changed(value=0, ratio=None, better="lower", must=0)
    assert count.meets(0) and not dataclasses.replace(count, value=1).meets(0)
    assert rows.ratio_of(2.0, 1.0, "higher") == 2.0 and rows.ratio_of(2.0, 1.0, "lower") == 0.5
