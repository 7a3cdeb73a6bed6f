"""`JobParts`: what a job's data sets, model and structure are, each built when it is first needed and kept for the next
reader. Planning a job and checking it before ranks start share one."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import nn

from meshwright.errors import MeshwrightError
from meshwright.job import Job
from meshwright.profile.structure.model_structure import ModelStructure
from meshwright.train.build import build_data, construct_model, freeze, sample_batch

Part = TypeVar("Part")


class JobParts:
    """The parts of one job in one process. Parts whose construction fails are tried again by the next reader, who gets
    the same error."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._parts: dict[str, Any] = {}

    def once(self, name: str, build: Callable[[], Part]) -> Part:
        """What `build` returned when it was first called with this name."""
        if name not in self._parts:
            self._parts[name] = build()
        return cast(Part, self._parts[name])

    def release(self) -> None:
        """Frees the memory of all parts: a launcher has no use for them while its ranks train."""
        self._parts.clear()

    @property
    def data(self) -> tuple[Any, Any]:
        """The training set and the evaluation set; the latter is None where the job has none."""
        return self.once("data", lambda: build_data(self.job))

    @property
    def sample(self) -> Any:
        """A batch of two samples of the training set."""
        return self.once("sample", lambda: sample_batch(self.job, self.data[0]))

    @property
    def meta_model(self) -> nn.Module | None:
        """The model on the meta device; None where it can only be built with memory."""
        return self.once("meta_model", self._build_meta_model)

    def _build_meta_model(self) -> nn.Module | None:
        try:
            with torch.device("meta"):
                return construct_model(self.job)
        except MeshwrightError:
            raise
        except Exception:  # whatever a model's own code raises on the meta device
            return None

    @property
    def model(self) -> nn.Module:
        """The model, on the meta device where that is possible. Parameters that the job freezes are frozen."""
        return self.once("model", self._build_model)

    def _build_model(self) -> nn.Module:
        model = self.meta_model
        if model is None:
            model = construct_model(self.job)
        freeze(model, self.job.train.freeze)
        return model

    @property
    def structure(self) -> ModelStructure:
        """How the model can be split and cut, on a batch like `sample`."""
        return self.once("structure", self._build_structure)

    def _build_structure(self) -> ModelStructure:
        sample = self.sample
        return ModelStructure(self.model, sample, self.job.data.target)
