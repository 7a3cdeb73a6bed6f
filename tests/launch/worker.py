"""The rank of the launch tests: `-m tests.launch.worker CASE ARGUMENTS` trains nothing, in a chosen way."""

import json
import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.errors import InputError
from meshwright.launch import environment
from meshwright.launch.ending import finishing
from meshwright.launch.output import terminal
from meshwright.launch.place import Place
from meshwright.launch.rank import run_rank
from meshwright.launch.signals import StopRequest
from meshwright.launch.world import World

TIMEOUT_S = 60.0
LIMIT_S = 60.0  # no case goes on for longer, whatever goes wrong


def step(world: World, place: Place, number: int) -> None:
    """One step of a real run in small: compute, exchange, agree."""
    place.at(number, "forward")
    gradient = torch.ones(8) * (world.rank + 1)
    place.at(number, "backward")
    dist.all_reduce(gradient)
    assert gradient[0].item() == world.size * (world.size + 1) / 2
    place.finish_step()


def report(folder: Path, world: World, **facts: object) -> None:
    """Tells the test something, whole or not at all."""
    path = folder / f"report-{world.rank}-{world.attempt}.json"
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps({"pid": os.getpid(), "attempt": world.attempt, **facts}))
    draft.replace(path)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.02)


def plain(world: World, place: Place, folder: Path) -> None:
    """Finishes after three steps, once the test has looked at it; says a word everywhere."""
    for number in range(3):
        step(world, place, number)
    print(f"stdout of rank {world.rank}")
    print(f"terminal of rank {world.rank}", file=terminal())
    os.write(2, f"noise of rank {world.rank}\n".encode())
    report(folder, world, threads=torch.get_num_threads(), size=world.size, arguments=sys.argv)
    if (folder / "hold").exists():
        wait_for(folder / "go")


def raising(world: World, place: Place, folder: Path) -> None:
    """Rank 1 fails at step 2 with two lines; the others notice in the exchange."""
    for number in range(5):
        if number == 2 and world.rank == 1:
            place.at(2, "forward")
            raise ValueError("the seventh\nsample is odd")
        step(world, place, number)


def early(world: World, place: Place, folder: Path) -> None:
    """Rank 1 fails before any step."""
    report(folder, world)
    if world.rank == 1:
        raise KeyError("head.weight")
    step(world, place, 0)


def mistaken(world: World, place: Place, folder: Path) -> None:
    """Rank 1 finds a mistake of the user's, even after steps."""
    report(folder, world)
    step(world, place, 0)
    if world.rank == 1:
        raise InputError("train.global_batch is 3, but there are 2 ranks: choose a multiple")
    step(world, place, 1)


def killed(world: World, place: Place, folder: Path) -> None:
    """Rank 1 is killed in as many attempts as the test asked for."""
    for number in range(4):
        if number == 2 and world.rank == 1 and world.attempt < int((folder / "kills").read_text()):
            place.at(2, "backward")
            os.kill(os.getpid(), signal.SIGKILL)
        step(world, place, number)
    report(folder, world)


def until_stopped(world: World, place: Place, folder: Path) -> None:
    """Steps until somebody asks for a stop; all ranks agree on it, as a training loop does."""
    with StopRequest() as stop:
        deadline = time.monotonic() + LIMIT_S
        for number in range(1_000_000):
            step(world, place, number)
            if number == 1:
                report(folder, world, stage="stepping")
            wish = torch.tensor(float(stop.requested))
            dist.all_reduce(wish)
            if wish.item():
                break
            assert time.monotonic() < deadline
        report(folder, world, stage="saved", received=str(stop.requested))


def deaf(world: World, place: Place, folder: Path) -> None:
    """Notes a request to stop and goes on."""
    with StopRequest():
        report(folder, world, stage="stepping")
        wait_for(folder / "never")


def stuck(world: World, place: Place, folder: Path) -> None:
    """Rank 1 never comes to the second exchange, while another one is under way, as in a training step."""
    step(world, place, 0)
    if world.rank == 1:
        place.at(1, "evaluate")
        wait_for(folder / "never")
    under_way = dist.all_reduce(torch.zeros(1), async_op=True)
    step(world, place, 1)
    under_way.wait()


class Bomb:
    """Goes off when the interpreter takes down its modules."""

    def __del__(self) -> None:
        os.abort()


def crashing_at_exit(world: World, place: Place, folder: Path) -> None:
    """Rank 1 finishes, and crashes while its process ends, as torch's threads may."""
    step(world, place, 0)
    print(f"last words of rank {world.rank}")
    if world.rank == 1:
        sys.modules["torch"].__dict__["bomb"] = Bomb()


if __name__ == "__main__":
    case, where, *rest = sys.argv[1:]
    cases = (plain, raising, early, mistaken, killed, until_stopped, deaf, stuck, crashing_at_exit)
    chosen = {function.__name__: function for function in cases}[case]
    if case == "killed" and (Path(where) / "kill-start-up").exists() and os.environ["RANK"] == "1":
        (Path(where) / "kill-start-up").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    timeout_s = float(rest[0]) if case == "stuck" else TIMEOUT_S
    # Our own launcher's first module ends its ranks itself, which a case is there to see; torchrun's are the command's.
    with nullcontext() if environment.read().agent else finishing():
        run_rank(lambda world, place: chosen(world, place, Path(where)), "cpu", timeout_s)
