"""Reads the models of rows that have mixtures of experts. mixtures.yaml has their sizes by name."""

from functools import cache
from pathlib import Path
from typing import Any

from meshwright.files.yaml_file import read_mapping
from meshwright.user.call import Call
from validation.runs.case import NotCovered
from validation.runs.reading.flops import MIXTURE
from validation.runs.rows import PublishedRow

FILE = Path(__file__).with_suffix(".yaml")


@cache
def _settings() -> dict[str, Any]:
    return read_mapping(FILE, "published mixtures of experts")


def is_mixture(row: PublishedRow) -> bool:
    return str(row.model.get("family", "")).startswith("moe")


def read_mixture(row: PublishedRow, defaults: list[str]) -> tuple[Call, int]:
    """The model, and the length of its sequences. What the model differs in is added to `defaults`. Raises `NotCovered`
    for models that are no decoders."""
    name, settings = row.model["name"], _settings()
    if name in settings["other_blocks"]:
        raise NotCovered(settings["other_blocks"][name])
    if name not in settings["mixtures"]:
        raise NotCovered(f"no {name} among the mixtures of experts")
    keywords = dict(settings["mixtures"][name])
    stands_for = keywords.pop("for", None)
    if stands_for:
        defaults.append(stands_for)
    if "layers" in row.model:
        keywords["layers"] = row.model["layers"]
    length = row.model["seq"]
    return Call(call=MIXTURE, **{**keywords, "sequence": length}), length
