"""The cluster as a drawing: machines with their devices, and the links between them with their bandwidths. Of many
equal machines a few are drawn, and the others are counted."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from meshwright.cluster.cluster import Cluster, Link
from meshwright.numbers.units import bandwidth_text, bytes_text, seconds_text
from meshwright.plan import Plan
from meshwright.plan_fields.groups import MESH_ORDER
from meshwright.report.page import Drawing
from meshwright.simulator.communication.placement import axis_groups

MOST_MACHINES = 4  # that are drawn of each kind
MOST_KINDS = 6
MOST_DEVICES = 16  # that are drawn of each machine
_DEVICES_IN_ROW = 4
_DEVICE_WIDTH, _DEVICE_HEIGHT, _GAP, _PADDING = 50, 30, 6, 12
_MACHINE_WIDTH = 2 * _PADDING + _DEVICES_IN_ROW * _DEVICE_WIDTH + (_DEVICES_IN_ROW - 1) * _GAP
_MACHINE_GAP = 18
_LINE = 17
_WIDTH = MOST_MACHINES * _MACHINE_WIDTH + (MOST_MACHINES - 1) * _MACHINE_GAP


def cluster_values(cluster: Cluster, plan: Plan | None = None) -> dict[str, Any]:
    """Returns what `cluster_drawing` draws, as plain values. With a plan, `uses` has the axes of the plan that use the
    links within a machine and those between machines, and `pipeline` its number of pipeline ranks."""
    machines = sum(node.number for node in cluster.nodes)
    values: dict[str, Any] = {
        "name": cluster.name,
        "based_on": cluster.basis,
        "devices": cluster.device_count,
        "nodes": [
            {
                "device": node.device.name,
                "kind": node.device.kind,
                "memory_bytes": node.device.memory_bytes,
                "count": node.count,
                "number": node.number,
                "cores": node.cores,
                "link": _link_values(node.link),
            }
            for node in cluster.nodes
        ],
        "link": _link_values(cluster.link) if cluster.link is not None and machines > 1 else None,
    }
    if plan is not None and plan.world_size <= cluster.device_count:
        groups = axis_groups(plan.axes, cluster)
        values["uses"] = {
            tier: [f"{name} {groups[name].ranks}" for name in MESH_ORDER if tier in groups[name].tiers]
            for tier in ("within", "between")
        }
        values["ranks"], values["pipeline"] = plan.world_size, plan.axes.pipeline
    return values


def _link_values(link: Link) -> dict[str, Any]:
    return {"name": link.name, "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s, "latency_s": link.latency_s}


@dataclass
class _Shapes:
    """The SVG elements so far, and the lowest point that one of them reaches."""

    elements: list[Markup]
    bottom: float = 0.0

    def box(self, x: float, y: float, width: float, height: float, style: str) -> None:
        self.elements.append(
            Markup('<rect x="{:g}" y="{:g}" width="{:g}" height="{:g}" rx="5" style="{}"/>').format(
                x, y, width, height, style
            )
        )
        self.bottom = max(self.bottom, y + height)

    def line(self, x1: float, y1: float, x2: float, y2: float, width: float) -> None:
        self.elements.append(
            Markup(
                '<line x1="{:g}" y1="{:g}" x2="{:g}" y2="{:g}" style="stroke:var(--series-5);stroke-width:{:g}"/>'
            ).format(x1, y1, x2, y2, width)
        )

    def text(self, x: float, y: float, words: str, size: int = 13, anchor: str = "start", bold: bool = False) -> None:
        weight = ";font-weight:600" if bold else ""
        self.elements.append(
            Markup('<text x="{:g}" y="{:g}" text-anchor="{}" style="font-size:{}px{}">{}</text>').format(
                x, y, anchor, size, weight, words
            )
        )
        self.bottom = max(self.bottom, y + 4)


def cluster_drawing(values: Mapping[str, Any], title: str = "The cluster") -> Drawing:
    """Returns the drawing of a cluster that `cluster_values` has described."""
    shapes = _Shapes([])
    y, rank = 0.0, 0
    trunk_y: list[float] = []
    nodes: Sequence[Mapping[str, Any]] = values["nodes"]
    left = 30.0 if values.get("link") else 1.0
    for node in nodes[:MOST_KINDS]:
        if values.get("link"):
            trunk_y.append(y + 2 * _LINE + 20)
        _draw_kind(shapes, node, values, left, y, rank)
        rank += node["count"] * node["number"]
        y = shapes.bottom + 22
    if len(nodes) > MOST_KINDS:
        shapes.text(left, y, f"and {len(nodes) - MOST_KINDS:,} more kinds of machines")
        y += _LINE + 8
    if values.get("link"):
        shapes.line(10, trunk_y[0], 10, y + 10, 4)
        for at in trunk_y:
            shapes.line(10, at, left, at, 4)
        shapes.line(10, y + 10, left, y + 10, 4)
        shapes.text(
            left + 6, y + 14, f"Between machines: {_link_text(values['link'])}{_uses(values, 'between')}", bold=True
        )
    width, height = _WIDTH + left + 4, shapes.bottom + 4
    svg = Markup('<svg viewBox="0 0 {:g} {:g}" xmlns="http://www.w3.org/2000/svg">{}</svg>').format(
        width, height, Markup("").join(shapes.elements)
    )
    return Drawing(svg, _description(values), title, minimum_px=760, note=_note(values))


def _draw_kind(
    shapes: _Shapes, node: Mapping[str, Any], values: Mapping[str, Any], left: float, y: float, first_rank: int
) -> None:
    """Draws the machines of one kind, with a line of text above them."""
    number, count = node["number"], node["count"]
    memory = f" with {bytes_text(node['memory_bytes'])} each" if node["memory_bytes"] else ""
    machines = "1 machine" if number == 1 else f"{number:,} machines"
    shapes.text(
        left, y + 13, f"{machines}: {count:,} × {node['device']}{memory}, {node['cores']:,} CPU cores", bold=True
    )
    within = f"Within a machine: {_link_text(node['link'])}{_uses(values, 'within')}"
    shapes.text(left, y + 13 + _LINE, within if count > 1 else "One device in each machine")
    drawn = number if number <= MOST_MACHINES else MOST_MACHINES - 1
    top = y + 2 * _LINE + 8
    for machine in range(drawn):
        x = left + machine * (_MACHINE_WIDTH + _MACHINE_GAP)
        _draw_machine(shapes, node, values, x, top, first_rank + machine * count)
    if values.get("link") and drawn > 1:
        for machine in range(1, drawn):
            x = left + machine * (_MACHINE_WIDTH + _MACHINE_GAP)
            shapes.line(x - _MACHINE_GAP, top + 12, x, top + 12, 4)
    if number > drawn:
        x = left + drawn * (_MACHINE_WIDTH + _MACHINE_GAP)
        shapes.line(x - _MACHINE_GAP, top + 12, x + 8, top + 12, 4)
        shapes.text(x + 14, top + 17, f"… {number - drawn:,} more machines", bold=True)


def _draw_machine(
    shapes: _Shapes, node: Mapping[str, Any], values: Mapping[str, Any], x: float, y: float, first_rank: int
) -> None:
    count = node["count"]
    drawn = count if count <= MOST_DEVICES else MOST_DEVICES - 1
    rows = -(-(drawn + (count > drawn)) // _DEVICES_IN_ROW)
    height = 2 * _PADDING + rows * _DEVICE_HEIGHT + (rows - 1) * _GAP
    shapes.box(x, y, _MACHINE_WIDTH, height, "fill:var(--surface);stroke:var(--grid)")
    for number in range(drawn + (count > drawn)):
        row, column = divmod(number, _DEVICES_IN_ROW)
        left, top = x + _PADDING + column * (_DEVICE_WIDTH + _GAP), y + _PADDING + row * (_DEVICE_HEIGHT + _GAP)
        if number == drawn:
            shapes.text(left + _DEVICE_WIDTH / 2, top + 20, f"+{count - drawn:,}", anchor="middle")
            continue
        rank = first_rank + number
        shapes.box(left, top, _DEVICE_WIDTH, _DEVICE_HEIGHT, _device_style(rank, values))
        shapes.text(left + _DEVICE_WIDTH / 2, top + 20, f"{rank:,}", anchor="middle")


def _device_style(rank: int, values: Mapping[str, Any]) -> str:
    """The colour of a device: that of its pipeline stage, none if the plan does not use it."""
    ranks, pipeline = values.get("ranks"), values.get("pipeline", 1)
    if ranks is None:
        return "fill:var(--ground);stroke:var(--series-0);stroke-width:1.5"
    if rank >= ranks:
        return "fill:var(--ground);stroke:var(--neutral);stroke-dasharray:3 3"
    colour = rank // (ranks // pipeline) % 7 if pipeline > 1 else 0
    return f"fill:var(--ground);stroke:var(--series-{colour});stroke-width:3"


def _link_text(link: Mapping[str, Any]) -> str:
    bandwidth = link["bandwidth_bytes_per_s"]
    speed = f"{bandwidth_text(bandwidth)} per device and direction" if bandwidth else "bandwidth not known"
    latency = f", {seconds_text(link['latency_s'])} latency" if link["latency_s"] else ""
    return f"{link['name']}, {speed}{latency}"


def _uses(values: Mapping[str, Any], tier: str) -> str:
    axes = values.get("uses", {}).get(tier, [])
    return f"; used by {', '.join(axes)}" if axes else ""


def _note(values: Mapping[str, Any]) -> str:
    words = [f"Constants of the hardware: {values['based_on']}.", "A device's number is that of its rank."]
    if values.get("pipeline", 1) > 1:
        words.append("Devices with the same colour of edge hold the same pipeline stages.")
    if values.get("ranks", values["devices"]) < values["devices"]:
        words.append("Devices with a dashed edge are not used by the plan.")
    return " ".join(words)


def _description(values: Mapping[str, Any]) -> str:
    return ". ".join([f"Cluster {values['name']} with {values['devices']:,} devices", *_node_texts(values)])


def _node_texts(values: Mapping[str, Any]) -> Iterator[str]:
    for node in values["nodes"][:MOST_KINDS]:
        yield f"{node['number']:,} machines of {node['count']:,} × {node['device']}, {_link_text(node['link'])}"
