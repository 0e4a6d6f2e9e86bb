"""Trains one config under several precision policies, one process each, and sets the runs side by side: a table, a picture, a JSON.

  python scripts/compare_policies.py --config sums_smollm2_135m --out runs/compare --runs bf16 jet_fp8 fp8_rollout_only jet_fp8:float64 \\
      -- --config.model.path=FOLDER --config.steps=150

A run is POLICY or POLICY:REDUCTIONS. What stands behind `--` goes to every run. Runs that are there already are not done again.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from jetrl_jax import metrics

COLUMNS = ("reward_first", "reward_last", "mismatch_mean_abs", "mismatch_max_abs", "mismatch_k3", "ess_sequence", "equal_share", "seconds")


def train(config: str, name: str, out: Path, overrides: list[str]) -> Path:
    policy, _, reductions = name.partition(":")
    folder = out / name.replace(":", "_")
    words = [f"--config={config}", f"--config.policy={policy}", f"--config.out={folder}", *overrides]
    words += [f"--config.policy_overrides.reductions={reductions}"] if reductions else []
    subprocess.run([sys.executable, "-m", "jetrl_jax.cli", "train", *words], check=True)
    return folder / "metrics.jsonl"


def row(rows: list[dict]) -> dict[str, float]:
    """Means over the run; rewards over its first and last tenth; seconds a step as the median, which leaves compilation out."""
    tenth = max(1, len(rows) // 10)
    mean = {c: float(np.mean([m[c] for m in rows])) for c in ("mismatch_mean_abs", "mismatch_k3", "ess_sequence")}
    return {
        "steps": len(rows),
        "reward_first": float(np.mean([m["reward"] for m in rows[:tenth]])),
        "reward_last": float(np.mean([m["reward"] for m in rows[-tenth:]])),
        "mismatch_max_abs": max(m["mismatch_max_abs"] for m in rows),
        "equal_share": float(np.mean([m["mismatch_equal_share"] for m in rows])),
        "seconds": float(np.median([m["seconds"] for m in rows])),
        **mean,
    }


def plot(runs: dict[str, list[dict]], png: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (top, bottom) = plt.subplots(2, sharex=True, figsize=(8, 7), layout="constrained")
    for name, rows in runs.items():
        steps = [m["step"] for m in rows]
        top.plot(steps, metrics.smooth([m["reward"] for m in rows]), label=name)
        values = np.array([m["mismatch_mean_abs"] for m in rows])
        if values.any():
            bottom.semilogy(steps, np.where(values > 0, values, np.nan), label=name)
        else:
            bottom.plot([], [], label=f"{name}: 0 at every step")
    top.set_ylabel("mean reward (smoothed)")
    bottom.set_ylabel("mean |Δ log p| of rollout and update")
    bottom.set_xlabel("optimizer step")
    for axes in (top, bottom):
        axes.legend(frameon=False)
        axes.grid(alpha=0.3)
    figure.savefig(png, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", nargs="+", required=True)
    parser.add_argument("overrides", nargs="*", help="flags of `jetrl train`, behind --")
    args = parser.parse_args()
    runs = {name: metrics.read(train(args.config, name, args.out, args.overrides)) for name in args.runs}
    table = {name: row(rows) for name, rows in runs.items()}
    (args.out / "table.json").write_text(json.dumps(table, indent=2) + "\n")
    plot(runs, args.out / "curves.png")
    print(f"\n{'run':<20} {'steps':>5} " + " ".join(f"{c:>17}" for c in COLUMNS))
    for name, r in table.items():
        print(f"{name:<20} {r['steps']:>5} " + " ".join(f"{r[c]:>17.4g}" for c in COLUMNS))


if __name__ == "__main__":
    main()
