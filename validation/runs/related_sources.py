"""Which sources must not calibrate each other (related_sources.yaml).

A source is scored with a calibration that has seen neither its own rows nor those of a related source.
"""

from functools import cache
from pathlib import Path
from typing import Any

from meshwright.files.yaml_file import read_mapping

FILE = Path(__file__).with_name("related_sources.yaml")


def _relations() -> dict[str, Any]:
    return read_mapping(FILE, "related sources")


@cache
def related_sources(source: str) -> frozenset[str]:
    """The source itself and all sources related to it."""
    groups = [group["sources"] for group in _relations()["groups"] if source in group["sources"]]
    return frozenset({source, *(name for group in groups for name in group)})


@cache
def untrusted_sources() -> frozenset[str]:
    """Sources that are scored but calibrate nothing, because their own figures scatter too much."""
    return frozenset(_relations()["untrusted"])


@cache
def publisher(source: str) -> str | None:
    """The publisher whose name the catalog gives to sustained rates measured on this source's machines.

    None for most sources, which have published no such rates."""
    publishers: dict[str, str] = _relations()["publisher"]
    return publishers.get(source)
