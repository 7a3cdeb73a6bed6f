"""Machines of `train --nodes` greet each other through a real store on the loopback address, strangers are named."""

import json
from datetime import timedelta

import pytest

from meshwright.errors import InputError
from meshwright.processes.environment import SESSION
from meshwright.processes.failure import Failure, read_record, write_record
from meshwright.processes.loopback import connect_store, serve_store
from meshwright.processes.token import machines
from meshwright.processes.token.machines import Greeter, connect_launcher_store, read_greeting

TOKEN, OTHER = b"the token of the run", b"the token of another"
FAILURE = Failure(1, 0, "ValueError", "wrong", "", 4, "backward", 2.0, False)


def do_nothing() -> None:
    pass


def test_a_machine_with_another_token_is_refused_on_both_sides(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "_REFUSED_S", 0.1)
    served, port = serve_store()
    greeter = Greeter(served, TOKEN)
    store = connect_store("127.0.0.1", port, timedelta(seconds=30))
    with pytest.raises(InputError, match=r"node1:29500: machine 0 has another token than .* \(--node-rank 1\): set"):
        read_greeting(store, OTHER, 1, "node1:29500", do_nothing)
    store.queue_push("refusals", b"\xff")
    greeter.look()
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "node1:29500: the machine there has another token than this one"
    assert lines[1].endswith("(--node-rank 1) came without the token of this run")
    assert lines[2] == "refused: a process that is no machine came without the token of this run"
    read_greeting(store, TOKEN, 1, "node1:29500", do_nothing).write("a", "b")
    assert greeter.signed.read("a") == b"b"


def test_a_greeting_that_a_stranger_replaces_is_restored(capfd: pytest.CaptureFixture[str]) -> None:
    served, port = serve_store()
    greeter = Greeter(served, TOKEN)
    session = greeter.signed.session
    stranger = connect_store("127.0.0.1", port, timedelta(seconds=30))
    earlier = json.loads(served.get("greeting"))
    for text in (json.dumps({**earlier, "session": "0" * 32}), "junk"):
        stranger.set("greeting", text)
        assert read_greeting(stranger, TOKEN, 1, "node1:29500", greeter.look).session == session
    assert "without the token of this run replaced the greeting of node 0" in capfd.readouterr().err


def test_failures_that_a_stranger_tells_a_launcher_are_ignored(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, port = serve_store()
    signed = Greeter(served, TOKEN).signed
    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "MESHWRIGHT_TOKEN": TOKEN.decode(),
        SESSION: signed.session,
    }.items():
        monkeypatch.setenv(name, value)
    write_record(connect_launcher_store(30), FAILURE)
    assert read_record(signed, 1, 0) == FAILURE
    (key,) = (key for key in served.list_keys() if "failure" in key)
    served.set(key, served.get(key).decode().replace("wrong", "other"))
    assert read_record(signed, 1, 0) is None
    assert "refused: 'failure of rank 1 in attempt 0'" in capfd.readouterr().err
