"""Careful reading of a model folder's JSON files: every complaint names the file, the field, its value and the remedy."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jetrl_jax.errors import UserError

KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """The JSON object in a file of a model folder; `UserError` with the remedy if it is missing, broken or no object."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} does not exist: {remedy}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): {remedy}") from None
    except ValueError as error:  # broken JSON, or bytes that are no UTF-8
        raise UserError(f"{path} is not valid JSON ({error}): fetch the file again") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path} holds a JSON {type(raw).__name__}, not an object: fetch the file again")
    return raw


class Fields:
    """Typed reading of one JSON object; each complaint names file, field and value."""

    def __init__(self, where: str, raw: Mapping[str, Any]) -> None:
        self.where, self.raw = where, raw

    def get(self, field: str, kind: type, default: Any = None) -> Any:
        """The field's value, or the default where it is missing or null; without a default it is required."""
        value = self.raw.get(field)
        if value is None:
            if default is None:
                raise UserError(f"{self.where}: the field {field} is missing: add it, as {KINDS[kind]}")
            return default
        # JSON's true is a Python int, and an integer is a fine float: neither is left to isinstance alone.
        fits = isinstance(value, kind) or (kind is float and isinstance(value, int))
        if not fits or (isinstance(value, bool) and kind is not bool):
            raise UserError(f"{self.where}: {field} = {value!r} must be {KINDS[kind]}")
        return float(value) if kind is float else value

    def refuse(self, field: str, why: str) -> None:
        raise UserError(f"{self.where}: {field} = {self.raw[field]!r} is not supported: {why}")
