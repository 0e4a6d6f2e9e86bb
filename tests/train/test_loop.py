"""The loop end to end on a tiny model: resume, dynamic sampling, penalties, KL, stop strings, what is refused, and what is written."""

import json
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
from folder import MODEL, config_for, write_model

from jetrl_jax import config as configs
from jetrl_jax import metrics
from jetrl_jax.checkpoint import Checkpoints
from jetrl_jax.errors import UserError
from jetrl_jax.models.weights import load_params
from jetrl_jax.rollout.text import generate_text
from jetrl_jax.train import loop, rewards
from jetrl_jax.train.export import export_run
from jetrl_jax.train.setup import optimizer_of, setup
from jetrl_jax.train.update import init_state


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def graded_by_parity(monkeypatch):
    """A reward that a random model earns about half of the time: the number of characters is even."""
    monkeypatch.setitem(rewards.REWARDS, "last_number", lambda text, answer: float(len(text) % 2 == 0))


def state_of(config, step):
    abstract = jax.eval_shape(lambda p: init_state(p, optimizer_of(config), config.seed), MODEL.param_shapes())
    return Checkpoints(config.out).restore(step, abstract)


@pytest.fixture(scope="module")
def four(model, tmp_path_factory):
    """Four steps at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(rewards.REWARDS, "last_number", lambda text, answer: float(len(text) % 2 == 0))
        config = config_for(model, tmp_path_factory.mktemp("four") / "run", steps=4, checkpoint__every=2, evaluation__prompts=4)
        return config, loop.train(config)


def test_two_and_two_steps_equal_four(model, four, tmp_path):
    config = config_for(model, tmp_path / "run", steps=2, evaluation__prompts=4)
    loop.train(config)
    halfway = state_of(config, 2)
    config = config_for(model, tmp_path / "run", steps=4, evaluation__prompts=4)
    result = loop.train(config)
    whole, resumed = state_of(four[0], 4), state_of(config, 4)
    chex.assert_trees_all_equal(whole, resumed)
    chex.assert_trees_all_equal(state_of(four[0], 2), halfway)
    assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(halfway.params), jax.tree.leaves(whole.params), strict=True))
    assert result == four[1]  # the same summary, evaluations before and after included
    clock = ("seconds", "tokens_per_second")
    rows = [metrics.read(f"{c.out}/metrics.jsonl") for c in (four[0], config)]
    a, b = ([{k: v for k, v in m.items() if not k.startswith(clock)} for m in run] for run in rows)
    assert a == b and [m["step"] for m in a] == [1, 2, 3, 4]


def test_what_a_run_writes(four):
    config, result = four
    folder = Path(config.out)
    files = {p.name for p in folder.iterdir()}
    assert {"metrics.jsonl", "config.json", "checkpoints", "curve.png", "evaluation_before.json", "evaluation_after.json"} <= files
    assert configs.from_json((folder / "config.json").read_text()) == config
    rows = metrics.read(folder / "metrics.jsonl")
    for m in rows:
        assert m["mismatch_max_abs"] == 0 and m["ratio"] == 1 and m["ess_token"] == 1  # one flow, on the CPU: to the bit
        assert 0 <= m["reward"] <= 1 and 1 <= m["completion_length_min"] <= m["completion_length"] <= m["completion_length_max"] <= 6
        assert (m["grad_norm"] > 0) == (m["groups_without_signal"] < 4) and m["entropy"] > 0 and m["skipped_steps"] == 0
    assert any(m["grad_norm"] > 0 for m in rows)
    assert result["mismatch_max_abs"] == 0 and 0 <= result["evaluation_before"] <= 1
    assert rows[-1]["prompts_consumed"] == 16


def test_a_finished_run_changes_nothing_and_says_the_same(four):
    config, result = four
    before = state_of(config, 4)
    assert loop.train(config) == result
    chex.assert_trees_all_equal(before, state_of(config, 4))


@pytest.mark.parametrize(("field", "value"), [("optimizer.learning_rate", "0.5"), ("policy", "jet_fp8"), ("seed", "3")])
def test_another_config_in_the_same_folder_is_refused(four, field, value):
    config = configs.from_json(configs.to_json(four[0]))
    configs.set_text(config, field, value)
    with pytest.raises(UserError, match=field):
        loop.train(config)


def test_fewer_steps_than_done_and_no_resume_are_refused(four):
    for field, value in (("steps", "3"), ("checkpoint.resume", "False")):
        config = configs.from_json(configs.to_json(four[0]))
        configs.set_text(config, field, value)
        with pytest.raises(UserError, match=r"already at step 4|holds a run at step 4"):
            loop.train(config)


def test_a_broken_checkpoint_is_named(model, tmp_path):
    config = config_for(model, tmp_path / "run", steps=1)
    loop.train(config)
    for file in (tmp_path / "run/checkpoints/1/state").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    with pytest.raises(UserError, match="cannot be read"):
        loop.train(config_for(model, tmp_path / "run", steps=2))


def test_dynamic_sampling_keeps_groups_that_differ(model, tmp_path, monkeypatch):
    calls = []

    def reward(text, answer):  # all but every third prompt's groups are alike
        calls.append(answer)
        return float(len(text) % 2 == 0) if (len(calls) - 1) // 4 % 3 == 0 else 0.0

    monkeypatch.setitem(rewards.REWARDS, "last_number", reward)
    config = config_for(model, tmp_path / "run", algorithm__dynamic_sampling=True, algorithm__dynamic_sampling_rounds=5)
    parts = setup(config)
    stream = loop.prompts_of(config, parts.tokenizer, "train", True)
    sampler = loop.Sampler(parts.sampler, parts.tokenizer, parts.sampling, rows=4, width=20, group=4)
    state = init_state(load_params(model, MODEL), parts.spec.optimizer, 0)
    qparams = loop.quantize(parts.policy.rollout, MODEL, state.params)
    scored, position, counts = loop.collect(config, parts, sampler, stream, state, qparams)
    assert position == counts["groups_drawn"] == len(calls) // 4 > 4
    by_group = scored.rewards.reshape(4, 4)
    useful = counts["groups_drawn"] - counts["groups_without_signal"]
    assert (by_group.std(1) > 0).sum() == min(useful, 4) and scored.samples.rollout.tokens.shape == (16, 6)
    # the texts still belong to their tokens
    for text, row, n in zip(scored.samples.texts, scored.samples.rollout.tokens, scored.samples.rollout.lengths, strict=True):
        kept = row[:n - 1] if row[n - 1] in parts.sampling.stop_ids else row[:n]
        assert parts.tokenizer.decode(kept) == text


def test_penalties_and_a_reference(model, tmp_path):
    kl = {"steps": 2, "algorithm__kl_coefficient": 0.5}
    config = config_for(model, tmp_path / "run", **kl, algorithm__overlong_penalty=1.0, algorithm__overlong_buffer=6)
    loop.train(config)
    first, second = metrics.read(tmp_path / "run/metrics.jsonl")
    assert first["kl"] == 0 < second["kl"]  # the reference is where the run began
    assert first["reward_shaped"] < first["reward"]
    rewarded = config_for(model, tmp_path / "run2", **kl, algorithm__kl_place="reward", algorithm__kl_estimator="k1")
    loop.train(rewarded)
    first, second = metrics.read(tmp_path / "run2/metrics.jsonl")
    assert first["reward_shaped"] == pytest.approx(first["reward"]) and second["reward_shaped"] != pytest.approx(second["reward"], abs=1e-6)


def test_many_switches_at_once(model, tmp_path):
    """Sequence ratios, truncated correction, a filter and dynamic sampling with a penalty in one run."""
    config = config_for(
        model, tmp_path / "run", algorithm__objective="gspo", algorithm__correction="tis", algorithm__correction_level="sequence",
        algorithm__aggregation="constant", algorithm__advantage="rloo", algorithm__dynamic_sampling=True,
        algorithm__overlong_penalty=1.0, algorithm__overlong_buffer=3, rollout__top_k=12, rollout__min_p=0.01, optimizer__schedule="cosine",
    )  # fmt: skip
    loop.train(config)
    for m in metrics.read(tmp_path / "run/metrics.jsonl"):
        assert m["mismatch_max_abs"] == 0 and m["ratio"] == m["weight"] == 1 and "kl" not in m
        assert m["groups_drawn"] >= 4 and m["prompts_consumed"] % 4 == 0


def test_groups_that_only_fill_the_batch_carry_no_gradient(model, tmp_path, monkeypatch):
    monkeypatch.setitem(rewards.REWARDS, "last_number", lambda text, answer: 0.0)
    penalty = {"algorithm__overlong_penalty": 1.0, "algorithm__overlong_buffer": 6}
    config = config_for(model, tmp_path / "run", steps=1, algorithm__dynamic_sampling=True, algorithm__dynamic_sampling_rounds=2, **penalty)
    loop.train(config)
    (m,) = metrics.read(tmp_path / "run/metrics.jsonl")
    assert m["reward_shaped"] < 0 == m["reward"] and m["grad_norm"] == 0 and m["groups_without_signal"] == m["groups_drawn"] == 8


def test_folders_that_are_not_the_runs_own_are_refused(model, tmp_path):
    before = (model / "config.json").read_bytes()
    for out in ("", model, model / ".." / model.name):
        with pytest.raises(UserError, match="folder of the run's own"):
            loop.train(config_for(model, out, steps=1))
    assert (model / "config.json").read_bytes() == before and not (model / "checkpoints").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="out="):
        loop.train(config_for(model, tmp_path / "file", steps=1))


def test_broken_weights_leave_no_run_behind(tmp_path):
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="safetensors"):
        loop.train(config_for(folder, tmp_path / "run", steps=1))
    assert not (tmp_path / "run").exists()


def test_stop_strings_shorten_and_count_as_stopped(model, tmp_path):
    plain = config_for(model, tmp_path / "a", rollout__max_new_tokens=6, rollout__prompts_per_step=4)
    prompts = ["What is 1 + 1?", "What is 2 + 2?", "What is 3 + 4?", "What is 9 + 9?"]
    texts = generate_text(plain, prompts)
    letter = next(t[2] for t in texts if len(t) > 3)
    stopped = generate_text(config_for(model, tmp_path / "b", rollout__stop_strings=f"({letter!r},)"), prompts)
    assert stopped == [t.split(letter)[0] for t in texts] and stopped != texts


def test_a_prompts_text_does_not_depend_on_the_others(model, tmp_path):
    config = config_for(model, tmp_path / "a", policy="bf16")
    prompts = ["What is 1 + 1?", "What is 2 + 2?", "What is 3 + 4?", "What is 9 + 9?"]
    assert generate_text(config, prompts)[0] == generate_text(config, [prompts[0], "0", "1", "2"])[0]
    with pytest.raises(UserError, match="max_prompt_length"):
        generate_text(config, ["What is 1 + 1 + 1 + 1 + 1?"])


def test_export_gives_the_checkpoints_weights(four, tmp_path, capsys):
    config, _ = four
    assert export_run(config.out, str(tmp_path / "hf")) == 4
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["step"] == 4
    exported, state = load_params(tmp_path / "hf", MODEL), state_of(config, 4)
    chex.assert_trees_all_equal(exported, jax.tree.map(lambda x: x.astype("bfloat16").astype("float32"), state.params))
    assert (tmp_path / "hf/tokenizer.json").is_file()
    export_run(config.out, str(tmp_path / "hf2"), step=2)
    with pytest.raises(UserError, match="no such checkpoint"):
        export_run(config.out, str(tmp_path / "hf3"), step=3)
    with pytest.raises(UserError, match=r"no config\.json"):
        export_run(str(tmp_path), str(tmp_path / "hf4"))


def test_lengths_beyond_the_model_are_refused(model, tmp_path):
    with pytest.raises(UserError, match="64 positions"):
        loop.train(config_for(model, tmp_path / "run", rollout__max_new_tokens=60))
