"""The quantization kernels without a GPU: interpreted over numpy against `canonical_quantize`, and compiled for sm_90a."""

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton")
from interpreted import patched
from quantized import FORMATS, nasty, same

from jetrl_jax.kernels import inspect, operators, quantizers, reference_fused, tiles
from jetrl_jax.precision import Format
from jetrl_jax.quantize import dequantize, quantize, quantize_p

ROWS, COLUMNS, BLOCKS = Format(), Format(block=(128, 1)), Format(block=(128, 128))
S = jax.ShapeDtypeStruct


@pytest.fixture
def numpy():
    with patched(tiles, quantizers):
        yield


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("shape", [(2, 130, 200), (3, 7, 70), (5, 384)], ids=str)
def test_quantize_is_the_oracles(numpy, fmt, shape):
    x = nasty(shape, jnp.bfloat16 if shape[-1] % 2 else jnp.float32)
    assert operators.supported(x.aval, site="", fmt=fmt)
    same(quantizers.native_quantize(x, site="", fmt=fmt), quantize_p.bind(x, site="", fmt=fmt))


@pytest.mark.parametrize("block", [(1, 64), (1, 0), (1, 48), (1, 512)], ids=str)
def test_other_row_blocks(numpy, block):
    x = nasty((3, 9, 192), jnp.bfloat16)
    fmt = Format(block=block)
    same(quantizers.native_quantize(x, site="", fmt=fmt), quantize_p.bind(x, site="", fmt=fmt))


@pytest.mark.parametrize("config", [(1, 1, 1), (1, 4, 1), (16, 2, 4), (64, 1, 4)], ids=str)
def test_row_tiles(numpy, config):
    x = nasty((33, 640), jnp.bfloat16)
    same(quantizers.rows(x, ROWS, config), quantize_p.bind(x, site="", fmt=ROWS))


@pytest.mark.parametrize("shape", [(2, 130, 200), (2, 256, 256), (1, 1, 128)], ids=str)
def test_both_requantize_and_blocks(numpy, shape):
    x = nasty(shape, jnp.bfloat16)
    e5m2 = Format("e5m2", (128, 1), "pow2")
    same(quantizers.quantize_both(x, ROWS, e5m2), reference_fused.quantize_both(x, ROWS, e5m2))
    values, scales = reference_fused.quantize(x, ROWS)
    same(quantizers.requantize(values, scales, COLUMNS), reference_fused.requantize(values, scales, COLUMNS))
    same(quantizers.requantize(values, scales, COLUMNS, (128, 8, None)), reference_fused.requantize(values, scales, COLUMNS))
    same(quantizers.columns(x, COLUMNS, (64, 4)), reference_fused.quantize(x, COLUMNS))
    w = nasty(shape, jnp.float32)
    same(quantizers.blocks(w, BLOCKS, transposed=True), reference_fused.quantize_blocks(w, BLOCKS))


def test_requantize_is_dequantize_then_quantize():
    x = nasty((2, 130, 200), jnp.bfloat16)
    q = quantize(x, "x", ROWS)
    want = quantize(dequantize(q), "xT", COLUMNS)
    same(reference_fused.requantize(q.values, q.scales, COLUMNS), [want.values, want.scales])


def test_operators_on_the_cpu_are_the_oracles():
    x = nasty((2, 130, 200), jnp.bfloat16)
    same(operators.quantize_both_p.bind(x, declares=(("a", ROWS), None, ("b", COLUMNS), None)),
         quantize_p.bind(x, site="", fmt=ROWS) + quantize_p.bind(x, site="", fmt=COLUMNS))
    values, scales, turned = jax.jit(lambda w: operators.quantize_blocks_p.bind(
        w, declares=(("w", BLOCKS), None, ("w", BLOCKS)), kernels="auto"))(x.astype(jnp.float32))
    same([values, scales], quantize_p.bind(x, site="", fmt=BLOCKS))
    same([turned], [values.swapaxes(-1, -2)])
    q = quantize_p.bind(x, site="", fmt=ROWS)
    same(operators.requantize_p.bind(*q, declares=(("xT", COLUMNS), None)), reference_fused.requantize(*q, COLUMNS))


@pytest.mark.parametrize("fmt,shape,dtype,fits", [
    (Format(block=(1, 0)), (4, 4096), jnp.bfloat16, False), (Format(block=(0, 0)), (4, 4), jnp.bfloat16, False),
    (Format("bf16", (0, 0)), (4, 128), jnp.bfloat16, False), (ROWS, (0, 128), jnp.bfloat16, False), (ROWS, (4, 128), jnp.float64, False),
    (Format(block=(64, 64)), (128, 128), jnp.float32, False), (ROWS, (4, 128), jnp.float32, True)], ids=str)
def test_what_is_covered(fmt, shape, dtype, fits):
    assert operators.supported(S(shape, dtype), site="", fmt=fmt) is fits


BIG = S((8192, 4096), jnp.bfloat16)
PAYLOAD, SCALES = S((8192, 4096), jnp.float8_e4m3fn), S((8192, 32), jnp.float32)


@pytest.mark.parametrize("fun,shapes", [
    (lambda x: quantizers.rows(x, ROWS), [BIG]), (lambda x: quantizers.rows(x, ROWS), [S((1, 4096), jnp.bfloat16)]),
    (lambda x: quantizers.columns(x, COLUMNS), [BIG]), (lambda x: quantizers.quantize_both(x, ROWS, COLUMNS), [BIG]),
    (lambda x: quantizers.quantize_both(x, Format("e5m2"), COLUMNS), [S((3, 130, 200), jnp.float32)]),
    (lambda q, s: quantizers.requantize(q, s, COLUMNS), [PAYLOAD, SCALES]),
    (lambda w: quantizers.blocks(w, BLOCKS, True), [S((36, 4096, 4096), jnp.float32)])], ids=range(7))
def test_compiles_for_hopper(fun, shapes):
    for c in inspect.compiled(fun, *shapes):
        assert c.spilled == 0 and c.shared <= inspect.SHARED_LIMIT, c.name
        assert shapes[0].dtype == jnp.float32 or c.registers * c.threads * 2 <= 65536, c.name  # two on a multiprocessor
        assert c.uses("F2FP")
        if all(s.shape[-1] % 128 == 0 for s in shapes):
            assert c.uses("LDG.E.128") and c.uses("STG.E.128")
