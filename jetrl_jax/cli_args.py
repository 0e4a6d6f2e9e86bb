"""Arguments of one `jetrl` command: `--config`, `--config.FIELD` in any order, the command's own absl flags, and nothing else.

ml_collections' own flag is not used: measured with 1.1.0, an unknown field ends in a traceback, `--config.x` before `--config` fails, and
absl lets extra words pass in silence.
"""

import dataclasses
import difflib
import json
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from ml_collections.config_dict import ConfigDict

from jetrl_jax import config as configuration
from jetrl_jax.errors import UserError, check_unicode


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What the user gave: the config's name or path, overrides in order, the command's flags, and the name of a command that takes one."""

    config_name: str
    overrides: tuple[tuple[str, str], ...]
    flags: flags.FlagValues
    name: str = ""

    def config(self) -> ConfigDict:
        """The config with its overrides, checked."""
        if not self.config_name:
            names = ", ".join(configuration.packaged())
            raise UserError(f"--config is missing: give a file, --config=configs/demo.py, or one of the packaged ones: {names}")
        return configuration.load(self.config_name, self.overrides)


def parse(argv: Sequence[str], values: flags.FlagValues, named: bool = False) -> Arguments:
    """Read a command's arguments. `values` defines its flags; a flag `config` among them says that the command takes a config.

    named: one word that is no flag is the command's name for what it is to do (`jetrl bench kernels`).
    """
    takes_config = "config" in values
    rest, overrides = split_overrides(argv) if takes_config else (list(argv), [])
    values.set_gnu_getopt(True)  # flags may follow words, so that every extra word is named
    try:
        _, *words = values(["jetrl", *rest])
    except flags.UnrecognizedFlagError as e:
        raise UserError(f"unknown flag --{e.flagname}: {_hint(e.flagname, list(values))}") from None
    except flags.Error as e:
        raise UserError(str(e)) from None
    name = words.pop(0) if named and words else ""
    if words:
        raise UserError(f"extra words on the command line: {' '.join(map(repr, words))}; every argument is a flag, --NAME=VALUE")
    return Arguments(str(values["config"].value) if takes_config else "", tuple(overrides), values, name)


def _hint(name: str, known: list[str]) -> str:
    """What an unknown flag may have meant; fields of the config count where the command takes one."""
    if "config" in known:
        known = [*known, *(f"config.{field}" for field in configuration.SCHEMA)]
    near = [f"config.{name}"] if f"config.{name}" in known else difflib.get_close_matches(name, known, n=3)
    if near:
        return f"did you mean {' or '.join(f'--{n}' for n in near)}?"
    return f"known are {', '.join(f'--{n}' for n in known[:10])}" if known else "the command takes no flags"


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """(everything else, (field, text) of each --config.FIELD).

    A value follows `=` or is the next word; a true-or-false field alone is true, and --noconfig.FIELD is false.
    """
    rest: list[str] = []
    overrides: list[tuple[str, str]] = []
    words = iter(argv)
    for word in words:
        name, equals, text = word.lstrip("-").partition("=")
        if not word.startswith("-") or not name.startswith(("config.", "noconfig.")):
            rest.append(word)
            continue
        field = name.partition(".")[2]
        is_bool = configuration.SCHEMA.get(field, (str, False))[0] is bool
        if name.startswith("no"):
            if equals or not is_bool:
                raise UserError(f"--{name}: only a field that is true or false is switched off this way, without a value")
            text = "false"
        elif not equals and is_bool:
            text = "true"
        elif not equals:
            following = next(words, None)
            if following is None:
                raise UserError(f"--{name} has no value: --{name}=VALUE")
            text = following
        overrides.append((field, text))
    return rest, overrides


def prompts(given: Sequence[str], path: str, column: str) -> list[str]:
    """The prompts of --prompt and of a JSONL file, whose lines are texts or objects with `column`; errors name the line."""
    found = list(given)
    for prompt in found:
        check_unicode("--prompt", prompt)
    try:
        lines = Path(path).read_text(encoding="utf-8").removesuffix("\n").split("\n") if path else []  # JSON may hold other line separators
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"--prompts={path}: cannot be read: {e}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            raise UserError(f"{path}:{number}: the line is empty; each line is a JSON text or an object with {column!r}")
        try:
            value = json.loads(line)
        except json.JSONDecodeError as e:
            raise UserError(f"{path}:{number}: not JSON: {e.msg} at column {e.colno}") from None
        text = value.get(column) if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise UserError(f"{path}:{number}: expected a JSON text or an object with a text in {column!r} (data.prompt_column)")
        check_unicode(f"{path}:{number}: the prompt", text)
        found.append(text)
    if not found:
        raise UserError("no prompt: give --prompt=TEXT (again for more) or --prompts=FILE.jsonl")
    return found


def print_completions(prompts: Sequence[str], completions: Sequence[str]) -> None:
    """One prompt's completion as it is; of several, one JSON object a line."""
    if len(prompts) == 1:
        print(completions[0])
        return
    for prompt, completion in zip(prompts, completions, strict=True):
        print(json.dumps({"prompt": prompt, "completion": completion}, ensure_ascii=False))


def help_text(command: str, summary: str, values: flags.FlagValues) -> str:
    """What `jetrl COMMAND --help` prints: the command's flags, and with a config its packaged names and every field's default."""
    lines = [f"usage: jetrl {command} [--FLAG=VALUE ...]", "", summary, ""]
    for name in values:
        lines.append(f"  --{name}: {values[name].help}")
    if "config" in values:
        config = configuration.base.get_config()
        lines += ["", f"packaged configs: {', '.join(configuration.packaged())}", "", "fields, and their defaults in base:"]
        lines += [f"  --config.{field}={'none' if value is None else value}" for field, value in configuration.flatten(config)]
    return "\n".join(lines)
