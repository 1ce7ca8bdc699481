"""Tables of dialects and of operators, made from what the code does."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from preamp import casting, dialects
from preamp.policy import Moving, Policy
from preamp.record.formatting import power

UNNAMED = "-"


def dialect_rows() -> list[list[str]]:
    """Return each dialect, its system and what is odd about it."""
    head = ["dialect", "system", "what is odd about it"]
    return [head, *([_code(name), each.system, each.odd] for name, each in dialects.ALL.items())]


def rule_rows() -> list[list[str]]:
    """Return what each dialect does with its system's defaults."""
    head = ["dialect", "first scale", "grows by", "clean steps", "falls by", "overflows", "lowest", "highest"]
    return [head, *([_code(name), *_rule(each.policy)] for name, each in dialects.ALL.items())]


def _rule(policy: Policy[Any]) -> list[str]:
    if not isinstance(policy, Moving):
        return [power(policy.start().scale), *[UNNAMED] * 6]
    divisor = policy.compat.backoff_divisor
    return [
        power(policy.start().scale),
        f"{policy.growth_factor:g}",
        f"{policy.growth_interval + policy.compat.growth_delay:,}",
        f"{1.0 / divisor if divisor else policy.backoff_factor:g}",
        str(getattr(policy, "hysteresis", 1)),
        power(policy.min_scale),
        power(policy.max_scale),
    ]


def operator_rows(*names: str) -> list[list[str]]:
    """Return the operators of some tables of `casting`, those together that have the same rules."""
    tables = [getattr(casting, name).rules for name in names]
    together: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for operator in sorted({operator for table in tables for operator in table}):
        together[tuple(table.get(operator, UNNAMED) for table in tables)].append(operator)
    order = [*casting.RULES, UNNAMED]
    groups = sorted(together.items(), key=lambda group: [order.index(rule) for rule in group[0]])
    head = [*[f"`casting.{name}`" for name in names], "operators"]
    return [head, *([*rules, " ".join(map(_code, operators))] for rules, operators in groups)]


def _code(name: str) -> str:
    return f"`{name}`"


def _plain(text: str) -> str:
    """Return text in which Markdown finds nothing to mark up."""
    return re.sub(r"([*_`|\\])", r"\\\1", text)


def _markdown(rows: Iterable[list[str]]) -> str:
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "| --- " * head.count(" | ") + "| --- |", *body])


class Dialects(SphinxDirective):
    """The dialects: `{dialects} systems` or `{dialects} rules`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        rows = {"systems": dialect_rows, "rules": rule_rows}[self.arguments[0]]()
        return self.parse_text_to_nodes(_markdown(rows))


class Operators(SphinxDirective):
    """Tables of `casting` beside each other: `{operators} CPU CUDA`."""

    required_arguments = 1
    optional_arguments = 9

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(_markdown(operator_rows(*self.arguments)))


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.add_directive("dialects", Dialects)
    app.add_directive("operators", Operators)
    return {"parallel_read_safe": True}
