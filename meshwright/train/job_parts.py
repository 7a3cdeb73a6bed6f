"""`JobParts`: the data sets, the sample batch, the model and the model structure of a job, each built when it is first
read and then cached. Planning a job and checking it before ranks start share one `JobParts`, so that nothing is built
twice."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import nn

from meshwright.errors import MeshwrightError, ModelConstructorError
from meshwright.job import Job
from meshwright.model_io.batch import target_key
from meshwright.profile.structure.model_structure import ModelStructure
from meshwright.train.build import build_data, construct_model, freeze, sample_batch

Part = TypeVar("Part")


class JobParts:
    """Builds and caches the parts of one job: its data sets, sample batch, model and model structure. A part whose
    construction raises an error is not cached: the next access builds it again, and gets the same error."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._parts: dict[str, Any] = {}

    def once(self, name: str, build: Callable[[], Part]) -> Part:
        """Returns the part that is cached under this name. The first call builds it with `build`."""
        if name not in self._parts:
            self._parts[name] = build()
        return cast(Part, self._parts[name])

    def release(self) -> None:
        """Drops all cached parts. A launcher does this to free their memory, because it does not need them while its
        ranks train."""
        self._parts.clear()

    @property
    def data(self) -> tuple[Any, Any]:
        """The training set and the evaluation set. The latter is None if the job has none."""
        return self.once("data", lambda: build_data(self.job))

    @property
    def sample(self) -> Any:
        """A batch of two samples of the training set."""
        return self.once("sample", lambda: sample_batch(self.job, self.data[0]))

    @property
    def meta_model(self) -> nn.Module | None:
        """The model on the meta device. None if its constructor fails there, for example because it reads values of
        tensors."""
        return self.once("meta_model", self._build_meta_model)

    def _build_meta_model(self) -> nn.Module | None:
        try:
            with torch.device("meta"):
                return construct_model(self.job)
        except ModelConstructorError:
            return None
        except MeshwrightError:
            raise
        except Exception:  # whatever a model's own code raises on the meta device
            return None

    @property
    def model(self) -> nn.Module:
        """The model, on the meta device if it can be built there, otherwise in memory. Parameters that the job freezes
        are frozen."""
        return self.once("model", self._build_model)

    def _build_model(self) -> nn.Module:
        model = self.meta_model
        if model is None:
            model = construct_model(self.job)
        freeze(model, self.job.train.freeze)
        return model

    @property
    def structure(self) -> ModelStructure:
        """The structure of the model (which layers can be split, where it can be cut into stages), found with `sample`
        as input."""
        return self.once("structure", self._build_structure)

    def _build_structure(self) -> ModelStructure:
        sample = self.sample
        return ModelStructure(self.model, sample, target_key(self.job.data.target, self.job.loss is not None))
