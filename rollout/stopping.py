"""Stop strings, on the host: where a completion ends because its text says so.

A stop string may begin and end anywhere inside tokens, and a token may be a piece of a character, so the only sound question is put to
the text of a whole prefix: does `decode(ids[:n])` contain a stop string? As n grows the answer turns from no to yes once and stays yes
(text once complete is not taken back), and the n at which it turns is found by bisection: a completion without a stop string costs one
decoding, one of 4096 tokens with one about thirteen.
"""

from collections.abc import Callable, Sequence

import numpy as np

from jetrl_jax.errors import UserError

# What decoders write for an unfinished character. It is taken back when the next token completes it, so nothing may stop there.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def check_stop_strings(stop_strings: Sequence[str]) -> tuple[str, ...]:
    """The stop strings as a tuple, each once, in order.

    Raises:
      UserError: not a sequence of non-empty strings, or one that holds U+FFFD.
    """
    if isinstance(stop_strings, str) or not isinstance(stop_strings, Sequence):
        raise UserError(f"stop_strings = {stop_strings!r}: must be a list of strings, such as [{str(stop_strings)!r}]")
    for stop in stop_strings:
        if not isinstance(stop, str):
            raise UserError(f"stop_strings holds {stop!r}, a {type(stop).__name__}: every entry must be a string")
        if not stop:
            raise UserError("stop_strings holds an empty string, which would end every completion before its first token: remove it")
        if REPLACEMENT in stop:
            raise UserError(f"stop_strings holds {stop!r}: U+FFFD stands for an unfinished character and cannot end a text; remove it")
    return tuple(dict.fromkeys(stop_strings))


def cut_at_stop_strings(
    token_ids: Sequence[int] | np.ndarray, decode: Callable[[list[int]], str], stop_strings: Sequence[str]
) -> tuple[int, bool]:
    """How many leading tokens to keep: the fewest whose text contains a stop string, or all of them.

    Args:
      token_ids: the completion's ids, without prompt and padding.
      decode: ids -> text. It must not rewrite earlier text when ids are appended (beyond completing a character): switch
        "clean up tokenization spaces" off, as models of byte-level BPE do anyway.
      stop_strings: see `check_stop_strings`; may be empty.

    Returns:
      (n_kept, stopped). The token that completes the stop string is kept: it was sampled, and it is trained on.
    """
    stops = check_stop_strings(stop_strings)
    ids = [int(i) for i in token_ids]

    def contains(n: int) -> bool:
        text = decode(ids[:n])
        return any(stop in text for stop in stops)

    if not stops or not ids or not contains(len(ids)):
        return len(ids), False
    without, having = 0, len(ids)  # contains(without) is False, contains(having) is True
    while having - without > 1:
        middle = (without + having) // 2
        if contains(middle):
            having = middle
        else:
            without = middle
    return having, True


def text_before_stop(text: str, stop_strings: Sequence[str]) -> str:
    """The text up to the stop string, which is left out; the whole text if there is none.

    Of several stop strings the one that is complete first, read character by character, counts (of those that end together the
    longest). So the result does not depend on how the text is split into tokens, nor on the order of the stop strings.
    """
    found = [(text.index(stop) + len(stop), text.index(stop)) for stop in check_stop_strings(stop_strings) if stop in text]
    return text[: min(found)[1]] if found else text
