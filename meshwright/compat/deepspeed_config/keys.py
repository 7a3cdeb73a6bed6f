"""Which keys of DeepSpeed's configuration are honoured, ignored and refused. The table is keys.yaml."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from meshwright.errors import InputError, did_you_mean
from meshwright.files.yaml_file import read_mapping

Effect = Literal["honoured", "ignored", "refused"]
EFFECTS: tuple[Effect, ...] = ("honoured", "ignored", "refused")


@dataclass(frozen=True)
class Key:
    """A key by its dotted name. `text` says what it becomes, or why it is ignored or refused. `off` are the values of a
    refused key that ask for nothing."""

    name: str
    effect: Effect
    text: str
    off: tuple[Any, ...] = ()


@dataclass(frozen=True)
class CheckedKeys:
    """What a configuration has besides honoured keys: `ignored` keys with the reasons, `unknown` keys with the nearest
    known ones, and keys whose value is `auto`."""

    ignored: dict[str, str]
    unknown: dict[str, str]
    auto: tuple[str, ...]


@cache
def known_keys() -> dict[str, Key]:
    """The table of all keys, by name."""
    keys = {}
    for name, entry in read_mapping(Path(__file__).with_name("keys.yaml"), "key table").items():
        effect = next(effect for effect in EFFECTS if effect in entry)
        keys[name] = Key(name, effect, entry[effect], tuple(entry.get("off", ())))
    return keys


def check_keys(config: Mapping[str, Any], source: str) -> CheckedKeys:
    """Compares a configuration with the table. Raises an `InputError` for a refused key, and for an unknown key of a
    known section; DeepSpeed does so, too. An unknown key outside of all sections is only noted, because scripts store
    their own values there."""
    ignored: dict[str, str] = {}
    unknown: dict[str, str] = {}
    auto: list[str] = []
    for name, value in _entries(config, ""):
        key = known_keys().get(name)
        if value == "auto":
            auto.append(name)
        if key is None:
            siblings = {other.rpartition(".")[2] for other in known_keys() if _section(other) == _section(name)}
            siblings |= {other.partition(".")[0] for other in known_keys()} if "." not in name else set()
            nearest = did_you_mean(name.rpartition(".")[2], siblings)
            if "." in name:
                raise InputError(f"{source}: {_section(name)} has no key '{name.rpartition('.')[2]}'{nearest}")
            unknown[name] = nearest
        elif key.effect == "ignored" and not _is_off(value):
            ignored[name] = key.text
        elif key.effect == "refused" and not _is_off(value) and value not in key.off:
            raise InputError(f"{source}: {name} is {value!r:.80}, which is not offered, because {key.text}")
    return CheckedKeys(ignored, unknown, tuple(auto))


def _entries(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yields the keys of the table that a configuration has, with their values. What is below such a key belongs to
    its value. Keys that the table does not have are yielded, too."""
    for key, value in section.items():
        name = f"{prefix}{key}"
        has_keys_below = any(known.startswith(f"{name}.") for known in known_keys())
        if name not in known_keys() and has_keys_below and isinstance(value, Mapping):
            yield from _entries(value, f"{name}.")
        elif name in known_keys() or not (has_keys_below and value in (None, False, "auto")):
            yield name, value


def _section(name: str) -> str:
    return name.rpartition(".")[0]


def _is_off(value: Any) -> bool:
    """Whether this is a section that is switched off: it, or what is in it, says `enabled: false`, and nothing in it
    says `enabled: true`."""
    switches = list(_switches(value))
    return bool(switches) and not any(switch is True for switch in switches)


def _switches(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key == "enabled":
                yield inner
            else:
                yield from _switches(inner)
