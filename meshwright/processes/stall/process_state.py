"""Whether the process of a rank on this machine runs, is stopped, or is gone."""

import os
import sys
from pathlib import Path

_GONE, _STOPPED = ("Z", "X"), ("T", "t")


def is_alive(pid: int) -> bool:
    return _state(pid) not in ("", *_GONE)


def describe_process(pid: int) -> str:
    """Returns the middle of a sentence about a rank that did not answer."""
    state = _state(pid)
    if not state or state in _GONE:
        return "is gone"
    return "does not answer, because its process is stopped" if state in _STOPPED else "does not answer"


def _state(pid: int) -> str:
    """The state of a process as Linux writes it; `R` for processes of which it is not known, and empty for none."""
    try:
        os.kill(pid, 0)
        if sys.platform != "linux":  # there is no /proc, which tells zombies
            return "R"
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except PermissionError:
        return "R"
    except (OSError, IndexError):
        return ""
