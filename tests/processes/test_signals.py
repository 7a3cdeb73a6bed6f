"""A signal becomes a flag in this process, and only within the context."""

import os
import signal

from meshwright.processes.signals import StopRequest


def test_signals_become_a_flag_and_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGINT)  # would raise KeyboardInterrupt
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        assert stop.received == signal.SIGINT
        assert not stop.insisted
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_forked_child_still_dies_of_sigterm() -> None:
    with StopRequest():
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGTERM
