"""A user's own loop under torchrun, in which one rank hangs or calls other collectives: `loop.py FAULT TIMEOUT_S`."""

import sys

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import meshwright as mw
from tests.train.stalls.planted import Net, Points, is_rank


def main(fault: str, timeout_s: str) -> None:
    model = Net("" if fault in ("data", "left out") else fault)
    session = mw.parallelize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss=cross_entropy, timeout_s=float(timeout_s), device="cpu"
    )
    data = Points(sample=300) if fault == "data" else Points()
    for step, batch in enumerate(session.prepare(DataLoader(data, batch_size=16))):
        if fault == "left out" and step == 3 and is_rank(1):
            continue
        session.step(batch)


if __name__ == "__main__":
    main(*sys.argv[1:])
