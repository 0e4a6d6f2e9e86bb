"""Decode attention without a GPU: the kernel's source on numpy, the operator's oracle, and what the kernel compiles to."""

import math
from pathlib import Path

import gluon_numpy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import STORED, case

pytest.importorskip("triton")

from jetrl_jax.kernels import decode_attention, flash, inspect  # noqa: E402
from jetrl_jax.kernels.decode_attention import Config, candidates  # noqa: E402

HERE = Path(decode_attention.__file__).parent


def run_on_numpy(operands, config):
    """What the kernels write, with everything that they may leave out poisoned."""
    q, k, v, layer, positions, *scales = operands
    (b, h, hd), (s, kv) = q.shape, k.shape[2:4]
    parts, heads = -(-s // config.segment), math.gcd(kv, config.heads)
    run = gluon_numpy.kernels(HERE / "attend_segment.py", HERE / "decode_attention.py")
    inputs = [gluon_numpy.Ptr(x) for x in (q, k, v, *(scales or (layer, layer)), layer, positions)]
    sizes = dict(B=b, S=s, KV=kv, G=h // kv, D=hd, HD=1 << (hd - 1).bit_length(), FP8=bool(scales), SEGMENT=config.segment, PARTS=parts,
                 HB=heads, W=heads * config.warps, BW=config.slots, STAGES=config.stages)
    out = np.full((b, h, hd), np.nan, q.dtype)
    part, sums = np.full((b, parts, h, hd), np.nan, np.float32), np.full((b, parts, h, 2), np.nan, np.float32)
    for gluon_numpy.gl.pid in range(b * parts * kv // heads):
        if parts == 1:
            run["_single"](*inputs, gluon_numpy.Ptr(out), **sizes)
        else:
            run["_segments"](*inputs, gluon_numpy.Ptr(part), gluon_numpy.Ptr(sums), **sizes)
    for gluon_numpy.gl.pid in range(b * h if parts > 1 else 0):
        run["_merge"](*(gluon_numpy.Ptr(x) for x in (part, sums, positions, out)), S=s, H=h, D=hd, HD=sizes["HD"], SEGMENT=config.segment,
                      PARTS=parts, P2=1 << (parts - 1).bit_length(), CHUNK=min(8, 1 << (parts - 1).bit_length()))
    return out


@pytest.mark.parametrize("fmt, shape, config", [
    ("bf16", (3, 77, 2, 4, 128), Config(2, 1, 32, 3, 96)),
    ("bf16", (4, 300, 2, 7, 64), Config(1, 2, 16, 2, 64)),
    ("bf16", (2, 100, 3, 1, 80), Config(4, 1, 32, 3, 512)),
    ("e4m3", (3, 77, 2, 4, 128), Config(1, 1, 32, 3, 32)),
    ("e4m3", (4, 200, 4, 8, 64), Config(4, 2, 32, 3, 128)),
    ("e4m3", (2, 100, 3, 2, 96), Config(1, 4, 16, 4, 512)),
    ("e4m3", (2, 600, 1, 16, 16), Config(1, 1, 32, 2, 32)),
])
def test_source_on_numpy(fmt, shape, config):
    operands, exact, tolerance = case(fmt, *shape)
    with np.errstate(invalid="ignore"):
        assert (np.abs(run_on_numpy(operands, config).astype(np.float64) - exact) <= tolerance).all()


@pytest.mark.parametrize("fmt", STORED)
def test_operator_here_is_its_oracle(fmt):
    operands, exact, tolerance = case(fmt, 5, 70, 2, 3, 32)
    out = jax.jit(lambda *a: flash.decode_attention_p.bind(*a, kernels="auto")[0])(*operands)
    assert out.dtype == jnp.bfloat16 and (np.abs(np.asarray(out, np.float64) - exact) <= tolerance).all()


COMPILED = [
    *[("bf16", 8, 4, 128, c) for c in candidates(False)[:3]],
    *[("e4m3", 8, 4, 128, c) for c in candidates(True)[:3]],
    ("e4m3", 2, 7, 64, Config(1, 2, 32, 2, 512)),
    ("e5m2", 4, 1, 32, Config(2, 1, 32, 3, 4096)),
    ("bf16", 4, 2, 80, Config(4, 1, 32, 2, 512)),
]


@pytest.mark.parametrize("fmt, kv, group, hd, config", COMPILED)
def test_compiles_for_hopper(fmt, kv, group, hd, config):
    s = jax.ShapeDtypeStruct
    cache, scales = s((2, 16, 4096, kv, hd), STORED[fmt]), s((2, 16, 4096, kv, 1), jnp.float32)
    shapes = [s((16, kv * group, hd), jnp.bfloat16), cache, cache, s((1,), jnp.int32), s((16,), jnp.int32)]
    found = inspect.compiled(lambda *a: decode_attention.attention(*a, config=config), *shapes, *([scales] * 2 if fmt != "bf16" else []))
    assert [c.name for c in found] == (["_single"] if config.segment == 4096 else ["_segments", "_merge"])
    assert all(c.spilled == 0 and c.shared <= inspect.SHARED_LIMIT for c in found)
    assert found[0].uses("HMMA.16816.F32.BF16") and found[0].uses("LDGSTS.E.BYPASS.128")
    if fmt == "e4m3":  # payload, read 16 bytes at a time, is widened in pairs
        assert found[0].uses("F2FP.F16.E4M3.UNPACK_B") and found[0].uses("LDS.128" if hd == 128 else "LDS")
