"""The drawn batch and the loop oracle of the loss tests.

The oracle takes two points of the model: `theta`, where the loss is, and `frozen`, where everything under a stop_gradient is. So
central differences in theta alone are the gradient that the code should have, also for the token form of GSPO.
"""

import math

import jax.numpy as jnp
import numpy as np

from jetrl_jax.train import losses
from jetrl_jax.train.losses import Objective

B, N, CONTEXTS, V = 5, 6, 4, 5
LENGTHS = [6, 3, 5, 0, 1]  # full, ragged, empty, single
BOUNDS = {"grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "gspo": (0.1, 0.15)}
CORRECTIONS = [("none", "token"), ("tis", "token"), ("tis", "sequence"), ("mis", "token"), ("mis", "sequence")]
KLS = [(0.0, "k3"), (0.3, "k1"), (0.3, "k2"), (0.3, "k3")]
AGGREGATIONS = sorted(losses.AGGREGATIONS)


class Batch:
    """A tiny model, a table of logits theta [CONTEXTS, V], and a drawn batch on which clips and caps do and do not bite."""

    def __init__(self, seed: int = 1):
        rng = np.random.default_rng(seed)
        self.theta = rng.standard_normal((CONTEXTS, V))
        self.contexts = rng.integers(0, CONTEXTS, (B, N))
        self.tokens = rng.integers(0, V, (B, N))
        self.mask = (np.arange(N) < np.array(LENGTHS)[:, None]).astype(np.float64)
        self.logp = self.model(self.theta, np)
        self.old = self.logp + 0.25 * rng.standard_normal((B, N))
        self.rollout = self.old + 0.3 * rng.standard_normal((B, N)) - 0.1
        self.ref = self.logp + 0.5 * rng.standard_normal((B, N))
        self.advantages = np.array([1.3, -0.7, -1.1, 0.4, 0.9])

    def model(self, theta, xp):
        logits = theta[self.contexts]
        shifted = logits - logits.max(-1, keepdims=True)
        normal = shifted - xp.log(xp.exp(shifted).sum(-1, keepdims=True))
        return xp.take_along_axis(normal, self.tokens[..., None], axis=-1)[..., 0]

    def arrays(self, dtype=jnp.float32):
        """Positional and keyword arrays of policy_loss, without logp."""
        cast = [jnp.asarray(x, dtype) for x in (self.rollout, self.advantages, self.mask, self.old, self.ref)]
        return cast[:3], {"old_logp": cast[3], "ref_logp": cast[4]}


BATCH = Batch()


def objective(kind="grpo", aggregation="token_mean", correction=("none", "token"), kl=(0.0, "k3"), **changes) -> Objective:
    fields = {
        "kind": kind,
        "clip_low": BOUNDS[kind][0],
        "clip_high": BOUNDS[kind][1],
        "aggregation": aggregation,
        "constant_length": 9,
        "correction": correction[0],
        "correction_level": correction[1],
        "correction_cap": 1.2,
        "kl_coefficient": kl[0],
        "kl_estimator": kl[1],
    }
    return Objective(**(fields | changes))


def oracle(o: Objective, batch: Batch, theta: np.ndarray, frozen: np.ndarray, margins: list[float] | None = None) -> float:
    """The loss in plain Python; `margins` collects the distance of every quantity to its kink and, by sign, which side it is on."""
    logp, fixed = batch.model(theta, np), batch.model(frozen, np)
    margins = [] if margins is None else margins
    rows = []  # per sequence, its token losses
    for b in range(B):
        anchor = batch.rollout[b] if o.correction == "none" else batch.old[b]
        length = LENGTHS[b]
        drift = [anchor[n] - batch.rollout[b, n] for n in range(length)]
        row = []
        for n in range(length):
            if o.kind == "gspo":
                sequence = math.exp(sum(fixed[b, m] - anchor[m] for m in range(length)) / length)
                ratio = sequence * math.exp(logp[b, n] - fixed[b, n])
            else:
                ratio = math.exp(logp[b, n] - anchor[n])
            w = 1.0
            if o.correction != "none":
                w = math.exp(sum(drift) if o.correction_level == "sequence" else drift[n])
                margins.append(w - o.correction_cap)
                if w > o.correction_cap:
                    w = o.correction_cap if o.correction == "tis" else 0.0
            a = batch.advantages[b]
            margins += [ratio - (1 + o.clip_high), ratio - (1 - o.clip_low)]
            clipped = min(max(ratio, 1 - o.clip_low), 1 + o.clip_high)
            loss = -w * min(ratio * a, clipped * a)
            x = batch.ref[b, n] - logp[b, n]
            if o.kl_place == "loss":
                loss += o.kl_coefficient * {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[o.kl_estimator]
            row.append(loss)
        rows.append(row)
    filled = [row for row in rows if row]
    if o.aggregation == "token_mean":
        return sum(map(sum, filled)) / sum(map(len, filled))
    if o.aggregation == "sequence_mean":
        return sum(sum(row) / len(row) for row in filled) / len(filled)
    return sum(map(sum, filled)) / (len(filled) * o.constant_length)
