"""From logits to tokens: top-k, top-p and min-p, and the log-probabilities of exactly that distribution.

`z` is everywhere the float32 logits over the temperature, `[..., V]`, as the head gives them. The three filters are reduced to one number
per position, the cut-off tau, and the kept set is `{v : z_v >= tau}` by definition: tokens that tie with the last kept one are kept too.
Rollout stores tau with each token, and the update evaluates `masked_logprob` with the stored tau, so that both sides speak of the same
distribution even where they disagree about z in the last bit (design.md, "Numerics, to the bit", item 8).

The filters compose as in Hugging Face's `generate`: top-k first, then top-p over the renormalised survivors, then min-p relative to the
most probable token. (vLLM has the same top-k and top-p but applies min-p before them; the two differ only if top-p and min-p are both on.)

Noise is Gumbel-max (`argmax(z + g)`, g standard Gumbel), one key for every pair of request and position and never one per slot or batch,
so that a request gets the same tokens alone and in company.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real

import jax
import jax.numpy as jnp

from jetrl_jax.errors import UserError
from jetrl_jax.kernels.vocab import masked_logprob as masked_logprob  # re-exported
from jetrl_jax.numerics import wide

# Below this, logits / temperature leaves float32's useful range (and at 1e-39 overflows); what is meant is greedy decoding.
MIN_TEMPERATURE = 1e-4


def _integer(name: str, value: object, low: int, remedy: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < low:
        raise UserError(f"rollout.{name} = {value!r}: must be an integer of at least {low}; {remedy}")
    return int(value)


def _number(name: str, value: object, remedy: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise UserError(f"rollout.{name} = {value!r}: must be a finite number; {remedy}")
    return float(value)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn. Frozen and hashable, so that it can be a static argument of `jit`.

    Raises:
      UserError: a field of the wrong type or out of its range.
    """

    # The most tokens that one completion may have, stop token included.
    max_new_tokens: int
    # Divides the logits. 0 is greedy decoding: the most probable token, filters unused, log-probabilities those at temperature 1.
    temperature: float = 1.0
    # Keep the k most probable tokens; 0 keeps all, and so does any k >= V.
    top_k: int = 0
    # Keep the smallest set of most probable tokens with at least this mass; 1 keeps all.
    top_p: float = 1.0
    # Keep tokens at least this fraction as probable as the most probable one; 0 keeps all.
    min_p: float = 0.0
    # A completion ends with the first of these ids, which belongs to it.
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        temperature = _number("temperature", self.temperature, "1 samples from the model's own distribution, 0 is greedy")
        if temperature < 0 or 0 < temperature < MIN_TEMPERATURE:
            raise UserError(f"rollout.temperature = {temperature!r}: must be 0 (greedy) or at least {MIN_TEMPERATURE}")
        top_p = _number("top_p", self.top_p, "1 switches the filter off")
        if not 0 < top_p <= 1:
            raise UserError(f"rollout.top_p = {top_p!r}: must be above 0 and at most 1; 1 switches the filter off")
        min_p = _number("min_p", self.min_p, "0 switches the filter off")
        if not 0 <= min_p <= 1:
            raise UserError(f"rollout.min_p = {min_p!r}: must lie between 0 and 1; 0 switches the filter off")
        if isinstance(self.stop_ids, str) or not isinstance(self.stop_ids, Iterable):
            raise UserError(f"rollout.stop_ids = {self.stop_ids!r}: must be a sequence of token ids, such as (2,)")
        stop_ids = tuple(_integer("stop_ids", i, 0, "each entry is a token id") for i in self.stop_ids)
        clean = {
            "max_new_tokens": _integer("max_new_tokens", self.max_new_tokens, 1, "it is the longest completion in tokens"),
            "temperature": temperature,
            "top_k": _integer("top_k", self.top_k, 0, "0 switches the filter off"),
            "top_p": top_p,
            "min_p": min_p,
            "stop_ids": stop_ids,
        }
        # Plain Python numbers, so that equal settings are one static argument and never trace twice.
        for name, value in clean.items():
            object.__setattr__(self, name, value)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


def greedy(z: jax.Array) -> jax.Array:
    """The most probable token, of several the one with the smallest id: `[..., V]` -> `[...]` int32."""
    return jnp.argmax(z, axis=-1).astype(jnp.int32)


def cutoff(z: jax.Array, sampling: Sampling, reductions: str = "auto") -> jax.Array:
    """The smallest logit that survives top-k, top-p and min-p: z `[..., V]` float32 -> tau `[...]` float32, not differentiated.

    -inf if no filter is on or decoding is greedy. Always at most max(z), so that the most probable token is kept. A filter that is
    off is not traced: only top-p without top-k sorts the vocabulary. Its masses are summed as `reductions` says (`jetrl_jax.numerics`).
    """
    z = jax.lax.stop_gradient(z)
    vocabulary = z.shape[-1]
    tau = jnp.full(z.shape[:-1], -jnp.inf, jnp.float32)
    if sampling.is_greedy:
        return tau
    largest = jnp.max(z, axis=-1)
    by_rank = None  # the logits in descending order, as many as top-p must look at
    if 0 < sampling.top_k < vocabulary:
        by_rank, _ = jax.lax.top_k(z, sampling.top_k)
        tau = by_rank[..., -1]
    if sampling.top_p < 1:
        if by_rank is None:
            by_rank = jnp.sort(z, axis=-1, descending=True)
        tau = _nucleus(z, by_rank, tau, sampling.top_p, reductions)
    if sampling.min_p > 0:
        # p_v >= min_p * max p  <=>  z_v >= max z + log(min_p): no normalisation, hence the same before and after the other filters.
        passes = z >= (largest + math.log(sampling.min_p))[..., None]
        tau = jnp.maximum(tau, jnp.min(jnp.where(passes, z, jnp.inf), axis=-1))
    return jnp.minimum(tau, largest)


def _nucleus(z: jax.Array, by_rank: jax.Array, tau: jax.Array, top_p: float, reductions: str) -> jax.Array:
    """Top-p over `{z >= tau}`; `by_rank` are its largest logits in order: all of them, or the k of top-k.

    A token stays while the mass before it is below top_p. If more than k tokens passed top-k by a tie, those beyond k are absent from
    `by_rank` but equal its last entry, so the smallest kept logit is found there all the same; only their mass has to be counted.
    """

    def smallest_kept(z: jax.Array, by_rank: jax.Array, tau: jax.Array) -> jax.Array:
        largest = by_rank[..., :1]
        total = jnp.sum(jnp.where(z >= tau[..., None], jnp.exp(z - largest), 0), axis=-1, keepdims=True)
        mass = jnp.exp(by_rank - largest)
        before = jnp.concatenate([jnp.zeros_like(largest), jnp.cumsum(mass, axis=-1)[..., :-1]], axis=-1)
        return jnp.min(jnp.where(before < top_p * total, by_rank, jnp.inf), axis=-1)

    return wide(smallest_kept, reductions)(z, by_rank, tau)


def request_key(key: jax.Array, request_id: jax.Array | int, position: jax.Array | int) -> jax.Array:
    """The key of one draw: `fold_in(fold_in(run key, request id), position)` (design.md, "Randomness"). Ids are below 2**32."""
    return jax.random.fold_in(jax.random.fold_in(key, request_id), position)


def sample(
    key: jax.Array, z: jax.Array, request_ids: jax.Array, positions: jax.Array, sampling: Sampling, reductions: str = "auto"
) -> tuple[jax.Array, jax.Array]:
    """Draws one token per sequence from the filtered distribution.

    Args:
      key: the run's key, of a threefry implementation: JAX's faster `rbg` keys draw other numbers in another batch.
      z: `[B, V]` float32, logits over the temperature (greedy: over 1).
      request_ids: `[B]` int, unique to the request. positions: `[B]` int, of the token drawn.
      sampling, reductions: static; see `cutoff`.

    Returns:
      tokens `[B]` int32 and the cut-offs tau `[B]` float32 that `masked_logprob` takes. Greedy: the argmax and -inf.
    """
    tau = cutoff(z, sampling, reductions)
    if sampling.is_greedy:
        return greedy(z), tau

    def noise(request_id: jax.Array, position: jax.Array) -> jax.Array:
        # "high": with the default, Gumbel numbers stop at 16 in coarse steps, which 150,000 tokens reach in every 50th draw.
        return jax.random.gumbel(request_key(key, request_id, position), z.shape[-1:], jnp.float32, mode="high")

    noisy = z + jax.vmap(noise)(request_ids, positions)
    return greedy(jnp.where(z >= tau[:, None], noisy, -jnp.inf)), tau
