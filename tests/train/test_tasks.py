"""The tasks: what they hold, that splits are disjoint, and every way in which a JSONL file can be wrong."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_jax.errors import UserError
from jetrl_jax.train.tasks import Example, gsm8k, jsonl, load_task, sums


# --- sums -------------------------------------------------------------------------------------------------------------------------
def terms_of(example: Example) -> list[int]:
    question = example.prompt
    assert isinstance(question, str)
    return [int(term) for term in question.removeprefix("What is ").removesuffix("?").split(" + ")]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(2, 4), st.integers(1, 50), st.integers(0, 2**40), st.sampled_from(["train", "test"]))
def test_sums_are_right_and_repeatable(digits, terms, size, seed, split):
    examples = sums(digits=digits, terms=terms, size=size, seed=seed, split=split)
    assert len(examples) == size
    for example in examples:
        numbers = terms_of(example)
        assert len(numbers) == terms and all(len(str(n)) == digits for n in numbers)
        assert example.answer == str(sum(numbers))
        assert example.columns == {"prompt": example.prompt, "answer": example.answer, "terms": numbers}
    assert examples == sums(digits=digits, terms=terms, size=size, seed=seed, split=split)


def test_sums_are_distinct_while_there_are_enough_and_then_come_round_evenly():
    for digits in (2, 8):
        assert len({e.prompt for e in sums(digits=digits, terms=2, size=300, seed=0)}) == 300
    train = [e.prompt for e in sums(digits=1, terms=2, size=10_000, seed=0)]
    test = [e.prompt for e in sums(digits=1, terms=2, size=10_000, seed=0, split="test")]
    assert len(set(train)) + len(set(test)) == 100 and 10 <= len(set(test)) <= 30
    times = [train.count(prompt) for prompt in set(train)]
    assert max(times) - min(times) == 1


@pytest.mark.parametrize("digits", [1, 2, 12])
def test_splits_are_disjoint_for_any_two_seeds_and_any_order_of_the_terms(digits):
    def drawn(split, seed):
        return {tuple(sorted(terms_of(e))) for e in sums(digits=digits, terms=2, size=400, seed=seed, split=split)}

    assert not drawn("train", 0) & drawn("test", 0)
    assert not drawn("train", 0) & drawn("test", 1)


def test_seeds_give_different_sums():
    assert sums(digits=2, terms=2, size=20, seed=0) != sums(digits=2, terms=2, size=20, seed=1)


@pytest.mark.parametrize(("change", "message"), [
    ({"digits": 0}, "data.digits=0"), ({"terms": 1}, "data.terms=1"), ({"size": 0}, "data.size=0"), ({"digits": 5000}, "data.digits=5000"),
    ({"seed": -1}, "seed=-1"), ({"split": "tran"}, "did you mean 'train'"),
])  # fmt: skip
def test_sums_refuse(change, message):
    with pytest.raises(UserError, match=message):
        sums(**({"digits": 1, "terms": 2, "size": 4, "seed": 0} | change))


# --- GSM8K ------------------------------------------------------------------------------------------------------------------------
def test_gsm8k_is_whole():
    train, test = gsm8k("train"), gsm8k("test")
    assert (len(train), len(test)) == (7473, 1319)
    assert train[0].prompt.startswith("Natalia sold clips") and train[0].answer == "72"
    assert all(set(e.columns) == {"question", "answer"} and e.prompt == e.columns["question"] for e in train + test)
    assert all(e.answer.lstrip("-").replace(".", "").isdigit() for e in train + test)
    assert not {e.prompt for e in train} & {e.prompt for e in test}
    with pytest.raises(UserError, match="unknown data.split 'dev'"):
        gsm8k("dev")


# --- JSONL ------------------------------------------------------------------------------------------------------------------------
GOOD = b'{"prompt": "1 + 1?", "answer": "2"}'


def write(tmp_path, content: bytes) -> str:
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    return str(path)


def test_jsonl_reads_strings_chats_numbers_and_other_columns(tmp_path):
    chat = [{"role": "system", "content": ""}, {"role": "user", "content": "é\u2028?"}]
    rows = [{"q": "one", "a": "1", "level": 3}, {"q": chat, "a": 42}, {"q": "x", "a": 0.25}, {"q": "y", "a": 1e-07}, {"q": "z", "a": 1e22}]
    text = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    examples = jsonl(write(tmp_path, b"\xef\xbb\xbf" + text.encode() + b"\r\n"), "q", "a")
    assert [e.answer for e in examples] == ["1", "42", "0.25", "0.0000001", "10000000000000000000000"]
    assert examples[1].prompt == tuple(chat)
    assert [e.columns for e in examples] == rows
    assert len(jsonl(write(tmp_path, GOOD))) == 1  # no line end after the last line


@pytest.mark.parametrize(("line", "message"), [
    (b"", "the line is empty"),
    (b"  \t", "the line is empty"),
    (b'{"prompt": "a", ', "not valid JSON"),
    (b'{"prompt": "a", "answer": NaN}', "NaN is no JSON value"),
    (b"[" * 100_000, "not valid JSON"),
    (b'{"prompt": "a", "answer": ' + b"9" * 5000 + b"}", "not valid JSON"),
    (b'"just text"', "a JSON string"),
    (b"null", "a JSON null"),
    (b'{"prompt": "\xff"}', "not UTF-8"),
    (b'{"answer": "2"}', "no column 'prompt', this line has 'answer'; set data.prompt_column"),
    (b'{"prompt": "a", "solution": "2"}', "no column 'answer', .*'solution'; set data.answer_column"),
    (b"{}", "this line has none"),
    (b'{"prompt": 3, "answer": "2"}', "column 'prompt' is a number"),
    (b'{"prompt": null, "answer": "2"}', "column 'prompt' is a null"),
    (b'{"prompt": " ", "answer": "2"}', "column 'prompt' is an empty string"),
    (b'{"prompt": [], "answer": "2"}', "list without messages"),
    (b'{"prompt": ["hi"], "answer": "2"}', "message 1 of column 'prompt'"),
    (b'{"prompt": [{"role": "user", "content": "a"}, {"role": "user"}], "answer": "2"}', "message 2 of column 'prompt'"),
    (b'{"prompt": [{"role": "user", "content": "\\ud800"}], "answer": "2"}', "column 'prompt' has half a surrogate pair at character 1"),
    (b'{"prompt": "ab\\udc00", "answer": "2"}', r"column 'prompt' has half a surrogate pair at character 3, in 'ab\\udc00'"),
    (b'{"prompt": "a", "answer": ["2"]}', "column 'answer' is a list"),
    (b'{"prompt": "a", "answer": true}', "column 'answer' is a boolean"),
    (b'{"prompt": "a", "answer": ""}', "column 'answer' is an empty string"),
], ids=range(23))  # fmt: skip
def test_a_bad_line_is_named(tmp_path, line, message):
    with pytest.raises(UserError, match=rf"data\.jsonl, line 3: .*{message}"):
        jsonl(write(tmp_path, GOOD + b"\n" + GOOD + b"\n" + line + b"\n" + GOOD + b"\n"))


def test_a_bad_file_is_named(tmp_path):
    with pytest.raises(UserError, match="data.path is empty"):
        jsonl("")
    with pytest.raises(UserError, match="none.jsonl' cannot be read .No such file"):
        jsonl(str(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match="cannot be read .Is a directory"):
        jsonl(str(tmp_path))
    with pytest.raises(UserError, match="data.jsonl is empty"):
        jsonl(write(tmp_path, b""))
    with pytest.raises(UserError, match="line 1: the line is empty"):
        jsonl(write(tmp_path, b"\n"))


def test_tasks_by_name(tmp_path):
    assert load_task("sums", seed=3, digits=2, terms=3, size=5, split="test") == sums(digits=2, terms=3, size=5, seed=3, split="test")
    assert load_task("gsm8k", split="test")[0].answer == "18"
    assert load_task("jsonl", path=write(tmp_path, GOOD), prompt_column="answer", answer_column="prompt")[0].answer == "1 + 1?"
    with pytest.raises(UserError, match="unknown data.name 'gsm8': did you mean 'gsm8k'"):
        load_task("gsm8")
