"""Fixtures for the tests of parameter servers."""

import pytest


@pytest.fixture
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes Gloo connect the threads of a test over the loopback interface."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
