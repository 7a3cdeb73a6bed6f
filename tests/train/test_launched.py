"""`meshwright train` in ranks that torchrun started: it trains, and an error names the step."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.train.one_process import TOY

MODEL = """
import ctypes, os
from tests.train.toy import Net

class Failing(Net):
    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 3 and os.environ["RANK"] == "1":
            raise ValueError("the third call")
        return super().forward(x)

class Aborting(Net):
    def __init__(self, hidden):  # torch's threads do so now and then: the process aborts when C++ takes itself down
        super().__init__(hidden)
        libc = ctypes.CDLL(None)
        getattr(libc, "__cxa_atexit")(ctypes.cast(libc.abort, ctypes.c_void_p), None, None)
"""


def torchrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "toy.yaml").write_text(yaml.safe_dump({**TOY, "cluster": "2xcpu", "output": str(folder / "runs")}))
    (folder / "model.py").write_text(MODEL)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--log-dir", str(folder / "elastic"), "-m", "meshwright", "train", str(folder / "toy.yaml")]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120)


def test_torchruns_ranks_train_together(tmp_path: Path) -> None:
    run = torchrun(tmp_path, "--json", "--set", "model.call=model.py:Aborting")
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert (result["steps"], result["run"]) == (10, str(tmp_path / "runs" / "toy-0001"))
    assert "training on 2 CPU ranks" in run.stderr
    assert {log.name for log in (tmp_path / "runs" / "toy-0001" / "logs").glob("*.log")} == {"rank-0.log", "rank-1.log"}


@pytest.mark.soak
def test_the_error_of_a_failing_rank_names_step_and_line(tmp_path: Path) -> None:
    run = torchrun(tmp_path, "--set", "model.call=model.py:Failing")
    assert run.returncode != 0
    assert "rank 1 failed at step 2 (forward): ValueError: the third call (model.py, line 11)\n" in run.stderr
