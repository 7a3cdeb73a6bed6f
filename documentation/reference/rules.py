"""The page of the rules: what a plan must not combine, why, what to do instead, and where each rule holds."""

from documentation.reference.markdown import page, table
from meshwright.plan_rules import table as rules
from meshwright.plan_rules.no_effect import NO_EFFECT
from meshwright.plan_rules.rule import DERIVED, FACTS

_INTRODUCTION = (
    "What a plan must not combine. A condition is written with the fields of a [plan](plan.md) and the words that are "
    "listed below; in a reason or remedy, braces stand for the value in the plan. A rule holds for every `plan` when "
    "it is made; for every `run`, and therefore in searches and `--fix`; in `--fix` alone; for what is compiled "
    "(`compile`: nothing, then); or at the doors that it names."
)


def rules_page() -> str:
    rows = [(f"`{rule.when}`", _plain(rule.why), _plain(rule.instead), ", ".join(rule.where)) for rule in rules.RULES]
    effects = [(f"`{name}`", f"`{rule.when}`", rule.instead) for name, rule in NO_EFFECT.items()]
    words = [(f"`{name}`", f"`{expression}`") for name, expression in DERIVED.items()]
    words += [(f"`{name}`", meaning) for name, meaning in FACTS.items()]
    return page(
        "What plans must not combine",
        "`meshwright/plan_rules`",
        _INTRODUCTION,
        table(("refused when", "because", "instead", "holds for"), rows),
        "## Fields without effect",
        "These fields are accepted, and have no effect in a plan",
        table(("field", "where", "with effect"), effects),
        "## Words of conditions",
        table(("word", "stands for"), words),
    )


def _plain(text: str) -> str:
    return text.replace("{", "`{").replace("}", "}`")
