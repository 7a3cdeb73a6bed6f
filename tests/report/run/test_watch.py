"""`meshwright watch`: who is answered, and what."""

import http.client
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.report.run.watch import RunServer
from meshwright.train.output.folder import RunFolder
from tests.report.made_up_run import BEGAN, make_run


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunServer]:
    run = make_run(tmp_path / "run", ranks=2, steps=60, finished=False)
    with RunServer(run) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server: RunServer, path: str, host: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_only_the_address_with_the_token_is_answered(server: RunServer) -> None:
    assert get(server, "/")[0] == 404
    assert get(server, "/body")[0] == 404
    status, body = get(server, f"/{server.token}/body")
    assert status == 200
    assert "running" in body
    assert server.token not in body


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_another_host_name_is_refused(server: RunServer, host: str) -> None:
    status, text = get(server, f"/{server.token}/", host)
    assert status == 421
    assert "Summary" not in text


def test_localhost_is_the_same_machine(server: RunServer) -> None:
    assert get(server, f"/{server.token}/body", f"localhost:{server.port}")[0] == 200


def test_the_server_listens_on_loopback_only(server: RunServer) -> None:
    assert server.server_address[0] == "127.0.0.1"


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no run folder"):
        RunServer(tmp_path)


def test_a_port_that_is_taken_is_refused(server: RunServer, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"--port {server.port}"):
        RunServer(tmp_path / "run", server.port)


@pytest.mark.soak
def test_a_page_follows_the_run(server: RunServer, tmp_path: Path, open_page: Callable[..., Any]) -> None:
    opened = open_page(server.url)
    assert "step 60" in opened.page.locator("#now-latest").inner_text()
    entry = {"kind": "train", "step": 70, "epoch": 0, "loss": 0.5, "lr": 0.1, "samples_per_s": 9.0, "time": BEGAN + 99}
    with RunFolder(tmp_path / "run").metrics.open("a") as file:
        file.write(json.dumps(entry) + "\n")
    opened.page.locator("#now-latest", has_text="step 70").wait_for(timeout=60_000)
    assert opened.problems == []
