"""The command line: `jetrl train | generate | flow | export | doctor | bench`. A user's mistake is one message on stderr, exit code 2."""

import sys
from collections.abc import Callable

from absl import flags

from jetrl_jax.cli_args import Arguments, help_text, parse, print_completions, prompts
from jetrl_jax.errors import UserError, unknown


# Each command reads its arguments first and imports the heavy modules after that: a mistake is told at once.
def train(args: Arguments) -> int:
    """Train a model with on-policy reinforcement learning."""
    config = args.config()
    from jetrl_jax.config_check import check_training

    check_training(config)
    from jetrl_jax.train.loop import train

    train(config)
    return 0


def generate(args: Arguments) -> int:
    """Sample completions of prompts with the rollout that training uses."""
    config = args.config()
    given = prompts(args.flags.prompt, args.flags.prompts, config.data.prompt_column)
    from jetrl_jax.rollout.text import generate_text

    print_completions(given, generate_text(config, given))
    return 0


def flow(args: Arguments) -> int:
    """Print both precision flow graphs and whether the rollout's is contained in the update's forward (exit code 1 if not)."""
    config = args.config()
    from jetrl_jax.flow import main_report

    text, code = main_report(config)
    print(text)
    return code


def export(args: Arguments) -> int:
    """Write a checkpoint of a run as a Hugging Face folder."""
    for name in ("run", "out"):
        if not args.flags[name].value:
            raise UserError(f"--{name} is missing: jetrl export --run=runs/NAME --out=FOLDER")
    from jetrl_jax.train.export import export_run

    export_run(args.flags.run, args.flags.out, step=args.flags.step)
    return 0


def doctor(args: Arguments) -> int:
    """Print devices, versions, what runs natively, what falls back, and what to install."""
    from jetrl_jax.doctor import report

    text, code = report()
    print(text)
    return code


def bench(args: Arguments) -> int:
    """Measure on the GPU at hand: jetrl bench kernels | tune | page (exit code 1 if nothing could be measured)."""
    from jetrl_jax.bench.command import main

    return main(args.name, args.flags)


COMMANDS: dict[str, Callable[[Arguments], int]] = {
    "train": train, "generate": generate, "flow": flow, "export": export, "doctor": doctor, "bench": bench}
NAMED = ("bench",)  # commands whose first word is a name


def flags_of(command: str) -> flags.FlagValues:
    """The absl flags of one command; fields of the config come on top, as --config.FIELD."""
    values = flags.FlagValues()
    if command in ("train", "generate", "flow"):
        flags.DEFINE_string("config", "", "A Python file with get_config(), or a packaged config's name.", flag_values=values)
    if command == "generate":
        flags.DEFINE_multi_string("prompt", [], "A prompt; repeat the flag for more.", flag_values=values)
        flags.DEFINE_string("prompts", "", "A JSONL file; each line a text, or an object with data.prompt_column.", flag_values=values)
    if command == "export":
        flags.DEFINE_string("run", "", "The run's folder (`out` of its config).", flag_values=values)
        flags.DEFINE_string("out", "", "The folder to write.", flag_values=values)
        flags.DEFINE_integer("step", None, "The checkpoint's step; the newest if not given.", lower_bound=0, flag_values=values)
    if command == "bench":
        flags.DEFINE_string("only", "", "Comma-separated groups (kernels: fprop, dgrad, wgrad, passes, linear, lm_head, decode, attention; "
                            "tune: gemm, wgrad, decode, lm_head, attention); all if not given.", flag_values=values)
        flags.DEFINE_string("shapes", "", "Comma-separated models whose layer shapes are measured (qwen3-8b, qwen3-32b, llama-3.1-8b, "
                            "qwen2.5-0.5b); all if not given.", flag_values=values)
        flags.DEFINE_string("out", "", "The file to write: rows of kernels (none if not given), the table of tune (the packaged one if not "
                            "given), the page (docs/bench.md).", flag_values=values)
        flags.DEFINE_float("seconds", 0.0, "Begin nothing new after so many seconds; 0 is no limit.", lower_bound=0.0, flag_values=values)
    return values


def usage() -> str:
    """What `jetrl` and `jetrl --help` print."""
    rows = [f"  {name:9} {function.__doc__}" for name, function in COMMANDS.items()]
    return "\n".join(["usage: jetrl COMMAND [--FLAG=VALUE ...]", "", *rows, "", "jetrl COMMAND --help lists its flags and fields."])


def run(argv: list[str]) -> int:
    """Run one command line (without the program's name) and return its exit code; raises UserError."""
    if not argv or argv[0] in ("--help", "-h", "help"):
        print(usage())
        return 0 if argv else 2
    command, *rest = argv
    if command not in COMMANDS:
        raise unknown("command", command, COMMANDS)
    if any(word in ("--help", "-h", "-help") for word in rest):
        print(help_text(f"{command} NAME" if command in NAMED else command, COMMANDS[command].__doc__ or "", flags_of(command)))
        return 0
    return COMMANDS[command](parse(rest, flags_of(command), named=command in NAMED))


def main(argv: list[str] | None = None) -> int:
    """Entry point of `jetrl`: 0 done, 1 a verdict that does not hold, 2 the user's mistake, 130 interrupted."""
    try:
        return run(sys.argv[1:] if argv is None else argv)
    except UserError as e:
        print(f"jetrl: {e}", file=sys.stderr)
        return 2
    except RuntimeError as e:
        if "Unable to initialize backend" not in str(e):
            raise
        print(f"jetrl: {str(e).splitlines()[0]}; `jetrl doctor` says what is there and what to install", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("jetrl: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
