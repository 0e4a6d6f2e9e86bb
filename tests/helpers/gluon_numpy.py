"""Runs the source of a Gluon kernel on numpy: the same indices, masks and order of steps, without layouts and without concurrency.

`kernels(*paths)` gives the kernels' functions by name; set `gl.pid` and call one with `Ptr`s. A load or store outside the array fails, and
so does one that a mask should have held back. It knows what our decode attention uses, no more.
"""

import builtins
import math
import types
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np


class Tensor(np.ndarray):
    def to(self, dtype):
        return np.asarray(self).astype(dtype).view(Tensor)

    def reshape(self, shape):
        return np.ndarray.reshape(self, shape)

    def permute(self, *axes):
        return np.transpose(self, axes)


def tensor(x: Any) -> Tensor:
    return np.asarray(x).view(Tensor)


class Int(int):
    """A scalar of the kernel: an int that knows `.to`."""

    def to(self, dtype):
        return self


for _op in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "mod"):
    def _method(self, other, _op=f"__{_op}__"):
        y = getattr(int, _op)(self, other)
        return y if y is NotImplemented else Int(y)
    setattr(Int, f"__{_op}__", _method)


class Ptr:
    def __init__(self, array: np.ndarray, offset: Any = 0):
        self.array, self.offset, self.dtype = array.reshape(-1), offset, types.SimpleNamespace(element_ty=array.dtype)

    def __add__(self, other):
        return Ptr(self.array, self.offset + (int(other) if isinstance(other, int) else np.asarray(other).astype(np.int64)))


class Shared:
    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, array.dtype

    def index(self, i):
        return Shared(self.array[i])

    def slice(self, start, size, dim):
        return Shared(self.array[(slice(None),) * dim + (slice(start, start + size),)])

    def permute(self, axes):
        return Shared(np.transpose(self.array, axes))

    def load(self, layout):
        return tensor(self.array.copy())


def _masked(p: Ptr, mask: Any) -> tuple[np.ndarray, np.ndarray]:
    at, mask = np.broadcast_arrays(np.asarray(p.offset), True if mask is None else np.asarray(mask))
    assert not mask.any() or (at[mask].min() >= 0 and at[mask].max() < p.array.size), "outside the array"
    return at, mask


def _load(p, mask=None, other=0):
    at, mask = _masked(p, mask)
    x = np.where(mask, p.array[np.where(mask, at, 0)], np.asarray(other).astype(p.array.dtype))
    return tensor(x) if at.ndim else Int(x)


def _store(p, value, mask=None):
    at, mask = _masked(p, mask)
    p.array[at[mask]] = np.broadcast_to(value, at.shape)[mask].astype(p.array.dtype)


def _async_load(shared, p, mask=None):
    shared.array[...] = np.broadcast_to(_load(p, mask), shared.array.shape)


def _layout(*args):
    return None


gl = types.SimpleNamespace(
    pid=0, constexpr=object, float32=np.float32, bfloat16=ml_dtypes.bfloat16, int64=np.int64, float8e4nv=ml_dtypes.float8_e4m3fn,
    **dict.fromkeys(("BlockedLayout", "SliceLayout", "DistributedLinearLayout", "DotOperandLayout", "NVMMADistributedLayout",
                     "SwizzledSharedLayout"), _layout),
    program_id=lambda axis: Int(gl.pid), load=_load, store=_store,
    arange=lambda a, b, layout=None: tensor(np.arange(a, b)), expand_dims=lambda x, axis: tensor(np.expand_dims(x, axis)),
    full=lambda shape, value, dtype, layout=None: tensor(np.full(shape, value, dtype)),
    zeros=lambda shape, dtype, layout=None: tensor(np.zeros(shape, dtype)),
    where=lambda c, a, b: tensor(np.where(c, a, b).astype(np.float32)),
    maximum=lambda a, b: Int(max(a, b)) if isinstance(a, int) else tensor(np.maximum(a, b)), minimum=lambda a, b: Int(min(a, b)),
    max=lambda x, axis: tensor(np.max(x, axis)), sum=lambda x, axis: tensor(np.sum(np.asarray(x), axis, dtype=np.float32)),
    exp2=lambda x: tensor(np.exp2(np.asarray(x, np.float32))), convert_layout=lambda x, layout, assert_trivial=False: x,
    static_range=lambda *a: map(Int, builtins.range(*a)),
    allocate_shared_memory=lambda dtype, shape, layout: Shared(np.zeros(shape, dtype)),
    inline_asm_elementwise=lambda asm, constraints, xs, dtype, is_pure, pack: xs[0].to(dtype),
)


def _mma(a, b, acc):
    return tensor(np.matmul(np.asarray(a, np.float32), np.asarray(b, np.float32)) + np.asarray(acc))


def kernels(*paths: str | Path) -> dict[str, Any]:
    """The functions in the Gluon part of these files, which begins at the first decorator that names gluon or triton."""
    plain = types.SimpleNamespace(jit=lambda f: f, constexpr_function=lambda f: f)
    copies = types.SimpleNamespace(async_load=_async_load, commit_group=lambda: None, wait_group=lambda n: None)
    scope: dict[str, Any] = {
        "gluon": plain, "triton": plain, "gl": gl, "tl": gl, "async_copy": copies, "mma_v2": _mma, "math": math,
        "range": gl.static_range, "max": lambda a, b: Int(builtins.max(a, b)), "min": lambda a, b: Int(builtins.min(a, b))}
    for path in paths:
        source = Path(path).read_text()
        exec(compile(source[source.index("\n@gluon."):], str(path), "exec"), scope)
    return scope
