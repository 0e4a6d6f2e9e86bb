"""The training products: forward, gradient of the input and gradient of the weight at 8192 tokens."""

from collections.abc import Iterator

import jax

from jetrl_jax.bench import data, others, timing
from jetrl_jax.bench.shapes import ROWS, Shapes, floor
from jetrl_jax.bench.works import OURS, Work


def _blocks(n: int) -> int:
    return -(-n // 128)


def fp8_operands(m: int, n: int, k: int, sets: int) -> list[tuple[jax.Array, ...]]:
    """Sets of (a [m, k], sa [k/128, m], w [n, k], sw [n/128, k/128])."""
    return [(data.payload((m, k), 4 * i), data.scales((_blocks(k), m), 4 * i + 1), data.payload((n, k), 4 * i + 2),
             data.scales((_blocks(n), _blocks(k)), 4 * i + 3, k**-0.5)) for i in range(sets)]


def token_groups(n: int, k: int, t: int, sets: int) -> list[tuple[jax.Array, ...]]:
    """Sets of (a [n, t], sa [t/128, n], b [k, t], sb [t/128, k]): WGrad's operands."""
    return [(data.payload((n, t), 4 * i), data.scales((_blocks(t), n), 4 * i + 1), data.payload((k, t), 4 * i + 2),
             data.scales((_blocks(t), k), 4 * i + 3, t**-0.5)) for i in range(sets)]


def costs(m: int, n: int, k: int, out_bytes: int = 2) -> tuple[int, int, float, int]:
    """(operations, bytes, floor in seconds, sets of operands to rotate) of an FP8 product [m, k] by [n, k]."""
    flops, moved = 2 * m * n * k, m * k + n * k + out_bytes * m * n
    least = floor(flops, moved)
    return flops, moved, least, timing.number_of_sets(moved, least)


def _product(title: str, m: int, n: int, k: int) -> Work:
    """Ours on a [m, k] and w [n, k], with nothing beside it yet."""
    flops, _, least, count = costs(m, n, k)

    def ours():
        from jetrl_jax.kernels import gemm

        return timing.program(lambda a, sa, w, sw: gemm.product(a, sa, w, sw), fp8_operands(m, n, k, count))

    return Work(f"{title}, {m}x{n}x{k}", "TFLOP/s", {OURS: ours}, flops, floor=least)


def fprop(shapes: Shapes) -> Iterator[Work]:
    """y [M, N] = x [M, K] · wᵀ, in every column."""
    for name, (n, k) in shapes.products.items():
        yield _product(f"fprop {name}, {shapes.name}", ROWS, n, k).beside(
            _columns(ROWS, n, k), shapes.targets(others.XLA_BF16, 1.4, 1.6) | shapes.targets(others.CUBLASLT, None, 1.0))


def _columns(m: int, n: int, k: int) -> dict:
    count = costs(m, n, k)[3]

    def bf16():
        sets = [(data.normal((m, k), 2 * i), data.normal((n, k), 2 * i + 1, k**-0.5)) for i in range(count)]
        return timing.program(others.xla_bf16, sets)

    def fp8():
        return others.xla_fp8_program([(a, w) for a, _, w, _ in fp8_operands(m, n, k, count)])

    def plain():
        from jetrl_jax.bench import plain_triton

        return timing.program(plain_triton.product, fp8_operands(m, n, k, count))

    return {others.XLA_BF16: bf16, others.XLA_FP8: fp8, others.CUBLASLT: lambda: others.cublaslt(m, n, k, count), others.TRITON: plain}


def dgrad(shapes: Shapes) -> Iterator[Work]:
    """dx [M, K] = dy [M, N] · w: ours on the transposed payload [K, N], XLA's on the weight as it is."""
    for name, (n, k) in shapes.products.items():

        def bf16(n=n, k=k):
            sets = [(data.normal((ROWS, n), 2 * i), data.normal((n, k), 2 * i + 1, n**-0.5)) for i in range(costs(ROWS, k, n)[3])]
            return timing.program(others.xla_bf16_dgrad, sets)

        work = _product(f"dgrad {name}, {shapes.name}", ROWS, k, n)
        yield work.beside({others.XLA_BF16: bf16}, shapes.targets(others.XLA_BF16, 1.3, 1.5))


def wgrad(shapes: Shapes) -> Iterator[Work]:
    """dw [N, K] = dyᵀ · x over the tokens, float32."""
    for name, (n, k) in shapes.products.items():
        flops, _, least, count = costs(n, k, ROWS, out_bytes=4)

        def ours(n=n, k=k, count=count):
            from jetrl_jax.kernels import wgrad as kernel

            return timing.program(lambda a, sa, b, sb: kernel.product(a, sa, b, sb, None), token_groups(n, k, ROWS, count))

        def bf16(n=n, k=k, count=count):
            sets = [(data.normal((ROWS, n), 2 * i), data.normal((ROWS, k), 2 * i + 1, ROWS**-0.5)) for i in range(count)]
            return timing.program(others.xla_bf16_wgrad, sets)

        work = Work(f"wgrad {name}, {shapes.name}, {n}x{k}x{ROWS}", "TFLOP/s", {OURS: ours}, flops, floor=least)
        yield work.beside({others.XLA_BF16: bf16}, shapes.targets(others.XLA_BF16, 1.3, 1.5))
