"""What a step of a session costs besides the model: `python -m validation.speed.overhead` trains a net of three small
layers on one CPU thread with a bare loop and with sessions, in turns, and prints their CPU time per step."""

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw

ROUNDS, STEPS_PER_ROUND, WARM_UP_STEPS = 300, 5, 60
BATCH = (torch.randn(8, 1, 8, 8), torch.randint(0, 10, (8,)))
Step = Callable[[], Tensor]


def own_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Flatten(), nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, 10))


def bare_loop() -> Step:
    """Returns a step of a loop without Meshwright."""
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    inputs, target = BATCH

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(inputs), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def session_with(loss: Callable[[Tensor, Tensor], Tensor]) -> Step:
    """Returns a step of a session on a single rank."""
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    session = mw.parallelize(model, optimizer, loss=loss, plan=mw.Plan())
    return lambda: session.step(BATCH)


def main() -> None:
    torch.set_num_threads(1)
    steps: dict[str, Step] = {
        "bare loop": bare_loop(),
        "session, torch's cross entropy": session_with(F.cross_entropy),
        "session, a loss function of one's own": session_with(own_loss),
    }
    for step in steps.values():
        for _ in range(WARM_UP_STEPS):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            begin = time.thread_time()  # other processes do not change it much
            for _ in range(STEPS_PER_ROUND):
                step()
            seconds[name].append((time.thread_time() - begin) / STEPS_PER_ROUND)
    bare_s = median(seconds["bare loop"])
    for name, measured in seconds.items():
        step_s = median(measured)
        print(f"{name:40} {step_s * 1e6:7.0f} µs a step, {step_s / bare_s:.2f} of the bare loop")


if __name__ == "__main__":
    main()
