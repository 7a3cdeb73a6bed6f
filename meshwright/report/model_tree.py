"""The plan drawn on the model: the tree of modules, with equal blocks folded, what the plan does to each of them, and
what ranks exchange around them."""

from collections.abc import Mapping
from typing import Any

from meshwright.numbers.units import bytes_text, count_text
from meshwright.report.charts import SERIES_COLOURS
from meshwright.report.page import Phrase, Tree, TreeNode

_OPEN_DEPTH = 2  # modules up to this depth are unfolded at first
_COLOURS = {
    "replicated": SERIES_COLOURS[0],
    "sharded": SERIES_COLOURS[2],
    "split": SERIES_COLOURS[1],
    "stage": SERIES_COLOURS[6],
    "branch": SERIES_COLOURS[3],
    "recompute": SERIES_COLOURS[4],
    "frozen": SERIES_COLOURS[7],
    "tied": SERIES_COLOURS[7],
}


def model_tree(tree: Mapping[str, Any], title: str = "The plan on the model") -> Tree:
    """Returns the tree that `plan_on_modules` has described, for a page."""
    size = f"{count_text(tree['parameters'])} parameters"
    return Tree(
        _node(tree, 0),
        f"The modules of {tree['name']} ({size}), with what the plan does to each of them.",
        title,
        "A box with a coloured edge says what the plan does to all weights inside a module; a dashed box is an"
        " exchange between ranks. Click on a module, or press Enter on it, to fold or unfold it. Sizes are those of one"
        " copy of the weights.",
    )


def _node(node: Mapping[str, Any], depth: int) -> TreeNode:
    children = [_node(child, depth + 1) for child in node.get("children", [])]
    is_open = depth < _OPEN_DEPTH or len(children) == 1
    if hidden := node.get("hidden", 0):
        children.append(TreeNode([Phrase(f"{hidden:,} more modules", "muted")]))
    return TreeNode(_phrases(node), children, is_open)


def _phrases(node: Mapping[str, Any]) -> list[Phrase]:
    copies = node.get("copies", 1)
    phrases = [Phrase(node["name"], "name")]
    facts = []
    if copies > 1:
        phrases.insert(0, Phrase(f"{copies:,} × {node['class']}", "times"))
    elif node["class"] != node["name"]:
        facts.append(node["class"])
    if node["parameters"]:
        each = " each" if copies > 1 else ""
        facts += [f"{count_text(node['parameters'])} parameters", f"{bytes_text(node['bytes'])}{each}"]
    if facts:
        phrases.append(Phrase(", ".join(map(str, facts)), "muted"))
    for kind, words in node.get("labels", ()):
        phrases.append(Phrase(words, "label", _COLOURS.get(kind, SERIES_COLOURS[7])))
    return phrases + [Phrase(words, "exchange") for words in node.get("exchanges", ())]
