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
