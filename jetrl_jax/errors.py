"""The one exception for a user's own mistake: the command line prints its message without a traceback and exits with 2."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """One clear sentence that names the field, the value and what would be right."""


def unknown(kind: str, value: object, known: Iterable[str]) -> UserError:
    """An error for a name that does not exist, with the nearest names first."""
    names = sorted(known)
    near = difflib.get_close_matches(str(value), names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(repr(n) for n in near)}? " if near else ""
    return UserError(f"unknown {kind} {value!r}: {hint}known are {', '.join(names)}")


def check_unicode(field: str, text: str) -> None:
    """Raises UserError for a text with half a surrogate pair, which JSON can spell ("\\ud800") and no tokenizer takes.

    A command line has one for each byte that is not UTF-8 (PEP 383). field: where the text was given; the message shows what is around the
    first such character, counted from 1.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        around = text[max(e.start - 20, 0):e.start + 21]
        raise UserError(f"{field} has half a surrogate pair at character {e.start + 1}, in {around!r}: "
                        "write the whole character there (in UTF-8), or remove it") from None
