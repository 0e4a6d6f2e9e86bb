"""Checkpoints in and out, to the bit, and one clear message for each way in which they can be wrong."""

import json
import shutil
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

from jetrl_jax.errors import UserError
from jetrl_jax.models import weights
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.models.weights import HF_NAMES, export_model, load_params, save_params

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures" / "models"
NAMES = ["llama_llama3", "llama_tied", "qwen2_tied", "qwen3"]
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def load(folder):
    return load_params(folder, ModelConfig.from_hf(folder))


def copy_with(folder, name="llama_llama3", dtype=None, drop=(), **changes):
    """A fixture in `folder`, with tensors dropped, replaced (dots in a name written as two underscores) or all cast."""
    shutil.copytree(FIXTURES / name, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {key.replace("__", "."): value for key, value in changes.items()}
    tensors = {key: value if dtype is None else value.astype(dtype) for key, value in tensors.items() if key not in drop}
    save_file(tensors, folder / "model.safetensors")
    return folder


def message(action, *arguments, **options):
    with pytest.raises(UserError) as caught:
        action(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_lands_in_its_place(name):
    params, tensors = load(FIXTURES / name), load_file(FIXTURES / name / "model.safetensors")
    shapes = ModelConfig.from_hf(FIXTURES / name).param_shapes()
    chex.assert_trees_all_equal_shapes_and_dtypes(params, shapes)
    found = set()
    for path, leaf in flatten_dict(params, sep="/").items():
        slices = list(leaf) if path.startswith("layers/") else [leaf]
        for layer, part in enumerate(slices):
            tensor = HF_NAMES[path].format(layer=layer)
            np.testing.assert_array_equal(part, tensors[tensor].astype(np.float32), err_msg=tensor)
            found.add(tensor)
    assert found == set(tensors)


def test_shards_equal_the_single_file():
    chex.assert_trees_all_equal(load(FIXTURES / "llama_tied_sharded"), load(FIXTURES / "llama_tied"))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_source_dtypes(dtype, tmp_path):
    params = load(copy_with(tmp_path / "m", dtype=dtype))
    tensors = load_file(FIXTURES / "llama_llama3" / "model.safetensors")
    np.testing.assert_array_equal(params["layers"]["attn"]["q"][1], tensors[Q_PROJ].astype(dtype).astype(np.float32))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("max_shard_bytes", [10**9, 60_000])
def test_bf16_round_trip_is_exact(name, max_shard_bytes, tmp_path):
    source, target = FIXTURES / name, tmp_path / "deep" / "out"
    params = load(source)
    save_params(target, ModelConfig.from_hf(source), params, source=source, max_shard_bytes=max_shard_bytes)
    assert ModelConfig.from_hf(target) == ModelConfig.from_hf(source)
    chex.assert_trees_all_equal(load(target), params)
    shards = sorted(target.glob("model*.safetensors"))
    assert (target / "model.safetensors.index.json").exists() == (max_shard_bytes < 10**9) == (len(shards) > 1)
    written: dict[str, np.ndarray] = {}
    for shard in shards:
        tensors = load_file(shard)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= max_shard_bytes
        written |= tensors
    original = load_file(source / "model.safetensors")
    assert written.keys() == original.keys()
    assert all(written[n].dtype == ml_dtypes.bfloat16 and np.array_equal(written[n], original[n]) for n in original)


def test_index_names_every_tensor_and_the_total_size(tmp_path):
    source, target = FIXTURES / "qwen3", tmp_path / "out"
    save_params(target, ModelConfig.from_hf(source), load(source), max_shard_bytes=60_000)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    held = {name: (file, tensor.nbytes) for file in files for name, tensor in load_file(target / file).items()}
    assert index["weight_map"] == {name: file for name, (file, _) in held.items()}
    assert index["metadata"]["total_size"] == sum(size for _, size in held.values())


def test_float32_keeps_the_master_and_bf16_rounds_to_even(tmp_path):
    config = ModelConfig.from_hf(FIXTURES / "qwen3")
    params = jax.tree.map(lambda leaf: leaf * 1.001 + 1e-3, load(FIXTURES / "qwen3"))
    save_params(tmp_path / "f32", config, params, "float32")
    save_params(tmp_path / "bf16", config, params, "bfloat16")
    chex.assert_trees_all_equal(load(tmp_path / "f32"), params)
    chex.assert_trees_all_equal(load(tmp_path / "bf16"), jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params))
    for dtype, folder in (("float32", "f32"), ("bfloat16", "bf16")):
        assert json.loads((tmp_path / folder / "config.json").read_text())["dtype"] == dtype


def test_export_brings_the_tokenizer_and_the_token_ids(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / "qwen2_tied", source)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (source / name).write_text(name)
    (source / "optimizer.bin").write_text("not part of a model")
    config = export_model(source, tmp_path / "out")
    assert config == ModelConfig.from_hf(tmp_path / "out")
    found = {file.name for file in (tmp_path / "out").iterdir()}
    copied = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"}
    assert found == copied | {"config.json", "model.safetensors"}
    assert all((tmp_path / "out" / name).read_bytes() == (source / name).read_bytes() for name in copied)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"], written["pad_token_id"]) == (1, 2, None)
    # safetensors alone would leave a file that only its owner can read
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode == (tmp_path / "out" / "config.json").stat().st_mode


def test_export_writes_the_given_params(tmp_path):
    params = jax.tree.map(lambda leaf: leaf + 1, load(FIXTURES / "llama_tied"))
    export_model(FIXTURES / "llama_tied", tmp_path / "out", params, dtype="float32")
    chex.assert_trees_all_equal(load(tmp_path / "out"), params)


def test_a_tied_model_may_store_its_lm_head_and_old_ones_their_frequencies(tmp_path):
    head, frequencies = np.full((160, 72), 7.0, np.float32), np.ones(4, np.float32)
    folder = copy_with(tmp_path / "m", "llama_tied", lm_head__weight=head, model__layers__0__self_attn__rotary_emb__inv_freq=frequencies)
    chex.assert_trees_all_equal(load(folder), load(FIXTURES / "llama_tied"))


def test_missing_tensors(tmp_path):
    found = message(load, copy_with(tmp_path / "a", drop=[Q_PROJ]))
    assert f"a tensor is missing: {Q_PROJ}, of shape [64, 64]" in found
    found = message(load, copy_with(tmp_path / "b", drop=[Q_PROJ, "model.norm.weight"]))
    assert "2 tensors are missing, the first: model.norm.weight, of shape [64]" in found
    assert "tie_word_embeddings" not in found
    assert "lm_head.weight" in (found := message(load, copy_with(tmp_path / "c", drop=["lm_head.weight"])))
    assert "tie_word_embeddings" in found


def test_wrong_shapes_dtypes_and_unexpected_tensors(tmp_path):
    found = message(load, copy_with(tmp_path / "a", **{Q_PROJ.replace(".", "__"): np.zeros((64, 48), np.float32)}))
    assert f"tensor {Q_PROJ} has shape [64, 48], but config.json asks for [64, 64]" in found
    found = message(load, copy_with(tmp_path / "b", **{Q_PROJ.replace(".", "__"): np.zeros((64, 64), np.int8)}))
    assert f"tensor {Q_PROJ} is I8" in found and "BF16" in found
    found = message(load, copy_with(tmp_path / "c", model__layers__1__self_attn__q_proj__bias=np.zeros(64, np.float32)))
    assert "1 unexpected tensors, the first: model.layers.1.self_attn.q_proj.bias" in found
    found = message(load_params, FIXTURES / "llama_llama3", ModelConfig.from_hf(FIXTURES / "qwen3"))
    assert "q_norm.weight" in found and "missing" in found


def test_a_config_of_fewer_layers_is_noticed(tmp_path):
    shutil.copytree(FIXTURES / "qwen3", tmp_path / "m")
    raw = json.loads((tmp_path / "m" / "config.json").read_text()) | {"num_hidden_layers": 1}
    (tmp_path / "m" / "config.json").write_text(json.dumps(raw))
    assert "unexpected tensors, the first: model.layers.1." in message(load, tmp_path / "m")


@pytest.mark.parametrize("cut", [0, 3, 100, 5000, -1])
def test_a_file_cut_short(cut, tmp_path):
    shutil.copytree(FIXTURES / "llama_tied", tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    found = message(load, tmp_path / "m")
    assert f"{path} ({path.stat().st_size} bytes) is broken or cut short" in found and "fetch" in found


def test_a_git_lfs_pointer(tmp_path):
    shutil.copytree(FIXTURES / "llama_tied", tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "git-lfs" in message(load, tmp_path / "m")


def test_no_weights_at_all(tmp_path):
    shutil.copytree(FIXTURES / "llama_tied", tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    found = message(load, tmp_path / "m")
    assert "neither model.safetensors nor model.safetensors.index.json" in found


def test_broken_shards(tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(FIXTURES / "llama_tied_sharded", folder)
    index = folder / "model.safetensors.index.json"
    shard = folder / "model-00002-of-00003.safetensors"
    good = shard.read_bytes()

    shard.unlink()
    assert str(shard) in (found := message(load, folder)) and "does not exist" in found
    shard.write_bytes(good[:-5])
    assert str(shard) in (found := message(load, folder)) and "cut short" in found
    save_file({"other": np.zeros(1, np.float32)}, shard)
    assert str(shard) in (found := message(load, folder)) and "is missing, though model.safetensors.index.json places it there" in found
    shard.write_bytes(good)

    for content, words in [("{", "not valid JSON"), ("{}", "weight_map"), ('{"weight_map": {"a": "../up.safetensors"}}', "weight_map")]:
        index.write_text(content)
        assert words in message(load, folder)


def test_nothing_is_overwritten_and_nothing_is_left_half_written(tmp_path, monkeypatch):
    config, params = ModelConfig.from_hf(FIXTURES / "qwen3"), load(FIXTURES / "qwen3")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("precious")
    assert "exists already" in message(save_params, tmp_path / "full", config, params)
    (tmp_path / "file").write_text("precious")
    assert "exists already" in message(save_params, tmp_path / "file", config, params)

    calls = []

    def fills_the_disk(tensors, path, metadata):
        calls.append(path)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        save_file(tensors, path, metadata)

    monkeypatch.setattr(weights, "save_file", fills_the_disk)
    (tmp_path / "empty").mkdir()
    found = message(save_params, tmp_path / "empty", config, params, max_shard_bytes=60_000)
    assert "No space left on device" in found and len(calls) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "full"] and not any((tmp_path / "empty").iterdir())
    monkeypatch.undo()
    save_params(tmp_path / "empty", config, params)  # an empty folder is fine
    chex.assert_trees_all_equal(load(tmp_path / "empty"), params)


def test_params_of_another_model_are_not_written(tmp_path):
    params, config = load(FIXTURES / "llama_llama3"), ModelConfig.from_hf(FIXTURES / "qwen3")
    found = message(save_params, tmp_path / "out", config, params)
    assert "layers/attn/k is [2, 32, 64], but the model's config asks for [2, 64, 64]" in found
    found = message(save_params, tmp_path / "out", ModelConfig.from_hf(FIXTURES / "llama_llama3"), {**params, "extra": params["embed"]})
    assert "extra is [160, 64], but the model's config asks for nothing" in found
    assert "'float16'" in message(save_params, tmp_path / "out", config, params, "float16")
    assert not (tmp_path / "out").exists()
