"""Finds devices and links by name. The data is in catalog/*.yaml, each constant with its source."""

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from meshwright.cluster.cluster import Device, Link
from meshwright.errors import InputError, did_you_mean
from meshwright.files.yaml_file import read_mapping, validate

CATALOG = Path(__file__).parent / "catalog"


@dataclass(frozen=True)
class CatalogEntry:
    """A device and the machine that it is usually part of.

    `within` names the link between the devices of a machine, `between` the network between machines, and `cores` is the
    number of CPU cores per device. `aliases` are other names of the device, `reported` the names that drivers and the
    operating system report for the device."""

    device: Device
    within: str
    between: str
    cores: int
    aliases: tuple[str, ...]
    reported: tuple[str, ...]


@lru_cache
def entries() -> dict[str, CatalogEntry]:
    """Returns all entries of the catalog by the name of their device."""
    by_name: dict[str, CatalogEntry] = {}
    for file in (CATALOG / "nvidia.yaml", CATALOG / "other_gpus.yaml", CATALOG / "cpus.yaml"):
        for name, raw in read_mapping(file, "catalog").items():
            if name != "_shared":  # texts that several entries refer to
                by_name[name] = _entry(name, raw, f"{file.name}: {name}")
    return by_name


def _entry(name: str, raw: dict[str, Any], source: str) -> CatalogEntry:
    device = {"name": name, **raw["device"]}
    if "host" in raw:  # the link to CPU memory
        host = _links()["host"][raw["host"]]
        device["host_bandwidth_bytes_per_s"] = host["bandwidth_bytes_per_s"]
        device["sources"] = {**device["sources"], "host_bandwidth_bytes_per_s": host["source"]}
    return CatalogEntry(
        device=validate(Device, device, source),
        within=raw["within"],
        between=raw["between"],
        cores=raw["cores"],
        aliases=tuple(raw.get("aliases", ())),
        reported=tuple(raw.get("reported", ())),
    )


def find_entry(name: str) -> CatalogEntry:
    """Returns the entry of the device with this name or alias, in upper or lower case; raises `InputError` if there is
    none."""
    by_name = {word.lower(): entry for key, entry in entries().items() for word in (key, *entry.aliases)}
    entry = by_name.get(name.lower())
    if entry is None:
        raise InputError(f"there is no device '{name}' in the catalog{nearest_device(name)}")
    return entry


def nearest_device(name: str, *others: str) -> str:
    """Returns the end of an error message about an unknown device, such as `: did you mean 'A100-80GB'?`. `others` are
    names that are valid in addition to those of the catalog. Upper and lower case do not matter."""
    spellings = {word.lower(): word for key, entry in entries().items() for word in (key, *entry.aliases)}
    spellings |= {word.lower(): word for word in others}
    hint = did_you_mean(name.lower(), spellings)
    for word in spellings:
        hint = hint.replace(f"'{word}'", f"'{spellings[word]}'")
    return hint or ": docs/cluster.md lists them, and a YAML file describes any other"


def entry_reported_as(name: str) -> CatalogEntry | None:
    """Returns the catalog's entry for a name that a driver or the operating system reports; None if there is none."""
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
    """Returns the names of network links: the links with a fixed name (`InfiniBand-NDR`), and common rates of the
    families that exist at any rate (`Ethernet-25G`)."""
    named = [f"{_prefix(family)}-{name}" for family, raw in _families() for name in raw.get("names", {})]
    rates = (10, 25, 40, 50, 100, 200, 400, 800)
    return named + [f"{family}-{rate}G" for family, raw in _families() for rate in rates if "names" not in raw]


def is_within(name: str) -> bool:
    return name.lower() in (link.lower() for link in links_within())


def find_link(name: str) -> Link:
    """Returns the link with this name: `NVLink4`, `InfiniBand-NDR`, `Ethernet-25G`, or only a rate, `400G`."""
    for link, raw in _links()["within"].items():
        if link.lower() == name.lower():
            return _link(link, raw)
    rate = re.fullmatch(r"(\d+(?:\.\d+)?)G", name, re.IGNORECASE)
    if rate and float(rate[1]) > 0:
        return _link_of_family(_family_for(float(rate[1])), float(rate[1]))
    for family, raw in _families():
        for word, gbit in raw.get("names", {}).items():
            if name.lower() == f"{_prefix(family)}-{word}".lower():
                return _link_of_family(family, gbit)
        family_rate = re.fullmatch(rf"{re.escape(family)}-(\d+(?:\.\d+)?)G", name, re.IGNORECASE)
        if family_rate and float(family_rate[1]) > 0:
            return _link_of_family(family, float(family_rate[1]))
    hint = did_you_mean(name, [*links_within(), *links_between()])
    raise InputError(f"there is no link '{name}' in the catalog{hint or ': write NVLink4, Ethernet-25G or 400G'}")


def _families() -> list[tuple[str, dict[str, Any]]]:
    return list(_links()["between"].items())


def _prefix(family: str) -> str:
    return family.partition("-")[0]


def _family_for(gbit: float) -> str:
    families: dict[int, str] = _links()["by_rate"]
    return next(family for lowest_gbit, family in sorted(families.items(), reverse=True) if gbit >= lowest_gbit)


def _link_of_family(family: str, gbit: float) -> Link:
    raw = dict(_links()["between"][family])
    names = {rate: word for word, rate in raw.pop("names", {}).items()}
    name = f"{_prefix(family)}-{names[gbit]}" if gbit in names else f"{family}-{gbit:g}G"
    return _link(name, {**raw, "bandwidth_bytes_per_s": gbit * 1e9 / 8})


def _link(name: str, raw: dict[str, Any]) -> Link:
    return validate(Link, {"name": name, "curves": _curves().get(name, {}), **raw}, f"catalog: {name}")
