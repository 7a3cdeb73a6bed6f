"""A proof request is read as it was written, and only the user can write what the ranks read."""

import os
import stat
from pathlib import Path

from meshwright.proof.prove import work_folder
from meshwright.proof.record.request_file import read_request, write_request
from tests.proof.cases import random_request


def test_only_the_user_may_open_the_request(tmp_path: Path) -> None:
    request = random_request(0, 2)
    previous = os.umask(0)  # even if the user's files may be written by all
    try:
        with work_folder(tmp_path / "runs") as folder:
            for _ in range(2):  # the request of a second comparison replaces the first
                write_request(request, folder / "request.pickle")
            assert stat.S_IMODE((folder / "request.pickle").stat().st_mode) == 0o600
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert read_request(folder / "request.pickle").plan == request.plan
    finally:
        os.umask(previous)
