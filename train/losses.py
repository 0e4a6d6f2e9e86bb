"""Policy-gradient losses over the log-probabilities of sampled tokens: pure functions over [B, N] arrays and a mask.

B sequences, N completion positions. Every choice is a name in a dict here and a field of `Objective`. The loss of a batch is the
sum of the losses of its micro-batches, to rounding, because the divisors are computed once over the whole batch (`normaliser`).
Off the mask (0 on prompt and padding) any array may hold anything, NaN included: it reaches neither loss nor gradient.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jetrl_jax.errors import UserError, unknown

# A log-ratio is held in +-20 before exp, so that nothing overflows to inf and then meets a 0. Beyond it the gradient is 0: at
# e^20 times a negative advantage a step would only do harm. verl bounds at the same value.
LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What is optimised; hashable, a static argument of the update. Field names are those of `config.algorithm`.

    `dapo` (2503.14476) has the surrogate of `grpo` (2402.03300, eq. 3): it means the two bounds set apart, usually with `token_mean`.
    """

    kind: str = "grpo"  # grpo | dapo | gspo; `config.algorithm.objective`
    clip_low: float = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2
    aggregation: str = "token_mean"  # token_mean | sequence_mean | constant
    constant_length: int = 0  # for `constant`: the length every sequence is divided by, the longest completion allowed
    kl_coefficient: float = 0.0
    kl_estimator: str = "k3"  # k1 | k2 | k3
    kl_place: str = "loss"  # loss | reward
    correction: str = "none"  # none | tis | mis, of the mismatch between rollout and update
    correction_level: str = "token"  # token | sequence
    correction_cap: float = 2.0
    mask_truncated: bool = False  # leave out completions that ended at the length limit (DAPO, section 3.4)

    def __post_init__(self) -> None:
        choices: list[tuple[str, str, Iterable[str]]] = [
            ("objective", self.kind, LOG_RATIOS),
            ("aggregation", self.aggregation, AGGREGATIONS),
            ("kl_estimator", self.kl_estimator, KL_ESTIMATORS),
            ("kl_place", self.kl_place, ("loss", "reward")),
            ("correction", self.correction, ("none", "tis", "mis")),
            ("correction_level", self.correction_level, ("token", "sequence")),
        ]
        for field, value, known in choices:
            if value not in known:
                raise unknown(f"algorithm.{field}", value, known)
        # written so that NaN fails too
        if not 0 <= self.clip_low <= 1:
            raise UserError(f"algorithm.clip_low is {self.clip_low}: the lower bound is 1 - clip_low, give a number from 0 to 1")
        if not 0 <= self.clip_high < math.inf:
            raise UserError(f"algorithm.clip_high is {self.clip_high}: the upper bound is 1 + clip_high, give a finite number from 0 up")
        if not 0 <= self.kl_coefficient < math.inf:
            raise UserError(f"algorithm.kl_coefficient is {self.kl_coefficient}: give a finite number from 0 up, 0 for no KL term")
        if not 1 <= self.correction_cap < math.inf:
            raise UserError(f"algorithm.correction_cap is {self.correction_cap}: below 1 it would touch on-policy tokens, give 1 or more")
        if self.aggregation == "constant" and self.constant_length < 1:
            raise UserError(f"constant_length is {self.constant_length}: aggregation 'constant' divides by it, give the maximum length")


def mask_of(lengths: jax.Array, truncated: jax.Array, n: int, mask_truncated: bool) -> jax.Array:
    """The completion mask: lengths [B] (stop token included), truncated [B] bool -> [B, n] float32 of 0 and 1.

    With `mask_truncated`, completions that ended at the length limit are left out whole.
    """
    kept = jnp.where(truncated, 0, lengths) if mask_truncated else lengths
    return (jnp.arange(n) < kept[:, None]).astype(jnp.float32)


class Normaliser(NamedTuple):
    """Divisors of the whole batch, float32 scalars. All are sums over sequences: over devices, psum them."""

    tokens: jax.Array
    sequences: jax.Array  # those with at least one token: rows that pad the batch do not count
    slots: jax.Array  # sequences * constant_length


def normaliser(mask: jax.Array, objective: Objective) -> Normaliser:
    """The divisors for a whole batch (not a micro-batch): mask [B, N]."""
    sequences = jnp.sum(jnp.any(mask > 0, axis=-1), dtype=jnp.float32)
    return Normaliser(jnp.sum(mask > 0, dtype=jnp.float32), sequences, sequences * objective.constant_length)


def _token_mean(token_loss: jax.Array, mask: jax.Array, by: Normaliser) -> jax.Array:
    return jnp.sum(token_loss) / jnp.maximum(by.tokens, 1)


def _sequence_mean(token_loss: jax.Array, mask: jax.Array, by: Normaliser) -> jax.Array:
    return jnp.sum(_row_mean(token_loss, mask)) / jnp.maximum(by.sequences, 1)


def _constant(token_loss: jax.Array, mask: jax.Array, by: Normaliser) -> jax.Array:
    return jnp.sum(token_loss) / jnp.maximum(by.slots, 1)


# DAPO section 3.3; GRPO eq. 3; Dr. GRPO (2503.20783) section 3.2: no division by the length that a completion happens to have
AGGREGATIONS: dict[str, Callable[[jax.Array, jax.Array, Normaliser], jax.Array]] = {
    "token_mean": _token_mean,
    "sequence_mean": _sequence_mean,
    "constant": _constant,
}


def aggregate(token_loss: jax.Array, mask: jax.Array, how: str, by: Normaliser) -> jax.Array:
    """token_loss [B, N] of a micro-batch -> its share [] of the batch's loss; the shares add up."""
    return AGGREGATIONS[how](_blank(token_loss, mask), mask, by)


def _blank(x: jax.Array, mask: jax.Array) -> jax.Array:
    """x with 0 off the mask. A select before any arithmetic: 0 * NaN is NaN, in the gradient too."""
    return jnp.where(mask.astype(bool), x, 0)


def _row_mean(x: jax.Array, mask: jax.Array) -> jax.Array:
    """[B, N] -> [B], the mean over tokens; 0 for a row without any. x is 0 off the mask."""
    return jnp.sum(x, axis=-1) / jnp.maximum(jnp.sum(mask > 0, axis=-1), 1)


def _token_log_ratio(logp: jax.Array, anchor: jax.Array, mask: jax.Array) -> jax.Array:
    return logp - anchor


def _sequence_log_ratio(logp: jax.Array, anchor: jax.Array, mask: jax.Array) -> jax.Array:
    """GSPO 2507.18071, eq. 7 (value: mean over tokens) in the token form of eq. 14 (gradient: each token's own).

    With one advantage per sequence the gradient is that of eq. 10; the token form lets each token carry its own correction weight.
    """
    mean = jax.lax.stop_gradient(_row_mean(logp - anchor, mask))
    return _blank(mean[:, None] + (logp - jax.lax.stop_gradient(logp)), mask)


LOG_RATIOS: dict[str, Callable[[jax.Array, jax.Array, jax.Array], jax.Array]] = {
    "grpo": _token_log_ratio,
    "dapo": _token_log_ratio,
    "gspo": _sequence_log_ratio,
}


def policy_ratio(
    logp: jax.Array, old_logp: jax.Array | None, rollout_logp: jax.Array, mask: jax.Array, objective: Objective
) -> tuple[jax.Array, jax.Array]:
    """The importance ratio that is clipped, and the constant weight that corrects the mismatch of rollout and update.

    Correction `none`: ratio exp(logp - rollout_logp), weight 1. `tis`, `mis`: ratio exp(logp - old_logp), where old_logp is the
    update's own log-probability at the first forward, times exp(old_logp - rollout_logp), capped (`tis`: Yao et al. 2025, "Your
    efficient RL framework secretly brings you off-policy RL training") or 0 above the cap (`mis`: Liu, Li et al. 2025, "When speed
    kills stability"). By `sequence` one weight serves all tokens of a sequence, from the **sum** of its log-ratios: the true
    ratio of the sequences' probabilities, unbiased until it is capped, as in verl's "rollout correction"; a mean would not be.

    Args:
      logp: [B, N], differentiated.
      old_logp: [B, N], or None at the first forward, where it is stop_gradient(logp). Not read by `none`.
      rollout_logp, mask: [B, N].

    Returns:
      ratio [B, N] (for `gspo` that of the sequence, on each of its tokens) and weight [B, N], without gradient; both 1 off the mask.
    """
    logp, rollout_logp = _blank(logp, mask), jax.lax.stop_gradient(_blank(rollout_logp, mask))
    if objective.correction == "none":
        anchor, weight = rollout_logp, jnp.ones_like(logp)
    else:
        anchor = jax.lax.stop_gradient(logp if old_logp is None else _blank(old_logp, mask))
        drift = anchor - rollout_logp
        if objective.correction_level == "sequence":
            drift = _blank(jnp.broadcast_to(jnp.sum(drift, axis=-1, keepdims=True), drift.shape), mask)
        cap = objective.correction_cap
        beyond = cap if objective.correction == "tis" else 0.0
        weight = jnp.where(drift > math.log(cap), beyond, jnp.exp(jnp.minimum(drift, math.log(cap))))  # compared as logs: no inf
    log_ratio = LOG_RATIOS[objective.kind](logp, anchor, mask)
    return jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)), weight


def _k3(x: jax.Array) -> jax.Array:
    return jnp.expm1(jnp.clip(x, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)) - x


# of x = ref_logp - logp. Schulman 2020, "Approximating KL divergence"; k3 is GRPO's (2402.03300, eq. 4)
KL_ESTIMATORS: dict[str, Callable[[jax.Array], jax.Array]] = {"k1": lambda x: -x, "k2": lambda x: 0.5 * x * x, "k3": _k3}


def kl_estimate(logp: jax.Array, ref_logp: jax.Array, mask: jax.Array, estimator: str) -> jax.Array:
    """Estimate of KL(policy || reference) at each token, [B, N], differentiable in logp, 0 off the mask.

    In the loss it is the *gradient* that counts: on-policy that of k2 is the KL's own, that of k1 averages to zero (k1 belongs into
    the reward), and that of k3 is the gradient of KL(reference || policy).
    """
    return KL_ESTIMATORS[estimator](jax.lax.stop_gradient(_blank(ref_logp, mask)) - _blank(logp, mask))


def kl_reward_penalty(rollout_logp: jax.Array, ref_logp: jax.Array, mask: jax.Array, estimator: str, coefficient: float) -> jax.Array:
    """For `kl_place` reward: what to subtract from each sequence's reward, [B], the coefficient times the sum over its tokens."""
    return coefficient * jnp.sum(kl_estimate(rollout_logp, ref_logp, mask, estimator), axis=-1)


def policy_loss(
    logp: jax.Array,
    rollout_logp: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    objective: Objective,
    by: Normaliser,
    *,
    old_logp: jax.Array | None = None,
    ref_logp: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """A micro-batch's share of the loss, -weight * min(ratio A, clip(ratio) A) + kl_coefficient * KL, aggregated.

    Args:
      logp, rollout_logp, mask, old_logp: as in `policy_ratio`.
      advantages: [B], one per sequence.
      by: the divisors of the whole batch.
      ref_logp: [B, N] under the reference; needed for a KL term in the loss, else only measured.

    Returns:
      loss [], and sums (float scalars without gradient) that add up over micro-batches and devices; `finish_metrics` divides them.
    """
    in_loss = objective.kl_place == "loss" and objective.kl_coefficient > 0
    if in_loss and ref_logp is None:
        raise ValueError("kl_place is 'loss' and kl_coefficient > 0, so ref_logp is needed")
    mask = mask > 0
    ratio, weight = policy_ratio(logp, old_logp, rollout_logp, mask, objective)
    gain = _blank(advantages[:, None], mask)  # [B, N]
    low, high = 1 - objective.clip_low, 1 + objective.clip_high
    above, below, good, bad = ratio > high, ratio < low, gain > 0, gain < 0
    # The minimum written as a select: its gradient is right on the bound too, where `minimum` would halve it. A clip only bites
    # where the ratio has already moved the way the advantage pushes.
    token_loss = -weight * gain * jnp.where(above & good, high, jnp.where(below & bad, low, ratio))
    kl = jnp.zeros_like(ratio) if ref_logp is None else kl_estimate(logp, ref_logp, mask, objective.kl_estimator)
    if in_loss:
        token_loss = token_loss + objective.kl_coefficient * kl
    per_token = {
        "tokens": jnp.ones_like(ratio),
        "ratio": ratio,
        "weight": weight,
        "kl": kl,
        "clip_fraction": (above & good) | (below & bad),  # the gradient of these tokens is cut
        "above_positive": above & good,
        "above_negative": above & bad,
        "below_positive": below & good,
        "below_negative": below & bad,
    }
    sums = {name: jax.lax.stop_gradient(jnp.sum(_blank(x, mask), dtype=ratio.dtype)) for name, x in per_token.items()}
    return aggregate(token_loss, mask, objective.aggregation, by), sums


def finish_metrics(sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Means over all tokens of the added-up sums; 0 where there was no token."""
    return {name: x / jnp.maximum(sums["tokens"], 1) for name, x in sums.items() if name != "tokens"}
