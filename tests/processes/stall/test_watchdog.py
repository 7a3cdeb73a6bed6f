"""Ranks collect what each of them is doing: the thread that trains may be stuck, the watchdog answers."""

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.processes.communication_errors import explain_communication_error
from meshwright.processes.heartbeat import Heartbeat, heartbeat_file, read_heartbeat
from meshwright.processes.stall.watchdog import make_watchdog
from meshwright.processes.torch_private import default_store, set_default_timeout
from meshwright.processes.world import World
from tests.ranks import RankPool

TIMEOUT_S = 1.0
LONG_S = 60.0


class Stuck(nn.Module):
    """Waits in its forward pass until the other rank has found the cause."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store

    def forward(self, x: Tensor) -> Tensor:
        self._store.get("found")
        return x


def find_causes(rank: int, world_size: int, folder: str) -> list[str]:
    """Returns the lines that rank 0 finds for each fault of rank 1, and what its heartbeat said in the first one, in
    which rank 0 gives up waiting. In the second one, rank 1 gives up, and rank 0 loses the connection to it."""
    store = default_store()
    assert store is not None
    world = World(rank, rank, world_size, world_size, 0, torch.device("cpu"), None)
    heartbeat = Heartbeat.in_folder(Path(folder), rank, 0)
    heartbeat.update(3, "forward")
    watchdog = make_watchdog(world, store, heartbeat, TIMEOUT_S, lambda _: None, lambda _: None)
    assert watchdog is not None
    lines = []
    for fault in ("late", "operation"):
        group = dist.new_group()
        dist.barrier(group)  # connects the ranks, which may take longer than the timeout
        gives_up = rank == ("late", "operation").index(fault)
        timeout = timedelta(seconds=TIMEOUT_S if gives_up else LONG_S)
        set_default_timeout(group._get_backend(torch.device("cpu")), timeout)
        part = dist.PrefixStore(fault, store)
        try:
            if rank == 0:
                dist.all_reduce(torch.ones(3), group=group)
            elif fault == "late":
                nn.Sequential(nn.Identity(), Stuck(part))(torch.ones(1))
            else:
                dist.broadcast(torch.ones(3), src=0, group=group)
        except RuntimeError as error:
            explained = explain_communication_error(error, world, heartbeat, TIMEOUT_S, Path(folder), watchdog)
            assert explained is not None
            assert explained.report is not None
            assert Path(explained.report).read_text().splitlines()[0] == str(explained)
            lines.append(str(explained))
            if fault == "late":
                last = read_heartbeat(heartbeat_file(Path(folder), 1))
                lines.append(last.place if last else "")
        if rank == 0:
            part.set("found", "1")
        else:
            part.get("found")
        watchdog._answered_at = 0.0  # the next stall is another one
    watchdog.close()
    return lines


def test_a_watchdog_answers_for_a_stuck_thread(two: RankPool, tmp_path: Path) -> None:
    (late, place, operation), _ = two.run(find_causes, str(tmp_path))
    assert late.startswith("rank 1 has not entered the all-reduce of 3 float32 values called in find_causes (")
    assert "at step 3; rank 0 waits there; rank 1 is in Stuck.forward (test_watchdog.py, line" in late
    assert late.endswith("in the forward pass of 1 (no answer within 1 s)")
    assert place.startswith("Stuck.forward (test_watchdog.py, line"), "the heartbeat tells the place, too"
    assert operation.startswith("rank 1 calls broadcast of 3 float32 values in find_causes (test_watchdog.py, line")
    assert ", where rank 0 calls all-reduce of 3 float32 values in" in operation
