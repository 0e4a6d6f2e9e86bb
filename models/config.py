"""The shape of a model as data: read from Hugging Face's config.json, written back to it, and turned into parameter shapes.

Three dense families share one transformer: `llama` (Llama 3.x, SmolLM2), `qwen2` (Qwen2.5: bias on Q, K and V) and `qwen3` (RMSNorm on
every head of Q and K). What the transformer does not compute, such as a sliding window or YaRN, is refused here rather than ignored.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jetrl_jax.errors import UserError, unknown
from jetrl_jax.models.fields import Fields, read_json

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROPE_KINDS = ("default", "linear", "llama3")
DEFAULT_ROPE_THETA = 10000.0  # what transformers takes where config.json is silent
DEFAULT_QWEN3_HEAD_DIM = 128  # likewise; the other families divide hidden_size by the heads


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched. `linear` divides all of them by `factor`; `llama3` (Llama 3.1) only the slow ones.

    The last three fields are read by `llama3` alone; their defaults are Llama 3.1's.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise unknown("rope_type", self.kind, ROPE_KINDS)
        if not 0 < self.factor < math.inf:
            raise UserError(f"rope factor = {self.factor}: must be a finite number greater than 0")
        if self.kind == "llama3" and not self.high_freq_factor > self.low_freq_factor > 0:
            found = f"high_freq_factor = {self.high_freq_factor}, low_freq_factor = {self.low_freq_factor}"
            raise UserError(f"rope {found}: must be 0 < low_freq_factor < high_freq_factor")
        if self.original_max_position <= 0:
            raise UserError(f"rope original_max_position_embeddings = {self.original_max_position}: must be greater than 0")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer, hashable, so that it can be a static argument of `jit`.

    Errors: `UserError`, in the words of config.json, for sizes that no model can have.
    """

    family: str  # a key of ARCHITECTURES
    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F
    num_layers: int  # L
    num_heads: int  # H
    num_kv_heads: int  # K, a divisor of H
    head_dim: int  # even, for RoPE turns pairs; H · head_dim may differ from D
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position: int  # tokens
    qkv_bias: bool
    qk_norm: bool
    tie_embeddings: bool

    def __post_init__(self) -> None:
        if self.family not in ARCHITECTURES:
            raise unknown("model_type", self.family, ARCHITECTURES)
        sizes = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
        }
        for field, size in sizes.items():
            if not 0 < size < math.inf:
                raise UserError(f"{field} = {size}: must be a finite number greater than 0")
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"num_key_value_heads = {self.num_kv_heads}: must divide num_attention_heads = {self.num_heads}")
        if self.head_dim % 2:
            raise UserError(f"head_dim = {self.head_dim}: must be even, because rotary embedding turns pairs")

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path) -> "ModelConfig":
        """The model that a config.json describes; `source` is its folder, or its content.

        Errors: `UserError` that names the file, the field, its value and the remedy.
        """
        if isinstance(source, Mapping):
            return _read("config.json", source)
        path = Path(source) / "config.json"
        return _read(str(path), read_json(path, "give the folder of a Hugging Face model, which holds a config.json"))

    def to_hf(self) -> dict[str, Any]:
        """The content of a config.json that transformers loads as this very model.

        RoPE is written under the key of transformers 5 (`rope_parameters`) and under the old ones (`rope_theta`, `rope_scaling`), for
        older readers. Token ids belong to the tokenizer: they are null here, since a missing id would mean Llama 2's.
        """
        rope: dict[str, Any] = {"rope_type": "default"}
        if self.rope_scaling is not None:
            rope = {"rope_type": self.rope_scaling.kind, "factor": self.rope_scaling.factor}
            if self.rope_scaling.kind == "llama3":
                rope["low_freq_factor"] = self.rope_scaling.low_freq_factor
                rope["high_freq_factor"] = self.rope_scaling.high_freq_factor
                rope["original_max_position_embeddings"] = self.rope_scaling.original_max_position
        raw: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.family]],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None if self.rope_scaling is None else dict(rope),
            "rope_parameters": {**rope, "rope_theta": self.rope_theta},
            "max_position_embeddings": self.max_position,
            "attention_dropout": 0.0,
            "tie_word_embeddings": self.tie_embeddings,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
        if self.family == "llama":
            raw |= {"attention_bias": False, "mlp_bias": False}
        else:
            raw |= {"use_sliding_window": False, "sliding_window": None}
        if self.family == "qwen3":
            raw["attention_bias"] = False
        return raw

    def param_shapes(self) -> dict[str, Any]:
        """The float32 master parameters as `jax.ShapeDtypeStruct`: projections `[L, out, in]`, as in HF, layers stacked on axis 0."""

        def leaf(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.float32)

        L, D, F, V = self.num_layers, self.hidden_size, self.intermediate_size, self.vocab_size
        Hh, Kh = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attn = {"q": leaf(L, Hh, D), "k": leaf(L, Kh, D), "v": leaf(L, Kh, D), "o": leaf(L, D, Hh)}
        if self.qkv_bias:
            attn |= {"q_bias": leaf(L, Hh), "k_bias": leaf(L, Kh), "v_bias": leaf(L, Kh)}
        if self.qk_norm:
            attn |= {"q_norm": leaf(L, self.head_dim), "k_norm": leaf(L, self.head_dim)}
        mlp = {"gate": leaf(L, F, D), "up": leaf(L, F, D), "down": leaf(L, D, F)}
        params: dict[str, Any] = {"embed": leaf(V, D), "final_norm": leaf(D)}
        if not self.tie_embeddings:
            params["lm_head"] = leaf(V, D)
        return params | {"layers": {"attn_norm": leaf(L, D), "mlp_norm": leaf(L, D), "attn": attn, "mlp": mlp}}


def _read(where: str, raw: Mapping[str, Any]) -> ModelConfig:
    try:
        return _build(Fields(where, raw))
    except UserError as error:  # the dataclasses do not know which file their values come from
        message = str(error)
        raise UserError(message if where in message else f"{where}: {message}") from None


def _build(fields: Fields) -> ModelConfig:
    family = fields.get("model_type", str)
    if family not in ARCHITECTURES:
        raise unknown("model_type", family, ARCHITECTURES)
    _refuse_what_is_not_computed(fields, family)
    heads, hidden = fields.get("num_attention_heads", int), fields.get("hidden_size", int)
    head_dim = DEFAULT_QWEN3_HEAD_DIM
    if family != "qwen3" and fields.raw.get("head_dim") is None:
        if heads <= 0 or hidden % heads:
            raise UserError(f"hidden_size = {hidden} is not a multiple of num_attention_heads = {heads}; correct it, or set head_dim")
        head_dim = hidden // heads
    max_position = fields.get("max_position_embeddings", int)
    theta, scaling = _read_rope(fields, max_position)
    return ModelConfig(
        family=family,
        vocab_size=fields.get("vocab_size", int),
        hidden_size=hidden,
        intermediate_size=fields.get("intermediate_size", int),
        num_layers=fields.get("num_hidden_layers", int),
        num_heads=heads,
        num_kv_heads=fields.get("num_key_value_heads", int, heads),
        head_dim=fields.get("head_dim", int, head_dim),
        rms_norm_eps=fields.get("rms_norm_eps", float, 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position=max_position,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        tie_embeddings=fields.get("tie_word_embeddings", bool, False),
    )


def _refuse_what_is_not_computed(fields: Fields, family: str) -> None:
    raw = fields.raw
    if fields.get("hidden_act", str, "silu") != "silu":
        fields.refuse("hidden_act", "the feed-forward layer computes silu only")
    if raw.get("quantization_config") is not None:
        fields.refuse("quantization_config", "give the original checkpoint, in bf16, f16 or f32; jetrl quantizes it itself")
    for bias in {"llama": ("attention_bias", "mlp_bias"), "qwen2": (), "qwen3": ("attention_bias",)}[family]:
        if fields.get(bias, bool, False):
            fields.refuse(bias, f"a {family} model is computed without this bias; choose a checkpoint without it")
    # Qwen2.5 carries a window's length with use_sliding_window false: no layer looks at it.
    shorter = "if your sequences stay shorter than the window, set use_sliding_window to false in config.json"
    if fields.get("use_sliding_window", bool, False):
        fields.refuse("use_sliding_window", f"sliding-window attention is not computed; {shorter}")
    if raw.get("sliding_window") is not None and raw.get("use_sliding_window") is None:
        fields.refuse("sliding_window", f"sliding-window attention is not computed; {shorter}")
    layer_types = raw.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        fields.refuse("layer_types", "every layer must be full_attention; sliding windows and other kinds are not computed")


def _read_rope(fields: Fields, max_position: int) -> tuple[float, RopeScaling | None]:
    """RoPE's base and scaling from `rope_parameters` (transformers 5) or `rope_scaling` and `rope_theta` (before it)."""
    found = []
    for key in ("rope_parameters", "rope_scaling"):
        raw = fields.raw.get(key)
        if raw is not None and not isinstance(raw, Mapping):
            raise UserError(f"{fields.where}: {key} = {raw!r} is a {type(raw).__name__}; it must be an object or null")
        if raw:
            found.append(_read_rope_object(Fields(f"{fields.where}: {key}", raw), fields, max_position))
    if len(set(found)) > 1:
        raise UserError(f"{fields.where}: rope_parameters and rope_scaling disagree; remove the one that is wrong")
    return found[0] if found else (fields.get("rope_theta", float, DEFAULT_ROPE_THETA), None)


def _read_rope_object(rope: Fields, top: Fields, max_position: int) -> tuple[float, RopeScaling | None]:
    theta = rope.get("rope_theta", float, top.get("rope_theta", float, DEFAULT_ROPE_THETA))
    kind = rope.get("rope_type", str, rope.get("type", str, "default"))
    if kind not in ROPE_KINDS:
        raise UserError(f"{rope.where}: rope_type = {kind!r} is not supported; known are {', '.join(ROPE_KINDS)}")
    if rope.get("partial_rotary_factor", float, 1.0) != 1.0:
        rope.refuse("partial_rotary_factor", "every head is rotated whole")
    if any(isinstance(value, Mapping) for value in rope.raw.values()):
        raise UserError(f"{rope.where} = {dict(rope.raw)!r} is not supported: one object must serve all layers")
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind=kind, factor=rope.get("factor", float))
    return theta, RopeScaling(
        kind=kind,
        factor=rope.get("factor", float),
        low_freq_factor=rope.get("low_freq_factor", float),
        high_freq_factor=rope.get("high_freq_factor", float),
        original_max_position=rope.get("original_max_position_embeddings", int, max_position),
    )
