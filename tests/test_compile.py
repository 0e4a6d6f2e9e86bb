"""The compile function keeps bf16 roundings that plain jit drops, and pmap's flag is insisted on."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.compile import PMAP_FLAG, check_pmap_flags, compile, pmap_flag_set
from jetrl_jax.errors import UserError


def chain(a, b, c):
    """A sum over bf16 products: op by op every product is rounded to bf16 before the sum widens it to float32."""
    return (a * b).sum(-1) + c[0]


def drawn():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(32, 32)), jnp.bfloat16) for _ in range(3)]


def bits(x):
    return np.asarray(x).view(np.uint16)


def test_compiled_equals_op_by_op_to_the_bit():
    args = drawn()
    np.testing.assert_array_equal(bits(compile(chain)(*args)), bits(chain(*args)))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="which roundings XLA drops depends on the backend")
def test_plain_jit_drops_roundings_of_this_very_chain():
    args = drawn()
    assert (bits(jax.jit(chain)(*args)) != bits(chain(*args))).any()  # else the test above shows nothing


def test_arguments_of_jit_pass_through_and_nothing_recompiles():
    traced = chex.assert_max_traces(lambda x, n: x * n, n=2)
    f = compile(traced, static_argnums=1, donate_argnums=0)
    for n in (2, 3, 2):
        x = jnp.ones(4)
        np.testing.assert_array_equal(f(x, n), np.full(4, n))
        assert x.is_deleted()


@pytest.mark.parametrize("flags", [PMAP_FLAG, f"--xla_dump_to=x {PMAP_FLAG.upper()}"])
def test_the_flag_of_pmap_is_found(monkeypatch, flags):
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert pmap_flag_set()
    check_pmap_flags()


@pytest.mark.parametrize("flags", [None, "", "--xla_allow_excess_precision=true", f"{PMAP_FLAG}ish"])
def test_without_the_flag_pmap_is_refused(monkeypatch, flags):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    if flags is not None:
        monkeypatch.setenv("XLA_FLAGS", flags)
    assert not pmap_flag_set()
    with pytest.raises(UserError, match=f"XLA_FLAGS=.* lacks {PMAP_FLAG}.*start again"):
        check_pmap_flags()
