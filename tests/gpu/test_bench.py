"""`jetrl bench kernels` on a Hopper GPU: a small run of it, and that the other contestants compute what they are said to.

JETRL_TEST_PLATFORM=cuda,cpu python -m pytest -p no:xdist -o addopts="--import-mode=importlib" -m gpu -rA tests/gpu/test_bench.py
"""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax import cli
from jetrl_jax.bench import others, products, rows
from jetrl_jax.kernels import launch

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def hopper():
    if launch.missing():
        pytest.skip(launch.missing())


def wanted(a, sa, w, sw):
    """The block-scaled product in float32."""
    a = a.astype(jnp.float32) * jnp.repeat(sa.T, 128, -1)[:, :a.shape[1]]
    w = w.astype(jnp.float32) * jnp.repeat(jnp.repeat(sw, 128, 0), 128, 1)[:w.shape[0], :w.shape[1]]
    return np.asarray(jnp.einsum("mk,nk->mn", a, w, precision="highest"))


def error(y, want):
    y = np.asarray(y).astype(np.float32)
    return np.linalg.norm(y - want) / np.linalg.norm(want)


@pytest.mark.parametrize(("m", "n", "k"), [(512, 256, 384), (300, 200, 256)])
def test_plain_triton_multiplies(m, n, k):
    from jetrl_jax.bench import plain_triton

    [operands] = products.fp8_operands(m, n, k, 1)
    assert error(jax.jit(plain_triton.product)(*operands), wanted(*operands)) < 4e-3


def test_xla_keeps_the_per_tensor_product_in_fp8():
    [(a, _, w, _)] = products.fp8_operands(8192, 4096, 4096, 1)  # a small product XLA widens
    [y] = others.xla_fp8_program([(a, w)]).call()
    y, want = y[:64], np.asarray(a[:64]).astype(np.float32) @ np.asarray(w).astype(np.float32).T
    assert error(y, want) < 4e-3


def test_cublaslt_takes_the_scales_as_they_are_given():
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed here")
    contestant = others.cublaslt(512, 256, 1024, 2)
    y = contestant.call()
    contestant.wait(y)
    assert tuple(y.shape) == (512, 256) and bool(y.isfinite().all())


def test_a_small_run_writes_rows(tmp_path, capsys):
    out = tmp_path / "kernels.json"
    assert cli.main(["bench", "kernels", "--only=attention", "--shapes=qwen2.5-0.5b", f"--out={out}"]) == 0
    print(capsys.readouterr().out)
    found = rows.read(out)
    assert {r.against for r in found} == {"device-to-device copy"} and {r.device for r in found} == {jax.devices()[0].device_kind}
    assert all(r.value > 100 and r.against_value > 1000 for r in found)  # GB/s
    assert cli.main(["bench", "page", f"--out={tmp_path / 'page.md'}"]) == 0
