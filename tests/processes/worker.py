"""The rank program of the launch tests, `-m tests.processes.worker CASE ARGUMENTS`. Each case runs small steps and
ends or fails in another way."""

import json
import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from meshwright.errors import InputError
from meshwright.processes import environment
from meshwright.processes.heartbeat import Heartbeat
from meshwright.processes.output import terminal
from meshwright.processes.process_exit import skip_library_teardown
from meshwright.processes.rank import run_rank
from meshwright.processes.signals import StopRequest
from meshwright.processes.world import World

TIMEOUT_S = 60.0
LIMIT_S = 60.0  # no case runs longer


def step(world: World, heartbeat: Heartbeat, number: int) -> None:
    """Runs a small training step: compute, all-reduce, check the result."""
    heartbeat.update(number, "forward")
    gradient = torch.ones(8) * (world.rank + 1)
    heartbeat.update(number, "backward")
    dist.all_reduce(gradient)
    assert gradient[0].item() == world.size * (world.size + 1) / 2
    heartbeat.finish_step()


def report(folder: Path, world: World, **facts: object) -> None:
    """Writes facts for the test atomically."""
    path = folder / f"report-{world.rank}-{world.attempt}.json"
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps({"pid": os.getpid(), "attempt": world.attempt, **facts}))
    draft.replace(path)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} was not written"
        time.sleep(0.02)


def plain(world: World, heartbeat: Heartbeat, folder: Path) -> None:
    """Finishes after three steps and prints on every stream. Where the test asks for it, it waits for the test."""
    for number in range(3):
        step(world, heartbeat, number)
    print(f"stdout of rank {world.rank}")
    print(f"terminal of rank {world.rank}", file=terminal())
    os.write(2, f"noise of rank {world.rank}\n".encode())
    report(
        folder,
        world,
        threads=torch.get_num_threads(),
        size=world.size,
        arguments=sys.argv,
        random=float(np.random.random()),
        path=sys.path[0],
        pid=os.getpid(),
        parent=os.getppid(),
        session=os.getsid(0),
    )
    if (folder / "hold").exists():
        wait_for(folder / "go")


def raising(world: World, heartbeat: Heartbeat, folder: Path) -> None:
    """Rank 1 fails at step 2 with a message of two lines; the others notice in the all-reduce."""
    for number in range(5):
        if number == 2 and world.rank == 1:
            heartbeat.update(2, "forward")
            raise ValueError("the seventh\nsample is odd")
        step(world, heartbeat, number)


def early(world: World, heartbeat: Heartbeat, folder: Path) -> None:
    """Rank 1 fails before any step."""
    report(folder, world)
    if world.rank == 1:
        raise KeyError("head.weight")
    step(world, heartbeat, 0)


def mistaken(world: World, heartbeat: Heartbeat, folder: Path) -> None:
    """Rank 1 reports a mistake of the user after a completed step."""
    report(folder, world)
    step(world, heartbeat, 0)
    if world.rank == 1:
        raise InputError("train.global_batch is 3, but there are 2 ranks: choose a multiple")
    step(world, heartbeat, 1)


def killed(world: World, heartbeat: Heartbeat, folder: Path) -> None:
    """Rank 1 is killed in the number of attempts that the test wrote to a file."""
    for number in range(4):
        if number == 2 and world.rank == 1 and world.attempt < int((folder / "kills").read_text()):
            heartbeat.update(2, "backward")
            os.kill(os.getpid(), signal.SIGKILL)
        step(world, heartbeat, number)
    report(folder, world)


def until_stopped(world: World, heartbeat: Heartbeat, folder: Path) -> None:
    """Runs steps until a stop is requested; all ranks agree on it, as in a training loop."""
    with StopRequest() as stop:
        deadline = time.monotonic() + LIMIT_S
        for number in range(1_000_000):
            step(world, heartbeat, number)
            if number == 1:
                report(folder, world, stage="stepping")
            stop_requests = torch.tensor(float(stop.requested))
            dist.all_reduce(stop_requests)
            if stop_requests.item():
                break
            assert time.monotonic() < deadline
        report(folder, world, stage="saved", received=str(stop.requested))


def ignoring_stop(world: World, heartbeat: Heartbeat, folder: Path) -> None:
    """Ignores a request to stop."""
    with StopRequest():
        report(folder, world, stage="stepping")
        wait_for(folder / "never")


def stuck(world: World, heartbeat: Heartbeat, folder: Path) -> None:
    """Rank 1 never joins the second all-reduce, while another operation is under way, as in a training step."""
    step(world, heartbeat, 0)
    if world.rank == 1:
        heartbeat.update(1, "evaluate")
        wait_for(folder / "never")
    work = dist.all_reduce(torch.zeros(1), async_op=True)
    step(world, heartbeat, 1)
    work.wait()


def ending(world: World, heartbeat: Heartbeat, folder: Path) -> None:
    """The last rank executes the statement that the test wrote to a file, before the first or the second step."""
    for number in range(2):
        statement = folder / f"statement-{number}.py"
        if world.rank == world.size - 1 and statement.exists():
            heartbeat.update(number, "data")
            exec(compile(statement.read_text(), statement, "exec"), {"os": os, "sys": sys})
        step(world, heartbeat, number)


class AbortsWhenDeleted:
    """Aborts the process when the interpreter deletes its modules at exit."""

    def __del__(self) -> None:
        os.abort()


def crashing_at_exit(world: World, heartbeat: Heartbeat, folder: Path) -> None:
    """Rank 1 finishes, and crashes while its process ends, as threads of torch may."""
    step(world, heartbeat, 0)
    print(f"last words of rank {world.rank}")
    if world.rank == 1:
        sys.modules["torch"].__dict__["aborts_when_deleted"] = AbortsWhenDeleted()


def main() -> None:
    case, folder, *rest = sys.argv[1:]
    cases = (plain, raising, early, mistaken, killed, until_stopped, ignoring_stop, stuck, ending, crashing_at_exit)
    run_case = {function.__name__: function for function in cases}[case]
    if case == "killed" and (Path(folder) / "kill-start-up").exists() and os.environ["RANK"] == "1":
        (Path(folder) / "kill-start-up").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    timeout_s = float(rest[0]) if case == "stuck" else TIMEOUT_S
    # In ranks of meshwright's launcher, the launcher does this, and a case tests it. In ranks of torchrun the
    # program has to do it, as meshwright's command does.
    with nullcontext() if environment.read_environment().fork_server_pid else skip_library_teardown():
        run_rank(lambda world, heartbeat: run_case(world, heartbeat, Path(folder)), "cpu", timeout_s)


if __name__ == "__main__":
    main()
