"""Messages that several places give: what they name."""

import pytest

from jetrl_jax.errors import UserError, check_unicode, unknown


@pytest.mark.parametrize("text", ["", "Größe", "\U0001f600", "\x00\u2028"])
def test_whole_characters_pass(text):
    check_unicode("--prompt", text)


def test_half_a_surrogate_pair_is_named_with_what_is_around_it():
    with pytest.raises(UserError) as e:
        check_unicode("data.jsonl, line 3", "x" * 100 + "\ud83d" + "y" * 100)
    around = "x" * 20 + r"\ud83d" + "y" * 20
    assert str(e.value) == (f"data.jsonl, line 3 has half a surrogate pair at character 101, in '{around}': "
                            "write the whole character there (in UTF-8), or remove it")


def test_an_unknown_name_has_the_nearest_first():
    assert str(unknown("data.name", "gsm8", ["jsonl", "gsm8k"])) == "unknown data.name 'gsm8': did you mean 'gsm8k'? known are gsm8k, jsonl"
    assert str(unknown("data.name", "x", ["sums"])) == "unknown data.name 'x': known are sums"
