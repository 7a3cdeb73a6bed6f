"""The exceptions of Horovod, under the names and with the base classes that scripts catch."""


class HorovodInternalError(RuntimeError):
    """A collective failed, for example because a rank died. `elastic.run` restores the committed state and goes on."""


class MismatchError(HorovodInternalError):
    """Ranks called an operation with different shapes, types or options. The message has both sides. It is raised on
    every rank, and `elastic.run` does not catch it, because the next attempt would fail in the same way."""


class HostsUpdatedInterrupt(RuntimeError):
    """The number of workers of an elastic job changes. `elastic.run` goes on with the current state; `skip_sync` means
    that no worker was added, so that all have the state already."""

    def __init__(self, skip_sync: bool) -> None:
        super().__init__("the hosts of this job have changed")
        self.skip_sync = skip_sync
