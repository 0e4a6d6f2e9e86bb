"""Rewards on what models do write, on drawn numbers, and on expressions that would hang a grader."""

import functools
import threading
import time
from decimal import Decimal

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_jax.errors import UserError
from jetrl_jax.train import math_grader
from jetrl_jax.train.rewards import REWARDS, boxed_content, check_answers, number, overlong_penalty, score
from jetrl_jax.train.tasks import gsm8k

RIGHT, WRONG = 1.0, 0.0


@pytest.mark.parametrize(("completion", "answer", "reward"), [
    ("3 + 5 = 8", "8", RIGHT), ("3 + 5 = 8.", "8", RIGHT), ("It is **8**!", "8", RIGHT), ("8 or 9", "8", WRONG), ("8", "18", WRONG),
    ("", "8", WRONG), ("eight", "8", WRONG), ("10", "1", WRONG), ("The answer is 08", "8", RIGHT),
    ("costs $1,234.50.", "1234.5", RIGHT), ("1,234", "1,234", RIGHT), ("1,234,567", "1234567", RIGHT), ("1, 234", "234", RIGHT),
    ("(3,4)", "4", RIGHT), ("1,23", "23", RIGHT), ("so 12345,678", "678", RIGHT), ("1,2345", "2345", RIGHT),
    ("5.00", "5", RIGHT), (".5", "0.5", RIGHT), ("It is...5", "5", RIGHT), ("0.30000000000000004", "0.3", WRONG), ("5.", "5.0", RIGHT),
    ("-5", "-5", RIGHT), ("x=-5", "-5", RIGHT), ("\u22125", "-5", RIGHT), ("10-5", "5", RIGHT), ("10 - 5", "5", RIGHT), ("3–5", "5", RIGHT),
    ("(10)-5", "5", RIGHT), ("5", "-5", WRONG), ("-$5", "-5", RIGHT), ("$-5", "-5", RIGHT), ("-\\$5", "-5", RIGHT), ("-0", "0", RIGHT),
    ("\\$18 dollars", "18", RIGHT), ("£7", "$7", RIGHT), ("8<|im_end|>", "8", RIGHT), ("1" * 6000, "1" * 6000, RIGHT),
    ("٣", "3", WRONG), ("7", "seven", WRONG),
])  # fmt: skip
def test_last_number(completion, answer, reward):
    assert REWARDS["last_number"](completion, answer) == reward


@pytest.mark.parametrize(("completion", "answer", "reward"), [
    ("so\n#### 72", "72", RIGHT), ("####72", "72", RIGHT), ("#### $1,080 a week", "1080", RIGHT), ("#### -3", "-3", RIGHT),
    ("#### 72.", "72.00", RIGHT), ("#### 1\n#### 2", "2", RIGHT), ("#### 1\n#### 2", "1", WRONG), ("#### 5\n#### none", "5", WRONG),
    ("72", "72", WRONG), ("### 72", "72", WRONG), ("##### 72", "72", WRONG), ("####\n72", "72", WRONG), ("#### about 72", "72", WRONG),
    ("####", "72", WRONG), ("#### 72 then 73", "72", RIGHT),
])  # fmt: skip
def test_hash(completion, answer, reward):
    assert REWARDS["hash"](completion, answer) == reward


@pytest.mark.parametrize(("completion", "answer", "reward"), [
    (r"\boxed{8}", "8", RIGHT), (r"\boxed{ 8.0 }", "8", RIGHT), (r"\boxed {8}", "8", RIGHT), (r"\boxed{9}", "8", WRONG), ("8", "8", WRONG),
    (r"\boxed{1} no, \boxed{2}", "2", RIGHT), (r"\boxed{2} no, \boxed{1}", "2", WRONG), (r"\boxed{\boxed{2}}", "2", RIGHT),
    (r"\boxed{2} and \boxed{2", "2", WRONG), (r"\boxed{}", "2", WRONG), (r"\boxed{", "2", WRONG), ("\\boxed{2\\", "2", WRONG),
    (r"\boxed{1,234}", "1234", RIGHT), (r"\boxed{1{,}234}", "1234", RIGHT), (r"\boxed{\$5}", "5", RIGHT),
    (r"\boxed{5\text{ cm}}", "5", RIGHT),
    (r"\boxed{0.3000001}", "0.3", WRONG), (r"\boxed{x = 5}", "5", RIGHT), (r"\boxed{5, 6}", "6", WRONG),
    (r"\boxed{\frac{1}{2}}", "1/2", RIGHT), (r"\boxed{\dfrac12}", "0.5", RIGHT), (r"\boxed{\frac{1}{3}}", r"\frac{1}{2}", WRONG),
    (r"\boxed{x\cdot x}", "x^2", RIGHT), (r"\boxed{x + 1}", "1 + x", RIGHT), (r"\boxed{\{2,1\}}", r"\{1,2\}", RIGHT),
    (r"\boxed{3 + 5}", "8", WRONG), (r"\boxed{4 \times 2}", "8", WRONG), (r"\boxed{10-2}", "8", WRONG), (r"\boxed{16 \div 2}", "8", WRONG),
    (r"\boxed{8 \times 10^2}", "800", RIGHT), (r"\boxed{-\frac{1}{2}}", "-0.5", RIGHT),
    (r"\boxed{\text{east}}", "east", RIGHT), (r"\boxed{East}", r"\text{east}", RIGHT), (r"\boxed{seat}", "east", WRONG),
    (r"\boxed{\frac{}{}", "2", WRONG), (r"\boxed{\frac{}{}}", "2", WRONG), ("\\boxed{\ud800}", "2", WRONG), (r"\boxed{\\}}", "2", WRONG),
])  # fmt: skip
def test_boxed(completion, answer, reward):
    assert REWARDS["boxed"](completion, answer) == reward


ATOMS = st.sampled_from(["1", "x", r"\{", r"\}", "\\\\", " "])


@settings(max_examples=50, deadline=None)
@given(st.recursive(ATOMS, lambda inner: st.lists(inner, max_size=4).map(lambda parts: "{" + "".join(parts) + "}"), max_leaves=12))
def test_boxed_content_finds_the_closing_brace(content):
    assert boxed_content(f"a {{ \\boxed{{{content}}} }} b") == content
    assert boxed_content(f"\\boxed{{{content}") is None


@pytest.mark.parametrize("content", [r"9^{9^{9^9}}", "{" * 40 + "x" + "}" * 40, "1+" * 400 + "x"])
def test_what_never_ends_is_worth_nothing_and_the_grader_goes_on(content):
    start = time.process_time()
    assert REWARDS["boxed"](f"\\boxed{{{content}}}", "x^3") == WRONG
    assert time.process_time() - start < 1.0  # none of it ran in this process
    assert REWARDS["boxed"](r"\boxed{x\cdot x^2}", "x^3") == RIGHT


def test_the_grader_works_in_threads():
    seen: dict[int, bool] = {}

    def ask(power: int) -> None:
        seen[power] = math_grader.equivalent(f"y^{power}", f"y^{{{power}}}\\cdot 1")

    threads = [threading.Thread(target=ask, args=(power,)) for power in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {i: True for i in range(4)}


def test_a_grader_that_died_is_started_again():
    assert math_grader.equivalent("z^2", "z\\cdot z")
    math_grader._child.kill()
    math_grader._child.wait()
    assert math_grader.equivalent("z^3", "z\\cdot z^2")


# --- drawn numbers ----------------------------------------------------------------------------------------------------------------
WORDS = st.text(st.sampled_from("abc xyz,.!?:\n*="), max_size=12)
NUMBERS = st.decimals(min_value=-(10**12), max_value=10**12, places=3) | st.integers(-(10**30), 10**30).map(Decimal)
CURRENCIES = st.sampled_from(["", "$", "\\$", "€"])


@settings(max_examples=150, deadline=None)
@given(value=NUMBERS, before=WORDS, after=WORDS, commas=st.booleans(), currency=CURRENCIES, others=st.lists(st.integers(0, 99), max_size=4))
def test_a_written_number_is_read_back(value, before, after, commas, currency, others):
    written = ("-" if value < 0 else "") + currency + format(value.copy_abs(), ",f" if commas else "f")
    completion = " ".join([*map(str, others), f"{before} {written} {after}"])
    assert number(written) == value
    assert score("last_number", [completion, f"#### {written} {after}"], [str(value), str(value)]).tolist() == [1, 1]
    assert REWARDS["hash"](f"{before} #### {written} {after}", str(value)) == RIGHT
    assert REWARDS["boxed"](f"{before}\\boxed{{{written}}}{after}", str(value)) == RIGHT
    assert REWARDS["last_number"](completion, str(value + 1)) == WRONG


@settings(max_examples=150, deadline=None)
@given(completion=st.text(st.sampled_from("0123456789.,-$#\\{} /abxoed")), answer=st.text(st.sampled_from("0123456789.,-$ab"), max_size=5))
def test_no_text_raises(completion, answer):
    for name in ("last_number", "hash"):
        assert REWARDS[name](completion, answer) in (RIGHT, WRONG)


def test_gsm8k_solutions_earn_their_reward():
    for split in ("train", "test"):
        examples = gsm8k(split)
        solutions, answers = [e.columns["answer"] for e in examples], [e.answer for e in examples]
        check_answers("hash", answers)
        for name in ("hash", "last_number"):
            assert score(name, solutions, answers).all()
        assert score("boxed", [f"\\boxed{{{s.rpartition('####')[2].strip()}}}" for s in solutions], answers).all()
        assert score("hash", solutions, answers[1:] + answers[:1]).mean() < 0.1


# --- by name ----------------------------------------------------------------------------------------------------------------------
def test_score():
    rewards = score("last_number", ["8", "9"], ["8", "8"])
    chex.assert_shape(rewards, (2,))
    assert rewards.dtype == np.float32 and rewards.tolist() == [1, 0]
    with pytest.raises(UserError, match="unknown reward 'last_numbr': did you mean 'last_number'"):
        score("last_numbr", ["8"], ["8"])
    with pytest.raises(ValueError, match="zip"):
        score("hash", ["8"], ["8", "9"])


def test_answers_that_nothing_could_match_are_named():
    check_answers("last_number", ["8", "-1,000.5"])
    check_answers("boxed", ["x^2"])
    with pytest.raises(UserError, match="reward.name='hash' compares numbers, but the answer of example 2 is '1/2'"):
        check_answers("hash", ["1", "1/2"])
    with pytest.raises(UserError, match="unknown reward"):
        check_answers("box", ["1"])


class OverlongTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.parameters((20, 8, 1.0), (20, 20, 0.5), (20, 1, 2.0), (20, 0, 1.0))
    def test_follows_equation_13(self, most, buffer, penalty):
        def oracle(length):
            if length <= most - buffer:
                return 0.0
            return penalty * ((most - buffer) - length) / buffer if length <= most else -penalty

        lengths = jnp.arange(most + 3)
        punished = self.variant(functools.partial(overlong_penalty, max_new_tokens=most, buffer=buffer, penalty=penalty))(lengths)
        chex.assert_shape(punished, (most + 3,))
        chex.assert_type(punished, jnp.float32)
        chex.assert_trees_all_close(punished, np.array([oracle(n) for n in range(most + 3)], np.float32), rtol=1e-6)

    @chex.variants(with_pmap=True)
    def test_under_pmap(self):
        punished = self.variant(functools.partial(overlong_penalty, max_new_tokens=8, buffer=4, penalty=1.0))(jnp.array([4, 6, 8]))
        chex.assert_trees_all_close(punished, np.array([0, -0.5, -1], np.float32))

    def test_refuses(self):
        for buffer, penalty, message in ((9, 1.0, "buffer=9"), (-1, 1.0, "buffer=-1"), (4, -1.0, "penalty=-1"), (4, np.nan, "=nan")):
            with self.assertRaisesRegex(UserError, message):
                overlong_penalty(jnp.zeros(2, jnp.int32), 8, buffer, penalty)
