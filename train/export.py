"""`jetrl export`: a checkpoint of a run as a Hugging Face folder in bf16."""

import json
from pathlib import Path

import jax

from jetrl_jax import config as configs
from jetrl_jax.checkpoint import Checkpoints
from jetrl_jax.errors import UserError
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.models.weights import export_model
from jetrl_jax.train.setup import optimizer_of
from jetrl_jax.train.update import init_state


def export_run(run: str, out: str, step: int | None = None) -> int:
    """Write the parameters of `run`'s checkpoint (the newest, or that of `step`) to the folder `out`; returns the step."""
    stored = Path(run) / "config.json"
    if not stored.is_file():
        raise UserError(f"--run={run}: no config.json there; give the folder that a run wrote to (`out` in its config)")
    checkpoints = Checkpoints(run, create=False)
    step = checkpoints.latest() if step is None else step
    if step is None:
        raise UserError(f"--run={run}: it has no checkpoint yet")
    config = configs.from_json(checkpoints.config(step))
    model = ModelConfig.from_hf(config.model.path)
    abstract = jax.eval_shape(lambda p: init_state(p, optimizer_of(config), config.seed), model.param_shapes())
    state = checkpoints.restore(step, abstract)
    checkpoints.close()
    export_model(config.model.path, out, state.params)
    print(json.dumps({"run": run, "step": step, "out": out}))
    return step
