"""`jetrl doctor`: what this machine has, whether its kernels are right, what falls back to jnp, and what to install."""

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from packaging.requirements import Requirement

from jetrl_jax.compile import PMAP_FLAG, compile, pmap_flag_set
from jetrl_jax.kernels import launch, selfcheck
from jetrl_jax.numerics import wide_dtype

SHOWN = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "safetensors", "ml_collections")
OPTIONAL = {"matplotlib": "the curve of a run"}
FP8_CAPABILITY = 8.9  # the first compute capability with FP8 tensor cores; Hopper is 9.0


def report() -> tuple[str, int]:
    """The text to print, and 0 if training can run here, 1 if something must be put right first."""
    problems = unmet(requirements("jetrl-jax"))
    sections = [("versions", [f"python {platform.python_version()}", *(f"{name} {version(name) or 'missing'}" for name in SHOWN)])]
    try:
        backend = jax.default_backend()
    except (RuntimeError, AssertionError) as e:  # JAX_PLATFORMS names a platform that this jax cannot start
        named = f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}"
        problems.append(f"jax starts no backend with {named} ({type(e).__name__}: {str(e) or 'none found'}): unset it, or set it to cpu")
    else:
        problems += rounding_problems()
        kernels, faults = selfcheck.run()
        problems += faults
        sections += [(f"devices (backend {backend})", [describe(d) for d in jax.local_devices()]), ("numerics", numerics()),
                     ("kernels", kernels)]
    sections.append(("to install or put right", [*problems, *missing_extras()] or ["nothing"]))
    lines = []
    for title, rows in sections:
        lines += [title, *(f"  {row}" for row in rows), ""]
    lines.append("verdict: " + (f"{len(problems)} problem(s) above must be put right" if problems else "ready to train"))
    return "\n".join(lines), int(bool(problems))


def version(name: str) -> str | None:
    """The installed version of a distribution, None if it is missing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def requirements(distribution: str) -> list[Requirement]:
    """What an installed distribution needs at its core, extras left out."""
    found = [Requirement(r) for r in importlib.metadata.requires(distribution) or ()]
    return [r for r in found if r.marker is None or r.marker.evaluate({"extra": ""})]


def unmet(needed: Iterable[Requirement]) -> list[str]:
    """A line with the pip command for each requirement that is missing or too old."""
    lines = []
    for r in needed:
        have = version(r.name)
        if have is None or not r.specifier.contains(have, prereleases=True):
            lines.append(f"{r.name} {have or 'missing'}, needs {r.specifier or 'any version'}: pip install '{r.name}{r.specifier}'")
    return lines


def describe(device: jax.Device) -> str:
    """Name and memory of a device, and whether it has FP8 tensor cores."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        memory = f"{stats['bytes_limit'] / 2**30:.0f} GiB for jax"
    else:
        memory = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB of host memory"
    cores = "" if device.platform == "cpu" else f", FP8 tensor cores: {'yes' if has_fp8_cores(device) else 'no'}"
    return f"{device.id}: {device.device_kind}, {memory}{cores}"


def has_fp8_cores(device: jax.Device) -> bool:
    """Whether an NVIDIA device multiplies E4M3 natively; False on anything else."""
    return float(getattr(device, "compute_capability", 0) or 0) >= FP8_CAPABILITY


def numerics() -> list[str]:
    """How FP8 products, reductions and roundings run here."""
    why = launch.missing()
    products = f"the jnp reference path: {why}" if why else "our kernels on this device's FP8 tensor cores (policy_overrides.kernels)"
    pmap = "set" if pmap_flag_set() else f"not set: under jax.pmap rollout and update would round differently; set XLA_FLAGS={PMAP_FLAG}"
    return [
        f"FP8 products: {products}",
        f"reductions: {jnp.dtype(wide_dtype()).name} by default",
        f"bf16 roundings kept under jit: {'no' if rounding_problems() else 'yes'}",
        f"bf16 roundings kept under pmap: XLA_FLAGS {pmap}",
    ]


def rounding_problems() -> list[str]:
    """Empty if XLA takes and obeys the option that keeps bf16 roundings (design.md, "Numerics" 1)."""
    x = jnp.full(8, 1 + 2**-7, jnp.bfloat16)  # its square, 1 + 2^-6 + 2^-14, is 1 + 2^-6 in bf16; left alone XLA keeps all of it
    try:
        square = compile(lambda x: (x * x).astype(jnp.float32))(x)
    except Exception as e:  # whatever this XLA raises for an option that it does not know
        return [f"XLA refuses xla_allow_excess_precision ({type(e).__name__}): pip install 'jax>=0.11'"]
    if (square != 1 + 2**-6).any():
        return ["XLA drops bf16 roundings though xla_allow_excess_precision is off, so rollout and update differ: pip install 'jax>=0.11'"]
    return []


def missing_extras() -> list[str]:
    """Optional packages that are not there, with the command that brings them; CUDA's where a GPU is not used."""
    lines = [f"{name} (optional, {use}): pip install {name}" for name, use in OPTIONAL.items() if version(name) is None]
    if has_nvidia_driver() and version("jax-cuda13-plugin") is None:
        lines.append(f"an NVIDIA driver is here, and jax cannot use it: pip install 'jax[cuda13]=={jax.__version__}'")
    return lines


def has_nvidia_driver() -> bool:
    """Whether the machine has an NVIDIA driver, by its tool or its kernel module."""
    return shutil.which("nvidia-smi") is not None or os.path.exists("/proc/driver/nvidia/version")
