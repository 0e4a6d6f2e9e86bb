"""What number format every edge of the network has: `Format`, `Precision` of one layer, `Flow` of one phase, `PrecisionPolicy` of both.

A policy is data: frozen, hashable, static under jit. In a unified policy `policy.rollout is policy.train` (Jet-RL, arXiv 2601.14243: the
rollout's precision graph is contained in the training forward's); `fp8_rollout_only` is the baseline that the paper attacks.
"""

import dataclasses
import fnmatch
import re
from typing import Any

from jetrl_jax.errors import UserError, unknown
from jetrl_jax.kernels.launch import KERNELS
from jetrl_jax.numerics import REDUCTIONS

FP8 = {"e4m3": 448.0, "e5m2": 57344.0}  # name -> largest finite value
DTYPES = (*FP8, "bf16", "float32", "float64")
SCALES = ("float32", "pow2")
SAVED = ("requantize", "dual", "bf16")
# The places of one layer that a policy can tell apart, as paths below `layers/i/`.
SITES = ("attn/qkv", "attn/kv_cache", "attn/o", "mlp/gate_up", "mlp/down")


@dataclasses.dataclass(frozen=True)
class Format:
    """Number format of an edge: dtype, block (rows, columns; 0 = the whole axis) that shares a scale, and the scale's type."""

    dtype: str = "e4m3"
    block: tuple[int, int] = (1, 128)
    scale: str = "float32"

    @property
    def quantized(self) -> bool:
        return self.dtype in FP8

    @property
    def along_tokens(self) -> "Format":
        """The format of WGrad's operands: the block turned, so that groups run along the tokens."""
        return dataclasses.replace(self, block=self.block[::-1])

    def __str__(self) -> str:
        if not self.quantized:
            return self.dtype
        rows, cols = ("all" if b == 0 else str(b) for b in self.block)
        return f"{self.dtype} {rows}x{cols} {self.scale}"

    @classmethod
    def parse(cls, text: str, field: str = "format") -> "Format":
        """"bf16", "e4m3 1x128", "e5m2 128x128 pow2", "e4m3 1xall"; raises UserError otherwise."""
        words = text.split()
        if not words or words[0] not in DTYPES:
            raise unknown(f"number format in {field}={text!r}:", words[0] if words else text, DTYPES)
        if words[0] not in FP8:
            if len(words) > 1:
                raise UserError(f"{field}={text!r}: {words[0]} has no block and no scale; write {words[0]!r} alone")
            return cls(words[0], (0, 0))
        block = re.fullmatch(r"(\d+|all)x(\d+|all)", words[1]) if len(words) > 1 else re.fullmatch(r"(\d+)x(\d+)", "1x128")
        if not block or len(words) > 3:
            raise UserError(f"{field}={text!r}: write dtype, block and scale type, for example 'e4m3 1x128 float32'")
        if len(words) == 3 and words[2] not in SCALES:
            raise unknown(f"scale type in {field}={text!r}:", words[2], SCALES)
        rows, cols = (0 if b == "all" else int(b) for b in block.groups())
        return cls(words[0], (rows, cols), words[2] if len(words) == 3 else "float32")


BF16 = Format("bf16", (0, 0))
FLOAT32 = Format("float32", (0, 0))
FLOAT64 = Format("float64", (0, 0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """The formats of one layer's edges."""

    weight: Format = BF16
    activation: Format = BF16  # input of a product, quantized along its contracted axis
    gradient: Format = BF16  # output gradient at DGrad's and WGrad's input
    saved_activation: str = "bf16"  # for WGrad: "requantize" the saved FP8 (the paper's); "dual": save it along tokens too; or save "bf16"
    kv_cache: Format = BF16  # K after RoPE, and V; block columns are the head size
    logits: Format = BF16  # both operands of lm_head
    operators: str = "bf16"  # between operators; float64 only serves finite differences

    def __post_init__(self):
        if self.saved_activation not in SAVED:
            raise unknown("saved_activation", self.saved_activation, SAVED)
        if self.logits.quantized:
            raise UserError(f"logits={self.logits}: lm_head stays unquantized in jetrl; write 'bf16' or 'float32'")
        if self.kv_cache.quantized and self.kv_cache.block != (1, 0):
            raise UserError(f"kv_cache={self.kv_cache}: the KV cache has one scale per token and head; write '{self.kv_cache.dtype} 1xall'")
        w, a = self.weight, self.activation
        if a.quantized and a.block[0] not in (0, 1):
            raise UserError(f"activation={a}: a scale over several tokens differs between a decode step and the full forward, and lets a "
                            "token see later ones; write '1' as the first block size (or 'all', for the tensor-wise ablation)")
        if w.quantized and a.quantized and w.block[1] != a.block[1]:
            raise UserError(f"weight={w} and activation={a} cut the contracted axis differently; give both the same second block size")
        if w.quantized and w.block[0] and 128 % w.block[0]:
            raise UserError(f"weight={w}: projections are padded to rows of 128; write a first block size that divides 128, or 'all'")
        g, rows = self.gradient, w.block[0] or 128  # one scale a projection is repeated by rows of 128; one a row is quantized anew
        if w.quantized and g.quantized and g.block[1] and g.block[1] != rows and w.block != (1, 0):
            raise UserError(f"weight={w} and gradient={g} cut DGrad's contracted axis differently; give gradient the second block {rows}")
        if a.quantized and g.quantized and a.block[1] and g.block[1] and a.block[1] != g.block[1]:
            raise UserError(f"activation={a} and gradient={g} group the tokens of WGrad differently; give both the same second block size")


def matches(pattern: str, path: str, num_layers: int = 0) -> bool:
    """Whether an override pattern (shell-style) names a path; in a model of num_layers, `layers/-1/…` is the last layer."""
    names = [path]
    if num_layers and (m := re.match(r"layers/(\d+)/(.*)", path)):
        names.append(f"layers/{int(m[1]) - num_layers}/{m[2]}")
    return any(fnmatch.fnmatchcase(n, pattern) for n in names)


@dataclasses.dataclass(frozen=True)
class Flow:
    """The precision flow of one phase: a base, and overrides (path pattern, field, value), later ones win.

    kernels: whether products, attention and the vocabulary run as kernels on Hopper (`kernels.launch.KERNELS`). Quantizers always do there:
    they give the same bits.
    """

    base: Precision
    overrides: tuple[tuple[str, str, Format | str], ...] = ()
    reductions: str = "auto"
    kernels: str = "auto"

    def at(self, path: str, num_layers: int = 0) -> Precision:
        """The precision at a path such as `layers/3/mlp/down`; `layers/-1/…` patterns count from the end."""
        changes: dict[str, Any] = {field: value for pattern, field, value in self.overrides if matches(pattern, path, num_layers)}
        return dataclasses.replace(self.base, **changes) if changes else self.base

    def layer(self, index: int, num_layers: int) -> tuple[tuple[str, Precision], ...]:
        return tuple((site, self.at(f"layers/{index}/{site}", num_layers)) for site in SITES)

    def segments(self, num_layers: int) -> tuple[tuple[int, int], ...]:
        """Ranges of consecutive layers of equal precision; each is one `scan`."""
        cuts = [i for i in range(1, num_layers) if self.layer(i, num_layers) != self.layer(i - 1, num_layers)]
        return tuple(zip([0, *cuts], [*cuts, num_layers], strict=True))

    def label(self, segment: tuple[int, int], num_layers: int) -> str:
        """How a segment is called in the flow graph: no layer index where all layers are alike."""
        return "layers" if segment == (0, num_layers) else f"layers[{segment[0]}:{segment[1]}]"


@dataclasses.dataclass(frozen=True)
class PrecisionPolicy:
    """One name, two views. `rollout` drives sampling, `train` the update."""

    name: str
    rollout: Flow
    train: Flow

    @property
    def unified(self) -> bool:
        return self.rollout == self.train


_JET = Precision(weight=Format(block=(128, 128)), activation=Format(), gradient=Format(), saved_activation="requantize")
_POW2: dict[str, Any] = {f: dataclasses.replace(getattr(_JET, f), scale="pow2") for f in ("weight", "activation", "gradient")}


def _whole(block: tuple[int, int]) -> dict[str, Any]:
    return {f: Format(block=block) for f in ("weight", "activation", "gradient")}


_BASES: dict[str, tuple[Precision, Precision]] = {  # name -> (rollout, train)
    "bf16": (Precision(),) * 2,
    "jet_fp8": (_JET,) * 2,
    "fp8_rollout_only": (_JET, Precision()),
    "jet_fp8_kv8": (dataclasses.replace(_JET, kv_cache=Format(block=(1, 0))),) * 2,
    "jet_fp8_hybrid": (dataclasses.replace(_JET, gradient=Format("e5m2")),) * 2,
    "fp8_rowwise": (dataclasses.replace(_JET, **_whole((1, 0))),) * 2,
    "fp8_tensorwise": (dataclasses.replace(_JET, **_whole((0, 0))),) * 2,
    "jet_fp8_pow2": (dataclasses.replace(_JET, **_POW2),) * 2,
    "float64": (
        Precision(weight=FLOAT64, activation=FLOAT64, gradient=FLOAT64, kv_cache=FLOAT64, logits=FLOAT64, operators="float64"),
    ) * 2,
}
PRESETS = tuple(n for n in _BASES if n != "float64")
"""`bf16`; `jet_fp8` (the paper's: W 128×128, A and G 1×128, E4M3); `fp8_rollout_only` (the paper's baseline); `jet_fp8_kv8` (FP8 KV cache
too); `jet_fp8_hybrid` (E5M2 gradients); for ablation `fp8_rowwise` (a scale per row; W quantized a second time for DGrad), `fp8_tensorwise`
(one scale a tensor: it sees the neighbours in the batch, so a request's tokens depend on its company) and `jet_fp8_pow2`. Not
listed: `float64`, unquantized, for tests under jax_enable_x64."""

_FORMATS = ("weight", "activation", "gradient", "kv_cache", "logits")


def _value(field: str, text: str) -> Format | str:
    if field == "saved_activation":
        if text not in SAVED:
            raise unknown("policy_overrides.saved_activation", text, SAVED)
        return text
    if field not in _FORMATS:
        raise unknown("field in policy_overrides", field, (*_FORMATS, "saved_activation", "reductions", "kernels", "paths"))
    return Format.parse(text, f"policy_overrides.{field}")


def _path_override(text: str, view: int) -> list[tuple[str, str, Format | str]]:
    """"layers/0/*=bf16" (a preset's formats in rollout, view 0, or train, 1) or "layers/*/mlp/down=activation:bf16" -> override triples."""
    pattern, _, rest = (part.strip() for part in text.partition("="))
    if not pattern or not rest:
        raise UserError(f"policy_overrides.paths has {text!r}; write 'PATTERN=PRESET' or 'PATTERN=FIELD:FORMAT', such as 'layers/0/*=bf16'")
    if ":" in rest:
        field, _, value = (part.strip() for part in rest.partition(":"))
        if field == "logits":
            raise UserError(f"policy_overrides.paths has {text!r}, but lm_head has no path; set policy_overrides.logits={value!r} instead")
        return [(pattern, field, _value(field, value))]
    if rest not in PRESETS:
        raise unknown(f"preset in policy_overrides.paths {text!r}:", rest, PRESETS)
    base = _BASES[rest][view]
    return [(pattern, f, getattr(base, f)) for f in (*_FORMATS, "saved_activation") if f != "logits"]


def make_policy(
    name: str, *, reductions: str = "auto", kernels: str = "auto", paths: tuple[str, ...] = (), **fields: str | None
) -> PrecisionPolicy:
    """The preset `name`, with fields ("activation"="e4m3 1x128 pow2", …) changed everywhere and `paths` overrides on top."""
    if name not in _BASES:
        raise unknown("policy", name, PRESETS)
    if reductions not in REDUCTIONS:
        raise unknown("policy_overrides.reductions", reductions, REDUCTIONS)
    if kernels not in KERNELS:
        raise unknown("policy_overrides.kernels", kernels, KERNELS)
    changes: dict[str, Any] = {f: _value(f, text) for f, text in fields.items() if text is not None}
    rollout, train = (
        Flow(dataclasses.replace(base, **changes), tuple(o for text in paths for o in _path_override(text, view)), reductions, kernels)
        for view, base in enumerate(_BASES[name]))
    return PrecisionPolicy(name, rollout, rollout if rollout == train else train)
