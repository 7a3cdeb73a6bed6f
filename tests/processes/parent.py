"""A launcher in its own process, to which tests send signals. Its ranks are forked from it, as those of meshwright's
commands."""

from pathlib import Path

from meshwright.errors import MeshwrightError
from meshwright.processes.local.fork_server import preloaded


def main(case: str, folder: str, grace_s: str) -> None:
    try:
        with preloaded("tests.processes.worker"):
            from meshwright.processes.local.launch import RankSettings, launch

            ranks = RankSettings(count=2, device="cpu", threads=1, restarts=3, grace_s=float(grace_s))
            restarts = launch("tests.processes.worker", [case, folder], ranks, Path(folder))
    except MeshwrightError as error:
        print(f"{type(error).__name__}: {error}")
    else:
        print(f"finished after {restarts} restarts")
