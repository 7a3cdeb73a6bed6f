"""Checkpoints in a bucket, over the S3 protocol: a server on this machine stands in for the store. The run is stopped,
its folder is lost, and it goes on from the bucket; the bucket disappears in the middle; there is none at the start."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.train.commands import finish, start
from tests.train.one_process import EVALUATED, TOY

pytestmark = pytest.mark.soak

NEEDED = "needs pip install 'meshwright[remote]' 'moto[server]' boto3"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of an S3 server that has the bucket `checkpoints`. Processes that are started find the server by the
    environment variables of AWS."""
    pytest.importorskip("s3fs", reason=NEEDED)
    boto3 = pytest.importorskip("boto3", reason=NEEDED)
    server = pytest.importorskip("moto.server", reason=NEEDED).ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "name",
        "AWS_SECRET_ACCESS_KEY": "hunter2",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="checkpoints")
    yield client
    urlopen(Request(f"http://{host}:{port}/moto-api/reset", method="POST"))  # the buckets are those of this process
    server.stop()


def job(epochs: int, **checkpoint: Any) -> dict[str, Any]:
    options = {"every_steps": 2, "keep": 2, "copy_to": "s3://checkpoints/team", **checkpoint}
    return {**TOY, **EVALUATED, "train": {**TOY["train"], "epochs": epochs}, "checkpoint": options}


def objects(s3: Any) -> set[str]:
    found = s3.list_objects_v2(Bucket="checkpoints").get("Contents", [])
    return {item["Key"].removeprefix("team/toy-0001/") for item in found}


def test_a_run_goes_on_from_a_bucket_on_another_machine(tmp_path: Path, s3: Any) -> None:
    first, _ = start(tmp_path / "first", job(epochs=1), 2)
    finish(first, 5)
    assert {name for name in objects(s3) if name.endswith("copy.json")} == {
        "step-00000004/copy.json",
        "step-00000005/copy.json",
    }
    assert not any(name.startswith("step-00000002") for name in objects(s3))
    s3.put_object(Bucket="checkpoints", Key="team/toy-0001/step-00000005/index.json", Body=b"damaged")
    second, resumed = start(tmp_path / "second", job(epochs=2), 2, "--resume", "s3://checkpoints/team/toy-0001")
    _, error = finish(second, 10)
    assert "checkpoint left out: s3://checkpoints/team/toy-0001/step-00000005: index.json has 7 bytes" in error
    assert "resuming after step 4 on 2 CPU ranks" in error
    assert "hunter2" not in error + "".join(path.read_text() for path in resumed.logs.glob("*.log"))
    whole, whole_folder = start(tmp_path / "whole", job(epochs=2, copy_to=None), 2)
    finish(whole, 10)
    last = "checkpoints/step-00000010/rank-00000.bin"
    assert (resumed.path / last).read_bytes() == (whole_folder.path / last).read_bytes()
    assert {name for name in objects(s3) if name.endswith("copy.json")} == {
        "step-00000008/copy.json",
        "step-00000010/copy.json",
    }


def test_a_bucket_that_disappears_does_not_end_the_run(tmp_path: Path, s3: Any) -> None:
    process, folder = start(tmp_path, job(epochs=40), 1)
    while process.poll() is None and not any(name.endswith("copy.json") for name in objects(s3)):
        pass
    is_deleted = False
    while not is_deleted:
        for name in objects(s3):
            s3.delete_object(Bucket="checkpoints", Key=f"team/toy-0001/{name}")
        with suppress(s3.exceptions.ClientError):  # the run has written another object
            s3.delete_bucket(Bucket="checkpoints")
            is_deleted = True
    _, error = finish(process, 200)
    assert "checkpoints are not copied to s3://checkpoints/team, which is tried again: s3://checkpoints" in error
    assert "the newest checkpoints are not copied to s3://checkpoints/team: `train` with --resume" in error
    s3.create_bucket(Bucket="checkpoints")
    again, _ = start(tmp_path, job(epochs=40), 1, "--resume", str(folder.path))
    finish(again, 200)
    assert "step-00000200/copy.json" in objects(s3)


def test_a_bucket_that_does_not_exist_is_named_before_the_first_step(tmp_path: Path, s3: Any) -> None:
    process, folder = start(tmp_path, job(epochs=1, copy_to="s3://nothing/team"), 1)
    _, error = process.communicate(timeout=200)
    assert process.returncode == 2
    assert "checkpoint.copy_to: s3://nothing/team/toy-0001" in error
    assert not folder.path.exists()
