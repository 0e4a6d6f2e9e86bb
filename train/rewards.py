"""Rewards: plain functions `(completion, answer) -> float`, found by name in `REWARDS`.

A reward never raises on a completion, whatever the policy wrote: what cannot be read is worth 0.0. What the *data set* got wrong
(an answer that no completion could match) is the user's to know, so `check_answers` says it before the run starts.
"""

import re
from collections.abc import Callable, Sequence
from decimal import Decimal

import jax
import jax.numpy as jnp
import numpy as np

from jetrl_jax.errors import UserError, unknown
from jetrl_jax.train import math_grader

# A minus is a sign unless something stands right before it that it would subtract from: "x=-5" and "is -5" are negative, "10-5" and
# "3–5" are not. A currency sign may stand on either side of it. Commas count only between groups of three digits, so that "1, 2"
# and "(3,4)" stay lists; a full stop only before a digit, so that the end of a sentence does not belong to the number.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]}%.])[-\u2212])?"
    r"(?:\\?[$€£][-\u2212]?)?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9.])\.[0-9]+)"
)
_MARK = re.compile(r"(?<!#)####(?!#)[ \t]*")
# A number, an operator, a number, but for the power of ten of "3 \times 10^5": a calculation that was copied and not carried out.
_UNDONE = re.compile(r"[0-9)}]\s*(?:[-+*\u2212]|\\(?:times|cdot)(?!\s*10\s*\^)|\\div)\s*[0-9({\\]")
_BOXED = re.compile(r"\\boxed\s*\{")
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf)\s*\{([^{}]*)\}")


def _value(match: re.Match[str]) -> Decimal:
    """The exact value of a `_NUMBER`. Decimal compares exactly, 5 == 5.00, and unlike int() has no limit on the number of digits."""
    negative = any(minus in match.group()[: match.start("digits") - match.start()] for minus in "-\u2212")
    value = Decimal(match["digits"].replace(",", ""))
    return value.copy_negate() if negative else value


def number(text: str) -> Decimal | None:
    """The number that `text` is, with nothing around it but spaces and a currency sign; None if it is not one."""
    match = _NUMBER.fullmatch(text.strip())
    return _value(match) if match else None


def last_number(completion: str, answer: str) -> float:
    """1.0 if the last number in the completion equals the answer: "3 + 5 = 8." for "8", "$1,234.50" for "1234.5"."""
    matches = list(_NUMBER.finditer(completion))
    return float(bool(matches) and _value(matches[-1]) == number(answer))


def hash_mark(completion: str, answer: str) -> float:
    """1.0 if the number after the last `####` equals the answer: the form of GSM8K's own solutions (arXiv 2110.14168)."""
    marks = list(_MARK.finditer(completion))
    match = _NUMBER.match(completion, marks[-1].end()) if marks else None
    return float(match is not None and _value(match) == number(answer))


def boxed(completion: str, answer: str) -> float:
    r"""1.0 if what stands in the last `\boxed{…}` equals the answer: as text, as a number, or in the eyes of math-verify.

    Two plain numbers are compared exactly and never reach math-verify, which rounds to six decimals. A sum, difference or product
    is no answer to a question whose answer is a number: math-verify would accept the question's own "3 + 5" for 8.
    """
    content = boxed_content(completion)
    if content is None or not content.strip():
        return 0.0
    text, gold = (_TEXT.sub(r"\1", part).strip() for part in (content, answer))
    if text == gold:
        return 1.0
    value, expected = number(text), number(gold)
    if value is not None and expected is not None:
        return float(value == expected)
    if expected is not None and _UNDONE.search(text):
        return 0.0
    if min(len(text), len(gold)) >= 3 and text.isalpha() and gold.isalpha():
        return float(text.casefold() == gold.casefold())  # math-verify would read products of letters: "seat" = "east"
    return float(math_grader.equivalent(answer.strip(), content.strip()))


def boxed_content(text: str) -> str | None:
    r"""What stands between the braces of the last `\boxed{`, nested braces included; None without one, or if it never closes."""
    marks = list(_BOXED.finditer(text))
    if not marks:
        return None
    start, depth, position = marks[-1].end(), 1, marks[-1].end()
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 2  # \{ and \} are characters, not groups
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[start:position]
        position += 1
    return None


REWARDS: dict[str, Callable[[str, str], float]] = {"last_number": last_number, "boxed": boxed, "hash": hash_mark}
_NUMERIC = ("last_number", "hash")


def _reward(name: str) -> Callable[[str, str], float]:
    if name not in REWARDS:
        raise unknown("reward", name, REWARDS)
    return REWARDS[name]


def score(name: str, completions: Sequence[str], answers: Sequence[str]) -> np.ndarray:
    """The reward called `name` of each completion against its answer, [B] float32. UserError for an unknown name."""
    reward = _reward(name)
    return np.array([reward(c, a) for c, a in zip(completions, answers, strict=True)], np.float32)


def check_answers(name: str, answers: Sequence[str]) -> None:
    """UserError if some answer could never be matched by the reward called `name`, naming the first; called once, before a run."""
    _reward(name)
    if name in _NUMERIC:
        for index, answer in enumerate(answers, 1):
            if number(answer) is None:
                raise UserError(f"reward.name={name!r} compares numbers, but the answer of example {index} is {answer[:60]!r}; "
                                "use reward.name='boxed', or choose another data.answer_column")


def overlong_penalty(lengths: jax.Array, max_new_tokens: int, buffer: int, penalty: float) -> jax.Array:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), to be added to the reward.

    0 up to `max_new_tokens - buffer` tokens, from there linearly down to `-penalty` at `max_new_tokens`; with `buffer = 0` no
    length that can be generated is punished, as in the paper's formula. lengths: [B] completion tokens -> [B] float32.
    """
    if not 0 <= buffer <= max_new_tokens:
        raise UserError(f"algorithm.overlong_buffer={buffer} must lie between 0 and rollout.max_new_tokens={max_new_tokens}")
    if not 0.0 <= penalty < float("inf"):
        raise UserError(f"algorithm.overlong_penalty={penalty} must be a number of at least 0: it is what is taken off the reward")
    room = (max_new_tokens - buffer) - lengths
    return penalty * jnp.clip(room.astype(jnp.float32) / max(buffer, 1), -1.0, 0.0)
