"""The report of a stall: its first line says which rank is stuck and why; then what every rank was doing."""

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from meshwright.processes.stall.record import RankRecord

_SHOWN_CALLS = 12


def format_report(line: str, records: Mapping[int, RankRecord], missing: Mapping[int, str]) -> str:
    parts = [line, "", f"written at {time.strftime('%Y-%m-%d %H:%M:%S')}", "", _table(records, missing)]
    for rank, record in sorted(records.items()):
        parts += ["", f"--- rank {rank}", f"step {record.step}, {record.activity}"]
        if record.module:
            parts.append(f"module: {record.module}")
        parts.append(f"waits in: {record.exchange}" if record.exchange else "waits for no other rank")
        parts += [f"is in: {record.place}", "", record.stacks.rstrip()]
        if record.calls:
            parts += ["", "the last collectives that it called, in torch's flight recorder:"]
            parts += [
                f"  {call.group} number {call.number}: {call}{'' if call.is_done else '   <- not done'}"
                for call in record.calls[-_SHOWN_CALLS:]
            ]
    return "\n".join(parts) + "\n"


def _table(records: Mapping[int, RankRecord], missing: Mapping[int, str]) -> str:
    lines = [f"rank {rank}: {text}" for rank, text in missing.items()]
    for rank, record in records.items():
        doing = f"waits in the {record.exchange}" if record.exchange else f"is in {record.place}"
        lines.append(f"rank {rank}: step {record.step}, {record.activity}: {doing}")
    return "\n".join(sorted(lines, key=lambda line: int(line.split()[1].rstrip(":"))))


def write_report(text: str, folder: Path | None) -> Path:
    """Writes the report to the folder of the logs or, without one, to the system's folder of temporary files. Returns
    its path."""
    if folder is None:
        with tempfile.NamedTemporaryFile("w", prefix="meshwright-stall-", suffix=".txt", delete=False) as file:
            file.write(text)
        return Path(file.name)
    number = 1
    while True:
        path = folder / f"stall-{number}.txt"
        try:
            with path.open("x") as stream:
                stream.write(text)
            return path
        except FileExistsError:
            number += 1
