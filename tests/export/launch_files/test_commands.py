"""The torchrun and mpirun commands, split into words as a shell does."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.export.launch_files.commands import mpirun_command, torchrun_command
from meshwright.export.launch_files.layout import Layout
from meshwright.export.launch_files.request import parse_time
from tests.export.launch_files.requests import HOSTILE, request

ONE_MACHINE = Layout(nodes=1, ranks_per_node=2, on_gpus=False, cores_per_rank=1)
TRAIN = ["train", "toy.yaml", "--resume=auto"]


def words_in_shell(command: str) -> list[str]:
    """Returns the words that a shell makes of the command."""
    show = shlex.join([sys.executable, "-c", "import json, sys; print(json.dumps(sys.argv[1:]))"])
    words: list[str] = json.loads(subprocess.check_output(["sh", "-c", f"{show} {command}"]))
    return words


def test_torchrun() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    one = words_in_shell(torchrun_command(request(layout=ONE_MACHINE)).text)
    port = one.pop(6)
    options = ["--master-addr=localhost", "--nproc-per-node=2", "--max-restarts=3"]
    assert one == [*launcher, *options, "-m", "meshwright", *TRAIN]
    assert re.fullmatch(r"--master-port=\d{4,5}", port)
    several = shlex.split(torchrun_command(request(rendezvous="10.0.0.1:29500", interface="eth0")).text)
    assert several == [
        *("env", "GLOO_SOCKET_IFNAME=eth0", "NCCL_SOCKET_IFNAME=eth0", *launcher),
        *("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=toy", "--rdzv-endpoint=10.0.0.1:29500"),
        *("--nproc-per-node=8", "--max-restarts=3", "-m", "meshwright", *TRAIN),
    ]


def test_mpirun() -> None:
    launcher = [sys.executable, "-m", "meshwright", *TRAIN]
    one = shlex.split(mpirun_command(request(layout=ONE_MACHINE)).text)
    assert one == ["mpirun", "-n", "2", "--bind-to", "none", *launcher]
    several = mpirun_command(request(rendezvous="[fd00::1]:29500", hosts=("a", "b"))).text
    assert shlex.split(several[several.index("mpirun") :]) == [
        *("mpirun", "-n", "16", "--bind-to", "none", "--map-by", "ppr:8:node", "-x", "MESHWRIGHT_TOKEN"),
        *("-H", "a:8,b:8", "env", "MASTER_ADDR=fd00::1", "MASTER_PORT=29500", *launcher),
    ]


def test_mpirun_passes_on_a_token_that_is_no_word_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "mpirun").write_text('#!/bin/sh\necho "$MESHWRIGHT_TOKEN" "$@"\n')
    (tmp_path / "mpirun").chmod(0o755)
    command = mpirun_command(request(rendezvous="a:1")).text

    def token(**variables: str) -> str:
        path = f"{tmp_path}:{os.environ['PATH']}"
        run = subprocess.run(["sh", "-c", command], env={"PATH": path, **variables}, capture_output=True, text=True)
        first, *words = run.stdout.split()
        assert first not in words
        return first

    assert token(MESHWRIGHT_TOKEN="0123456789abcdef") == "0123456789abcdef"
    assert re.fullmatch("[0-9a-f]{32}", token())
    assert token() != token()


def test_several_machines_need_an_address_and_as_many_hosts() -> None:
    for command in (torchrun_command, mpirun_command):
        with pytest.raises(InputError, match="2 machines needs --rendezvous HOST:PORT"):
            command(request())
    with pytest.raises(InputError, match="--hosts names 1 machines, but the ranks are on 2"):
        mpirun_command(request(rendezvous="a:1", hosts=("a",)))


def test_no_value_is_executed() -> None:
    for command in (torchrun_command, mpirun_command):
        text = command(request(layout=ONE_MACHINE, arguments=("train", HOSTILE))).text
        assert text.count("\n") == 1
        assert shlex.split(text)[-2:] == ["train", HOSTILE]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 1800), ("1:30", 90), ("1:00:05", 3605), ("2-3", 183_600), ("1-0:30", 88_200), ("1-00:00:01", 86_401)],
)
def test_times_are_read_as_slurm_reads_them(text: str, seconds: int) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "1h", "1-", "-1", "1:2:3:4", "1 2", "0", "0-0:0", "1\n", "١"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--time"):
        parse_time(text)
