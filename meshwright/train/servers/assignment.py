"""Decides which server holds which rows of which parameters. The result depends only on names, sizes and the
optimizer's class, so every server and worker computes it without communication.

An elementwise optimizer updates some rows of a parameter exactly as if it had the whole parameter. With such an
optimizer, the rows of all parameters, one after another, are cut into one range per server, of about equal sizes in
bytes. With any other optimizer each parameter stays whole: from the largest to the smallest, it goes to the server that
holds the fewest bytes so far.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.parallel.weights.layout import WholeOnOneRank

AXIS = "servers"


@dataclass(frozen=True)
class ParameterRows:
    """A range of rows of one parameter, from row `first` on. `whole` is the shape of the whole parameter; a parameter
    without dimensions counts as one row."""

    name: str
    first: int
    rows: int
    whole: tuple[int, ...]
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of these rows."""
        return (self.rows, *self.whole[1:]) if self.whole else ()

    def view(self, tensor: Tensor) -> Tensor:
        """A view of these rows in a tensor that has the shape of the whole parameter."""
        return tensor.narrow(0, self.first, self.rows) if self.whole else tensor


def assign_parameters(parameters: Mapping[str, Tensor], servers: int, cut: bool) -> list[list[ParameterRows]]:
    """Returns, for each server, the rows that it holds, in the order of `parameters`. Without `cut`, parameters stay
    whole."""
    sizes = {name: parameter.numel() * parameter.element_size() for name, parameter in parameters.items()}
    return _assign_rows(parameters, sizes, servers) if cut else _assign_whole(parameters, sizes, servers)


def _assign_rows(parameters: Mapping[str, Tensor], sizes: Mapping[str, int], servers: int) -> list[list[ParameterRows]]:
    """Cuts the rows of all parameters into ranges of equal size in bytes, one for each server."""
    assignment: list[list[ParameterRows]] = [[] for _ in range(servers)]
    bytes_per_server, begin = sum(sizes.values()) / servers, 0
    for name, parameter in parameters.items():
        rows = _row_count(parameter)
        ends = [
            _nearest_row((server + 1) * bytes_per_server - begin, sizes[name], rows) for server in range(servers - 1)
        ] + [rows]
        for server, (first, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if end > first:
                part = ParameterRows(name, first, end - first, tuple(parameter.shape), parameter.dtype)
                assignment[server].append(part)
        begin += sizes[name]
    return assignment


def _assign_whole(
    parameters: Mapping[str, Tensor], sizes: Mapping[str, int], servers: int
) -> list[list[ParameterRows]]:
    """Gives each parameter, from the largest to the smallest, to the server with the fewest bytes."""
    assignment: list[list[ParameterRows]] = [[] for _ in range(servers)]
    loads, owner = [0] * servers, {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        owner[name] = loads.index(min(loads))
        loads[owner[name]] += sizes[name]
    for name, parameter in parameters.items():
        whole = ParameterRows(name, 0, _row_count(parameter), tuple(parameter.shape), parameter.dtype)
        assignment[owner[name]].append(whole)
    return assignment


def _row_count(parameter: Tensor) -> int:
    return parameter.shape[0] if parameter.dim() else 1


def _nearest_row(offset: float, size: int, rows: int) -> int:
    """The row boundary nearest to an offset in bytes from the parameter's beginning. `size` is the parameter's size in
    bytes."""
    return min(rows, max(0, round(offset / size * rows))) if size else 0


def checkpoint_layout(rows: ParameterRows) -> WholeOnOneRank:
    """Returns the layout of these rows within the whole parameter, for checkpoints. It is a `WholeOnOneRank`, even if
    it is only a part of the parameter, because that class makes checkpoints gather parameter names from all servers."""
    ranges = ((rows.first, rows.rows),) if rows.whole else ()
    return WholeOnOneRank(rows.whole, 0, ranges, AXIS, rows.whole[:1])
