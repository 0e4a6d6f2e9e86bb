"""Prompts: template, chat, the length policies, and an order that the position alone resumes."""

from typing import SupportsIndex

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_jax.errors import UserError
from jetrl_jax.rollout.collect import pad_prompts
from jetrl_jax.train.data import Counts, PromptStream
from jetrl_jax.train.tasks import Example

BOS = 1


class Characters:
    """A tokenizer whose tokens are characters, after one BOS, so that a test reads what the policy would be given."""

    def encode(self, text: str, /) -> list[int]:
        return [BOS, *map(ord, text)] if text else []

    def render_chat(self, messages, /) -> list[int]:
        return self.encode("".join(f"<{m['role'][0]}>{m['content']}</>" for m in messages) + "<a>")


def text(ids) -> str:
    assert ids[0] == BOS
    return "".join(map(chr, ids[1:]))


def stream(prompts, **options) -> PromptStream:
    examples = [Example(prompt, str(i)) for i, prompt in enumerate(prompts)]
    return PromptStream(examples, Characters(), **({"max_prompt_length": 100, "shuffle": False} | options))


def texts(prompts, **options) -> list[str]:
    built = stream(prompts, **options)
    return [text(prompt.ids) for _, prompt in built.batch(0, len(built))]


CHAT = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"})


@pytest.mark.parametrize(("prompts", "options", "expected"), [
    (["hi"], {}, "<u>hi</><a>"),
    (["hi"], {"chat": False}, "hi"),
    (["hi"], {"template": "Q: {prompt} Box it: \\boxed{}, {x}"}, "<u>Q: hi Box it: \\boxed{}, {x}</><a>"),
    (["{prompt}"], {"template": "[{prompt}]", "chat": False}, "[{prompt}]"),
    (["hi"], {"system": "sys"}, "<s>sys</><u>hi</><a>"),
    (["hi"], {"system": "sys", "template": "{prompt}!", "chat": False}, "sys\n\nhi!"),
    ([CHAT], {"system": "sys", "template": "{prompt}!"}, "<s>sys</><u>a</><a>b</><u>c!</><a>"),
    ([CHAT[1:2]], {}, "<a>b</><a>"),
])  # fmt: skip
def test_what_the_policy_is_given(prompts, options, expected):
    assert texts(prompts, **options) == [expected]
    assert CHAT[2]["content"] == "c"  # the data set is left as it was


def test_drop_leaves_out_and_counts():
    built = stream(["1234", "12345", "1", "123456"], chat=False, max_prompt_length=5, too_long="drop")
    assert built.counts == Counts(total=4, kept=2, dropped=2, truncated=0) and len(built) == 2
    assert [(p.answer, p.example.prompt) for _, p in built.batch(0, 2)] == [("0", "1234"), ("2", "1")]


def test_truncate_keeps_the_end_of_the_examples_own_text_and_all_around_it():
    options = {"template": "Q:{prompt}=", "max_prompt_length": 8, "chat": False, "too_long": "truncate"}
    assert texts(["1234567", "123"], **options) == ["Q:4567=", "Q:123="]
    assert stream(["1234567", "123"], **options).counts == Counts(total=2, kept=2, dropped=0, truncated=1)
    assert texts(["0123456789"], max_prompt_length=14, too_long="truncate") == ["<u>6789</><a>"]
    long = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "0123456789"})
    assert texts([long], max_prompt_length=27, too_long="truncate") == ["<u>a</><a>b</><u>789</><a>"]


def test_truncate_drops_what_has_no_room():
    options = {"template": "12345{prompt}", "max_prompt_length": 6, "chat": False, "too_long": "truncate"}
    with pytest.raises(UserError, match=r"all 1 prompts are longer .*=6 and what stands around them .*shortest has 8 tokens"):
        stream(["ab"], **options)
    frame = ({"role": "assistant", "content": "0123456789"},)
    built = stream(["ab", frame], max_prompt_length=11, too_long="truncate")
    assert built.counts == Counts(total=2, kept=1, dropped=1, truncated=1)


@settings(max_examples=60, deadline=None)
@given(prompt=st.text(st.characters(codec="utf-8"), min_size=1, max_size=60), limit=st.integers(2, 40), chat=st.booleans())
def test_a_truncated_prompt_is_the_longest_tail_that_fits(prompt, limit, chat):
    frame = len([BOS, *"<u></><a>"]) if chat else 1
    options = {"chat": chat, "max_prompt_length": limit + frame - 1, "too_long": "truncate"}
    kept = prompt if len(prompt) < limit else prompt[-(limit - 1) :]
    assert texts([prompt], **options) == [f"<u>{kept}</><a>" if chat else kept]


def test_stop_names_the_example():
    with pytest.raises(UserError, match="example 3 has 10 tokens, more than data.max_prompt_length=8; raise the limit, or set"):
        stream(["a", "1234567", "123456789"], chat=False, max_prompt_length=8, too_long="stop")
    assert stream(["a", "1234567"], chat=False, max_prompt_length=8, too_long="stop").counts.kept == 2


def test_all_dropped_says_how_long_the_shortest_is():
    with pytest.raises(UserError, match=r"all 2 prompts are longer than data.max_prompt_length=3 \(the shortest has 5 tokens\)"):
        stream(["12345", "1234"], chat=False, max_prompt_length=3)


@pytest.mark.parametrize(("prompts", "options", "message"), [
    ([], {}, "no examples"),
    (["a"], {"too_long": "trunc"}, "unknown data.too_long 'trunc': did you mean 'truncate'"),
    (["a"], {"max_prompt_length": 0}, "data.max_prompt_length=0"),
    (["a"], {"template": "Q: {question}"}, "has no {prompt}"),
    (["a"], {"seed": -1}, "seed=-1"),
    (["a", CHAT], {"chat": False}, "example 2 is a list of chat messages; set data.chat=True"),
    ([CHAT[1:2]], {"template": "{prompt}"}, "example 1 has no user message"),
    ([({"role": "system", "content": "s"}, *CHAT)], {"system": "t"}, "example 1 has a system message of its own"),
    (["a", ""], {"chat": False}, "example 2 has no tokens"),
])  # fmt: skip
def test_refuses(prompts, options, message):
    with pytest.raises(UserError, match=message):
        stream(prompts, **options)


# --- order ------------------------------------------------------------------------------------------------------------------------
NAMES = [f"p{i}" for i in range(13)]


def served(built: PromptStream, position: SupportsIndex, n: int) -> list[tuple[int, str]]:
    return [(place, prompt.answer) for place, prompt in built.batch(position, n)]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**62), position=st.integers(0, 2**33), n=st.integers(1, 30), cut=st.integers(0, 29), shuffle=st.booleans())
def test_a_position_resumes_exactly(seed, position, n, cut, shuffle):
    cut = min(cut, n - 1)
    whole = served(stream(NAMES, seed=seed, shuffle=shuffle), position, n)
    again = stream(NAMES, seed=seed, shuffle=shuffle)  # a new process, so to say
    parts = (served(again, position, cut) if cut else []) + served(again, position + cut, n - cut)
    assert parts == whole
    assert [place for place, _ in whole] == list(range(position, position + n))


def test_every_epoch_serves_all_in_an_order_of_its_own():
    built = stream(NAMES, shuffle=True, seed=5)
    epochs = [[answer for _, answer in served(built, 13 * e, 13)] for e in range(4)]
    assert all(sorted(epoch, key=int) == [str(i) for i in range(13)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    other = [answer for _, answer in served(stream(NAMES, shuffle=True, seed=6), 0, 13)]
    assert other not in epochs
    plain = stream(NAMES, shuffle=False)
    assert [answer for _, answer in served(plain, 12, 3)] == ["12", "0", "1"]


def test_the_shuffle_is_fair():
    first = [served(stream(NAMES, shuffle=True, seed=seed), 0, 1)[0][1] for seed in range(1300)]
    counts = np.array([first.count(str(i)) for i in range(13)])
    assert ((counts - 100) ** 2 / 100).sum() < 32.9  # chi-square, 12 degrees of freedom, p = 0.001; the seeds are fixed


def test_the_order_is_the_same_in_every_version():
    assert [int(answer) for _, answer in served(stream(NAMES, shuffle=True, seed=0), 0, 13)] == [11, 3, 2, 1, 8, 6, 0, 7, 4, 10, 12, 5, 9]


def test_positions_from_arrays_and_bad_ones():
    built = stream(NAMES)
    assert served(built, np.int32(4), 2) == served(built, 4, 2)
    with pytest.raises(ValueError, match="position >= 0"):
        built.batch(-1, 2)
    with pytest.raises(ValueError, match="n >= 1"):
        built.batch(0, 0)
    with pytest.raises(TypeError):
        built.batch(1.5, 2)


# --- padding ----------------------------------------------------------------------------------------------------------------------
@given(st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9), min_size=1, max_size=5), st.integers(9, 12), st.integers(0, 9))
def test_padding_keeps_every_token(prompts, length, pad_id):
    tokens, lengths = pad_prompts(prompts, length, pad_id)
    assert tokens.shape == (len(prompts), length) and tokens.dtype == lengths.dtype == np.int32
    assert [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)] == prompts
    assert all((row[n:] == pad_id).all() for row, n in zip(tokens, lengths, strict=True))


@pytest.mark.parametrize("prompts", [[], [[1], []], [[1, 2, 3, 4]]])
def test_padding_refuses(prompts):
    with pytest.raises(ValueError, match="must have 1 to 3 tokens"):
        pad_prompts(prompts, 3, 0)
