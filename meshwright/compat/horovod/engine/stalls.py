"""`StallCheck`: prints on rank 0 which ranks have not called an operation that the others wait for."""

import sys
import time

from meshwright.compat.horovod.engine.negotiation import Key, Negotiation

CHECK_S = 1.0


class StallCheck:
    """Looks once a second at the operations that wait. `warning_s` is after how long one is reported (0: never), and
    `shutdown_s` after how long all ranks fail (0: never)."""

    def __init__(self, warning_s: float, shutdown_s: float) -> None:
        self.enabled = warning_s > 0
        self._warning_s, self._shutdown_s = warning_s, shutdown_s
        self._since: dict[Key, float] = {}
        self._reported: set[Key] = set()
        self._next_s = 0.0

    def look(self, negotiation: Negotiation) -> str | None:
        """Returns why all ranks have to fail; None if they go on."""
        now = time.monotonic()
        if not self.enabled or now < self._next_s:
            return None
        self._next_s = now + CHECK_S
        stalled = negotiation.stalled()
        self._since = {request.key: self._since.get(request.key, now) for request, _ in stalled}
        self._reported &= self._since.keys()
        for request, missing in stalled:
            waited_s = now - self._since[request.key]
            if waited_s > self._warning_s and request.key not in self._reported:
                self._reported.add(request.key)
                others = "for which the other ranks of its process set wait"
                text = f"horovod: ranks {missing} have not called {request.title} for {waited_s:.0f} s, {others}"
                print(text, file=sys.stderr, flush=True)
            if self._shutdown_s and waited_s > self._shutdown_s:
                return f"{request.title} waited {waited_s:.0f} s for ranks {missing}"
        return None
