"""In a real run, a rank is killed when it has copied a checkpoint and has written nothing of it yet. What was published
stays, and the run goes on from it to the same weights."""

import os
import signal
from pathlib import Path
from typing import Any

from meshwright.checkpoint import background
from meshwright.checkpoint.load import find_newest_valid
from meshwright.checkpoint.manifest import FileChecksum, checkpoint_name
from meshwright.checkpoint.reader import verify
from tests.train import commands
from tests.train.runs.test_faults import STEPS, assert_same, final_state, job_on, undisturbed
from tests.train.toy import Net

__all__ = ["undisturbed"]  # a fixture
PUBLISHED, KILLED = 5, 10
_write_copied = background.write_copied


def dying_net(marker: str) -> Net:
    """The model of the job. Rank 1 kills itself once, when it is about to write its copy of step 10. The file `marker`
    then has the names that are in the folder of checkpoints."""

    def write(path: Path, file: Any) -> FileChecksum:
        is_there = path.parent.name == f".writing-{checkpoint_name(KILLED)}" and path.name == "rank-00001.bin"
        if is_there and not Path(marker).exists():
            verify(path.parent.parent / checkpoint_name(PUBLISHED))
            Path(marker).write_text("\n".join(sorted(os.listdir(path.parent.parent))))
            os.kill(os.getpid(), signal.SIGKILL)
        return _write_copied(path, file)

    background.write_copied = write
    return Net()


def test_a_kill_between_copy_and_publication_loses_nothing_that_was_published(tmp_path: Path, undisturbed: Any) -> None:
    marker = tmp_path / "killed"
    model = {"call": "tests.checkpoint.test_killed_run:dying_net", "marker": str(marker)}
    process, folder = commands.start(tmp_path, {**job_on(2), "model": model}, 2)
    result, err = commands.finish(process, STEPS)
    assert result["restarts"] == 1
    at_the_kill = marker.read_text().split()
    assert checkpoint_name(PUBLISHED) in at_the_kill
    assert checkpoint_name(KILLED) not in at_the_kill
    assert f".writing-{checkpoint_name(KILLED)}" in at_the_kill
    assert f"resuming after step {PUBLISHED} " in err
    assert find_newest_valid(folder.checkpoints).problems == ()
    assert_same(final_state(folder), undisturbed(2))
    assert [path.name for path in folder.checkpoints.iterdir() if path.name.startswith(".")] == []
