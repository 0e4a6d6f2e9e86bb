"""The transformer: Flax Linen modules that read quantized weights by one flow, the same code for rollout and update.

Rollout is `apply({"q": qparams}, …)`, update `apply({"params": master, "q": qparams}, …)`: the forward reads `q` in both, the master is
only where the gradient arrives. Layers are stacked; consecutive layers of equal precision are one `lax.scan` (design.md, "Contracts").
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jetrl_jax.linear import DotSpec, QWeight, dot, dot_after, lookup, through
from jetrl_jax.models.attention import attend, attend_cache
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.models.qparams import operators_dtype
from jetrl_jax.models.rope import rotate, tables
from jetrl_jax.numerics import rms_norm, silu_mul
from jetrl_jax.precision import BF16, FLOAT64, Flow, Precision
from jetrl_jax.quantize import QTensor, quantize, straight_through

if TYPE_CHECKING:
    from jetrl_jax.rollout.cache import KVCache

INIT_STD = 0.02


def _vector(value: jax.Array, master: jax.Array | None) -> jax.Array:
    """A norm's weight or a bias as rollout rounded it, widened to float32: its gradient, a sum over all tokens, is not rounded to bf16."""
    return through(value.astype(jnp.promote_types(value.dtype, jnp.float32)), master)


class _FlowModule(nn.Module):
    """What every module below shares: where it stands in the flow, and how it asks for a weight."""

    config: ModelConfig
    flow: Flow
    segment: tuple[int, int]  # the layers that run this code, [first, last + 1)

    def _master(self, name: str, shape: tuple[int, ...], init: Any) -> jax.Array | None:
        """The float32 master where there is one: in the update, and at initialisation."""
        return self.param(name, init, shape) if self.is_initializing() or self.has_variable("params", name) else None

    def precision(self, site: str) -> Precision:
        return self.flow.at(f"layers/{self.segment[0]}/{site}", self.config.num_layers)

    def site(self, site: str) -> str:
        return f"{self.flow.label(self.segment, self.config.num_layers)}/{site}"

    def product(
        self, inputs: tuple[jax.Array, ...], site: str, features: dict[str, int], before: str = ""
    ) -> tuple[jax.Array, ...]:
        """[B, T, K] by the projections `features` (name -> N) that lie side by side at `site` -> one [B, T, N] each.

        inputs: x; or before="norm": x and a norm's weight [K]; or before="silu": gate and up.
        """
        x, eps = inputs[0], self.config.rms_norm_eps
        taps = [self._master(n, (f, x.shape[-1]), nn.initializers.normal(INIT_STD)) for n, f in features.items()]
        if self.is_initializing():
            return tuple(jnp.zeros((*x.shape[:-1], f), x.dtype) for f in features.values())
        given = tuple(t for t in taps if t is not None)
        flow, sizes = self.flow, tuple(features.values())
        spec = DotSpec(self.site(site), self.precision(site), sizes, flow.reductions, flow.kernels, before, eps)
        w: QWeight = self.get_variable("q", site.split("/")[-1])
        if before and spec.fuses:
            return dot_after(inputs, w, given or None, spec)
        if before == "norm":
            x = rms_norm(x, inputs[1], eps, flow.reductions)
        elif before == "silu":
            x = silu_mul(x, inputs[1], flow.reductions)
        return dot(x, w, given or None, dataclasses.replace(spec, before=""))

    def vector(self, name: str, size: int, init: Any = nn.initializers.ones) -> jax.Array:
        """A norm's weight or a bias [size], see `_vector`."""
        master = self._master(name, (size,), init)
        return master if master is not None and self.is_initializing() else _vector(self.get_variable("q", name), master)

    def norm(self, x: jax.Array, name: str) -> jax.Array:
        return rms_norm(x, self.vector(name, x.shape[-1]), self.config.rms_norm_eps, self.flow.reductions)


class Attention(_FlowModule):
    @nn.compact
    def __call__(
        self, x: jax.Array, gain: jax.Array, rope: tuple[jax.Array, jax.Array], cache: "KVCache | None", positions: jax.Array | None
    ):
        """x [B, T, D], normed by `gain` [D] -> [B, T, D] and the KV: of the whole sequence (cache None), or the cache with this token
        written at `positions`."""
        c, fmt = self.config, self.precision("attn/kv_cache").kv_cache
        sizes = {"q": c.num_heads * c.head_dim, "k": c.num_kv_heads * c.head_dim, "v": c.num_kv_heads * c.head_dim}
        q, k, v = self.product((x, gain), "attn/qkv", sizes, "norm")
        if c.qkv_bias:
            biases = (self.vector(f"{n}_bias", size, nn.initializers.zeros) for n, size in sizes.items())
            q, k, v = ((y + bias).astype(x.dtype) for y, bias in zip((q, k, v), biases, strict=True))
        q, k, v = (y.reshape(*y.shape[:2], -1, c.head_dim) for y in (q, k, v))
        if c.qk_norm:
            q, k = self.norm(q, "q_norm"), self.norm(k, "k_norm")
        q, k = (rotate(y, *rope, self.flow.reductions) for y in (q, k))
        ksite, vsite = self.site("attn/scores.k"), self.site("attn/values.v")
        q = straight_through(q, self.site("attn/scores.q"), FLOAT64 if x.dtype == jnp.float64 else BF16)
        if cache is None:
            kv: Any = (quantize(lax.stop_gradient(k), ksite, fmt), quantize(lax.stop_gradient(v), vsite, fmt))
            k, v = straight_through(k, ksite, fmt), straight_through(v, vsite, fmt)
            y = attend(q, k, v, None, self.flow.reductions, self.site("attn"), self.flow.kernels)
        else:
            assert positions is not None, "a decode step writes at its positions"
            kv = cache.write(quantize(k, ksite, fmt), quantize(v, vsite, fmt), positions)
            y = attend_cache(q, kv, positions, self.flow.reductions, self.site("attn"), self.flow.kernels)
        return self.product((y.reshape(*x.shape[:2], -1),), "attn/o", {"o": c.hidden_size})[0], kv


class MLP(_FlowModule):
    @nn.compact
    def __call__(self, x: jax.Array, gain: jax.Array) -> jax.Array:
        """x [B, T, D], normed by `gain` [D] -> [B, T, D] by down(silu(gate) · up) (SwiGLU, arXiv 2002.05202)."""
        c = self.config
        gu = self.product((x, gain), "mlp/gate_up", {"gate": c.intermediate_size, "up": c.intermediate_size}, "norm")
        return self.product(gu, "mlp/down", {"down": c.hidden_size}, "silu")[0]


class Block(_FlowModule):
    @nn.compact
    def __call__(
        self, x: jax.Array, rope: tuple[jax.Array, jax.Array], cache: "KVCache | None" = None, positions: jax.Array | None = None
    ):
        """One layer: x [B, T, D] -> x and its KV (see `Attention`)."""
        where: dict[str, Any] = {"config": self.config, "flow": self.flow, "segment": self.segment}
        y, kv = Attention(**where, name="attn")(x, self.vector("attn_norm", x.shape[-1]), rope, cache, positions)
        x = x + y
        return x + MLP(**where, name="mlp")(x, self.vector("mlp_norm", x.shape[-1])), kv


class Transformer(nn.Module):
    """A decoder without its lm_head (`models/head.py`), under one precision flow.

    remat: "block" recomputes each layer in the backward pass from its input, "none" keeps every activation.
    """

    config: ModelConfig
    flow: Flow
    remat: str = "block"

    @nn.compact
    def __call__(
        self, tokens: jax.Array, positions: jax.Array | None = None, caches: "tuple[KVCache, ...] | None" = None, collect: bool = False
    ):
        """tokens [B, T] at positions 0…T-1 (right-padded) -> hidden [B, T, D] after the final norm, in bf16, and None.

        collect: gives the KV of every layer instead of None, one (K, V) pair of QTensors [l, B, T, K, hd] a segment (prefill).
        caches, positions [B]: one decode step; T = 1, the token's KV is written at its position; gives the caches written.
        """
        c, dtype = self.config, operators_dtype(self.flow)
        init = nn.initializers.normal(INIT_STD)
        has = self.is_initializing() or self.has_variable("params", "embed")
        embed = self.param("embed", init, (c.vocab_size, c.hidden_size)) if has else None
        norm = self.param("final_norm", nn.initializers.ones, (c.hidden_size,)) if has else None
        if has and not c.tie_embeddings:
            self.param("lm_head", init, (c.vocab_size, c.hidden_size))
        layers = self.param("layers", self._init_layers) if has else None
        if self.is_initializing():
            return jnp.zeros((*tokens.shape, c.hidden_size), dtype), None
        cos, sin = (jnp.asarray(t) for t in tables(c, tokens.shape[1] if caches is None else caches[0].length))
        rope = (cos[None], sin[None]) if caches is None else (cos[positions][:, None], sin[positions][:, None])
        x = lookup(self.get_variable("q", "embed"), embed, tokens)
        stacks: Any = self.get_variable("q", "segments")
        kvs = []
        for i, segment in enumerate(self.flow.segments(c.num_layers)):
            masters = None if layers is None else jax.tree.map(lambda w, s=segment: w if s == (0, c.num_layers) else w[s[0]:s[1]], layers)
            x, kv = self._run(segment, stacks[i], masters, x, rope, positions, None if caches is None else caches[i], collect)
            kvs.append(kv)
        x = rms_norm(x, _vector(self.get_variable("q", "final_norm"), norm), c.rms_norm_eps, self.flow.reductions)
        return x, tuple(kvs) if collect or caches is not None else None

    def _block(self, segment: tuple[int, int]) -> Block:
        return Block(self.config, self.flow, segment, parent=None)

    def _init_layers(self, key: jax.Array) -> dict:
        x = jnp.zeros((1, 1, self.config.hidden_size), operators_dtype(self.flow))
        cos, sin = tables(self.config, 1)
        keys = jax.random.split(key, self.config.num_layers)
        return jax.vmap(lambda k: self._block((0, 1)).init(k, x, (cos[None], sin[None]))["params"])(keys)

    def _run(self, segment, stack, masters, x, rope, positions, cache, collect):
        """The layers of one segment over x: payloads are broadcast and read by index, masters scanned in, a cache carried whole."""
        block, index = self._block(segment), jnp.arange(segment[1] - segment[0])

        def layer(x, master, i, cache=None):
            q = jax.tree.map(lambda w: w.at(i) if isinstance(w, QWeight) else lax.dynamic_index_in_dim(w, i, 0, keepdims=False), stack,
                             is_leaf=lambda w: isinstance(w, QWeight))
            variables = {"q": q} if master is None else {"q": q, "params": master}
            return block.apply(variables, x, rope, cache, positions)

        if cache is not None:
            def step(carry, i):
                x, cache = carry
                x, cache = layer(x, None, i, cache.replace(layer=i))
                return (x, cache.replace(layer=None)), None
            (x, cache), _ = lax.scan(step, (x, cache), index)
            return x, cache

        def body(x, inputs):
            x, kv = layer(x, *inputs)
            return x, kv if collect else None

        if self.remat == "block" and masters is not None:
            body = jax.checkpoint(body, prevent_cse=False)
        return lax.scan(body, x, (masters, index))


def weight_of_head(variables: dict, flow: Flow) -> tuple[QTensor, jax.Array | None]:
    """lm_head's operand [V, D] in the logits' format, and the master where its gradient arrives (the embedding's if tied)."""
    q, params = variables["q"], variables.get("params")
    w = q["lm_head"] if q["lm_head"] is not None else quantize(q["embed"], "lm_head.w", flow.base.logits)
    return w, None if params is None else params.get("lm_head", params["embed"])
