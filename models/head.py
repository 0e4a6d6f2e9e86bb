"""lm_head: logits of a few rows, and log-probabilities of many without ever holding the full [B, T, V] logits.

Logits are float32, divided by the temperature. With top-k, top-p or min-p the rollout stores each token's cut-off τ, and a log-probability
is that of the kept set {v : z_v ≥ τ} ∪ {token} (design.md "Numerics" 8). The operators are `kernels/vocab.py`'s.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jetrl_jax.kernels.vocab import backward_p, forward_p, logits_p
from jetrl_jax.numerics import wide_dtype
from jetrl_jax.precision import Flow, Format
from jetrl_jax.quantize import QTensor, quantize


@dataclasses.dataclass(frozen=True)
class HeadSpec:
    """Static part: the operands' format, temperature, rows of the vocabulary held at a time, and whether a cut-off applies."""

    fmt: Format
    temperature: float = 1.0
    chunk: int = 4096
    filtered: bool = False
    reductions: str = "auto"
    kernels: str = "auto"

    @classmethod
    def of(cls, flow: Flow, temperature: float = 1.0, chunk: int = 4096, filtered: bool = False) -> "HeadSpec":
        """Greedy decoding (temperature 0) reports the distribution at temperature 1."""
        return cls(flow.base.logits, temperature or 1.0, chunk, filtered, flow.reductions, flow.kernels)

    def inverse(self, rows: int) -> jax.Array:
        """1 / temperature of each row, wide [R]. Called in an x64 region."""
        return jnp.full(rows, 1 / self.temperature, wide_dtype(self.reductions))

    @property
    def params(self) -> dict[str, Any]:
        return {"chunk": self.chunk, "filtered": self.filtered, "reductions": self.reductions, "kernels": self.kernels}


def logits(hidden: jax.Array, w: QTensor, spec: HeadSpec) -> jax.Array:
    """hidden [B, D] -> logits over the temperature, float32 [B, V]."""
    x = quantize(hidden, "lm_head.x", spec.fmt)
    with jax.enable_x64(True):
        return logits_p.bind(x.values, w.values, spec.inverse(hidden.shape[0]), reductions=spec.reductions, kernels=spec.kernels)[0]


def _narrow(y: jax.Array, x: jax.Array) -> jax.Array:
    return y.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def token_logprobs(hidden: jax.Array, w: QTensor, tap: jax.Array | None, targets: jax.Array, tau: jax.Array, spec: HeadSpec):
    """hidden [R, D], targets [R], τ [R] -> log-probability of each target and entropy of its distribution, both float32 [R].

    Only [R, spec.chunk] logits exist at a time, forward and backward; the gradient of lm_head arrives at the master `tap` [V, D].
    """
    return _token_fwd(hidden, w, tap, targets, tau, spec)[0]


def _token_fwd(hidden, w, tap, targets, tau, spec):
    x = quantize(hidden, "lm_head.x", spec.fmt).values
    with jax.enable_x64(True):
        out = forward_p.bind(x, w.values, targets, tau, spec.inverse(x.shape[0]), **spec.params)
        return (_narrow(out[0], x), _narrow(out[1], x)), (hidden, x, w, tap, targets, tau, out)


def _token_bwd(spec, residuals, cotangents):
    hidden, x, w, tap, targets, tau, out = residuals
    weight = None if tap is None else tap.dtype.name
    with jax.enable_x64(True):
        dx, *dw = backward_p.bind(x, w.values, targets, tau, spec.inverse(x.shape[0]), *out, *cotangents, weight=weight, **spec.params)
        return dx.astype(hidden.dtype), None, dw[0] if dw else None, None, None


token_logprobs.defvjp(_token_fwd, _token_bwd)
