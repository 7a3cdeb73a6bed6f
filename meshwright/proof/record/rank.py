"""One rank of a proof: `python -m meshwright.proof.record.rank FOLDER DEVICE`, started by `prove`."""

import sys
from pathlib import Path

from meshwright.processes.rank import run_rank
from meshwright.proof.record.record import record
from meshwright.proof.record.request_file import read_request

REQUEST_FILE = "request.pickle"


def main() -> None:
    folder, device = Path(sys.argv[1]), sys.argv[2]
    request = read_request(folder / REQUEST_FILE)
    run_rank(lambda world, heartbeat: record(request, world, folder, heartbeat), device, request.timeout_s)


if __name__ == "__main__":
    main()
