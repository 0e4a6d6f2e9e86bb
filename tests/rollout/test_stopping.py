"""Stop strings against a token-by-token search, with tokens that split strings and characters anywhere."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_jax.errors import UserError
from jetrl_jax.rollout.stopping import check_stop_strings, cut_at_stop_strings, text_before_stop


def decoder(pieces: list[bytes]):
    """A byte-level vocabulary: ids index the pieces, unfinished characters come out as U+FFFD."""
    return lambda ids: b"".join(pieces[i] for i in ids).decode("utf-8", errors="replace")


def split(text: str, cuts: list[int]) -> list[bytes]:
    """The UTF-8 bytes of text, cut into pieces at the given places."""
    raw = text.encode()
    places = [0, *sorted({c % (len(raw) + 1) for c in cuts} - {0, len(raw)}), len(raw)]
    return [raw[a:b] for a, b in zip(places, places[1:], strict=False)] if raw else []


texts = st.text("abcé€\n", max_size=24)
cuts = st.lists(st.integers(0, 80), max_size=30)
stop_lists = st.lists(st.text("abcé€\n", min_size=1, max_size=3), max_size=3)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(text=texts, where=cuts, stops=stop_lists)
def test_fewest_tokens_whose_text_contains_a_stop_string(text, where, stops):
    pieces = split(text, where)
    decode = decoder(pieces)
    ids = list(range(len(pieces)))
    first = next((n for n in range(len(ids) + 1) if any(s in decode(ids[:n]) for s in stops)), None)
    assert cut_at_stop_strings(ids, decode, stops) == ((len(ids), False) if first is None else (first, True))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(text=texts, where=cuts, stops=stop_lists)
def test_the_text_does_not_depend_on_the_tokens(text, where, stops):
    pieces = split(text, where)
    decode = decoder(pieces)
    n, stopped = cut_at_stop_strings(range(len(pieces)), decode, stops)
    cut = text_before_stop(decode(list(range(n))), stops)
    assert cut == text_before_stop(text, stops)
    assert stopped == (cut != text)
    assert not any(s in cut for s in stops)


def test_of_several_stop_strings_the_first_complete_one_counts():
    assert text_before_stop("a\n\nb", ["\n\n", "\n"]) == "a"
    assert text_before_stop("xabcdy", ["abcd", "bc"]) == "xa"
    assert text_before_stop("xabcdy", ["cd", "bcd"]) == "xa"
    assert text_before_stop("xy", ["z"]) == "xy"
    assert text_before_stop("xy", []) == "xy"


def test_a_stop_string_inside_one_token_keeps_that_token():
    assert cut_at_stop_strings(np.asarray([0, 1, 2]), decoder([b"one ", b"END two", b" END"]), ["END"]) == (2, True)
    assert cut_at_stop_strings(np.asarray([], np.int32), decoder([]), ["END"]) == (0, False)


@pytest.mark.parametrize(("stops", "most"), [(["END"], 14), (["never"], 1), ([], 0)])
def test_long_completions_are_decoded_few_times(stops, most):
    pieces, calls = [b"word "] * 4096, []
    pieces[2999] = b"END"

    def decode(ids):
        calls.append(len(ids))
        return decoder(pieces)(ids)

    assert cut_at_stop_strings(range(4096), decode, stops) == ((3000, True) if most == 14 else (4096, False))
    assert len(calls) <= most


@pytest.mark.parametrize(
    ("stops", "message"),
    [("END", "must be a list"), (None, "must be a list"), (["a", ""], "empty string"), (["a", 3], "a int"), (["\ufffd"], "U\\+FFFD")],
)
def test_bad_stop_strings(stops, message):
    for refuse in (check_stop_strings, lambda s: text_before_stop("a", s), lambda s: cut_at_stop_strings([], str, s)):
        with pytest.raises(UserError, match=message):
            refuse(stops)


def test_checked_stop_strings_are_a_tuple_without_repeats():
    assert check_stop_strings(["b", "a", "b"]) == ("b", "a")
