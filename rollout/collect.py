"""One step's rollout on the host's side: prompts in, completions with their texts out."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jetrl_jax.compile import compile
from jetrl_jax.models.qparams import quantize_params
from jetrl_jax.models.tokenizer import Tokenizer
from jetrl_jax.models.transformer import Transformer
from jetrl_jax.rollout.decode import Rollout, generate
from jetrl_jax.rollout.sampling import Sampling
from jetrl_jax.rollout.stopping import cut_at_stop_strings, text_before_stop

quantize: Any = compile(quantize_params, static_argnums=(0, 1, 3))  # (flow, model config, master[, transposed]) -> qparams
compiled_generate: Any = compile(generate, static_argnums=(0, 6, 7))


class Samples(NamedTuple):
    """P prompts, G samples each, as numpy on the host: `rollout` rows and `texts` are [P·G], a prompt's samples in a row."""

    prompts: np.ndarray  # [P, T] int32, right-padded
    prompt_lengths: np.ndarray  # [P]
    rollout: Rollout
    texts: list[str]


def pad_prompts(prompts: Sequence[Sequence[int]], length: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Right-padded tokens [B, P] int32 with P = length, and the lengths [B] int32. ValueError for an empty or too long prompt."""
    lengths = np.array([len(ids) for ids in prompts], np.int32)
    if not len(prompts) or lengths.min() < 1 or lengths.max() > length:
        raise ValueError(f"prompts to pad must have 1 to {length} tokens, got lengths {lengths.tolist()}")
    tokens = np.full((len(prompts), length), pad_id, np.int32)
    for row, ids in zip(tokens, prompts, strict=True):
        row[: len(ids)] = ids
    return tokens, lengths


class Sampler:
    """Calls the jitted rollout with one shape: every batch is padded to `rows` prompts of `width` tokens, so that nothing recompiles."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        sampling: Sampling,
        *,
        rows: int,
        width: int,
        group: int = 1,
        stop_strings: Sequence[str] = (),
        fixed_length: bool = False,
    ):
        self.model, self.tokenizer, self.sampling = model, tokenizer, sampling
        self.rows, self.width, self.group = rows, width, group
        self.stop_strings, self.fixed_length = tuple(stop_strings), fixed_length

    def __call__(self, qparams: dict, prompts: Sequence[Sequence[int]], request_ids: np.ndarray, key: jax.Array) -> Samples:
        """prompts: at most `rows` lists of ids; request_ids [len(prompts)·group], unique to each sample."""
        count = len(prompts)
        # An unused row is one pad token long, and its samples are thrown away.
        pad = self.tokenizer.pad_id
        tokens, lengths = pad_prompts([*prompts, *[[pad]] * (self.rows - count)], self.width, pad)
        ids = np.zeros(self.rows * self.group, np.uint32)
        ids[: len(request_ids)] = request_ids
        out = compiled_generate(
            self.model, qparams, jnp.asarray(tokens), jnp.asarray(lengths), jnp.asarray(ids), key, self.sampling, self.fixed_length
        )
        out = jax.tree.map(lambda x: np.array(x)[: count * self.group], jax.device_get(out))
        return Samples(tokens[:count], lengths[:count], *self._texts(out))

    def _texts(self, out: Rollout) -> tuple[Rollout, list[str]]:
        """Texts without stop token and stop string; rows that a stop string ends become shorter."""
        lengths: Any = np.array(out.lengths)
        stopped: Any = np.array(out.stopped)
        texts = []
        for i, row in enumerate(out.tokens):
            kept = row[: lengths[i]]
            if self.stop_strings:
                n, cut = cut_at_stop_strings(kept, self.tokenizer.decode, self.stop_strings)
                if cut:
                    stopped[i], lengths[i], kept = True, n, kept[:n]
            ended_by_id = len(kept) and int(kept[-1]) in self.sampling.stop_ids
            text = self.tokenizer.decode(kept[:-1] if ended_by_id else kept)
            texts.append(text_before_stop(text, self.stop_strings) if self.stop_strings else text)
        return dataclasses.replace(out, lengths=lengths, stopped=stopped), texts
