"""Configs: load a file with `get_config()`, lay command-line overrides over it, check it, and carry it through JSON.

`configs/base.py` holds every field and its type. A config file's values are laid over it one by one, so a field that nothing reads and
a value of the wrong type are one clear message (UserError) wherever they come from: a file, the command line or a checkpoint.
"""

import ast
import difflib
import importlib
import importlib.util
import json
import pkgutil
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from ml_collections.config_dict import ConfigDict

from jetrl_jax import configs
from jetrl_jax.configs import base
from jetrl_jax.errors import UserError


def packaged() -> list[str]:
    """Names that `--config NAME` accepts besides a path."""
    return sorted(m.name for m in pkgutil.iter_modules(configs.__path__))


def load(name_or_path: str, overrides: Iterable[tuple[str, str]] = ()) -> ConfigDict:
    """The config of a file or of a packaged name, with overrides (dotted field, text) on top; checked and locked."""
    from jetrl_jax.config_check import check  # reads the presets, and with them imports jax

    config = _overlay(base.get_config(), flatten(_get_config(name_or_path)), f"config {name_or_path}")
    for field, text in overrides:
        set_text(config, field, text)
    check(config)
    return config


def set_text(config: ConfigDict, field: str, text: str) -> None:
    """Set one field from the command line: the text is read as the type that the field has."""
    section, name = _locate(config, field)
    section[name] = _parse(field, text)


def to_json(config: ConfigDict) -> str:
    """Every field as indented JSON; tuples become lists, unset placeholders null."""
    return json.dumps(config.to_dict(preserve_field_references=False), indent=2) + "\n"


def from_json(text: str) -> ConfigDict:
    """The inverse of `to_json`; fields missing from the text (a run of an older version) keep their defaults."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError as e:
        raise UserError(f"the stored config is not JSON (line {e.lineno}): {e.msg}") from None
    if not isinstance(values, dict):
        raise UserError(f"the stored config is a JSON {type(values).__name__}, not an object")
    return _overlay(base.get_config(), flatten(values), "the stored config")


def _get_config(name_or_path: str) -> ConfigDict:
    """Run `get_config()` of the file or packaged module; a mistake in the user's own file becomes a UserError that names its line."""
    path = Path(name_or_path)
    try:
        if path.suffix == ".py" and path.is_file():
            module: ModuleType = _module_from(path)
        elif name_or_path in packaged():
            module = importlib.import_module(f"jetrl_jax.configs.{name_or_path}")
        else:
            near = difflib.get_close_matches(path.stem, packaged(), n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UserError(f"--config={name_or_path}: no such file or packaged config; {hint}packaged are {', '.join(packaged())}")
        if not callable(getattr(module, "get_config", None)):
            raise UserError(f"--config={name_or_path}: the file has no function get_config()")
        config = module.get_config()
    except UserError:
        raise
    except Exception as e:  # a config file is the user's own program: whatever it raises is a mistake in that file
        line = next((f.lineno for f in reversed(traceback.extract_tb(e.__traceback__)) if Path(f.filename) == path.resolve()), None)
        line = e.lineno if isinstance(e, SyntaxError) else line
        where = f"{name_or_path}:{line}" if line else name_or_path
        raise UserError(f"--config={where}: {type(e).__name__}: {_short(e)}") from None
    if not isinstance(config, ConfigDict):
        raise UserError(f"--config={name_or_path}: get_config() returned {type(config).__name__}, expected an ml_collections ConfigDict")
    return config


def _module_from(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"_jetrl_config_{path.stem}", path.resolve())
    assert spec and spec.loader  # the suffix is .py
    module = importlib.util.module_from_spec(spec)
    sys.dont_write_bytecode, keep = True, sys.dont_write_bytecode  # leave no __pycache__ beside the user's file
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = keep
    return module


def _short(e: Exception) -> str:
    """An exception's message without ml_collections' listing of every other field, and without the quotes of its nested repr."""
    head, _, tail = str(e).replace("\\n", "\n").strip("'").partition(" Other fields present:")
    near = tail.rpartition("\n")[2]
    return f"{head} {near}" if near.startswith("Did you mean") else head


def flatten(config: ConfigDict | dict[str, Any]) -> list[tuple[str, Any]]:
    """(dotted field, value) of every leaf; references are resolved."""
    values = config.to_dict(preserve_field_references=False) if isinstance(config, ConfigDict) else config

    def walk(section: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in section.items():
            if isinstance(value, dict):
                yield from walk(value, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", value

    return list(walk(values, ""))


def _schema() -> dict[str, tuple[type, bool]]:
    """Field -> (type, whether None is allowed), read from base.py: only a placeholder is None there, and it knows its type."""
    config = base.get_config()
    found: dict[str, tuple[type, bool]] = {}
    for field, value in flatten(config):
        section, _, name = field.rpartition(".")
        found[field] = (config[section] if section else config).get_ref(name).get_type(), value is None
    return found


SCHEMA = _schema()


def _overlay(config: ConfigDict, values: list[tuple[str, Any]], source: str) -> ConfigDict:
    """Set typed values; raises UserError naming the source, the field and what it expects."""
    for field, value in values:
        try:
            section, name = _locate(config, field)
            section[name] = _typed(field, value)
        except UserError as e:
            raise UserError(f"{source}: {e}") from None
    return config


def _locate(config: ConfigDict, field: str) -> tuple[ConfigDict, str]:
    """The section of a dotted field, and the name in it; UserError with the nearest fields if there is no such field."""
    known = list(SCHEMA)
    if field not in SCHEMA:
        inside = [f for f in known if f.startswith(f"{field}.")]
        if inside:
            raise UserError(f"{field} is a section, not a field; its fields are {', '.join(inside)}")
        raise UserError(f"unknown config field {field!r}: did you mean {' or '.join(_nearest(field, known))}?")
    *path, name = field.split(".")
    section = config
    for part in path:
        section = section[part]
    return section, name


def _nearest(field: str, known: list[str]) -> list[str]:
    """Up to three fields that may have been meant: of the same or a similar last name if there are any, else of a similar path."""
    leaf = field.rpartition(".")[2]
    leaves = {k.rpartition(".")[2] for k in known}
    near = [leaf] if leaf in leaves else difflib.get_close_matches(leaf, leaves, n=2, cutoff=0.75)
    by_leaf = [k for k in known if k.rpartition(".")[2] in near]
    likest = difflib.get_close_matches(field, by_leaf or known, n=3, cutoff=0.0)
    return [repr(k) for k in likest]


EXPECTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", tuple: "a list of texts"}


def _typed(field: str, value: Any) -> Any:
    """A Python value as the field's type: whole numbers pass as floats, lists as tuples, and nothing else is converted."""
    kind, optional = SCHEMA[field]
    if value is None and optional:
        return None
    fits = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
    if kind is float:
        fits = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is tuple:
        fits = isinstance(value, tuple | list) and all(isinstance(v, str) for v in value)
    if not fits:
        raise UserError(f"{field}={value!r}: expected {EXPECTED[kind]}{' or None' if optional else ''}, got {type(value).__name__}")
    return kind(value)


def _parse(field: str, text: str) -> Any:
    """The text of an override as the field's type."""
    kind, optional = SCHEMA[field]
    word = text.strip().lower()
    if optional and word == "none":
        return None
    try:
        if kind is bool:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[word]
        if kind is tuple:
            literal = ast.literal_eval(text) if text.strip()[:1] in "([" and text.strip() else [t for t in text.split(",") if t]
            return _typed(field, literal)
        return kind(text)
    except UserError:
        raise
    except (ValueError, KeyError, SyntaxError):
        raise UserError(f"{field}={text!r}: expected {EXPECTED[kind]}{' or None' if optional else ''}") from None
