"""What a run says at its end: reward before and after, the curve, and where everything is."""

from typing import Any

import numpy as np
from ml_collections import ConfigDict

from jetrl_jax import metrics
from jetrl_jax.errors import UserError
from jetrl_jax.train.resume import Run


def summary(config: ConfigDict, run: Run, before: dict | None, after: dict | None) -> dict[str, Any]:
    """Draws the curve, prints the summary, and returns it."""
    rows = metrics.read(run.metrics) if run.metrics.is_file() else []
    if not rows:
        raise UserError(f"{run.metrics} has no steps, but the run is finished: was it removed? Its checkpoints are still there")
    tenth = max(1, len(rows) // 10)
    result: dict[str, Any] = {
        "steps": config.steps,
        "reward_first": float(np.mean([m["reward"] for m in rows[:tenth]])),
        "reward_last": float(np.mean([m["reward"] for m in rows[-tenth:]])),
        "mismatch_max_abs": max(m["mismatch_max_abs"] for m in rows),
        "mismatch_mean_abs": float(np.mean([m["mismatch_mean_abs"] for m in rows])),
        "skipped_steps": rows[-1]["skipped_steps"],
    }
    lines = [
        f"reward of the training prompts: {result['reward_first']:.3f} (first {tenth} steps) -> {result['reward_last']:.3f} (last {tenth})"
    ]
    if before and after:
        result |= {"evaluation_before": before["reward"], "evaluation_after": after["reward"]}
        lines.append(f"reward of {after['prompts']} {after['split']} prompts: {before['reward']:.3f} before -> {after['reward']:.3f} after")
    lines.append(
        f"|log-probability of update - of rollout|: mean {result['mismatch_mean_abs']:.3g}, largest {result['mismatch_max_abs']:.3g}"
    )
    curve = metrics.plot(run.metrics, run.folder / "curve.png")
    lines.append(
        f"written to {run.folder}: metrics.jsonl, config.json, checkpoints/"
        + (", curve.png" if curve else " (no curve: pip install matplotlib)")
    )
    lines.append(f"next: jetrl export --run={config.out} --out=FOLDER")
    print("\n".join(["", *lines]), flush=True)
    return result
