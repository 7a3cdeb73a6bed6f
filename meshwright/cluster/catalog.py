"""What devices and links are known by name. The data is in catalog/*.yaml, each constant with its source."""

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from meshwright.cluster.cluster import Device, Link
from meshwright.errors import InputError, did_you_mean
from meshwright.yaml_file import read_mapping, validated

CATALOG = Path(__file__).parent / "catalog"


@dataclass(frozen=True)
class Entry:
    """A device and the machine it usually sits in: links by name, CPU cores a device, and its other names.

    `reported` are the names that drivers and the operating system give it."""

    device: Device
    within: str
    between: str
    cores: int
    aliases: tuple[str, ...]
    reported: tuple[str, ...]


@lru_cache
def entries() -> dict[str, Entry]:
    """All devices by name."""
    found: dict[str, Entry] = {}
    for file in (CATALOG / "nvidia.yaml", CATALOG / "cpus.yaml"):
        for name, raw in read_mapping(file, "catalog").items():
            if name != "_shared":  # texts that several entries refer to
                found[name] = _entry(name, raw, f"{file.name}: {name}")
    return found


def _entry(name: str, raw: dict[str, Any], source: str) -> Entry:
    return Entry(
        device=validated(Device, {"name": name, **raw["device"]}, source),
        within=raw["within"],
        between=raw["between"],
        cores=raw["cores"],
        aliases=tuple(raw["aliases"]),
        reported=tuple(raw["reported"]),
    )


def find_entry(name: str) -> Entry:
    """A device by its name or another of its names, in any case."""
    names = {known.lower(): entry for key, entry in entries().items() for known in (key, *entry.aliases)}
    entry = names.get(name.lower())
    if entry is None:
        raise InputError(f"there is no device '{name}' in the catalog{nearest_device(name)}")
    return entry


def nearest_device(name: str, *others: str) -> str:
    """`: did you mean 'A100-80GB'?`, for whatever case it was written in; `others` are names besides the catalog's."""
    known = {word.lower(): word for key, entry in entries().items() for word in (key, *entry.aliases)}
    known |= {word.lower(): word for word in others}
    hint = did_you_mean(name.lower(), known)
    for word in known:
        hint = hint.replace(f"'{word}'", f"'{known[word]}'")
    return hint or ": docs/cluster.md lists them, and a YAML file describes any other"


def entry_reported_as(name: str) -> Entry | None:
    """The catalog's device for a name that a driver reports; None for one that is not known."""
    return next((entry for entry in entries().values() if name in entry.reported), None)


@lru_cache
def _links() -> dict[str, Any]:
    return read_mapping(CATALOG / "links.yaml", "catalog")


@lru_cache
def _curves() -> dict[str, Any]:
    return read_mapping(CATALOG / "curves.yaml", "catalog")


def links_within() -> list[str]:
    return list(_links()["within"])


def links_between() -> list[str]:
    """Links that have a name of their own, and a few rates of the families that take any."""
    named = [f"{_prefix(family)}-{name}" for family, raw in _families() for name in raw.get("names", {})]
    rates = (10, 25, 40, 50, 100, 200, 400, 800)
    return named + [f"{family}-{rate}G" for family, raw in _families() for rate in rates if "names" not in raw]


def is_within(name: str) -> bool:
    return name.lower() in (known.lower() for known in links_within())


def find_link(name: str) -> Link:
    """`NVLink4`, `InfiniBand-NDR`, `Ethernet-25G`, or a rate alone: `400G`."""
    for known, raw in _links()["within"].items():
        if known.lower() == name.lower():
            return _link(known, raw)
    rate = re.fullmatch(r"(\d+(?:\.\d+)?)G", name, re.IGNORECASE)
    if rate and float(rate[1]) > 0:
        return _of_family(_family_for(float(rate[1])), float(rate[1]))
    for family, raw in _families():
        for word, gbit in raw.get("names", {}).items():
            if name.lower() == f"{_prefix(family)}-{word}".lower():
                return _of_family(family, gbit)
        other = re.fullmatch(rf"{re.escape(family)}-(\d+(?:\.\d+)?)G", name, re.IGNORECASE)
        if other and float(other[1]) > 0:
            return _of_family(family, float(other[1]))
    hint = did_you_mean(name, [*links_within(), *links_between()])
    raise InputError(f"there is no link '{name}' in the catalog{hint or ': write NVLink4, Ethernet-25G or 400G'}")


def _families() -> list[tuple[str, dict[str, Any]]]:
    return list(_links()["between"].items())


def _prefix(family: str) -> str:
    return family.partition("-")[0]


def _family_for(gbit: float) -> str:
    rules: dict[int, str] = _links()["by_rate"]
    return next(family for least, family in sorted(rules.items(), reverse=True) if gbit >= least)


def _of_family(family: str, gbit: float) -> Link:
    raw = dict(_links()["between"][family])
    names = {rate: word for word, rate in raw.pop("names", {}).items()}
    name = f"{_prefix(family)}-{names[gbit]}" if gbit in names else f"{family}-{gbit:g}G"
    return _link(name, {**raw, "bandwidth_bytes_per_s": gbit * 1e9 / 8})


def _link(name: str, raw: dict[str, Any]) -> Link:
    return validated(Link, {"name": name, "curves": _curves().get(name, {}), **raw}, f"catalog: {name}")
