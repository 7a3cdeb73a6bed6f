"""The accuracy of predictions that the documentation states (stated_accuracy.yaml), compared with computed figures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from meshwright.files.yaml_file import read_mapping

FILE = Path(__file__).with_suffix(".yaml")
REPOSITORY = Path(__file__).parents[1]


class StatedFigure(BaseModel):
    """A figure that the documentation states, and by how much a computed figure may be worse."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    stated: float
    margin: float
    better: Literal["lower", "higher"]

    def is_worse(self, computed: float) -> bool:
        """Whether the computed figure is worse than the stated one by more than the margin."""
        worse_by = computed - self.stated if self.better == "lower" else self.stated - computed
        return worse_by > self.margin


class StatedAccuracy(BaseModel):
    """The stated figures of one comparison, the command that computes them, and the words of the documents that state
    them, by file."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    command: str
    figures: dict[str, StatedFigure]
    documents: dict[str, tuple[str, ...]]

    def worse_figures(self, computed: Mapping[str, float]) -> list[str]:
        """One line for each figure that is worse than stated by more than its margin. Figures that are not in
        `computed` are not compared."""
        return [
            f"{name}: {computed[name]:.4g} instead of the stated {figure.stated:.4g} ± {figure.margin:.4g} "
            f"(`{self.command}` computes it, validation/stated_accuracy.yaml states it)"
            for name, figure in self.figures.items()
            if name in computed and figure.is_worse(computed[name])
        ]

    def missing_words(self) -> list[str]:
        """One line for each statement that its document does not contain; line breaks do not matter."""
        return [
            f"{file} does not say: {words}"
            for file, statements in self.documents.items()
            for words in statements
            if words not in " ".join((REPOSITORY / file).read_text().split())
        ]


def stated_accuracies() -> dict[str, StatedAccuracy]:
    """All stated accuracies, by the name of their comparison."""
    content: dict[str, Any] = read_mapping(FILE, "stated accuracy of predictions")
    return {name: StatedAccuracy.model_validate(values) for name, values in content.items()}
