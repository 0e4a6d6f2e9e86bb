"""Where the tests run: on the CPU with two devices (pmap variants need them), or on what JETRL_TEST_PLATFORM names, such as `cuda`."""

import atexit
import os
import sys
from pathlib import Path

# Before jax is imported, which is when it reads them.
os.environ["JAX_PLATFORMS"] = os.environ.get("JETRL_TEST_PLATFORM", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2".strip()
os.environ.setdefault("JETRL_KERNEL_CACHE", str(Path(__file__).parent.parent / "build" / "kernels"))  # not the user's

sys.path.insert(0, str(Path(__file__).parent / "helpers"))  # `tiny`, which the tests share

import jax  # noqa: E402
import pytest  # noqa: E402


@atexit.register
def _quiet_end() -> None:
    """At the very end triton's bindings list on stderr what they leaked (triton 3.9), after pytest's closing line."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if jax.default_backend() != "gpu":
        skip = pytest.mark.skip(reason="needs a CUDA device; on a machine with one: JETRL_TEST_PLATFORM=cuda python -m pytest -m gpu")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)
