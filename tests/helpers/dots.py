"""One product and its gradients, as the tests of `linear.py` and `operands.py` run it."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jetrl_jax.compile import compile
from jetrl_jax.linear import DotSpec, dot
from jetrl_jax.models.qparams import quantize_weight
from jetrl_jax.precision import make_policy

JET = make_policy("jet_fp8").train.base
LONG, SHORT = (2, 130, 200), (2, 5, 48)  # [B, T, K]: ragged in tokens and columns; less than a block
QUICK = {"xla_backend_optimization_level": 0}  # compiles twice as fast, for tests that do not compare bits


def policy(name="jet_fp8", **fields):
    return make_policy(name, **fields).train.base


def drawn(seed, shape, spread=2):
    """Values that bf16 holds exactly, of several magnitudes."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.exp2(rng.integers(-spread, spread + 1, shape))
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def weight(masters, p, site="here"):
    """As quantize_params makes it, without the layers' axis."""
    return jax.tree.map(lambda a: a[0], quantize_weight([jnp.asarray(m)[None] for m in masters], site, p))


def spec_of(masters, p):
    return DotSpec("here", p, tuple(len(m) for m in masters))


def forward_and_gradients(x, masters, dys, p, jit=compile):
    """(outputs, gradient of x, gradients of the masters) of one `dot`; dys are the outputs' gradients."""
    def f(x, w, taps, dys):
        y, vjp = jax.vjp(lambda x, taps: dot(x, w, taps, spec_of(masters, p)), x, taps)
        return y, *vjp(dys)

    return jit(f)(jnp.asarray(x), weight(masters, p), tuple(map(jnp.asarray, masters)), tuple(map(jnp.asarray, dys)))
