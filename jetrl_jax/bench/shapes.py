"""The layer shapes that kernels are measured at, and the floors of time that bytes and operations set."""

import dataclasses

from jetrl_jax.errors import unknown

# What an H200 reaches: a large device-to-device copy, bytes read and written; the fastest products of NVIDIA's own library on it (cuBLASLt,
# one scale a tensor). Floors are taken from these; the data sheet's 4.8 TB/s, 1979 and 989 TFLOP/s were not reached by anything.
COPY_BANDWIDTH = 4.3e12
FP8_RATE = 1560e12
BF16_RATE = 800e12
ROWS = 8192  # tokens of a training product


@dataclasses.dataclass(frozen=True)
class Shapes:
    """One model's sizes, and its four products: name -> (N, K) of y = x [M, K] · wᵀ."""

    name: str
    hidden: int  # D
    heads: int  # H
    kv_heads: int  # K
    head_dim: int
    ffn: int  # F
    vocabulary: int

    def targets(self, against: str, must: float | None, aim: float | None) -> dict[str, tuple[float | None, float | None]]:
        """What is asked of an 8B's products; other models are measured beside them, with nothing asked."""
        return {against: (must, aim)} if self.name.endswith("-8b") else {}

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        width = self.heads * self.head_dim
        return {
            "qkv": (width + 2 * self.kv_heads * self.head_dim, self.hidden),
            "o": (self.hidden, width),
            "gate_up": (2 * self.ffn, self.hidden),
            "down": (self.hidden, self.ffn),
        }

    def features(self, product: str) -> tuple[int, ...]:
        """Outputs of the projections that lie side by side in a product."""
        width, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {"qkv": (width, kv, kv), "o": (self.hidden,), "gate_up": (self.ffn, self.ffn), "down": (self.hidden,)}[product]


MODELS = {s.name: s for s in (
    Shapes("qwen3-8b", 4096, 32, 8, 128, 12288, 151936),
    Shapes("qwen3-32b", 5120, 64, 8, 128, 25600, 151936),
    Shapes("llama-3.1-8b", 4096, 32, 8, 128, 14336, 128256),
    Shapes("qwen2.5-0.5b", 896, 14, 2, 64, 4864, 151936),
)}


def select(kind: str, text: str, known: dict) -> list:
    """The entries of `known` that a comma-separated flag names, in its order; all for an empty one."""
    names = [n.strip() for n in text.split(",") if n.strip()]
    for name in names:
        if name not in known:
            raise unknown(kind, name, known)
    return [known[n] for n in dict.fromkeys(names)] if names else list(known.values())


def floor(flops: float = 0.0, moved: float = 0.0, rate: float = FP8_RATE, bandwidth: float = COPY_BANDWIDTH) -> float:
    """Seconds under which no kernel gets: operations at the best rate, or bytes at a copy's bandwidth, whichever is longer."""
    return max(flops / rate, moved / bandwidth)
