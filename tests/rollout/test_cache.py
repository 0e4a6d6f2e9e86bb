"""The KV cache: fan-out of a prompt to its samples, writes in place, and the write of an ended sequence dropped."""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jetrl_jax.precision import BF16, Format
from jetrl_jax.quantize import dequantize, quantize
from jetrl_jax.rollout.cache import KVCache, from_prefill

L, P, T, S, K, HD, G = 2, 2, 3, 5, 2, 4, 2
FP8 = Format(block=(1, 0))  # a scale per token and head


def kv(fmt: Format, *lead: int, seed: int = 0):
    x = jnp.asarray(np.random.default_rng(seed).normal(size=(2, *lead, K, HD)), jnp.bfloat16)
    return quantize(x[0], "k", fmt), quantize(x[1], "v", fmt)


class CacheTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_pmap=True)
    def test_fan_out(self):
        for fmt in (BF16, FP8):
            pair = kv(fmt, L, P, T)
            cache = self.variant(lambda pair: from_prefill(pair, S, G))(pair)
            assert cache.length == S
            chex.assert_shape(cache.k.values, (L, P * G, S, K, HD))
            chex.assert_shape(cache.k.scales, (L, P * G, S, 1 if fmt is BF16 else K, 1))
            for got, want in zip((cache.k, cache.v), pair, strict=True):
                assert got.fmt == fmt and got.values.dtype == want.values.dtype
                full, part = dequantize(got), dequantize(want)
                for b in range(P * G):  # the samples of a prompt stand in a row
                    np.testing.assert_array_equal(full[:, b, :T], part[:, b // G])
                assert not np.asarray(full[:, :, T:]).any()

    @chex.variants(with_jit=True, without_jit=True)
    def test_a_write_touches_one_slot_of_one_layer(self):
        for fmt in (BF16, FP8):
            old = from_prefill(kv(fmt, L, P * G, S), S, 1)
            new = kv(fmt, P * G, 1, seed=1)
            positions = jnp.asarray([0, 4, 2, S])  # the last sequence has ended: past the cache
            cache = self.variant(lambda c, k, v, at: c.replace(layer=jnp.int32(1)).write(k, v, at))(old, *new, positions)
            for got, before, token in ((cache.k, old.k, new[0]), (cache.v, old.v, new[1])):
                want = jax.tree.map(np.array, before)
                for leaf, t in ((want.values, token.values), (want.scales, token.scales)):
                    for b, s in enumerate([0, 4, 2]):
                        leaf[1, b, s] = t[b, 0]
                np.testing.assert_array_equal(np.asarray(got.values, np.float32), want.values.astype(np.float32))
                np.testing.assert_array_equal(got.scales, want.scales)
            k, v = cache.read()  # the layer that was written
            np.testing.assert_array_equal(dequantize(k), dequantize(cache.k)[1])
            np.testing.assert_array_equal(dequantize(v), dequantize(cache.v)[1])


def test_a_donated_cache_is_written_in_place():
    cache = from_prefill(kv(FP8, L, P, T), S, 1)
    write = jax.jit(lambda c, k, v, at: c.replace(layer=jnp.int32(0)).write(k, v, at).replace(layer=None), donate_argnums=0)
    after = write(cache, *kv(FP8, P, 1), jnp.asarray([3, 3]))
    assert isinstance(after, KVCache) and cache.k.values.is_deleted()
