"""A row of figures that the tests of the bench change."""

import dataclasses
from typing import Any

from jetrl_jax.bench.rows import Row

ROW = Row(
    work="fprop qkv", measure="TFLOP/s", value=1145.0, against="XLA bf16", against_value=803.0, ratio=1.426, better="higher", must=1.4,
    aim=1.6, command="jetrl bench kernels", device="NVIDIA H200", versions={"jax": "0.11.2"})


def changed(**fields: Any) -> Row:
    """ROW with other fields."""
    return dataclasses.replace(ROW, **fields)
