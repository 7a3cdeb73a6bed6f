"""Draws cases. The same seed and number give the same case.

Every case has one operator that the number decides, so that all operators occur about equally often (or those that few
programs had, see rare.py), and a plan kind by weight. The other statements are random. Positions, ranges and
dimensions are drawn over the whole size, so that they also lie at and across the borders between ranks.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any

from validation.fuzz.losses import LOSSES
from validation.fuzz.operators.operator import Operator
from validation.fuzz.operators.table import OPERATORS
from validation.fuzz.plans import PLANS, PlanKind
from validation.fuzz.program import BASE_LAYOUTS, Case, Program, Sizes, Statement, Statements
from validation.fuzz.training.optimizers import ELEMENTWISE, OPTIMIZERS

_SAMPLES_MIXED = 0.02  # how often an operator's dimension is that of the samples
_BLOCK_FAMILIES = ("attention", "contractions")


def draw_case(
    seed: int,
    number: int,
    attempt: int = 0,
    plans: Collection[str] = tuple(PLANS),
    operators: Collection[str] = (),
    plan_weights: Mapping[str, float] | None = None,
) -> Case:
    """Returns the case of this seed and number; another one for each `attempt`, since some programs do not run in plain
    PyTorch either. `plans` are the kinds to draw from; each case has one of `operators`, if they are given. The plan
    and the operator that were drawn give the same case again, if they are the only ones to draw from."""
    rng = Random(f"{seed}/{number}/{attempt}")
    names = sorted(operators) or sorted(OPERATORS)
    focus = OPERATORS[names[(number + 7919 * seed) % len(names)]]
    kind_name = _draw_plan(rng, focus, plans, plan_weights)
    if kind_name is None:  # none of these plans has models with the operator
        focus = OPERATORS["mlp"]
        kind_name = _draw_plan(rng, focus, plans, plan_weights)
        assert kind_name is not None
    kind = PLANS[kind_name]
    program = _draw_program(rng, kind, focus)
    loss = _draw_loss(rng, kind, program)
    doors = ["share"] * 6 + ["prepare"] * 2
    if kind.axes.get("pipeline", 1) == 1 and "accumulation" not in kind.groups.get("memory", {}):
        doors += ["own loop", "two passes"]
    return Case(
        program=program,
        plan_kind=kind_name,
        plan=kind.plan(),
        loss=loss,
        optimizer=rng.choice(ELEMENTWISE) if rng.random() < 0.6 else rng.choice(sorted(OPTIMIZERS)),
        door=rng.choice(doors) if not LOSSES[loss].is_own else "share",
        clip_norm=0.05 if rng.random() < 0.1 else None,
        batch=kind.batch,
        last_batch=rng.choice([kind.batch] * 4 + [kind.batch - 3]),
        seed=rng.randrange(2**31),
    )


def _draw_plan(rng: Random, focus: Operator, plans: Collection[str], weights: Mapping[str, float] | None) -> str | None:
    fitting = [name for name in plans if _fits(focus, PLANS[name])]
    of_plans = [weights[name] if weights else PLANS[name].weight for name in fitting]
    return rng.choices(fitting, of_plans)[0] if fitting else None


def _fits(focus: Operator, kind: PlanKind) -> bool:
    return bool(_models_for(focus, kind)) and allows(focus, kind)


def allows(operator: Operator, kind: PlanKind) -> bool:
    """Whether the plan computes what one process computes: some operators look at all samples of a batch by design."""
    if operator.needs == "batch_norm":
        accumulation = kind.groups.get("memory", {}).get("accumulation", 1)
        synchronized = kind.groups.get("numerics", {}).get("batch_norm") == "synchronized"
        return kind.parts == 1 or (synchronized and accumulation == 1)
    return "one_part" not in operator.needs or kind.parts == 1


def _models_for(focus: Operator, kind: PlanKind) -> list[str]:
    if "tokens" in focus.needs:
        return [model for model in kind.models if model == "tokens"]
    return [model for model in kind.models if _path(BASE_LAYOUTS[model], focus.takes) is not None]


def _draw_program(rng: Random, kind: PlanKind, focus: Operator) -> Program:
    model = rng.choice(_models_for(focus, kind))
    sizes = Sizes(L=rng.choice((12, 12, 8, 16, 9, 10)), D=16, H=4, V=rng.choice((11, 12)), S=6)
    if rng.random() < 0.15 and "tensor" not in kind.axes:
        sizes = replace(sizes, D=12, H=2, L=12)
    blocks = max(kind.stages, 2)
    equal = (blocks > 2 and rng.random() < 0.7) or rng.random() < 0.4
    drawing = _Drawing(rng, kind, model, sizes)
    places = [drawing.gap() for _ in range(blocks + 1)]
    bodies = [drawing.block() for _ in range(1 if equal else blocks)]
    if kind.operators:
        bodies[0] = (*bodies[0], drawing.statement(OPERATORS[rng.choice(kind.operators)], "BLD"))
    around = drawing.around(focus)
    if "tokens" in focus.needs or rng.random() < 0.5:
        place = rng.randrange(1 if model in ("towers", "heads") else blocks + 1)
        places[place] = (*places[place], *around)
    else:
        place = rng.randrange(len(bodies))
        bodies[place] = (*bodies[place], *around) if rng.random() < 0.5 else (*around, *bodies[place])
    bodies = bodies * blocks if equal else bodies
    pooled = (model == "tokens" and rng.random() < 0.1) or (model == "features" and rng.random() < 0.4)
    return Program(model, sizes, tuple(places), tuple(bodies), equal, pooled, model == "tokens" and rng.random() < 0.2)


def _draw_loss(rng: Random, kind: PlanKind, program: Program) -> str:
    own_too = program.kind in ("tokens", "features")
    names = [name for name, loss in LOSSES.items() if own_too or not loss.is_own]
    names = [name for name in names if not kind.losses or name in kind.losses]
    weights = [0.4 if LOSSES[name].is_coupled else 1.0 for name in names]
    return rng.choices(names, weights)[0]


class _Drawing:
    """Draws the statements of one program."""

    def __init__(self, rng: Random, kind: PlanKind, model: str, sizes: Sizes) -> None:
        self.rng, self.kind, self.model, self.sizes = rng, kind, model, sizes
        self.base = BASE_LAYOUTS[model]

    def gap(self) -> Statements:
        return self.statements(self.rng.choice((0, 0, 0, 1)), in_model=True)

    def block(self) -> Statements:
        """Attention and an MLP in most blocks of sequences, and other statements."""
        main: list[Statement] = []
        if self.base == "BLD":
            main += [self.of_family("attention")] if self.rng.random() < 0.85 else []
            main += [self.statement(OPERATORS[self.rng.choice(("mlp", "gated mlp", "Sequential"))], "BLD")] * (
                self.rng.random() < 0.6
            )
        elif self.base == "BD":
            main += [self.statement(OPERATORS[self.rng.choice(("mlp", "Sequential", "gated mlp"))], "BD")]
        else:
            main += [self.statement(OPERATORS[self.rng.choice(("Conv2d", "Conv2d bottleneck"))], "BCSS")]
        return (*main, *self.statements(self.rng.choice((0, 0, 1)), in_model=False))

    def of_family(self, family: str) -> Statement:
        names = [name for name, operator in OPERATORS.items() if operator.family == family]
        names = [name for name in names if not OPERATORS[name].needs and self.base in OPERATORS[name].takes]
        return self.statement(OPERATORS[self.rng.choice(names)], self.base)

    def statements(self, count: int, in_model: bool) -> Statements:
        """Random statements, and those that lead back to the layout of the model."""
        result: list[Statement] = []
        layout, kept = self.base, ""
        for _ in range(count):
            usable = [op for op in OPERATORS.values() if self.may_use(op, layout, kept, in_model)]
            operator = self.rng.choice(usable)
            result.append(self.statement(operator, layout))
            kept = layout if operator.name == "keep" else kept
            layout = operator.gives or layout
        return (*result, *self.way(layout, self.base))

    def may_use(self, operator: Operator, layout: str, kept: str, in_model: bool) -> bool:
        if layout not in operator.takes or not allows(operator, self.kind):
            return False
        if operator.needs == "kept":
            return kept == layout
        return "tokens" not in operator.needs or (in_model and self.model == "tokens")

    def around(self, focus: Operator) -> Statements:
        """The statement of one operator, with those that lead to a layout that it takes and back."""
        layouts = [layout for layout in focus.takes if _path(self.base, (layout,)) is not None]
        short = [layout for layout in layouts if layout == self.base]
        layout = short[0] if short and self.rng.random() < 0.6 else self.rng.choice(layouts)
        there = self.way(self.base, layout)
        if focus.needs == "kept":
            there = (*there, self.statement(OPERATORS["keep"], layout))
        return (*there, self.statement(focus, layout), *self.way(focus.gives or layout, self.base))

    def way(self, start: str, end: str) -> Statements:
        path = _path(start, (end,))
        assert path is not None
        result = []
        for before, after in pairwise(path):
            names = [n for n, op in OPERATORS.items() if op.gives == after and before in op.takes]
            result.append(self.statement(OPERATORS[self.rng.choice(names)], before))
        return tuple(result)

    def statement(self, operator: Operator, layout: str) -> Statement:
        """Draws the values of an operator's placeholders."""
        rng, options = self.rng, dict[str, Any]()
        names = operator.placeholders
        batch_dims = [dim for dim, letter in enumerate(layout) if letter in "BN"]
        other_dims = [dim for dim in range(len(layout)) if dim not in batch_dims]
        for name in names:
            if name in operator.choices:
                options[name] = rng.choice(operator.choices[name])
            elif name == "d":
                options[name] = rng.choice(batch_dims if rng.random() < _SAMPLES_MIXED else other_dims)
            elif name == "e":
                options[name] = rng.choice([dim for dim in other_dims if dim != options["d"]] or [0])
            elif name == "c":
                options[name] = rng.choice((0.5, -0.7, 1.5, 0.25))
            elif name == "k":
                options[name] = rng.choice((1, 1, 2, 3))
        size = (self.sizes.of(layout[options["d"]]) if "d" in options else None) or 1
        for name in ("i", "j"):
            if name in names and name not in options:
                options[name] = rng.randrange(size)
        if "a" in names or "b" in names:
            start = rng.randrange(max(1, size - 1))
            options["a"], options["b"] = start, rng.randrange(start + 1, size + 1) if size > 1 else 1
        return Statement(operator.name, options)


@cache
def _path(start: str, ends: tuple[str, ...]) -> tuple[str, ...] | None:
    """The layouts of a shortest way from one layout to one of others; None if there is no way."""
    paths: list[tuple[str, ...]] = [(start,)]
    seen = {start}
    while paths:
        longer: list[tuple[str, ...]] = []
        for path in paths:
            if path[-1] in ends:
                return path
            for operator in OPERATORS.values():
                if operator.gives and path[-1] in operator.takes and operator.gives not in seen:
                    seen.add(operator.gives)
                    longer.append((*path, operator.gives))
        paths = longer
    return None
