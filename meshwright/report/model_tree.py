"""The plan drawn on the model: the tree of modules, with equal blocks folded, what the plan does to each of them, and
what ranks exchange around them."""

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from meshwright.report.page import Drawing
from meshwright.report.units import bytes_text, count_text

_OPEN_DEPTH = 2  # modules up to this depth are unfolded at first
_COLOURS = {
    "replicated": "--series-0",
    "sharded": "--series-2",
    "split": "--series-1",
    "stage": "--series-6",
    "branch": "--series-3",
    "recompute": "--series-4",
    "frozen": "--series-7",
    "tied": "--series-7",
}
_STYLE = Markup(
    "<style>"
    ".modules{font-size:.9375rem;line-height:1.9}"
    ".modules details,.modules .leaf{margin-left:1.1rem}"
    ".modules summary{cursor:pointer;margin-left:-1.1rem}"
    ".modules .name{font-weight:600;overflow-wrap:anywhere}"
    ".modules .times{font-weight:600;background:var(--surface);border-radius:.3rem;padding:.02rem .35rem}"
    ".modules .class,.modules .size{color:var(--muted);overflow-wrap:anywhere}"
    ".modules .chip{border:1px solid var(--chip);border-left-width:.6rem;border-radius:.3rem;padding:.02rem .35rem;"
    "font-size:.8125rem;margin-right:.25rem;-webkit-box-decoration-break:clone;box-decoration-break:clone}"
    ".modules .exchange{background:var(--surface);border:1px dashed var(--series-5);border-radius:.3rem;"
    "padding:.02rem .35rem;font-size:.8125rem;margin-right:.25rem;-webkit-box-decoration-break:clone;"
    "box-decoration-break:clone}"
    ".modules .exchange::before{content:'⇄ '}"
    "</style>"
)


def model_tree(tree: Mapping[str, Any], title: str = "The plan on the model") -> Drawing:
    """Returns the drawing of a tree that `plan_on_modules` has described."""
    markup = Markup('{}<div class="modules">{}</div>').format(_STYLE, _node(tree, 0))
    size = f"{count_text(tree['parameters'])} parameters"
    return Drawing(
        markup,
        f"The modules of {tree['name']} ({size}), with what the plan does to each of them.",
        title,
        note="A box with a coloured edge says what the plan does to all weights inside a module; a dashed box is an"
        " exchange between ranks. Click on a module to fold or unfold it. Sizes are those of one copy of the weights.",
    )


def _node(node: Mapping[str, Any], depth: int) -> Markup:
    children = node.get("children", [])
    line = _line(node)
    hidden = node.get("hidden", 0)
    if not children and not hidden:
        return Markup('<div class="leaf">{}</div>').format(line)
    inside = Markup("").join(_node(child, depth + 1) for child in children)
    if hidden:
        inside += Markup('<div class="leaf size">{:,} more modules</div>').format(hidden)
    is_open = Markup(" open") if depth < _OPEN_DEPTH or len(children) == 1 else Markup("")
    return Markup("<details{}><summary>{}</summary>{}</details>").format(is_open, line, inside)


def _line(node: Mapping[str, Any]) -> Markup:
    copies = node.get("copies", 1)
    parts = [Markup('<span class="name">{}</span>').format(node["name"])]
    if copies > 1:
        parts.insert(0, Markup('<span class="times">{:,} × {}</span>').format(copies, node["class"]))
    elif node["class"] != node["name"]:
        parts.append(Markup('<span class="class">{}</span>').format(node["class"]))
    if node["parameters"]:
        each = " each" if copies > 1 else ""
        size = f"{count_text(node['parameters'])} parameters, {bytes_text(node['bytes'])}{each}"
        parts.append(Markup('<span class="size">{}</span>').format(size))
    for kind, words in node.get("labels", ()):
        colour = _COLOURS.get(kind, "--series-7")
        parts.append(Markup('<span class="chip" style="--chip:var({})">{}</span>').format(colour, words))
    parts += [Markup('<span class="exchange">{}</span>').format(words) for words in node.get("exchanges", ())]
    return Markup(" ").join(parts)
