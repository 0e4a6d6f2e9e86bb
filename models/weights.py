"""Weights in and out: Hugging Face safetensors (one file, or shards with an index) <-> the master tree of stacked float32 arrays.

Everything is checked against config.json from the files' headers before a byte of weights is read, and a folder is written whole or not
at all. The projections keep HF's `[out, in]` orientation; the layers of a projection are stacked on axis 0.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jetrl_jax.errors import UserError, unknown
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.models.fields import read_json

# Path in the master tree -> name in the checkpoint. All three families use these names; each has those that its config asks for.
HF_NAMES = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
    "layers/attn_norm": "model.layers.{layer}.input_layernorm.weight",
    "layers/mlp_norm": "model.layers.{layer}.post_attention_layernorm.weight",
    "layers/attn/q": "model.layers.{layer}.self_attn.q_proj.weight",
    "layers/attn/k": "model.layers.{layer}.self_attn.k_proj.weight",
    "layers/attn/v": "model.layers.{layer}.self_attn.v_proj.weight",
    "layers/attn/o": "model.layers.{layer}.self_attn.o_proj.weight",
    "layers/attn/q_bias": "model.layers.{layer}.self_attn.q_proj.bias",
    "layers/attn/k_bias": "model.layers.{layer}.self_attn.k_proj.bias",
    "layers/attn/v_bias": "model.layers.{layer}.self_attn.v_proj.bias",
    "layers/attn/q_norm": "model.layers.{layer}.self_attn.q_norm.weight",
    "layers/attn/k_norm": "model.layers.{layer}.self_attn.k_norm.weight",
    "layers/mlp/gate": "model.layers.{layer}.mlp.gate_proj.weight",
    "layers/mlp/up": "model.layers.{layer}.mlp.up_proj.weight",
    "layers/mlp/down": "model.layers.{layer}.mlp.down_proj.weight",
}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SOURCE_DTYPES = ("F32", "F16", "BF16")
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
MAX_SHARD_BYTES = 5_000_000_000
COPIED_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
TOKEN_ID_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def load_params(folder: str | Path, config: ModelConfig) -> dict[str, Any]:
    """The master parameters in `folder`, float32, in the tree of `config.param_shapes()`.

    Host memory beyond the result: one stacked leaf. `lm_head.weight` of a model with tied embeddings is not read: the embedding is used.
    Errors: `UserError` for a missing or broken file, a missing or unexpected tensor, a wrong shape or an unknown dtype.
    """
    folder = Path(folder)
    with ExitStack() as stack:
        where = _open(folder, stack)
        _check(folder, where, config)
        params = {}
        for path, leaf in flatten_dict(config.param_shapes(), sep="/").items():
            host = np.empty(leaf.shape, np.float32)
            for index, name in _names(path, config):
                host[index] = where[name].get_tensor(name)
            params[path] = jnp.array(host)  # a copy: jax owns it, so that it may be donated
        return unflatten_dict(params, sep="/")


def check_folder(folder: str | Path, config: ModelConfig) -> None:
    """Raises `UserError` where `load_params` would, by the files' headers alone."""
    with ExitStack() as stack:
        _check(Path(folder), _open(Path(folder), stack), config)


def save_params(
    folder: str | Path,
    config: ModelConfig,
    params: Mapping[str, Any],
    dtype: str = "bfloat16",
    *,
    source: str | Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a model folder that transformers loads: config.json, weights in `dtype`, and the tokenizer's files copied from `source`.

    Above `max_shard_bytes` the weights go into shards with an index. The folder must not exist yet, or be empty; it appears complete, by
    a rename, or not at all. Host memory: one stacked leaf and one shard.
    """
    folder = Path(folder)
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder} exists already: choose another folder, or remove it first")
    flat, shapes = flatten_dict(params, sep="/"), flatten_dict(config.param_shapes(), sep="/")
    for path in sorted(set(flat) | set(shapes)):
        found, expected = (list(tree[path].shape) if path in tree else "nothing" for tree in (flat, shapes))
        if found != expected:
            raise UserError(f"cannot write {folder}: parameter {path} is {found}, but the model's config asks for {expected}")
    raw = config.to_hf() | {"dtype": dtype, "torch_dtype": dtype}
    if source is not None:
        given = read_json(Path(source) / "config.json", "give the folder of a Hugging Face model")
        raw |= {field: given.get(field) for field in TOKEN_ID_FIELDS}

    final = folder.resolve()
    partial = final.parent / f".{final.name}.{os.getpid()}.partial"  # beside it: a rename does not cross file systems
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write_json(partial / "config.json", raw)
        for name in COPIED_FILES:
            if source is not None and (Path(source) / name).is_file():
                shutil.copyfile(Path(source) / name, partial / name)
        _write_shards(partial, _tensors(config, flat, dtype), max_shard_bytes)
        partial.rename(final)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as an error of its own
        raise UserError(f"cannot write {folder} ({error}): free some space or choose another folder; nothing was left there") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def export_model(
    source: str | Path,
    folder: str | Path,
    params: Mapping[str, Any] | None = None,
    dtype: str = "bfloat16",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> ModelConfig:
    """What `jetrl export` does: `params` (or, without them, the weights in `source`) as a model folder with the tokenizer of `source`.

    Reads what was written once more, headers only, before it returns the model's config.
    """
    config = ModelConfig.from_hf(source)
    params = load_params(source, config) if params is None else params
    save_params(folder, config, params, dtype, source=source, max_shard_bytes=max_shard_bytes)
    check_folder(folder, ModelConfig.from_hf(folder))
    return config


def _names(path: str, config: ModelConfig) -> Iterator[tuple[Any, str]]:
    """The checkpoint's tensors of one leaf, each with the index at which it stands in the leaf."""
    name = HF_NAMES[path]
    if path.startswith("layers/"):
        yield from ((layer, name.format(layer=layer)) for layer in range(config.num_layers))
    else:
        yield ..., name


def _open(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Tensor name -> open file that holds it. Like transformers, the single file is preferred where both forms are there."""
    if (folder / SINGLE).exists():
        handle = _open_file(folder / SINGLE, stack)
        return dict.fromkeys(handle.keys(), handle)
    if not (folder / INDEX).exists():
        raise UserError(f"{folder} has no weights: neither {SINGLE} nor {INDEX}; give a Hugging Face folder in safetensors format")
    weight_map = read_json(folder / INDEX, "fetch the file again").get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) and file == Path(file).name for file in weight_map.values()):
        raise UserError(f"{folder / INDEX}: weight_map must map tensor names to file names of this folder; fetch the file again")
    handles = {file: _open_file(folder / file, stack) for file in sorted(set(weight_map.values()))}
    held = {file: set(handle.keys()) for file, handle in handles.items()}
    for name, file in weight_map.items():
        if name not in held[file]:
            raise UserError(f"{folder / file}: tensor {name} is missing, though {INDEX} places it there; fetch both files again")
    return {name: handles[file] for name, file in weight_map.items()}


def _open_file(path: Path, stack: ExitStack) -> Any:
    try:
        return stack.enter_context(safe_open(path, framework="numpy"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist, though {INDEX} names it: fetch the missing file") from None
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise UserError(f"{path} ({size} bytes) is broken or cut short ({error}): fetch the file again (with git-lfs, if by git)") from None


def _check(folder: Path, where: Mapping[str, Any], config: ModelConfig) -> None:
    """Names, shapes and dtypes of all tensors against the config, from the headers alone."""
    expected: dict[str, list[int]] = {}
    for path, leaf in flatten_dict(config.param_shapes(), sep="/").items():
        for index, name in _names(path, config):
            expected[name] = list(leaf.shape if index is ... else leaf.shape[1:])
    missing = [name for name in expected if name not in where]
    if missing:
        tied = "; or set tie_word_embeddings to true in config.json, if the model ties them" if missing == [HF_NAMES["lm_head"]] else ""
        count = f"{len(missing)} tensors are missing, the first" if len(missing) > 1 else "a tensor is missing"
        shape = expected[missing[0]]
        raise UserError(f"{folder}: {count}: {missing[0]}, of shape {shape} by config.json; fetch the checkpoint again{tied}")
    for name, shape in expected.items():
        header = where[name].get_slice(name)
        if header.get_shape() != shape:
            raise UserError(
                f"{folder}: tensor {name} has shape {header.get_shape()}, but config.json asks for {shape}; "
                "weights and config.json are of different models"
            )
        if header.get_dtype() not in SOURCE_DTYPES:
            raise UserError(f"{folder}: tensor {name} is {header.get_dtype()}; give a checkpoint in {', '.join(SOURCE_DTYPES)}")
    # Old checkpoints store RoPE's frequencies, tied ones may store the embedding twice. Anything else would change the model's output.
    ignored = {HF_NAMES["lm_head"]} if config.tie_embeddings else set()
    extra = sorted(n for n in where if n not in expected and n not in ignored and not n.endswith(".rotary_emb.inv_freq"))
    if extra:
        raise UserError(
            f"{folder}: {len(extra)} unexpected tensors, the first: {extra[0]}; a {config.family} model of {config.num_layers} layers "
            "does not have them: weights and config.json are of different models"
        )


def _tensors(config: ModelConfig, flat: Mapping[str, Any], dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    for path, leaf in flat.items():
        host = np.asarray(leaf).astype(DTYPES[dtype])  # to the nearest, ties to even
        for index, name in _names(path, config):
            yield name, np.ascontiguousarray(host[index])


def _write_shards(folder: Path, tensors: Iterator[tuple[str, np.ndarray]], max_shard_bytes: int) -> None:
    """Fill shards in order; their number, which is part of their names, is known at the end."""
    shards: list[list[str]] = []
    shard: dict[str, np.ndarray] = {}
    total = 0

    def flush() -> None:
        path = folder / f"{len(shards)}.part"
        save_file(shard, path, metadata={"format": "pt"})
        shutil.copymode(folder / "config.json", path)  # safetensors makes files that only their owner can read
        shards.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        if shard and sum(held.nbytes for held in shard.values()) + tensor.nbytes > max_shard_bytes:
            flush()
        shard[name] = tensor
        total += tensor.nbytes
    flush()
    count = len(shards)
    files = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    for i, file in enumerate(files):
        (folder / f"{i}.part").rename(folder / file)
    if count > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
