"""`jetrl doctor`: what it says here, and on machines that it can only be told about."""

import types

import jax
import jax.numpy as jnp
import pytest
from packaging.requirements import Requirement

from jetrl_jax import doctor


def test_the_report_names_versions_devices_and_what_falls_back():
    text, code = doctor.report()
    assert f"jax {jax.__version__}" in text
    assert all(f"  {d.id}: {d.device_kind}, " in text for d in jax.local_devices())
    assert "FP8 products: the jnp reference path" in text
    assert "bf16 roundings kept under jit: yes" in text
    assert (code, text.splitlines()[-1]) == (0, "verdict: ready to train")


def test_the_rounding_check_sees_an_xla_that_drops_them(monkeypatch):
    assert doctor.rounding_problems() == []
    monkeypatch.setattr(doctor, "compile", lambda f: lambda x: jnp.square(x.astype(jnp.float32)))
    assert "drops bf16 roundings" in doctor.rounding_problems()[0]

    def refuses(f):
        raise ValueError("No such compile option")

    monkeypatch.setattr(doctor, "compile", refuses)
    assert "XLA refuses" in doctor.rounding_problems()[0]
    text, code = doctor.report()
    assert (code, text.splitlines()[-1]) == (1, "verdict: 1 problem(s) above must be put right")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="only seen on the CPU")
def test_without_the_option_xla_does_drop_a_rounding_here(monkeypatch):
    """What the check is for: the same program under plain jit."""
    monkeypatch.setattr(doctor, "compile", jax.jit)
    assert doctor.rounding_problems() != []


def test_missing_and_old_packages_come_with_their_pip_command():
    lines = doctor.unmet([Requirement("no-such-package>=2"), Requirement("jax>=99"), Requirement("jax")])
    assert lines == [
        "no-such-package missing, needs >=2: pip install 'no-such-package>=2'",
        f"jax {jax.__version__}, needs >=99: pip install 'jax>=99'",
    ]


def test_the_core_requirements_are_met_and_leave_the_extras_out():
    names = {r.name for r in doctor.requirements("jetrl-jax")}
    assert {"jax", "flax", "jinja2"} <= names
    assert not {"triton", "matplotlib", "pytest"} & names


def test_what_could_be_installed(monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda name: None)
    monkeypatch.setattr(doctor, "has_nvidia_driver", lambda: True)
    lines = doctor.missing_extras()
    assert any("pip install matplotlib" in line for line in lines)
    assert any(f"pip install 'jax[cuda13]=={jax.__version__}'" in line for line in lines)


@pytest.mark.parametrize(("capability", "native"), [("9.0", True), ("8.9", True), ("8.0", False), (None, False)])
def test_fp8_tensor_cores_by_compute_capability(capability, native):
    stats = {"bytes_limit": 104 * 2**30}
    device = types.SimpleNamespace(id=3, platform="gpu", device_kind="Some GPU", compute_capability=capability, memory_stats=lambda: stats)
    assert doctor.describe(device) == f"3: Some GPU, 104 GiB for jax, FP8 tensor cores: {'yes' if native else 'no'}"


def test_the_pmap_flag(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_allow_excess_precision=false")
    assert any(line.endswith("XLA_FLAGS set") for line in doctor.numerics())
    monkeypatch.setenv("XLA_FLAGS", "")
    assert any("not set: under jax.pmap rollout and update would round differently" in line for line in doctor.numerics())


def test_a_platform_that_jax_cannot_start(monkeypatch):
    def fails():
        raise RuntimeError("Unable to initialize backend 'tpu'")

    monkeypatch.setattr(doctor.jax, "default_backend", fails)
    text, code = doctor.report()
    assert code == 1
    assert "Unable to initialize backend 'tpu'" in text
