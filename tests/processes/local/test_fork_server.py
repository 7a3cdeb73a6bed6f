"""The fork server reads the exit codes of ranks, also where Python has no `os.waitid`."""

import os
import signal
from functools import partial

import pytest

from meshwright.processes.local.fork_server import _process_exit_code
from tests.processes.processes import wait_until


def _has_ended(pid: int) -> bool:
    return _process_exit_code(pid) is not None


@pytest.mark.parametrize("has_waitid", [True, False])
def test_the_exit_code_of_a_process_can_be_read_again(monkeypatch: pytest.MonkeyPatch, has_waitid: bool) -> None:
    if not has_waitid:  # as on macOS before Python 3.13
        monkeypatch.delattr(os, "waitid")
    for end, code in ((lambda: os._exit(3), 3), (lambda: os.kill(os.getpid(), signal.SIGKILL), -9)):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.read(read, 1)
            end()
        assert _process_exit_code(pid) is None
        os.write(write, b"x")
        wait_until(partial(_has_ended, pid), "the process has ended")
        assert [_process_exit_code(pid), _process_exit_code(pid)] == [code, code]
        if has_waitid:
            os.waitpid(pid, 0)
        os.close(read)
        os.close(write)
