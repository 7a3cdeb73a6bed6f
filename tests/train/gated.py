"""A data set at which workers wait until a test opens a gate: a part of the run happens before, the rest after it."""

import time
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from tests.train.toy import points


class Gated(Dataset[Any]):
    """A process that has read `free` samples waits for the file `gate`."""

    def __init__(self, gate: str, free: int, size: int = 510) -> None:
        self._points = points(size)
        self._size = size
        self._gate = Path(gate)
        self._remaining = free

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        while self._remaining <= 0 and not self._gate.exists():
            time.sleep(0.01)
        self._remaining -= 1
        return self._points[index]
