"""What a region with a table or rules of modules, or a rehearsal, does with each function of PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from preamp.autocasting.tables import DEFAULT, Casting, Rule, Scope
from preamp.errors import CastingError
from preamp.recipes.values import KNOWN, Recipe
from preamp.torch.autocasting import operators, recurrent

Action: TypeAlias = Literal[
    Rule,
    "float16",
    "bfloat16",
    "product",
    "quantized",
    "recurrent",
    "in float32",
    "without kernel",
    "inside",
    "calls",
    "backward",
    "listed",
    "once",
    "each",
    "steps",
    "padding",
]
"""What is done with a call: a rule of the table, or

- "float16", "bfloat16": run it in that precision, whatever the region's is;
- "product": compute it in float32, of inputs in low precision, and store the result in it;
- "quantized": compute its three products by a recipe;
- "recurrent": run a recurrent network step by step, so that its products are seen;
- "in float32": the same for another operator, if its inputs are in low precision;
- "without kernel": "in float32", because this device has no kernel for the low precision;
- "padding": call the operator that `pad` calls in C++;
- "inside": run a function in Python so that what it calls is seen;
- "calls": call it, which calls functions that it is given, and have those run in the mode;
- "backward": the same as "inside", with autocast off, as backward passes should run;
- "listed": call it, which is what PyTorch's autocast casts, and count it;
- "once": cast its inputs as PyTorch's autocast does, and a weight so that its gradients add up in float32;
- "steps": run a recurrent network step by step, for the same reason;
- "each": call it, and have PyTorch's autocast cast weights in it at each use, for the same reason.
"""
LOW = ("float16", "bfloat16")
UNCACHED = ("once", "each", "steps")  # each use of a weight has a cast of its own in the autograd graph
BACKWARD = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)


class Edits(NamedTuple):
    """What functions on a device type do differently from PyTorch.

    Attributes:
        device_type: whose tensors are cast.
        table: the rules that replace PyTorch's.
        optional: `table.optional`, which is not part of the table's equality.
        emulate: whether it is a rehearsal of a GPU: CUDA's rules, and products that compute in float32.
        recipe: how the products of linear layers are quantized.
        scope: what the table says of the module that is running; None outside of modules that it names.
        counted: whether calls are counted that PyTorch's autocast casts without us.
        owner: identifies the model that the table's rules of modules are about.
    """

    device_type: str
    table: Casting = DEFAULT
    optional: tuple[str, ...] = ()
    emulate: bool = False
    recipe: Recipe | None = None
    scope: Scope | None = None
    counted: bool = False
    owner: str = ""


def validate(casting: object, dtype: torch.dtype | None, emulate: object, recipe: object) -> None:
    """Check the arguments of a region that edits.

    Raises:
        CastingError: for an argument of the wrong type, a table that names an operator that does not exist,
            and a dtype that cannot be rehearsed.
    """
    if not isinstance(emulate, bool):
        raise CastingError(
            f"emulate={emulate!r} is not True or False. Write dtype=torch.float16, emulate=True."
        )
    if casting is not None and not isinstance(casting, Casting):
        raise CastingError(
            f"casting={casting!r} is not a table. Write casting=casting.DEFAULT.float32('softmax') "
            "after `from preamp import casting`."
        )
    operators.resolve(casting or DEFAULT)
    if recipe is not None and not isinstance(recipe, Recipe):
        raise CastingError(f"recipe={recipe!r} is not a recipe. Write recipe=preamp.recipes.MXFP8.")
    if isinstance(recipe, Recipe) and dtype is not None and str(dtype) != f"torch.{recipe.high}":
        raise CastingError(
            f"dtype={dtype}, and the recipe's high precision is {recipe.high}. Write recipe= without dtype=, "
            f"or dataclasses.replace(recipe, high={str(dtype).removeprefix('torch.')!r})."
        )
    if emulate and str(dtype).startswith("torch.float8"):
        raise CastingError(
            f"dtype={dtype} is rehearsed with the scales that training in it has. Write "
            "recipe=preamp.recipes.FLOAT8_CURRENT, without dtype= and emulate=."
        )
    if emulate and dtype not in (None, torch.float16, torch.bfloat16):
        raise CastingError(
            f"dtype={dtype} cannot be rehearsed: GPUs have no autocast to it. Write dtype=torch.float16 or "
            "dtype=torch.bfloat16."
        )


@cache
def actions(edits: Edits, in_graph: bool = False) -> Mapping[Callable[..., Any], Action]:
    """Return what is done with each function that does something other than what PyTorch does.

    Args:
        edits: what holds.
        in_graph: whether in code that is traced, where PyTorch casts a weight at each use.
    """
    named = _actions_of_operators(edits)
    if in_graph:
        named = {name: action for name, action in named.items() if action not in UNCACHED}
    acting: dict[Callable[..., Any], Action] = {}
    if not named:
        return acting
    for function, name in operators.functions().items():
        if name in named:
            acting[function] = named[name]
    for function in operators.checked_functions():
        # A function that may work in place calls one of two operators.
        if function not in acting or "inplace" in function.__code__.co_varnames:
            acting.pop(function, None)
            if operators.calls(function, frozenset(named)):
                acting[function] = "inside"
    for name, action in named.items():
        acting |= dict.fromkeys(operators.called_by_name(name), action)
    return acting | dict.fromkeys(BACKWARD, "backward")


@cache
def rules_of(edits: Edits) -> dict[str, Rule]:
    """Return the rule of every operator that autocast or the table names, and of those composed of them."""
    rules = _rules(edits)
    composed = {
        name: next((rules[inner] for inner in inners.split() if inner in rules), None)
        for name, inners in operators.COMPOSED.items()
    }
    return {**{name: rule for name, rule in composed.items() if rule}, **rules}


@cache
def _rules(edits: Edits) -> dict[str, Rule]:
    """Return the rule of every operator that autocast or the table names."""
    rules, scope = dict(operators.listed("cuda" if edits.emulate else edits.device_type)), edits.scope
    rules |= operators.resolve(edits.table if scope is None else scope.before)
    if scope and scope.rule == "untouched":
        rules = dict.fromkeys(rules, "untouched")
    if scope and scope.rule == "float32":
        rules = dict.fromkeys({*rules, *operators.arithmetic()}, "float32")
    return rules | (operators.resolve(scope.after) if scope else {})


def _actions_of_operators(edits: Edits) -> dict[str, Action]:
    """Return what is done with operators, where it is something other than what PyTorch does."""
    listed, scope = operators.listed(edits.device_type), edits.scope
    is_plain = edits.table == DEFAULT and not edits.emulate
    products = operators.listed("cuda")
    changed: dict[str, Action] = {}
    for name, rule in _rules(edits).items():
        if rule == "lower" and edits.emulate and products.get(name) == "lower":
            changed[name] = "recurrent" if name in recurrent.NAMES else "product"
            if name == "linear" and recipe_of(edits) is not None:
                changed[name] = "quantized"
        elif rule == "lower" and scope and (scope.rule == "float16" or scope.rule == "bfloat16"):
            changed[name] = scope.rule
        elif rule != listed.get(name):
            changed[name] = rule
        elif rule == "lower" and not is_plain:
            changed[name] = "once"
        elif edits.counted:
            changed[name] = "listed"
    order = {name: place for place, name in enumerate(_edited(edits))}
    for name, inners in operators.COMPOSED.items():
        # An operator that a table leaves untouched follows what the table says later of those inside.
        is_free = name not in _rules(edits) or (name in order and _rules(edits)[name] == "untouched")
        after = order.get(name, -1)
        found = [changed[one] for one in inners.split() if one in changed and order.get(one, 0) > after]
        if found and is_free:
            action = next((one for one in found if one not in ("once", "listed")), found[0])
            if action == "once":
                by_steps = edits.device_type == "cpu" and name in recurrent.STEPWISE_ON_CPU
                action = "steps" if by_steps else "each"
            elif action == "product" and name in recurrent.NAMES:
                action = "recurrent"
            changed[name] = action
    if edits.emulate:
        rules = _rules(edits)
        # What this device's autocast casts and a GPU's does not is left alone.
        others: dict[str, Action] = {name: "untouched" for name in listed if name not in rules}
        kernels: dict[str, Action] = {
            **dict.fromkeys(operators.ROUND_INSIDE.get(edits.device_type, "").split(), "in float32"),
            **dict.fromkeys(operators.WITHOUT_KERNEL.get(edits.device_type, ()), "without kernel"),
        }
        free = {name: how for name, how in kernels.items() if rules.get(name, "untouched") == "untouched"}
        changed = {**others, **changed, **free}
    if operators.PADDING & changed.keys() and "pad" not in changed:
        changed["pad"] = "padding"
    # What is written in place keeps its dtype, whatever the rule; but it can be refused.
    return changed | {f"{name}_": action for name, action in changed.items() if action == "refuse"}


def recipe_of(edits: Edits) -> Recipe | None:
    """Return the recipe of the module that is running, or of the region."""
    if edits.scope is None or edits.scope.rule == "default":
        return edits.recipe
    return KNOWN.get(edits.scope.rule)


def _edited(edits: Edits) -> dict[str, Rule]:
    """Return the rules of the operators that the table names, in the order of its edits."""
    scope = edits.scope
    if scope is None:
        return operators.resolve(edits.table)
    before, after = operators.resolve(scope.before), operators.resolve(scope.after)
    return {**{name: rule for name, rule in before.items() if name not in after}, **after}
