"""A run's folder: new, or one to go on from. What was measured before an interruption is kept, what would contradict it is refused."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jetrl_jax import config as configs
from jetrl_jax.checkpoint import Checkpoints
from jetrl_jax.errors import UserError
from jetrl_jax.files import write_whole

MAY_CHANGE = ("steps", "out", "checkpoint.every", "checkpoint.keep", "checkpoint.resume")
"""Fields in which a resumed run may differ from its checkpoint. `steps` only under the constant schedule: the others end at `steps`."""


@dataclasses.dataclass(frozen=True)
class Run:
    """step: the checkpoint's, or None for a new run."""

    folder: Path
    checkpoints: Checkpoints
    step: int | None

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    def evaluation(self, name: str) -> dict[str, Any] | None:
        """What `evaluate` stored under a name, if it did."""
        path = self.folder / f"evaluation_{name}.json"
        try:
            return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        except ValueError:  # broken by hand: measured again, or left out where it cannot be
            return None

    def store_evaluation(self, name: str, result: dict[str, Any]) -> None:
        write_whole(self.folder / f"evaluation_{name}.json", json.dumps(result) + "\n")


def open_run(config: ConfigDict) -> Run:
    """The run in `config.out`, its config.json written. Raises UserError if it holds another run's checkpoints."""
    folder = Path(config.out)
    if not config.out or folder.resolve() == Path(config.model.path).resolve() or _foreign(folder / "config.json"):
        raise UserError(f"out={config.out!r}: name a folder of the run's own, not a model's: a run writes a config.json there")
    checkpoints = Checkpoints(folder, config.checkpoint.keep)
    step = checkpoints.latest()
    if step is not None:
        if not config.checkpoint.resume:
            raise UserError(f"out={config.out}: it holds a run at step {step}; set checkpoint.resume=True to go on, or give another folder")
        _check_same(configs.from_json(checkpoints.config(step)), config, step)
    run = Run(folder, checkpoints, step)
    if step is None or step < config.steps:
        (folder / "evaluation_after.json").unlink(missing_ok=True)
    if step is None:
        (folder / "evaluation_before.json").unlink(missing_ok=True)
        if run.metrics.is_file() and run.metrics.stat().st_size:  # of a run that stopped before its first checkpoint
            os.replace(run.metrics, folder / "metrics.interrupted.jsonl")
    write_whole(folder / "config.json", configs.to_json(config))
    return run


def _foreign(path: Path) -> bool:
    """Whether a config.json is somebody else's: a model's, say."""
    if not path.is_file():
        return False
    try:
        return "policy" not in json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return True


def _check_same(stored: ConfigDict, config: ConfigDict, step: int) -> None:
    old, new = (dict(configs.flatten(c)) for c in (stored, config))
    for field in old:
        if old[field] != new[field] and (field not in MAY_CHANGE or (field == "steps" and config.optimizer.schedule != "constant")):
            why = f" (optimizer.schedule={config.optimizer.schedule} ends at steps)" if field == "steps" else ""
            raise UserError(
                f"{field}={new[field]!r}, but the run in {config.out} was at {old[field]!r} when it stopped at step {step}{why}: "
                "set it back to go on, or give another `out`"
            )
    if new["steps"] < step:
        raise UserError(f"steps={new['steps']}, but the run in {config.out} is already at step {step}: give more steps, or another `out`")
