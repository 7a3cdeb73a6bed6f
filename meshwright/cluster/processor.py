"""Detects this machine's processor, its memory, and those of its instructions that speed up training."""

import os
import platform
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from meshwright.cluster.catalog import CATALOG, entry_reported_as
from meshwright.files.yaml_file import read_mapping


@dataclass(frozen=True)
class Processor:
    """This machine's processor. `name` is the catalog's name if the catalog has this processor, and otherwise the name
    that the processor reports. `instructions` are those that speed up training (catalog/instructions.yaml)."""

    name: str
    instructions: tuple[str, ...]


def read_processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> Processor:
    try:
        text = cpuinfo.read_text()
    except OSError:
        text = ""
    flags = (_field(text, "flags") or _field(text, "Features")).split()
    reported = _field(text, "model name") or _arm_part(text) or platform.processor() or platform.machine() or "CPU"
    entry = entry_reported_as(reported)
    return Processor(
        name=entry.device.name if entry else re.sub(r"\((R|TM)\)|CPU|Processor|@.*", "", reported).strip(),
        instructions=tuple(instruction for flag, instruction in _instructions().items() if flag in flags),
    )


def memory_bytes() -> int:
    """Returns the bytes of memory of this machine, or the limit of its container if the limit is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(limit).read_text()))
        except (OSError, ValueError):  # absent, or the word "max"
            continue
    return total


def _field(text: str, name: str) -> str:
    match = re.search(rf"^{name}\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else ""


def _arm_part(text: str) -> str:
    """Returns implementer and part number, such as `ARM 0x41 0xd0c`, because Arm processors report no model name; an
    empty string for other processors."""
    implementer, part = _field(text, "CPU implementer"), _field(text, "CPU part")
    return f"ARM {implementer} {part}" if implementer and part else ""


@lru_cache
def _instructions() -> dict[str, str]:
    return read_mapping(CATALOG / "instructions.yaml", "catalog")
