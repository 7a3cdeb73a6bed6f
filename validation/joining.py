"""How many seconds of a core it costs when many ranks connect to a store and agree on what they run: `python -m
validation.joining 1000`. The ranks are threads of this process, each with a connection of its own."""

import sys
import tempfile
import threading
import time
from pathlib import Path

import torch.distributed as dist

from meshwright.processes.agreement import agree, versions
from meshwright.processes.launchers.launched_rank import LaunchedRank
from meshwright.processes.launchers.store import open_store
from meshwright.processes.launchers.store_place import StorePlace

TIMEOUT_S = 300.0
JOB = {f"field {number}": "value" for number in range(100)}  # as many as a job has


def main(ranks: int) -> None:
    stores: dict[int, dist.Store] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = StorePlace(file=Path(folder, "port"))

        def connect(rank: int) -> None:
            stores[rank] = open_store(LaunchedRank("threads", rank, ranks, rank, ranks, ""), place, TIMEOUT_S)

        def agree_on_all(rank: int) -> None:
            agree(versions(), rank, ranks, stores[rank], "versions", TIMEOUT_S)
            agree(JOB, rank, ranks, stores[rank], "job", TIMEOUT_S)

        start_s = time.process_time()
        versions()  # a process reads its code once
        print(f"a rank reads its code: {time.process_time() - start_s:.2f} s of a core")
        start_s = time.process_time()
        first = threading.Thread(target=connect, args=(0,))
        first.start()
        for rank in range(1, ranks):  # one after the other: torch looks up the name of each address that it connects to
            connect(rank)
        first.join()
        threads = [threading.Thread(target=agree_on_all, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(f"{ranks} ranks joined and agreed: {time.process_time() - start_s:.2f} s of a core")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
