"""docs/bench.md: made from the rows, and in step with them."""

import dataclasses
from pathlib import Path

from bench_rows import ROW, changed

from jetrl_jax.bench import page, rows

ROOT = Path(__file__).parent.parent.parent


def test_the_page_in_docs_is_in_step_with_its_rows():
    made = page.text(ROOT / "docs" / "bench")
    assert (ROOT / page.PAGE).read_text(encoding="utf-8") == made, "run `jetrl bench page` in the root of the repository"


def test_a_page_shows_every_figure_its_targets_and_how_it_was_measured(tmp_path):
    floor = changed(against="floor", against_value=1500.0, ratio=0.7633, must=None, aim=None)
    slow = changed(work="decode", measure="µs", value=65.0, against_value=113.0, ratio=1.738, better="lower", must=1.6, aim=1.9)
    h100 = changed(device="NVIDIA H100", value=700.0, ratio=0.9)
    rows.write(tmp_path / "bench" / "kernels.json", [ROW, floor, slow, h100])
    assert page.main(tmp_path / "bench.md") == 0
    text = (tmp_path / "bench.md").read_text()
    assert "## kernels, NVIDIA H200" in text and "## kernels, NVIDIA H100" in text
    assert "must: 2 of 2 met; aim: 0 of 2 met." in text and "must: 0 of 1 met; aim: 0 of 1 met." in text
    assert "| TFLOP/s, more is better | ours | against XLA bf16 | against floor |" in text
    assert "| fprop qkv | 1145 | 1.43× (803), must 1.4 met, aim 1.6 **missed** | 0.76× (1500) |" in text
    assert "| µs, less is better | ours | against XLA bf16 |" in text
    assert "| decode | 65 | 1.74× (113), must 1.6 met, aim 1.9 **missed** |" in text
    assert text.count("Measured with `jetrl bench kernels`; jax 0.11.2.") == 2


def test_lines_with_equal_targets_share_a_table_also_if_a_column_is_missing(tmp_path):
    second, triton = changed(work="fprop o"), changed(work="fprop o", against="plain Triton", must=None, aim=None)
    rows.write(tmp_path / "k.json", [ROW, second, triton])
    text = page.text(tmp_path)
    assert text.count("|---") == 4
    assert "| fprop qkv | 1145 | 1.43× (803), must 1.4 met, aim 1.6 **missed** | – |" in text


def test_an_exact_count_shows_both_numbers(tmp_path):
    rows.write(tmp_path / "k.json", [dataclasses.replace(ROW, value=0, against_value=3, ratio=None, better="lower", must=0, aim=None)])
    assert "| fprop qkv | 0 | 3, must 0 met |" in page.text(tmp_path)


def test_a_page_without_rows_says_how_to_measure_some(tmp_path):
    assert "No rows yet: `jetrl bench kernels" in page.text(tmp_path)
