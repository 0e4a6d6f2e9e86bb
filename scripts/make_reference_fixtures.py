"""Makes the references that tests compare our models with, by transformers and torch (no test needs torch itself).

    python scripts/make_reference_fixtures.py models                 # tests/fixtures/models/*: tiny random checkpoints
    python scripts/make_reference_fixtures.py text FOLDER NAME       # tests/fixtures/text/NAME.json: greedy text of a real model

Any environment with torch, transformers 5 and numpy will do; the versions used are recorded in the files. Half a minute each.

models/<name>/ is what `save_pretrained` writes of bf16 weights, and reference.npz beside it (<name>_sharded: the same weights in shards,
without a reference). reference.npz, computed in float32 from the bf16 weights, with eager attention:
    tokens [2, 12] int32, logits [2, 12, V] float32 of them,
    greedy [2, 8] int32 the argmax continuation, greedy_gap [2, 8] float32 best minus second-best logit, versions: a JSON string.

text/<name>.json: {"model", "versions", "attention", "prompts": [{"messages", "prompt_ids", "tokens", "text", "top2_tokens", "top2_logits",
"top2_logprobs", "logprobs_float32"}]}: greedy continuation of at most 24 tokens in bf16 (the stop token included), per token the two best
ids with their logits and log-probabilities (reduced in float32), and the log-probability that the same weights in float32 give the token.
Where the two best tie exactly, their order means nothing.
"""

import argparse
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

FIXTURES = Path(__file__).resolve().parent.parent / "tests" / "fixtures"
NEW_TOKENS = 24
QUESTIONS = ("What is 3 + 4?", "Name the capital of France.", "Write one line of Python that prints hello.", "Count from 1 to 5.")
COMMON: dict[str, Any] = {"vocab_size": 160, "num_hidden_layers": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}


def tiny_configs() -> dict[str, transformers.PreTrainedConfig]:
    """Small, and awkward on purpose: heads in groups, sizes that are no multiples of 128, a head_dim that is not D / H."""
    # With these factors and 8 original positions the 8 frequencies fall into all three of Llama 3.1's ranges: kept, blended, divided.
    llama3: dict[str, Any] = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 0.25, "high_freq_factor": 1.0}
    llama3["original_max_position_embeddings"] = 8
    linear: dict[str, Any] = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
    plain: dict[str, Any] = {"rope_type": "default", "rope_theta": 1000000.0}
    small: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    return {
        "llama_llama3": transformers.LlamaConfig(**COMMON, **small, rope_parameters=llama3, tie_word_embeddings=False, rms_norm_eps=1e-5),
        "llama_tied": transformers.LlamaConfig(
            **COMMON, hidden_size=72, intermediate_size=80, num_attention_heads=9, num_key_value_heads=3, rope_parameters=linear,
            tie_word_embeddings=True,
        ),
        "qwen2_tied": transformers.Qwen2Config(
            **COMMON, hidden_size=136, intermediate_size=64, num_attention_heads=4, num_key_value_heads=1, rope_parameters=plain,
            tie_word_embeddings=True,
        ),
        "qwen3": transformers.Qwen3Config(**COMMON, **small, head_dim=32, rope_parameters=plain, tie_word_embeddings=False),
    }


def versions() -> dict[str, str]:
    return {"transformers": transformers.__version__, "torch": torch.__version__, "numpy": np.__version__}


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Weights that leave nothing at zero or one: a forgotten bias or norm must show in the logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                weight.copy_(1 + 0.3 * noise)
            elif name.endswith("bias"):
                weight.copy_(0.5 * noise)
            elif "embed" in name or "lm_head" in name:
                weight.copy_(0.3 * noise)
            else:
                weight.copy_(1.5 * noise / weight.shape[1] ** 0.5)


def reference(folder: Path, seed: int, vocab_size: int) -> dict[str, Any]:
    """Logits and greedy continuation of drawn tokens, in float32 from the stored bf16 weights."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = torch.from_numpy(np.random.default_rng(seed).integers(3, vocab_size, (2, 12)))
    with torch.no_grad():
        logits = model(tokens).logits
        text, gaps = tokens, []
        for _ in range(8):  # whole forwards: the plainest decoding there is
            best = model(text).logits[:, -1].topk(2)
            gaps.append(best.values[:, 0] - best.values[:, 1])
            text = torch.cat([text, best.indices[:, :1]], axis=1)
    return {
        "tokens": tokens.numpy().astype(np.int32),
        "logits": logits.numpy(),
        "greedy": text[:, 12:].numpy().astype(np.int32),
        "greedy_gap": torch.stack(gaps, axis=1).numpy(),
        "versions": np.array(json.dumps(versions())),
    }


def make_model(name: str, config: transformers.PreTrainedConfig) -> None:
    folder = FIXTURES / "models" / name
    for seed in itertools.count():  # the first seed without a near tie, which a right implementation could break either way
        shutil.rmtree(folder, ignore_errors=True)
        model = transformers.AutoModelForCausalLM.from_config(config)
        randomize(model, seed)
        model.to(torch.bfloat16).save_pretrained(folder)
        arrays = reference(folder, seed, config.vocab_size)
        if arrays["greedy_gap"].min() > 0.05:
            break
    np.savez_compressed(folder / "reference.npz", **arrays)
    if name == "llama_tied":
        sharded = folder.with_name(f"{name}_sharded")
        shutil.rmtree(sharded, ignore_errors=True)
        model.save_pretrained(sharded, max_shard_size="60KB")
    size = sum(file.stat().st_size for file in folder.iterdir())
    deviation, gap = arrays["logits"].std(), arrays["greedy_gap"].min()
    print(f"{name}: seed {seed}, {size / 1e3:.0f} kB, logits of deviation {deviation:.2f}, smallest gap {gap:.3f}")


def make_text(source: Path, name: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, local_files_only=True)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(source, dtype=torch.bfloat16, attn_implementation="eager", local_files_only=True).eval()
    prompts = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        with torch.no_grad():
            out = model.generate(
                torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True
            )
        logits = torch.stack([step[0] for step in out.logits]).float()  # [N, V]
        best = logits.topk(2)
        tokens = out.sequences[0, len(ids) :].tolist()
        prompts.append({
            "messages": messages,
            "prompt_ids": ids,
            "tokens": tokens,
            "text": tokenizer.decode(tokens, skip_special_tokens=True),
            "top2_tokens": best.indices.tolist(),
            "top2_logits": best.values.tolist(),
            "top2_logprobs": logits.log_softmax(-1).gather(-1, best.indices).tolist(),
        })
        print(repr(prompts[-1]["text"]))
    model = model.float()
    for prompt in prompts:
        ids, tokens = prompt["prompt_ids"], prompt["tokens"]
        with torch.no_grad():
            logits = model(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1]
        prompt["logprobs_float32"] = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    path = FIXTURES / "text" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"model": name, "versions": versions(), "attention": "eager", "prompts": prompts}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description="make the reference fixtures of the tests")
    modes = parser.add_subparsers(dest="mode", required=True)
    modes.add_parser("models", help="tiny random checkpoints with logits")
    text = modes.add_parser("text", help="greedy text of a real model")
    text.add_argument("folder", type=Path, help="Hugging Face folder of the model")
    text.add_argument("name", help="name of the fixture")
    arguments = parser.parse_args()
    if arguments.mode == "text":
        make_text(arguments.folder, arguments.name)
    else:
        for name, config in tiny_configs().items():
            make_model(name, config)


if __name__ == "__main__":
    main()
