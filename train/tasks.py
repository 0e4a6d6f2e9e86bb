"""Tasks: where questions with a checkable answer come from. Each gives a list of `Example`; `train/data.py` makes prompts of them."""

import gzip
import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from jetrl_jax.errors import UserError, check_unicode, unknown

Message = dict[str, str]  # {"role": …, "content": …}, as chat templates read it
SPLITS = ("train", "test")
_HELD_OUT = 5  # one sum in five belongs to the test split


@dataclass(frozen=True)
class Example:
    """One question. prompt: plain text, or the messages of a chat; answer: what a reward compares with; columns: the whole source row."""

    prompt: str | tuple[Message, ...]
    answer: str
    columns: dict[str, Any] = field(default_factory=dict)


def load_task(name: str, *, seed: int = 0, split: str = "train", digits: int = 1, terms: int = 2, size: int = 1000, path: str = "",
              prompt_column: str = "prompt", answer_column: str = "answer") -> list[Example]:
    """The examples of the task called `name`: "sums", "gsm8k" or "jsonl". The arguments are fields of
    `config.data`; each task reads its own."""
    if name == "sums":
        return sums(digits=digits, terms=terms, size=size, seed=seed, split=split)
    if name == "gsm8k":
        return gsm8k(split)
    if name == "jsonl":
        return jsonl(path, prompt_column, answer_column)
    raise unknown("data.name", name, ("sums", "gsm8k", "jsonl"))


def _check_split(split: str) -> None:
    if split not in SPLITS:
        raise unknown("data.split", split, SPLITS)


# --- sums -------------------------------------------------------------------------------------------------------------------------
def sums(*, digits: int, terms: int, size: int, seed: int, split: str = "train") -> list[Example]:
    """`size` questions "What is 3 + 5?" over `terms` numbers of `digits` digits (one digit: 0 to 9; two: 10 to 99; and so on).

    They are distinct while there are enough: two one-digit terms make only 100 sums, and beyond those of the split they come round
    again, each as often as any other. Which split a sum is in depends on its terms alone, whatever their order and the seed: no
    training run has seen a test question, nor one with its terms swapped.
    """
    _check_split(split)
    for name, value, least, most in (("digits", digits, 1, 1000), ("terms", terms, 2, 1000), ("size", size, 1, 10**7)):
        if not least <= value <= most:
            raise UserError(f"data.{name}={value} must lie between {least} and {most}")
    if seed < 0:
        raise UserError(f"seed={seed} must not be negative")
    bits = np.random.PCG64(np.random.SeedSequence(seed))
    low, high = (0 if digits == 1 else 10 ** (digits - 1)), 10**digits
    space = (high - low) ** terms
    if space <= max(2**20, 4 * _HELD_OUT * size):  # all sums in a drawn order
        candidates = (_decode(int(code), low, high, terms) for code in np.argsort(bits.random_raw(space), kind="stable"))
    else:  # so many that drawing soon finds new ones: even the smaller split has four times as many as wanted
        candidates = (_draw(bits, digits, terms) for _ in itertools.count())
    found: dict[tuple[int, ...], None] = {}  # a set that keeps its order
    for problem in candidates:
        if _split_of(problem) == split:
            found[problem] = None
            if len(found) == size:
                break
    return [_sum_example(problem) for problem in itertools.islice(itertools.cycle(found), size)]


def _decode(code: int, low: int, high: int, terms: int) -> tuple[int, ...]:
    """The sum number `code` of all sums of `terms` numbers from low to high - 1: its terms are the code's digits in base high - low."""
    return tuple(low + code // (high - low) ** i % (high - low) for i in range(terms))


def _split_of(problem: tuple[int, ...]) -> str:
    """The split of a sum, from a hash of its sorted terms (Python's own hash() differs from process to process)."""
    digest = hashlib.blake2b(repr(sorted(problem)).encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest) % _HELD_OUT == 0 else "train"


def _draw(bits: np.random.PCG64, digits: int, terms: int) -> tuple[int, ...]:
    """Numbers drawn digit by digit, so any length is uniform. Raw words of a bit generator are the same in every version of numpy."""
    raw = bits.random_raw(terms * digits).reshape(terms, digits)
    drawn = raw % 10
    if digits > 1:
        drawn[:, 0] = 1 + raw[:, 0] % 9
    return tuple(int("".join(map(str, row))) for row in drawn)


def _sum_example(problem: tuple[int, ...]) -> Example:
    question, answer = f"What is {' + '.join(map(str, problem))}?", str(sum(problem))
    return Example(question, answer, {"prompt": question, "answer": answer, "terms": list(problem)})


# --- GSM8K ------------------------------------------------------------------------------------------------------------------------
def gsm8k(split: str = "train") -> list[Example]:
    """Grade-school word problems (arXiv 2110.14168, MIT): 7473 to train, 1319 to test. The answer is the number after `####`, without
    thousands commas; columns["answer"] keeps the worked solution."""
    _check_split(split)
    packed = resources.files("jetrl_jax.train").joinpath("gsm8k", f"{split}.jsonl.gz").read_bytes()
    rows = (row for _, row in _rows(gzip.decompress(packed), f"gsm8k/{split}.jsonl.gz"))
    return [Example(row["question"], row["answer"].rpartition("####")[2].strip().replace(",", ""), row) for row in rows]


# --- JSONL ------------------------------------------------------------------------------------------------------------------------
def jsonl(path: str, prompt_column: str = "prompt", answer_column: str = "answer") -> list[Example]:
    """A file of one JSON object a line. The prompt is a string or a list of {"role", "content"} messages, the answer a string or a
    number. UserError names file and line for a line that is empty, is no JSON object, or lacks a column or has it in another type."""
    if not path:
        raise UserError("data.path is empty; data.name='jsonl' needs the path of a .jsonl file")
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"data.path={path!r} cannot be read ({error.strerror}); give the path of an existing .jsonl file") from error
    examples = []
    for where, row in _rows(content, path):
        for option, column in (("prompt_column", prompt_column), ("answer_column", answer_column)):
            if column not in row:
                raise UserError(f"{where}: no column {column!r}, this line has {', '.join(map(repr, row)) or 'none'}; set data.{option}")
        examples.append(Example(_prompt(row[prompt_column], prompt_column, where), _answer(row[answer_column], answer_column, where), row))
    return examples


def _rows(content: bytes, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """("file, line 3", row) of every line, counted from 1. Lines end at \\n alone: JSON strings may hold other Unicode line ends."""
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if lines[-1] == b"":  # what follows the last line's end
        lines.pop()
    if not lines:
        raise UserError(f"{name} is empty; it must hold one JSON object a line")
    for index, line in enumerate(lines, 1):
        where = f"{name}, line {index}"
        if not line.strip():
            raise UserError(f"{where}: the line is empty; remove it, every line must be a JSON object")
        try:
            row = json.loads(line.decode("utf-8"), parse_constant=_no_constant)
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: not UTF-8 (byte {error.start + 1}); save the file as UTF-8") from error
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not valid JSON ({error}); every line must be one JSON object") from error
        if not isinstance(row, dict):
            raise UserError(f"{where}: a JSON {_kind(row)}, but every line must be a JSON object such as {{\"prompt\": …, \"answer\": …}}")
        yield where, row


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def _kind(value: Any) -> str:
    """The JSON name of a value's type."""
    kinds = ((bool, "boolean"), (dict, "object"), (list, "list"), (str, "string"), (int, "number"), (float, "number"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "null")


def _prompt(value: Any, column: str, where: str) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        return _text(value, column, where)
    if not isinstance(value, list):
        raise UserError(f"{where}: column {column!r} is a {_kind(value)}, but a prompt is a string or a list of messages")
    if not value:
        raise UserError(f"{where}: column {column!r} is a list without messages; give at least one, or remove the line")
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise UserError(f"{where}: message {number} of column {column!r} must be an object with the strings \"role\" and \"content\"")
        for key in ("role", "content"):
            check_unicode(f"{where}: column {column!r}", message[key])
    return tuple(value)


def _answer(value: Any, column: str, where: str) -> str:
    if isinstance(value, float):
        return format(Decimal(repr(value)), "f")  # 1e-07 as 0.0000001, which a reward reads as a number
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise UserError(f"{where}: column {column!r} is a {_kind(value)}, but an answer is a string or a number")
    return _text(value, column, where)


def _text(value: str, column: str, where: str) -> str:
    if not value.strip():
        raise UserError(f"{where}: column {column!r} is an empty string; fill it in, or remove the line")
    check_unicode(f"{where}: column {column!r}", value)
    return value
