"""The KV cache: K after RoPE and V in the flow's format, one stack of layers a segment, slot = position in the sequence."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jetrl_jax.quantize import QTensor


@flax.struct.dataclass
class KVCache:
    """k, v: QTensors with values [l, B, S, K, hd] and scales [l, B, S, 1 or K, 1]; `layer` names the layer that reads and writes now."""

    k: QTensor
    v: QTensor
    layer: jax.Array | None = None

    @property
    def length(self) -> int:
        """S, the number of slots."""
        return self.k.values.shape[2]

    def write(self, k: QTensor, v: QTensor, positions: jax.Array) -> "KVCache":
        """One token's K and V, values [B, 1, K, hd], at `positions` [B] of the layer. The stack is updated in place: a loop copies
        nothing."""
        rows = jnp.arange(positions.shape[0])

        def put(old, new):  # a position at or past S is dropped: a sequence that has ended writes nothing
            return jax.tree.map(lambda o, n: o.at[self.layer, rows, positions].set(n[:, 0], mode="drop"), old, new)

        return dataclasses.replace(self, k=put(self.k, k), v=put(self.v, v))

    def read(self) -> tuple[QTensor, QTensor]:
        """K and V of the layer, values [B, S, K, hd]."""

        def pick(t):
            return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, self.layer, 0, keepdims=False), t)

        return pick(self.k), pick(self.v)


def from_prefill(kv: tuple[QTensor, QTensor], slots: int, copies: int) -> KVCache:
    """The prompts' KV [l, P, T, K, hd] with room for `slots` tokens, each prompt `copies` times in a row: [l, P·copies, slots, K, hd]."""

    def grow(x):
        x = jnp.pad(x, [(0, 0), (0, 0), (0, slots - x.shape[2])] + [(0, 0)] * (x.ndim - 3))
        return jnp.repeat(x, copies, 1)

    return KVCache(*(jax.tree.map(grow, t) for t in kv))
