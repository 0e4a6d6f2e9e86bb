"""The command line: what each command calls, and that a mistake is one message on stderr, exit code 2, no traceback."""

import importlib
import json
import subprocess
import sys
import types

import pytest

from jetrl_jax import cli

RUN = ["--config=base", "--config.model.path=folder"]


@pytest.fixture
def calls(monkeypatch):
    """Stand-ins for the functions that commands call; yields what they were called with."""
    seen = []

    def stand_in(module, name, result=None):
        def record(*args, **kwargs):
            seen.append((name, args, kwargs))
            return result(*args) if callable(result) else result

        try:
            monkeypatch.setattr(importlib.import_module(module), name, record)
        except ModuleNotFoundError:
            fake = types.ModuleType(module)
            setattr(fake, name, record)
            monkeypatch.setitem(sys.modules, module, fake)

    stand_in("jetrl_jax.train.loop", "train")
    stand_in("jetrl_jax.flow", "main_report", ("edges differ", 1))
    stand_in("jetrl_jax.rollout.text", "generate_text", lambda config, prompts: [p.upper() for p in prompts])
    stand_in("jetrl_jax.train.export", "export_run")
    stand_in("jetrl_jax.doctor", "report", ("fine", 0))
    return seen


def refused(capsys, *argv: str) -> str:
    """The one message of a command line that is a mistake."""
    assert cli.main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jetrl: ") and err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    "argv",
    [
        ["--config=base", "--config.model.path=m", "--config.data.chat=false"],
        ["--config.model.path=m", "--noconfig.data.chat", "--config=base"],  # overrides may come first
        ["--config", "base", "--config.model.path", "m", "--config.data.chat", "--noconfig.data.chat"],  # the last one counts
        ["-config=base", "-config.model.path=m", "-noconfig.data.chat"],
    ],
)
def test_config_and_overrides_in_every_form(calls, argv):
    assert cli.main(["train", *argv]) == 0
    [(name, (config,), _)] = calls
    assert (name, config.model.path, config.data.chat, config.data.shuffle) == ("train", "m", False, True)


def test_flow_prints_the_report_and_passes_its_exit_code_on(calls, capsys):
    assert cli.main(["flow", *RUN]) == 1
    assert capsys.readouterr().out == "edges differ\n"


def test_doctor(calls, capsys):
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out == "fine\n"


def test_export(calls):
    assert cli.main(["export", "--run=runs/a", "--out", "hf"]) == 0
    assert cli.main(["export", "--run=runs/a", "--out=hf", "--step=3"]) == 0
    assert calls == [("export_run", ("runs/a", "hf"), {"step": None}), ("export_run", ("runs/a", "hf"), {"step": 3})]


def test_generate_one_prompt_prints_its_text_alone(calls, capsys):
    assert cli.main(["generate", *RUN, "--prompt=hello"]) == 0
    assert capsys.readouterr().out == "HELLO\n"


def test_generate_prints_several_as_json_lines(calls, capsys, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('"b\\nc"\n{"prompt": "d", "more": 1}\n')
    assert cli.main(["generate", *RUN, "--prompt=a", f"--prompts={path}"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"prompt": p, "completion": p.upper()} for p in ("a", "b\nc", "d")]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("", ":1: the line is empty"),
        ('"b"\n"a\\ud800"\n', ":2: the prompt has half a surrogate pair at character 2, in 'a\\ud800': write the whole character"),
        ('"a"\n\n', ":2: the line is empty"),
        ('"a"\n{"prompt"\n', ":2: not JSON"),
        ('{"question": "a"}\n', ":1: expected a JSON text or an object with a text in 'prompt'"),
        ("3\n", ":1: expected a JSON text"),
    ],
)
def test_a_bad_prompts_file_names_the_line(calls, capsys, tmp_path, body, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(body)
    assert message in refused(capsys, "generate", *RUN, f"--prompts={path}")
    assert calls == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "unknown command 'trian': did you mean 'train'?"),
        (["train"], "--config is missing: give a file, --config=configs/demo.py, or one of the packaged ones: base"),
        (["train", "--config"], "Missing value for flag --config"),
        (["train", "--config=nope.py"], "--config=nope.py: no such file or packaged config"),
        (["train", *RUN, "--config.seeed=3"], "unknown config field 'seeed': did you mean 'seed'"),
        (["train", *RUN, "--config.seed=x"], "seed='x': expected a whole number"),
        (["train", *RUN, "--config.seed"], "--config.seed has no value"),
        (["train", *RUN, "--noconfig.seed"], "--noconfig.seed: only a field that is true or false"),
        (["train", *RUN, "--noconfig.data.chat=true"], "--noconfig.data.chat: only a field"),
        (["train", *RUN, "--config.train.micro_batch=7"], "train.micro_batch=7 does not divide"),
        (["train", *RUN, "extra", "words"], "extra words on the command line: 'extra' 'words'"),
        (["train", *RUN, "--confg=x"], "unknown flag --confg: did you mean --config"),
        (["train", *RUN, "--optimizer.learning_rate=1"], "--optimizer.learning_rate: did you mean --config.optimizer.learning_rate?"),
        (["generate", *RUN], "no prompt: give --prompt=TEXT"),
        (["generate", *RUN, "--prompt=a\udcfc"], "--prompt has half a surrogate pair at character 2, in 'a\\udcfc'"),
        (["generate", *RUN, "--prompts=nowhere"], "--prompts=nowhere: cannot be read"),
        (["export"], "--run is missing"),
        (["export", "--run=a"], "--out is missing"),
        (["export", "--run=a", "--out=b", "--step=x"], "--step=x"),
        (["export", "--config=base"], "unknown flag --config: known are --run, --out, --step"),
        (["doctor", "--all"], "unknown flag --all: the command takes no flags"),
        (["doctor", "all"], "extra words on the command line: 'all'"),
    ],
)
def test_a_mistake_is_one_message(calls, capsys, argv, message):
    assert message in refused(capsys, *argv)
    assert calls == []


def test_jetrl_alone_and_help_list_the_commands(capsys):
    for argv, code in (([], 2), (["--help"], 0), (["help"], 0)):
        assert cli.main(argv) == code
        out = capsys.readouterr().out
        assert all(f"\n  {name} " in out for name in cli.COMMANDS)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_of_a_command_lists_its_flags_and_fields(calls, capsys, command):
    assert cli.main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"--{name}: " in out for name in cli.flags_of(command))
    assert ("--config.optimizer.learning_rate=1e-06" in out) == (command in ("train", "generate", "flow"))
    assert calls == []


def test_an_interrupt_is_said_in_one_line(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.COMMANDS, "doctor", interrupted)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "jetrl: interrupted\n"


def test_help_of_the_installed_command_imports_no_jax():
    code = "import sys; from jetrl_jax import cli; cli.main(['train', '--help']); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0
