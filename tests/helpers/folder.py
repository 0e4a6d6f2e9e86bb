"""A tiny Hugging Face folder for tests of the loop: a random Qwen3-shaped model over digits, with a tokenizer of one token a character."""

import json
from pathlib import Path

import jax
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jetrl_jax.config import load
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.models.weights import save_params

LETTERS = "0123456789 +?Whatis.=\n"
SPECIAL = ("<pad>", "<eos>")
MODEL = ModelConfig(
    family="qwen3", vocab_size=len(LETTERS) + 2, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=16, rms_norm_eps=1e-6, rope_theta=10000.0, rope_scaling=None, max_position=64, qkv_bias=False,
    qk_norm=True, tie_embeddings=True,
)  # fmt: skip


def write_tokenizer(folder: Path) -> None:
    vocab = {t: i for i, t in enumerate([*SPECIAL, *LETTERS])}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    raw.add_special_tokens(list(SPECIAL))
    raw.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"}
    settings |= {"clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_model(folder: Path, seed: int = 0) -> Path:
    """The folder, made: weights random but spread, so that sampling ends at different lengths."""
    rng = np.random.default_rng(seed)

    def leaf(path, s):
        noise = rng.normal(size=s.shape).astype(np.float32)
        name = path[-1].key
        return 1 + 0.1 * noise if "norm" in name else (0.3 if name == "embed" else 1.5 / s.shape[-1] ** 0.5) * noise

    save_params(folder, MODEL, jax.tree_util.tree_map_with_path(leaf, MODEL.param_shapes()))
    write_tokenizer(folder)
    return folder


def config_for(model: Path, out: Path, **fields: object):
    """The base config on that folder: one-digit sums, 4 prompts of 4 samples of up to 6 tokens; dots in `fields` are `__`."""
    small = {
        "model.path": model, "out": out, "policy": "bf16", "steps": 2, "data.chat": False, "data.max_prompt_length": 20,
        "rollout.prompts_per_step": 4, "rollout.group_size": 4, "rollout.max_new_tokens": 6, "train.micro_batch": 8,
        "train.vocab_chunk": 16, "optimizer.learning_rate": 1e-2,
    }  # fmt: skip
    small |= {name.replace("__", "."): value for name, value in fields.items()}
    return load("base", [(field, str(value)) for field, value in small.items()])
