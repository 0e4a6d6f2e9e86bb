"""Runs our memory-bound Gluon kernels on the CPU: their Python bodies over numpy arrays, layouts ignored, every access checked.

`patched(*modules)` makes `launch.call` do so for kernels of those modules. What it shows is the arithmetic, the masks and the addresses;
outputs start as 0xAA bytes, so that what a kernel leaves out is seen. It is no GPU: registers and races are not in it.
"""

import contextlib
import math
import types
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from triton.experimental.gluon._runtime import GluonJITFunction

from jetrl_jax.kernels import launch

F32 = np.dtype(np.float32)
FP8 = {"e4m3": (ml_dtypes.float8_e4m3fn, 448.0), "e5m2": (ml_dtypes.float8_e5m2, 57344.0)}


class Array(np.ndarray):
    """A block of numbers with the few methods that kernels use."""

    type = types.SimpleNamespace(layout=None)

    def __array_wrap__(self, out, context=None, return_scalar=False):
        return np.asarray(out).view(Array)

    def to(self, dtype, bitcast=False):
        return wrap(np.ascontiguousarray(self).reshape(self.shape).view(dtype) if bitcast else np.asarray(self).astype(dtype))


def wrap(x: Any) -> Any:
    return np.asarray(x).view(Array)


class Pointer:
    """Elements `offset` of a flat array."""

    def __init__(self, flat: np.ndarray, offset: Any = 0):
        self.flat, self.offset = flat, offset

    def __add__(self, n):
        return Pointer(self.flat, np.asarray(self.offset) + np.asarray(n))

    def to(self, dtype, bitcast=True):
        return Pointer(self.flat.view(dtype), self.offset * self.flat.itemsize // np.dtype(dtype).itemsize)

    def at(self, mask, shape=None):
        offset = np.broadcast_to(np.asarray(self.offset), np.shape(self.offset) if shape is None else shape)
        mask = np.broadcast_to(True if mask is None else np.asarray(mask), offset.shape)
        inside = offset[mask]
        assert inside.size == 0 or (inside.min() >= 0 and inside.max() < self.flat.size), "access outside of an array"
        return offset, mask


def load(pointer, mask=None, other=0.0):
    offset, mask = pointer.at(mask)
    out = np.full(offset.shape, other, pointer.flat.dtype)
    out[mask] = pointer.flat[offset[mask]]
    return wrap(out)


def store(pointer, value, mask=None):
    offset, mask = pointer.at(mask, np.broadcast_shapes(np.shape(pointer.offset), np.shape(value)))
    pointer.flat[offset[mask]] = np.broadcast_to(np.asarray(value), offset.shape)[mask].astype(pointer.flat.dtype)


def reduce(x, axis, combine):
    parts = [wrap(p) for p in np.moveaxis(np.asarray(x), axis, 0)]
    out = parts[0]
    for p in parts[1:]:
        out = combine(out, p)
    return out


def fp8(fmt: str, x: Any) -> np.ndarray:
    dtype, limit = FP8[fmt]
    return np.clip(np.asarray(x), -limit, limit).astype(dtype)


def assembly(text: str, constraints: str, args: list, dtype=None, **_) -> Any:
    """The meaning of our few lines of PTX, by what is in them."""
    a = [np.asarray(x) for x in args]
    if "satfinite" in text:
        fmt = "e5m2" if "e5m2" in text else "e4m3"
        by = a[-2] if "and.b32 $0, w" in text else a[-1]
        out = [fp8(fmt, x.astype(F32) * by).view(np.uint8) for x in a[: 1 if by is a[-2] else 4]]
        if by is a[-2]:
            return wrap(np.where(np.broadcast_to(a[-1], out[0].shape) == 0, np.uint8(0), out[0]).view(dtype))
        return wrap(sum(x.astype(np.uint32) << (8 * i) for i, x in enumerate(out)).view(np.int32))
    if text.startswith(("rcp.rn", "rcp.approx")):
        return wrap((np.float32(1) / a[0]).astype(F32))
    if text.startswith("ex2"):
        return wrap(np.exp2(a[0]).astype(F32))
    if "max.NaN.bf16x2" in text:
        return wrap(np.maximum(np.abs(a[0].astype(F32)), np.abs(a[1].astype(F32))).astype(dtype))
    if text.startswith("cvt.rn.bf16x2") or (dtype == F32 and "shl.b32" in text):
        return wrap(a[0].astype(dtype))
    raise NotImplementedError(text)


class Shared:
    """Shared memory of a kernel, without its races."""

    def __init__(self, dtype, shape, layout=None):
        self.data = np.full(shape, np.nan, dtype)

    def index(self, i):
        part = Shared.__new__(Shared)
        part.data = self.data[i]
        return part

    def store(self, x):
        self.data[...] = x

    def load(self, layout=None):
        return wrap(self.data.copy())


def fma(a, b, c):
    return wrap((np.asarray(a, np.float64) * np.asarray(b, np.float64) + np.asarray(c, np.float64)).astype(F32))


def language(program: list[int], warps: list[int]) -> types.SimpleNamespace:
    def nothing(*args, **kwargs):
        return None

    return types.SimpleNamespace(
        constexpr=Any, BlockedLayout=nothing, SliceLayout=nothing, SwizzledSharedLayout=nothing, allocate_shared_memory=Shared,
        program_id=lambda axis: wrap(np.int32(program[axis])),
        num_warps=lambda: warps[0], arange=lambda a, b, layout=None: wrap(np.arange(a, b, dtype=np.int32)), static_range=range,
        load=load, store=store, reduce=reduce, sum=lambda x, axis: wrap(np.asarray(x).sum(axis, dtype=x.dtype)),
        where=lambda c, a, b: wrap(np.where(c, a, b)), abs=lambda x: wrap(np.abs(np.asarray(x))),
        maximum=lambda a, b, propagate_nan=None: wrap(np.maximum(a, b)), fma=fma,
        rsqrt=lambda x: wrap((1 / np.sqrt(np.asarray(x))).astype(np.asarray(x).dtype)), convert_layout=lambda x, layout: x,
        expand_dims=lambda x, axis: wrap(np.expand_dims(np.asarray(x), axis)),
        full=lambda shape, value, dtype, layout=None: wrap(np.full(shape, value, dtype)), inline_asm_elementwise=assembly,
        pointer_type=lambda t: t, int8=np.int8, int32=np.int32, int64=np.int64, uint32=np.uint32, float32=F32, float64=np.float64,
        bfloat16=np.dtype(ml_dtypes.bfloat16), float8e4nv=np.dtype(ml_dtypes.float8_e4m3fn), float8e5=np.dtype(ml_dtypes.float8_e5m2))


@contextlib.contextmanager
def patched(*modules: Any) -> Iterator[None]:
    """Inside, `launch.call` interprets the kernels of `modules` (name all those whose functions they use)."""
    program, warps, saved = [0, 0, 0], [4], []
    gl = language(program, warps)
    for module in modules:
        for name, value in list(vars(module).items()):
            new = gl if name == "gl" else value.fn if isinstance(value, GluonJITFunction) else value
            new = value.value if type(value).__name__ == "constexpr" else new
            if new is not value:
                saved.append((module, name, value))
                setattr(module, name, new)

    def call(*args, kernel, out, grid, num_warps=4, num_ctas=1, flops=0, bytes_accessed=0, aliases=None, registers=None, **constants):
        assert bytes_accessed > 0 and not aliases
        shapes = out if isinstance(out, list | tuple) else [out]
        outs = [np.full(math.prod(s.shape) * np.dtype(s.dtype).itemsize, 0xAA, np.uint8).view(s.dtype) for s in shapes]
        inputs = [np.ascontiguousarray(np.asarray(a)).reshape(-1) for a in args]
        warps[0] = num_warps
        with np.errstate(all="ignore"):
            for i in range(math.prod(grid)):
                program[0] = i
                kernel(*[Pointer(a) for a in inputs + outs], **constants)
        outs = [jnp.asarray(o.reshape(s.shape)) for o, s in zip(outs, shapes, strict=True)]
        return outs if isinstance(out, list | tuple) else outs[0]

    original, launch.call = launch.call, call
    try:
        yield
    finally:
        launch.call = original
        for module, name, value in saved:
            setattr(module, name, value)
