"""How far the update's log-probabilities are from those that rollout reported, on the same tokens under the same parameters.

d = logp_update - logp_rollout over completion tokens, the stop token included, taken from the update's own differentiated
forward at the first mini-batch (before any step moved the parameters). Under an exact unified policy every figure is at its
ideal: 0, or 1 for `mismatch_mean_exp_abs`, the effective sample sizes and the share of equal tokens.

`measure` gives sums and maxima of one micro-batch, `combine` joins micro-batches (over devices: psum of "sum", pmax of "max"),
`finish` divides. The estimators k1 and k3 of KL(rollout || update) are Schulman's ("Approximating KL divergence", 2020).
"""

import jax
import jax.numpy as jnp

Tallies = dict[str, dict[str, jax.Array]]  # {"sum": {name: []}, "max": {name: []}}, float32 scalars

# Only inside exp: e^60, the square of the largest weight, still fits float32 many million times. Beyond it a figure says "broken" anyway.
_EXPONENT_BOUND = 30.0
_SUMS = ("tokens", "sequences", "k1", "k3", "abs", "exp_abs", "equal", "w_token", "w2_token", "w_sequence", "w2_sequence")


def zeros() -> Tallies:
    """The neutral element of `combine`, for the carry of a scan."""
    zero = jnp.zeros((), jnp.float32)
    return {"sum": dict.fromkeys(_SUMS, zero), "max": {"abs": zero}}


def measure(logp_update: jax.Array, logp_rollout: jax.Array, mask: jax.Array) -> Tallies:
    """Tallies of one micro-batch; no gradient flows through them.

    Args:
      logp_update: [B, N] log-probabilities of the sampled tokens as the update recomputed them.
      logp_rollout: [B, N] the same as rollout reported them.
      mask: [B, N], 1 on completion tokens. Elsewhere both arrays may hold anything, NaN included.

    Returns:
      Tallies for `combine` and `finish`. A NaN on a completion token shows up in every figure it belongs to.
    """
    valid = mask > 0
    d = jax.lax.stop_gradient(jnp.where(valid, logp_update, 0) - jnp.where(valid, logp_rollout, 0))  # [B, N], 0 off the mask
    d_sequence = jnp.sum(d, axis=-1)  # [B]: the log-ratio of a whole sequence
    filled = jnp.any(valid, axis=-1)  # rows that only pad the batch are no sequences
    bounded = jnp.clip(d, -_EXPONENT_BOUND, _EXPONENT_BOUND)
    w_token = jnp.exp(bounded)
    w_sequence = jnp.exp(jnp.clip(d_sequence, -_EXPONENT_BOUND, _EXPONENT_BOUND))

    def total(x: jax.Array, where: jax.Array = valid) -> jax.Array:
        return jnp.sum(jnp.where(where, x, 0), dtype=jnp.float32)

    sums = {
        "tokens": total(jnp.ones_like(d)),
        "sequences": total(jnp.ones_like(d_sequence), filled),
        "k1": total(-d),
        "k3": total(jnp.expm1(bounded) - d),  # expm1: no cancellation where d is small, which is where it should be
        "abs": total(jnp.abs(d)),
        "exp_abs": total(jnp.exp(jnp.abs(bounded))),
        "equal": total(logp_update == logp_rollout),
        "w_token": total(w_token),
        "w2_token": total(w_token * w_token),
        "w_sequence": total(w_sequence, filled),
        "w2_sequence": total(w_sequence * w_sequence, filled),
    }
    return {"sum": sums, "max": {"abs": jnp.max(jnp.abs(d), initial=0).astype(jnp.float32)}}


def combine(a: Tallies, b: Tallies) -> Tallies:
    """Tallies of two micro-batches together."""
    return {"sum": jax.tree.map(jnp.add, a["sum"], b["sum"]), "max": jax.tree.map(jnp.maximum, a["max"], b["max"])}


def finish(tallies: Tallies) -> dict[str, jax.Array]:
    """The figures of a whole batch, float32 scalars; all 0 where there was no token.

    Effective sample size = (sum w)^2 / (n sum w^2) with w = e^d, in (0, 1]: by token, and by sequence with d summed over it.
    """
    s = tallies["sum"]

    def ess(n: jax.Array, w: jax.Array, w2: jax.Array) -> jax.Array:
        # both quotients stay in range, where (sum w)^2 alone could overflow
        return jnp.where(n > 0, (w / jnp.where(n > 0, w2, 1)) * (w / jnp.maximum(n, 1)), 0)

    def mean(x: jax.Array) -> jax.Array:
        return x / jnp.maximum(s["tokens"], 1)

    return {
        "mismatch_k1": mean(s["k1"]),
        "mismatch_k3": mean(s["k3"]),
        "mismatch_mean_abs": mean(s["abs"]),
        "mismatch_max_abs": tallies["max"]["abs"],
        "mismatch_mean_exp_abs": mean(s["exp_abs"]),
        "mismatch_equal_share": mean(s["equal"]),
        "ess_token": ess(s["tokens"], s["w_token"], s["w2_token"]),
        "ess_sequence": ess(s["sequences"], s["w_sequence"], s["w2_sequence"]),
    }
