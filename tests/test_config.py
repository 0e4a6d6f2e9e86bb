"""Configs: files and names, overrides, one clear message for each mistake, JSON and back."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_jax import config, config_check
from jetrl_jax.configs import base
from jetrl_jax.errors import UserError

MODEL = ("model.path", "folder")


def fails(message: str):
    return pytest.raises(UserError, match=message)


def test_every_packaged_config_loads_and_can_train():
    for name in config.packaged():
        loaded = config.load(name, [MODEL, ("data.path", "x.jsonl")])
        config_check.check_training(loaded)
        assert loaded.is_locked


def test_every_check_names_a_field_and_every_default_passes():
    assert {*config_check.CHOICES, *config_check.RANGES} <= set(config.SCHEMA)
    config_check.check_training(config.load("base", [MODEL]))


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("optimizer.learning_rate", "1e-5", 1e-5),
        ("optimizer.learning_rate", "1", 1.0),
        ("steps", "7", 7),
        ("data.chat", "false", False),
        ("data.template", "{prompt}=", "{prompt}="),
        ("data.template", "none", None),
        ("policy_overrides.weight", "bf16", "bf16"),
        ("policy_overrides.paths", "layers/0/*=bf16,layers/-1/*=bf16", ("layers/0/*=bf16", "layers/-1/*=bf16")),
        ("rollout.stop_strings", "('a,b', '\\n')", ("a,b", "\n")),
        ("rollout.stop_strings", "", ()),
        ("out", "none", "none"),
    ],
)
def test_an_override_is_read_as_its_fields_type(field, text, value):
    got = config_check.get(config.load("base", [MODEL, (field, text)]), field)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("field", "text", "message"),
    [
        ("optimizer.learning_rte", "1", r"unknown config field 'optimizer.learning_rte': did you mean 'optimizer.learning_rate'\?"),
        ("learning_rate", "1", "did you mean 'optimizer.learning_rate'"),
        ("optimiser.warmup_steps", "1", "did you mean 'optimizer.warmup_steps'"),
        ("rollout", "1", "rollout is a section, not a field; its fields are .*rollout.group_size"),
        ("steps", "many", "steps='many': expected a whole number"),
        ("steps", "1.5", "steps='1.5': expected a whole number"),
        ("data.chat", "maybe", "data.chat='maybe': expected true or false"),
        ("rollout.stop_strings", "(1, 2)", r"rollout.stop_strings=\(1, 2\): expected a list of texts"),
        ("rollout.stop_strings", "('a'", "expected a list of texts"),
        ("policy", "jet_fp", "unknown policy 'jet_fp': did you mean 'jet_fp8'"),
        ("reward.name", "last", "unknown reward.name 'last': did you mean 'last_number'"),
        ("rollout.top_p", "0", "rollout.top_p=0.0: expected a number, more than 0 and at most 1"),
        ("optimizer.learning_rate", "nan", "optimizer.learning_rate=nan: expected a finite number, at least 0"),
        ("optimizer.b2", "1", "optimizer.b2=1.0: expected a number, at least 0 and less than 1"),
        ("rollout.temperature", "inf", "rollout.temperature=inf"),
        ("model.path", "", "model.path is empty: .*--config.model.path=FOLDER"),
    ],
)
def test_a_wrong_override_is_one_message_with_field_value_and_remedy(field, text, message):
    with fails(message):
        config.load("base", [MODEL, (field, text)])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"train.micro_batch": "7"}, "train.micro_batch=7 does not divide the 64 sequences .*choose one of 1, 2, 4"),
        ({"rollout.group_size": "1"}, "rollout.group_size=1"),
        ({"rollout.temperature": "0"}, "greedy samples"),
        ({"algorithm.overlong_penalty": "0.5"}, "algorithm.overlong_buffer=0"),
        ({"algorithm.overlong_penalty": "0.5", "algorithm.overlong_buffer": "33"}, "between 1 and rollout.max_new_tokens=32"),
    ],
)
def test_training_needs_fields_that_fit_together(overrides, message):
    loaded = config.load("base", [MODEL, *overrides.items()])  # enough for generate and flow
    with fails(message):
        config_check.check_training(loaded)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("c.stepz = 3", r":5: AttributeError: Key \"stepz\" does not exist.* Did you mean \"steps\""),
        ("c.steps = 'x'", ":5: TypeError"),
        ("c.steps = (", ":5: SyntaxError"),
        ("return c.to_dict()", "returned dict, expected an ml_collections ConfigDict"),
        ("c = ml_collections.ConfigDict({'steps': 3, 'lerning_rate': 1.0})", "unknown config field 'lerning_rate'"),
        ("c = ml_collections.ConfigDict({'steps': 'x'})", "steps='x': expected a whole number, got str"),
        ("c = ml_collections.ConfigDict({'steps': True})", "steps=True: expected a whole number, got bool"),
    ],
)
def test_a_mistake_in_a_config_file_names_the_file(tmp_path, body, message):
    path = tmp_path / "mine.py"
    head = "import ml_collections\nfrom jetrl_jax.configs import base\ndef get_config():\n  c = base.get_config()\n"
    path.write_text(f"{head}  {body}\n  return c\n")
    with fails(message) as caught:
        config.load(str(path))
    assert "mine.py" in str(caught.value)


def test_a_config_file_without_base_has_the_defaults_of_the_other_fields(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import ml_collections\ndef get_config():\n  return ml_collections.ConfigDict({'steps': 3, 'model': {'path': 'm'}})\n")
    loaded = config.load(str(path))
    assert (loaded.steps, loaded.model.path, loaded.rollout.group_size) == (3, "m", 8)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.py"]  # nothing is left beside the user's file


def test_a_file_that_is_no_config():
    with fails("no such file or packaged config; did you mean 'base'"):
        config.load("configs/bas.py")
    with fails("no function get_config"):
        config.load(__file__)


TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=8)


@settings(max_examples=25, deadline=None)
@given(
    rate=st.floats(min_value=0, allow_infinity=False),
    steps=st.integers(1, 2**62),
    stops=st.lists(TEXTS, max_size=3),
    template=st.none() | TEXTS,
)
def test_json_round_trip_keeps_values_types_and_placeholders(rate, steps, stops, template):
    c = base.get_config()
    c.optimizer.learning_rate, c.steps, c.rollout.stop_strings, c.data.template = rate, steps, tuple(stops), template
    back = config.from_json(config.to_json(c))
    assert config.flatten(back) == config.flatten(c)
    assert isinstance(back.rollout.stop_strings, tuple)
    config.set_text(back, "data.system", "be brief")  # still a placeholder of str
    assert back.data.system == "be brief"


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not JSON"), ("[]", "JSON list"), ('{"stepz": 1}', "unknown config field 'stepz'"), ('{"steps": null}', "steps=None: expected")],
)
def test_a_broken_stored_config_is_one_message(text, message):
    with fails(message):
        config.from_json(text)


def test_a_stored_config_of_an_older_version_gets_the_new_defaults():
    values = json.loads(config.to_json(base.get_config()))
    del values["train"]["remat"]
    assert config.from_json(json.dumps(values)).train.remat == "block"


def test_choices_are_those_that_the_code_knows():
    from jetrl_jax.train import advantages, data, losses, rewards, tasks

    known = {
        "algorithm.advantage": advantages.ADVANTAGES,
        "algorithm.objective": losses.LOG_RATIOS,
        "algorithm.aggregation": losses.AGGREGATIONS,
        "algorithm.kl_estimator": losses.KL_ESTIMATORS,
        "reward.name": rewards.REWARDS,
        "data.too_long": data.TOO_LONG,
        "data.split": tasks.SPLITS,
    }
    for field, names in known.items():
        assert set(config_check.CHOICES[field]) == set(names), field


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([("data.name", "jsonl")], "data.path is empty"),
        ([("algorithm.kl_coefficient", "0.1"), ("rollout.top_k", "5")], "mean nothing to the reference"),
        ([("algorithm.kl_coefficient", "0.1"), ("rollout.top_p", "0.9")], "mean nothing to the reference"),
    ],
)
def test_what_only_training_refuses(overrides, message):
    loaded = config.load("base", [("model.path", "folder"), *overrides])
    with pytest.raises(UserError, match=message):
        config_check.check_training(loaded)
