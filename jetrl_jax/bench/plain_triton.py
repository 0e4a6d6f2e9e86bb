"""What an ordinary Triton kernel reaches on the block-scaled product: the column beside which Gluon's work is judged.

`tl.dot` on 128 x 128 tiles read through TMA descriptors, 4 warps, the compiler's own pipeline of 3 stages; each block of K promoted to
float32 with its scales, which are loaded a block ahead: of twelve variants the fastest on an H200. Nothing else in jetrl calls it.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jetrl_jax.kernels import launch

TILE = 128
GROUP = 8


def product(a: jax.Array, sa: jax.Array, w: jax.Array, sw: jax.Array) -> jax.Array:
    """a [M, K] · wᵀ [K, N] -> bf16 [M, N]; FP8 payloads, sa float32 [K/128, M], sw float32 [N/128, K/128]. K a multiple of 128."""
    (m, k), n = a.shape, w.shape[0]
    describe = launch.mended_jax_triton().TensorDescriptor.from_array  # without a Gluon layout: plain Triton chooses its own
    return launch.call(
        describe(a, (TILE, TILE)), describe(w, (TILE, TILE)), sa, sw, kernel=_product, out=jax.ShapeDtypeStruct((m, n), jnp.bfloat16),
        grid=(-(-m // TILE) * -(-n // TILE),), num_warps=4, num_stages=3, flops=2 * m * n * k, bytes_accessed=m * k + n * k + 2 * m * n,
        M=m, N=n, K=k, T=TILE, G=GROUP)


@triton.jit
def _product(a_desc, w_desc, sa, sw, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, T: tl.constexpr, G: tl.constexpr):
    nm: tl.constexpr = (M + T - 1) // T
    nn: tl.constexpr = (N + T - 1) // T
    nk: tl.constexpr = (K + T - 1) // T
    t = tl.program_id(0)
    first = t // (G * nn) * G  # G row tiles at a time, for the L2 cache
    size = min(nm - first, G)
    m0 = (first + t % (G * nn) % size) * T
    n0 = t % (G * nn) // size * T
    rows = m0 + tl.arange(0, T)
    cols = n0 + tl.arange(0, T)
    acc = tl.zeros((T, T), tl.float32)
    p = tl.load(sa + rows, mask=rows < M, other=0.0)
    q = tl.load(sw + n0 // T * nk)
    for k in range(nk):
        block = tl.dot(a_desc.load([m0, k * T]), w_desc.load([n0, k * T]).T)
        acc += block * (p * q)[:, None]
        n = min(k + 1, nk - 1)
        p = tl.load(sa + n * M + rows, mask=rows < M, other=0.0)
        q = tl.load(sw + n0 // T * nk + n)
    tl.store(out + rows.to(tl.int64)[:, None] * N + cols[None, :], acc.to(tl.bfloat16), mask=(rows < M)[:, None] & (cols < N)[None, :])
