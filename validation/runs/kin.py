"""Which sources must not calibrate each other (kin.yaml): what a source is judged by has not seen its kin either."""

from functools import cache
from pathlib import Path

from meshwright.yaml_file import read_mapping

FILE = Path(__file__).with_name("kin.yaml")


@cache
def kin_of(source: str) -> frozenset[str]:
    """The source itself and its kin."""
    groups = [
        group["sources"] for group in read_mapping(FILE, "kin of sources")["groups"] if source in group["sources"]
    ]
    return frozenset({source, *(name for group in groups for name in group)})


@cache
def untrusted() -> frozenset[str]:
    """Sources that calibrate nothing."""
    return frozenset(read_mapping(FILE, "kin of sources")["untrusted"])


@cache
def publisher(source: str) -> str | None:
    """Under which name rates_reached.yaml has what the source measured of its own machines."""
    found: dict[str, str] = read_mapping(FILE, "kin of sources")["publisher"]
    return found.get(source)
