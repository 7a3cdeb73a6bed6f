"""Each row of each parameter belongs to one server, and messages between servers and workers keep their values."""

import torch
from torch import nn

from meshwright.profile.optimizer import is_elementwise
from meshwright.train.servers.assignment import assign_parameters
from meshwright.train.servers.messages import ServerReply, WorkerReport


def test_assigned_rows_are_balanced_and_cover_every_parameter_once() -> None:
    shapes = {"large": (100, 30), "middle": (40, 10), "bias": (7,), "number": (), "small": (5, 5)}
    parameters = {name: torch.randn(shape) for name, shape in shapes.items()}
    assignment = assign_parameters(parameters, 3, cut=True)
    loads = [sum(torch.Size(part.shape).numel() for part in rows) for rows in assignment]
    assert max(loads) - min(loads) < 60
    whole = {name: torch.full_like(tensor, float("nan")) for name, tensor in parameters.items()}
    for rows in assignment:
        assert len({part.name for part in rows}) == len(rows)
        for part in rows:
            part.view(whole[part.name]).copy_(part.view(parameters[part.name]))
    assert all(torch.equal(whole[name], tensor) for name, tensor in parameters.items())


def test_optimizers_that_are_not_elementwise_get_whole_parameters() -> None:
    parameters = {"weight": torch.zeros(64, 8), "bias": torch.zeros(8)}
    assert is_elementwise(torch.optim.AdamW([torch.zeros(1)]))
    assert not is_elementwise(torch.optim.Adafactor([nn.Parameter(torch.zeros(2, 2))]))
    assignment = assign_parameters(parameters, 2, cut=False)
    assert [[part.shape for part in rows] for rows in assignment] == [[(64, 8)], [(8,)]]


def test_messages_survive_packing_and_unpacking() -> None:
    report = WorkerReport(kind=1, version=2**60, samples=3, count=1.5, loss=-0.25, scale=65536.0)
    assert WorkerReport.unpack(report.pack()) == report
    reply = ServerReply(instruction=4, seed=2**62 + 1, loss=float("inf"))
    assert ServerReply.unpack(reply.pack()) == reply
