"""Checkpoints by Orbax: the whole train state and the config it was made with, committed whole or not at all."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jetrl_jax.errors import UserError


class Checkpoints:
    """The checkpoints of one run, in `folder`/checkpoints; the newest `keep` are kept."""

    def __init__(self, folder: str | Path, keep: int = 2, create: bool = True):
        self.folder = Path(folder).resolve() / "checkpoints"
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=create)
        if not create and not self.folder.is_dir():
            raise UserError(f"{folder} has no checkpoints")
        try:
            self._manager = ocp.CheckpointManager(self.folder, options=options, item_names=("state", "config"))
        except OSError as error:
            raise UserError(f"out={folder}: checkpoints cannot be written there ({error}); give another folder") from error

    def latest(self) -> int | None:
        """The newest step, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, config: str) -> None:
        """Write `state` (a pytree of arrays) and the config's JSON; returns when they are on disk, since the state is donated next."""
        self._manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), config=ocp.args.JsonSave({"json": config})))
        self._manager.wait_until_finished()

    def config(self, step: int) -> str:
        """The config's JSON at a step."""
        return self._restore(step, config=ocp.args.JsonRestore())["config"]["json"]

    def restore(self, step: int, abstract: Any) -> Any:
        """The state at a step; `abstract` gives shapes and dtypes (`jax.eval_shape`), arrays come back bit for bit."""
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        target = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), abstract)
        return self._restore(step, state=ocp.args.StandardRestore(target))["state"]

    def _restore(self, step: int, **items: Any) -> Any:
        known = self._manager.all_steps()
        if step not in known:
            raise UserError(f"step={step}: no such checkpoint in {self.folder}; there are {', '.join(map(str, sorted(known))) or 'none'}")
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except (ValueError, KeyError, OSError, TypeError) as error:  # what Orbax raises on missing, foreign or broken files
            first = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
            where = self.folder / str(step)
            raise UserError(
                f"checkpoint {where} cannot be read: it is broken, or of another model than model.path ({first}); "
                "nothing was changed. If it is broken, move it away to go on from the one before it"
            ) from error

    def close(self) -> None:
        self._manager.close()
