"""The hook `session` of a LightningModule: the module says which of its parts is the model, by training it through a
session of its own. This is needed for plans that split layers or cut a pipeline.

class Module(LightningModule):
    automatic_optimization = False

    def session(self, plan):
        return mw.parallelize(self.model, optimizer, loss=…, plan=plan, sample_batch=batch)

    def training_step(self, batch, index):
        self.log("loss", self.trainer.strategy.session.step(batch))
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.checkpoint.load import read_manifest_once
from meshwright.checkpoint.reader import open_checkpoint
from meshwright.errors import CheckpointError, InputError
from meshwright.plan import Plan
from meshwright.train.session import Session

_OBJECT = "lightning"


def has_session_hook(module: Any) -> bool:
    return callable(getattr(module, "session", None))


def make_session(module: Any, plan: Plan) -> Session:
    """Calls the module's hook. All ranks call this together."""
    name = type(module).__name__
    if module.automatic_optimization:
        raise InputError(
            f"{name} has the hook session, so its session makes the steps: set automatic_optimization = False, and call"
            " self.trainer.strategy.session.step(batch) in training_step"
        )
    session = module.session(plan)
    if not isinstance(session, Session):
        raise InputError(f"{name}.session returns a {type(session).__name__}: return mw.parallelize(…, plan=plan)")
    return session


def count_steps(session: Session, trainer: Any) -> None:
    """Lets Lightning count the optimizer steps of the session in its `global_step`."""
    progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress

    def count(*_: Any) -> None:
        progress.increment_ready()
        progress.increment_completed()

    session.optimizer.register_step_post_hook(count)


def save_session(path: Path, session: Session, contents: Mapping[str, Any]) -> None:
    """Saves the session and the other `contents` of a checkpoint of Lightning, which have to be plain values. All ranks
    call this together."""
    session.save(path, extra={_OBJECT: dict(contents)})


def load_session(path: Path, session: Session) -> dict[str, Any]:
    """Loads what `save_session` saved. Returns the other contents. All ranks call this together."""
    manifest = read_manifest_once(path)
    session.restore(path, manifest)
    with open_checkpoint(path, manifest) as reader:
        contents = reader.objects.get(_OBJECT)
    if not isinstance(contents, dict):
        raise CheckpointError(f"{path}: this checkpoint was not saved by Lightning, so it has no progress of its loops")
    return contents
