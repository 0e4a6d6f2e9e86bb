"""metrics.jsonl: one JSON object for each optimizer step, the line a person reads beside it, and the curve.

`step` is the number of optimizer steps done when the line was written. JSON has no NaN and no infinities: they are written as the texts
"NaN", "Infinity" and "-Infinity", and `read` gives them back as floats.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jetrl_jax.errors import UserError
from jetrl_jax.files import write_whole

NOT_IN_JSON = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsWriter:
    """Appends lines to one file; each is whole on disk before `write` returns.

    A new run (`after=None`) starts an empty file. A resumed one keeps the lines of steps up to `after`, its checkpoint's step: what the
    interrupted run wrote beyond it will be done again, and a line that it was killed in the middle of goes too.
    """

    def __init__(self, path: str | Path, after: int | None = None):
        self.path = Path(path)
        kept = [m for m in read(self.path) if m["step"] <= after] if after is not None and self.path.exists() else []
        write_whole(self.path, "".join(_line(m) for m in kept))

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Append the metrics of one step; they must have `step`. Arrays of one element are written as numbers."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(metrics))


def read(path: str | Path) -> list[dict[str, Any]]:
    """Every line in order; a last line without its end (the run was killed) is left out, any other broken one is a UserError."""
    text = Path(path).read_text(encoding="utf-8")
    found = []
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            metrics = json.loads(line)
            metrics["step"] += 0  # an object with a number
        except (json.JSONDecodeError, TypeError, KeyError):
            raise UserError(f"{path}:{number}: not a JSON object with a number 'step'; was the file edited?") from None
        found.append({k: NOT_IN_JSON.get(v, v) if isinstance(v, str) else v for k, v in metrics.items()})
    return found


def _line(metrics: Mapping[str, Any]) -> str:
    return json.dumps({k: _plain(v) for k, v in metrics.items()}, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """A Python value for JSON; `item` is what jax and numpy scalars have."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


# Metric -> how `step_line` prints it, in this order; a metric that a step does not have is left out.
LINE = {
    "reward": "reward {:.3f}",
    "loss": "loss {:+.4f}",
    "kl": "kl {:.4f}",
    "grad_norm": "grad {:.3g}",
    "learning_rate": "lr {:.2g}",
    "mismatch_mean_abs": "mismatch mean {:.2g}",
    "mismatch_max_abs": "max {:.2g}",
    "completion_length": "length {:.1f}",
    "truncated": "cut off {:.0%}",
    "skipped_steps": "skipped {:.0f}",
    "seconds": "{:.1f} s",
    "tokens_per_second": "{:.0f} tokens/s",
}


def step_line(metrics: Mapping[str, Any], steps: int | None = None) -> str:
    """One line of a step for a person: "step 3/10  reward 0.312  loss -0.0021  mismatch mean 0  max 0  ..."."""
    head = f"step {_plain(metrics['step'])}" + (f"/{steps}" if steps is not None else "")
    shown = {k: NOT_IN_JSON.get(v, v) if isinstance(v := _plain(metrics[k]), str) else v for k in LINE if k in metrics}
    return "  ".join([head, *(LINE[k].format(v) for k, v in shown.items())])


def plot(path: str | Path, png: str | Path) -> Path | None:
    """Draw reward and mismatch over the steps of a metrics file into a PNG; None where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot as plt

    rows = read(path)
    figure, (top, bottom) = plt.subplots(2, sharex=True, figsize=(7, 5), height_ratios=(2, 1), layout="constrained")
    steps = [m["step"] for m in rows]
    rewards = [m.get("reward", math.nan) for m in rows]
    top.plot(steps, rewards, color="0.75", label="each step")
    top.plot(steps, smooth(rewards), color="C0", label="smoothed")
    top.set_ylabel("mean reward")
    top.legend(loc="best", frameon=False)
    for name, label in (("mismatch_mean_abs", "mean"), ("mismatch_max_abs", "max")):
        bottom.plot(steps, [m.get(name, math.nan) for m in rows], label=label)
    bottom.set_ylabel("|Δ log p|, rollout and update")
    bottom.set_xlabel("optimizer step")
    bottom.legend(loc="best", frameon=False)
    figure.savefig(png, dpi=120)
    plt.close(figure)
    return Path(png)


def smooth(values: list[float], weight: float = 0.8) -> list[float]:
    """Exponential moving average with the start's bias taken out; NaN entries leave it as it was."""
    total = count = 0.0
    found = []
    for v in values:
        if not math.isnan(v):
            total, count = weight * total + (1 - weight) * v, weight * count + (1 - weight)
        found.append(total / count if count else math.nan)
    return found
