"""Makes the demo's model (models/demo): a small Qwen3 that can add two-digit numbers and often mistypes the answer.

    python scripts/make_demo_checkpoint.py FOLDER         # about 4 minutes on 2 CPU cores; FOLDER must not exist yet

Supervised training on the training split of the `sums` task, in two stages: text with right answers, until nine held-out answers in
ten would be sampled right; then 100 steps on text in which two digits of an answer in five are random, which leaves one in four right.
What reinforcement learning finds is a model that knows the sums but does not act on it, and all that it is told is the reward. No sum
of the test split is trained on; the first stage's end is all that they decide. Deterministic by --seed on one machine (run twice: the
same bytes).
"""

import argparse
import functools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

# Before jax is imported: a product that is shared out among threads adds its parts up in the order in which they finish.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jetrl_jax.compile import compile
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.models.head import HeadSpec, token_logprobs
from jetrl_jax.models.qparams import quantize_params
from jetrl_jax.models.transformer import Transformer, weight_of_head
from jetrl_jax.models.weights import save_params
from jetrl_jax.precision import make_policy
from jetrl_jax.train.tasks import sums

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
VOCABULARY = [PAD, EOS, UNKNOWN, "\n", *map(chr, range(32, 127))]  # a token is a character
CONFIG = ModelConfig(
    family="qwen3", vocab_size=len(VOCABULARY), hidden_size=128, intermediate_size=384, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=32, rms_norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, max_position=128, qkv_bias=False, qk_norm=True, tie_embeddings=True,
)  # fmt: skip
ANSWER = 4  # tokens: up to three digits and the end
BATCH, WARMUP, LEARNING_RATE, WEIGHT_DECAY = 256, 50, 1e-3, 0.1
CHECKED = 10  # steps between two looks at the held-out sums
LEARNT, MAX_STEPS = 0.9, 3000  # the first stage ends at this held-out accuracy
SLIPS, SLIP_STEPS = 0.4, 100  # the second: how many digits are random, and how long

FLOW = make_policy("bf16", reductions="float32").train  # the quick way: exactness matters to the run, not to its starting point
MODEL = Transformer(CONFIG, FLOW, "none")
HEAD = HeadSpec.of(FLOW, chunk=CONFIG.vocab_size)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each printable ASCII character, in transformers' form."""
    inner = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=EOS, pad_token=PAD, unk_token=UNKNOWN,
                                   model_max_length=CONFIG.max_position, clean_up_tokenization_spaces=False)  # fmt: skip


def corpus(split: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Questions [size, 16] and answers [size, ANSWER] of a split as ids; the end token, then padding, after an answer."""
    ids = {token: i for i, token in enumerate(VOCABULARY)}
    examples = sums(digits=2, terms=2, size=size, seed=0, split=split)
    answers = [[*(ids[c] for c in e.answer), ids[EOS], ids[PAD]][:ANSWER] for e in examples]
    return np.array([[ids[c] for c in str(e.prompt)] for e in examples], np.int32), np.array(answers, np.int32)


def slip(answers: np.ndarray, rate: float, rng: np.random.Generator) -> np.ndarray:
    """Answers [B, ANSWER] with every digit replaced by a random one with probability `rate`, the first one never by 0."""
    zero = VOCABULARY.index("0")
    drawn = rng.integers(0, 10, answers.shape)
    drawn[:, 0] = rng.integers(1, 10, len(answers))
    return np.where((answers >= zero) & (rng.random(answers.shape) < rate), zero + drawn, answers).astype(np.int32)


def loss(params: dict, q: dict, questions: jax.Array, answers: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy over the answers' tokens, and the mean probability of a whole answer: the accuracy of sampling at temperature 1."""
    variables = {"params": params, "q": q}
    hidden, _ = MODEL.apply(variables, jnp.concatenate([questions, answers], 1))
    rows = hidden[:, questions.shape[1] - 1 : -1].reshape(-1, CONFIG.hidden_size)
    w, tap = weight_of_head(variables, FLOW)
    logp, _ = token_logprobs(rows, w, tap, answers.reshape(-1), jnp.zeros(answers.size), HEAD)
    mask = answers != VOCABULARY.index(PAD)
    logp = jnp.where(mask, logp.reshape(answers.shape), 0.0)
    return -logp.sum() / mask.sum(), jnp.exp(logp.sum(1)).mean()


def warm_start(seed: int) -> dict:
    """The trained float32 parameters."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.linear_schedule(LEARNING_RATE / WARMUP, LEARNING_RATE, WARMUP), 0.9, 0.98, weight_decay=WEIGHT_DECAY),
    )

    @functools.partial(compile, donate_argnums=(0, 1))
    def step(params, opt_state, questions, answers):
        (value, _), grads = jax.value_and_grad(loss, has_aux=True)(params, quantize_params(FLOW, CONFIG, params), questions, answers)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    held_out = compile(lambda params, questions, answers: loss(params, quantize_params(FLOW, CONFIG, params), questions, answers)[1])
    rng = np.random.default_rng(seed)
    (questions, answers), test = corpus("train", 6480), corpus("test", 512)
    params: Any = jax.jit(lambda key: MODEL.init(key, jnp.zeros((1, 1), jnp.int32))["params"])(jax.random.key(seed))
    opt_state = optimizer.init(params)

    def train(rate: float) -> tuple[float, float]:
        """CHECKED steps on answers with slips at that rate; the last loss, and the held-out accuracy after it."""
        nonlocal params, opt_state
        for _ in range(CHECKED):
            at = rng.integers(0, len(questions), BATCH)
            params, opt_state, value = step(params, opt_state, questions[at], slip(answers[at], rate, rng))
        return float(value), float(held_out(params, *test))

    accuracy, count = 0.0, 0
    while accuracy < LEARNT:
        if count == MAX_STEPS:
            raise SystemExit(f"held-out accuracy {accuracy:.3f} after {MAX_STEPS} steps, not {LEARNT}; try another --seed")
        value, accuracy = train(0.0)
        count += CHECKED
        print(f"right answers: step {count}, loss {value:.3f}, held-out accuracy {accuracy:.3f}", flush=True)
    for count in range(CHECKED, SLIP_STEPS + 1, CHECKED):
        value, accuracy = train(SLIPS)
        print(f"mistyped answers: step {count}, loss {value:.3f}, held-out accuracy {accuracy:.3f}", flush=True)
    return params


def write(folder: Path, params: dict) -> None:
    """config.json, weights in bf16, the tokenizer's files, and generation_config.json with the stop token."""
    eos, pad = VOCABULARY.index(EOS), VOCABULARY.index(PAD)
    with tempfile.TemporaryDirectory() as name:
        source = Path(name)
        make_tokenizer().save_pretrained(source)
        token_ids = {"bos_token_id": None, "eos_token_id": eos, "pad_token_id": pad}
        (source / "config.json").write_text(json.dumps(token_ids))
        generation = {"do_sample": True, "eos_token_id": eos, "pad_token_id": pad}
        (source / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        save_params(folder, CONFIG, params, source=source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.folder.exists():
        parser.error(f"{arguments.folder} exists already: remove it first")
    write(arguments.folder, warm_start(arguments.seed))
    print(f"written to {arguments.folder}")


if __name__ == "__main__":
    main()
