"""Loss functions as source: means, sums, masked ones, and those that compare the samples of a batch.

`output` has the scores of V classes for each position or sample, and `target` the classes; in some losses a part of
them is -100. For torch's own losses, the classes are dimension 1 of the output.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class LossSource:
    """`lines` are the body of `loss(output, target)`. `ignores`: some targets are -100. `is_coupled`: it compares
    samples. `is_own`: the model returns it. `is_torch`: it is one of torch's, and `lines` is an expression.
    `takes_numbers`: the target has a number for each score."""

    lines: str
    ignores: bool = False
    is_coupled: bool = False
    is_own: bool = False
    is_torch: bool = False
    takes_numbers: bool = False


_ROWS = "rows, classes = output.flatten(0, -2), target.flatten()\n"
_EACH = "each = F.cross_entropy(rows, classes.clamp(min=0), reduction='none')\n"
LOSSES: dict[str, LossSource] = {
    "mean": LossSource(_ROWS + "return F.cross_entropy(rows, classes)"),
    "sum": LossSource(_ROWS + "return F.cross_entropy(rows, classes, reduction='sum')"),
    "ignored": LossSource(_ROWS + "return F.cross_entropy(rows, classes)", ignores=True),
    "smoothed": LossSource(_ROWS + "return F.cross_entropy(rows, classes, label_smoothing=0.1)"),
    "smoothed and ignored": LossSource(
        _ROWS + "return F.cross_entropy(rows, classes, label_smoothing=0.1)", ignores=True
    ),
    "masked mean": LossSource(
        _ROWS + _EACH + "mask = (classes != -100).to(rows.dtype)\nreturn (each * mask).sum() / mask.sum()", ignores=True
    ),
    "masked plain mean": LossSource(_ROWS + _EACH + "return (each * (classes != -100)).mean()", ignores=True),
    "squares": LossSource(
        "wanted = F.one_hot(target.clamp(min=0), output.shape[-1]).to(output.dtype)\nreturn F.mse_loss(output, wanted)"
    ),
    "squares of samples": LossSource(
        "wanted = F.one_hot(target.clamp(min=0), output.shape[-1]).to(output.dtype)\n"
        "return ((output - wanted) ** 2).flatten(1).sum(1).mean()"
    ),
    "sum and count": LossSource(
        _ROWS + "return F.cross_entropy(rows, classes, reduction='sum'), (classes != -100).sum()", ignores=True
    ),
    "contrastive": LossSource(
        "z = F.normalize(output.flatten(1), dim=1)\n"
        "return F.cross_entropy(z @ z.roll(1, 1).t() * 2, torch.arange(len(z)))",
        is_coupled=True,
    ),
    "batch variance": LossSource(
        _ROWS + "return F.cross_entropy(rows, classes) + output.var(0).mean()", is_coupled=True
    ),
    "CrossEntropyLoss": LossSource("nn.CrossEntropyLoss()", is_torch=True),
    "CrossEntropyLoss ignored": LossSource("nn.CrossEntropyLoss()", ignores=True, is_torch=True),
    "CrossEntropyLoss sum": LossSource("nn.CrossEntropyLoss(reduction='sum')", ignores=True, is_torch=True),
    "CrossEntropyLoss of a class": LossSource("nn.CrossEntropyLoss(ignore_index=2)", is_torch=True),
    "F.cross_entropy": LossSource("F.cross_entropy", ignores=True, is_torch=True),
    "MSELoss": LossSource("nn.MSELoss()", is_torch=True, takes_numbers=True),
    "own": LossSource(_ROWS + "return F.cross_entropy(rows, classes)", is_own=True),
    "own and ignored": LossSource(_ROWS + "return F.cross_entropy(rows, classes)", ignores=True, is_own=True),
    "own squares": LossSource(
        "wanted = F.one_hot(target, output.shape[-1]).to(output.dtype)\nreturn F.mse_loss(output, wanted)", is_own=True
    ),
}
