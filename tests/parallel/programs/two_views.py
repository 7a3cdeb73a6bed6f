"""Statements that hold two views of one tensor and write into one of them, in the form of statements.py."""

from torch import Tensor, nn

from tests.parallel.programs.statements import statement


@statement
def write_through_views_of_two_shapes(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    x = x.clone()
    position = x[:, 2]
    x.flatten(0, 1)[::5].mul_(2)
    position.add_(1)
    return x


@statement
def read_after_write_through_another_shape(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    y = x.clone()
    position, rows = y[:, 5], y.flatten(0, 1)[::5]
    rows.mul_(2)
    return x + position.unsqueeze(1)


@statement
def read_once_after_write_through_another_shape(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    def read_position(y: Tensor) -> Tensor:
        position = y[:, 5]
        y.flatten(0, 1)[::5].mul_(2)
        return position * 2

    return x + read_position(x.clone()).unsqueeze(1)


@statement
def read_views_of_two_shapes(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    y = x.clone()
    position, rows = y[:, 5], y.flatten(0, 1)[::5]
    return x + position.unsqueeze(1) + rows.mean(0)


@statement
def write_through_one_shape_after_the_other(x: Tensor, tokens: Tensor, model: nn.Module) -> Tensor:
    x = x.clone()
    x[:, 2].add_(1)
    x.flatten(0, 1)[::5].mul_(2)
    x[:, 5] += 2
    rows = x.flatten(0, 1)
    rows[::3] *= 2
    return x


_TWO_VIEWS = "of which the model already holds another view"
REFUSED = {
    "write_through_views_of_two_shapes": _TWO_VIEWS,
    "read_after_write_through_another_shape": _TWO_VIEWS,
    "read_once_after_write_through_another_shape": _TWO_VIEWS,
}
