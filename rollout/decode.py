"""Rollout as one jitted program: prefill once a prompt, fan out to its samples, then decode over the KV cache until all have ended.

The loop is a `lax.while_loop`; with `fixed_length` the same body is a `lax.scan` over all positions, and gives the same tokens. Both run
the very modules and payloads that the update trains (`models/transformer.py`).
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jetrl_jax.kernels.vocab import of_logits_p
from jetrl_jax.models.head import HeadSpec, logits
from jetrl_jax.models.transformer import Transformer, weight_of_head
from jetrl_jax.rollout.cache import KVCache, from_prefill
from jetrl_jax.rollout.sampling import Sampling, sample


@flax.struct.dataclass
class Rollout:
    """Completions of B = P·G requests, the G samples of a prompt in a row.

    tokens [B, N] int32, 0 after the end; logprobs [B, N] float32 of the distribution that was sampled from; tau [B, N] float32, the
    smallest kept logit (-inf without a filter); lengths [B] int32, stop token included; stopped [B] bool, false where the length limit cut
    it.
    """

    tokens: jax.Array
    logprobs: jax.Array
    tau: jax.Array
    lengths: jax.Array
    stopped: jax.Array


def prefill(
    model: Transformer, qparams: dict, tokens: jax.Array, lengths: jax.Array, slots: int, copies: int = 1
) -> tuple[tuple[KVCache, ...], jax.Array]:
    """Right-padded prompts [P, T] of `lengths` [P] -> caches for P·copies sequences of `slots` tokens, and the last hidden state [P, D]."""
    out: Any = model.apply({"q": qparams}, tokens, collect=True)
    hidden, kv = out
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], 1)[:, 0]
    return tuple(from_prefill(pair, slots, copies) for pair in kv), last


def decode_step(model: Transformer, qparams: dict, tokens: jax.Array, positions: jax.Array, caches: tuple[KVCache, ...]):
    """One token a sequence [B] at its position [B] -> caches with it written, hidden [B, D] that predicts the next token."""
    out: Any = model.apply({"q": qparams}, tokens[:, None], positions=positions, caches=caches)
    hidden, caches = out
    return caches, hidden[:, 0]


def generate(model: Transformer, qparams: dict, prompts: jax.Array, prompt_lengths: jax.Array, request_ids: jax.Array, key: jax.Array,
             sampling: Sampling, fixed_length: bool = False) -> Rollout:
    """Samples completions. Pure; `model`, `sampling` and `fixed_length` are static. Compile it with `jetrl_jax.compile.compile`.

    Args:
      prompts: [P, T] int32, right-padded; prompt_lengths: [P].
      request_ids: [P·G]: sample g of prompt p is row p·G + g. A request's noise comes from its id and the position alone
        (`sampling.request_key`), so it gives the same tokens alone and in company (design.md, "Randomness").
    """
    n, (p, t), b = sampling.max_new_tokens, prompts.shape, request_ids.shape[0]
    if b % p:
        raise ValueError(f"{b} request_ids for {p} prompts: every prompt needs the same number of samples")
    copies = b // p
    head, spec = weight_of_head({"q": qparams}, model.flow)[0], HeadSpec.of(model.flow, sampling.temperature)
    caches, hidden = prefill(model, qparams, prompts, prompt_lengths, t + n, copies)
    lengths0 = jnp.repeat(prompt_lengths, copies)
    stop_ids = jnp.asarray(sampling.stop_ids, jnp.int32)

    def draw(i, hidden, out, done):
        """Token i of every sequence that has not ended, written to `out`."""
        z = logits(hidden, head, spec)
        token, tau = sample(key, z, request_ids, lengths0 + i, sampling, model.flow.reductions)
        logp, = of_logits_p.bind(z, token, tau, reductions=spec.reductions, kernels=spec.kernels)
        token, logp = jnp.where(done, 0, token), jnp.where(done, 0.0, logp)
        out = Rollout(out.tokens.at[:, i].set(token), out.logprobs.at[:, i].set(logp), out.tau.at[:, i].set(jnp.where(done, -jnp.inf, tau)),
                      out.lengths + ~done, out.stopped | (~done & (token[:, None] == stop_ids).any(-1)))
        return out, token

    def body(carry):
        i, token, out, caches = carry
        # A sequence that has ended writes outside the cache, which drops it.
        at = jnp.where(out.stopped, t + n, lengths0 + i - 1)
        caches, hidden = decode_step(model, qparams, token, at, caches)
        out, token = draw(i, hidden, out, out.stopped)
        return i + 1, token, out, caches

    zeros = jnp.zeros((b, n))
    empty = Rollout(zeros.astype(jnp.int32), zeros, zeros - jnp.inf, jnp.zeros(b, jnp.int32), jnp.zeros(b, bool))
    out, token = draw(0, jnp.repeat(hidden, copies, 0), empty, empty.stopped)
    carry = (jnp.int32(1), token, out, caches)
    if fixed_length:
        return lax.scan(lambda c, _: (body(c), None), carry, length=n - 1)[0][2]
    return lax.while_loop(lambda c: (c[0] < n) & ~c[2].stopped.all(), body, carry)[2]
