"""Write a rehearsed recipe as the lines that train with it in another system.

Read in torchao 0.18, torchtitan b5bcd76, Transformer Engine 2.20, Megatron-LM core 0.20, MaxText e591f30 and
qwix 0.1.8. What a system cannot compute is refused: an export never has other numbers than the rehearsal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple, TypeAlias, get_args

from preamp.errors import CastingError, UsageError
from preamp.recipes import values
from preamp.recipes.arithmetic import SIGNS
from preamp.recipes.values import CONSTANTS, KNOWN, Operands, Owner, Quant, Recipe

NAMES = {name: f"recipes.{name}" for name in CONSTANTS}

__all__ = ["TARGETS", "export"]

PRODUCTS = "fprop", "dgrad", "wgrad"
Key: TypeAlias = tuple[Operands, Operands, Operands]
"""The three products. Two recipes with the same ones are written alike, whatever else they say."""

ANY_HIGH = frozenset(["bfloat16", "float16", "float32"])
BFLOAT16 = frozenset(["bfloat16"])


class Line(NamedTuple):
    """How a system is told a recipe.

    Attributes:
        text: what names it there.
        multiple: of which the system refuses other sizes of a weight.
        high: the high precisions in which the system computes the same numbers.
    """

    text: str
    multiple: int = 1
    high: frozenset[str] = ANY_HIGH


class Plan(NamedTuple):
    """What is to be computed where.

    Attributes:
        recipe: of the rehearsal.
        groups: the layers that are quantized alike, by their products.
        kept: the layers that stay high because the rehearsal says so.
        misfits: those that do because of their sizes.
        names: of all layers.
    """

    recipe: Recipe
    groups: dict[Key, list[str]]
    kept: list[str]
    misfits: list[str]
    names: list[str]


class System(NamedTuple):
    """A system to write for.

    Attributes:
        title: its name in sentences.
        find: returns how it is told a recipe; None if it has none with these numbers.
        write: returns the lines.
        why: why it cannot keep other products high than it does.
        mixes: whether layers may differ in how they are quantized.
        leaves: whether any layer may stay high.
    """

    title: str
    find: Callable[[Key], Line | None]
    write: Callable[[Plan], list[str]]
    why: str
    mixes: bool = False
    leaves: bool = True


def export(
    target: str, recipe: Recipe, layers: Mapping[str, tuple[int, int]], high: Mapping[str, frozenset[str]]
) -> str:
    """Return the lines that train with a recipe in another system.

    Args:
        target: a name in `TARGETS`.
        recipe: of the rehearsal.
        layers: the path of every linear layer in the rehearsal, such as "model.layers.0.mlp.down_proj", and
            its sizes (out_features, in_features).
        high: for layers that are not fully quantized, which of "fprop", "dgrad" and "wgrad" stay high.

    Raises:
        UsageError: for a target that does not exist, for layers and products that do not, and for what the
            target cannot compute, with one that can.
    """
    if target not in TARGETS:
        raise UsageError(f"target={target!r} does not exist. Write one of {', '.join(map(repr, TARGETS))}.")
    for path, products in high.items():
        if path not in layers or not products <= set(PRODUCTS):
            raise UsageError(
                f"high[{path!r}]={set(products)!r} is not of a layer in layers= and some of {PRODUCTS}."
            )
    plan, system = _plan(recipe, layers, high), TARGETS[target]
    if not plan.groups:
        raise UsageError(f"No layer is quantized, so there is nothing to write for {system.title}.")
    if len(plan.groups) > 1 and not system.mixes:
        _refuse_products(system, plan)
    for key, paths in plan.groups.items():
        line = system.find(key)
        if line is None:
            _refuse_recipe(system, plan, key)
        elif recipe.high not in line.high:
            raise UsageError(
                f"{system.title} does not compute {_name(key)} with high={recipe.high!r} as it is rehearsed. "
                f"Write dataclasses.replace(recipe, high={min(line.high)!r})."
            )
        else:
            _refuse_sizes(system, line, paths, layers)
    return "\n".join([*_comments(plan, layers), *system.write(plan)]) + "\n"


def _plan(recipe: Recipe, layers: Mapping[str, tuple[int, int]], high: Mapping[str, frozenset[str]]) -> Plan:
    plan = Plan(recipe, {}, [], [], list(layers))
    for path, sizes in layers.items():
        key = _without(_key(recipe), high.get(path, frozenset()))
        if not any(key):
            plan.kept.append(path)
        elif any(size % recipe.multiple for size in sizes):
            plan.misfits.append(path)
        else:
            plan.groups.setdefault(key, []).append(path)
    return plan


def _comments(plan: Plan, layers: Mapping[str, tuple[int, int]]) -> list[str]:
    recipe = plan.recipe
    found = [f"# {_name(_key(recipe))}. What is not quantized computes in {recipe.high}."]
    if plan.kept:
        found.append(f"# As in the rehearsal, high: {', '.join(plan.kept)}.")
    if plan.misfits:
        sizes = ", ".join(f"{path} {layers[path]}" for path in plan.misfits)
        found.append(f"# High because their sizes are no multiples of {recipe.multiple}: {sizes}.")
    if recipe.multiple > 1:
        found.append(f"# The number of tokens has to be a multiple of {recipe.multiple}, too.")
    return found


def _key(recipe: Recipe) -> Key:
    return recipe.fprop, recipe.dgrad, recipe.wgrad


def _without(key: Key, high: Iterable[str]) -> Key:
    fprop, dgrad, wgrad = (
        None if product in high else pair for product, pair in zip(PRODUCTS, key, strict=True)
    )
    return fprop, dgrad, wgrad


def _owned(key: Key, owner: Owner) -> Key:
    """Return the same products in another owner's arithmetic; CastingError if it has no such scales."""
    fprop, dgrad, wgrad = (
        pair and (replace(pair[0], owner=owner), replace(pair[1], owner=owner)) for pair in key
    )
    return fprop, dgrad, wgrad


def _kin(key: Key, find: Callable[[Key], Line | None]) -> Key | None:
    """Return what a system has that differs from a recipe in nothing but its owner."""
    for owner in get_args(Owner):
        try:
            other = _owned(key, owner)
        except CastingError:
            continue
        if find(other):
            return other
    return None


def _name(key: Key) -> str:
    constants = {_key(KNOWN[text]): name for text, name in NAMES.items()}
    if key in constants:
        return constants[key]
    if owners := {quant.owner for pair in key if pair for quant in pair}:
        for constant, name in constants.items():
            for owner in owners:
                if _kin(constant, lambda other: Line("") if other == key else None):
                    return f"{name} with owner={owner!r} in each Quant"
    return "This recipe"


def _can(key: Key, fits: Callable[[System], bool] = lambda system: True) -> str:
    names = [name for name, system in TARGETS.items() if system.find(key) and fits(system)]
    return f"Write target={' or '.join(map(repr, names))}." if names else "No other target has it."


def _refuse_recipe(system: System, plan: Plan, key: Key) -> None:
    whole = _key(plan.recipe)
    if key != whole and system.find(whole):
        _refuse_products(system, plan)
    if other := _kin(whole, system.find):
        raise UsageError(
            f"{_name(whole)} has not the arithmetic of {system.title}, which has {_name(other)}. Rehearse that, "
            f"or: {_can(key)}"
        )
    raise UsageError(f"{system.title} has no recipe that computes {_name(whole)}. {_can(key)}")


def _refuse_products(system: System, plan: Plan) -> None:
    whole, mixes = _key(plan.recipe), len(plan.groups) > 1
    key, path = next((key, paths[0]) for key, paths in plan.groups.items() if key != whole or not mixes)
    high = " and ".join(
        name for name, one, all_ in zip(PRODUCTS, key, whole, strict=True) if all_ and not one
    )
    raise UsageError(
        f"{system.title} cannot keep {high} of {path!r} high: {system.why}. "
        f"{_can(key, lambda other: other.mixes or not mixes)}"
    )


def _refuse_sizes(
    system: System, line: Line, paths: list[str], layers: Mapping[str, tuple[int, int]]
) -> None:
    for path in paths:
        if any(size % line.multiple for size in layers[path]):
            raise UsageError(
                f"{system.title} refuses {path!r} of sizes {layers[path]}, which are no multiples of "
                f"{line.multiple}. Rehearse with casting.DEFAULT.module({path!r}, 'high')."
            )


def _listed(paths: list[str]) -> list[str]:
    return ["layers = {", *(f"    {path!r}," for path in paths), "}"]


# torchao: a filter function names the layers. Every product of its float8 layers can be turned off.

_TORCHAO_FLOAT8 = (
    "from torchao.float8 import CastConfig, Float8LinearConfig, ScalingType, convert_to_float8_training"
)
_TORCHAO_PRODUCTS = {
    "fprop": ("cast_config_input", "cast_config_weight"),
    "dgrad": ("cast_config_grad_output", "cast_config_weight_for_grad_input"),
    "wgrad": ("cast_config_grad_output_for_grad_weight", "cast_config_input_for_grad_weight"),
}


def _torchao_float8(name: str, key: Key, high: tuple[str, ...]) -> str:
    config = f"Float8LinearConfig.from_recipe_name({name!r})"
    off = [
        f"    {field}=CastConfig(ScalingType.DISABLED, target_dtype=torch.float8_{quant.format}"
        f"{'fn' * (quant.format == 'e4m3')}),"
        for product, pair in zip(PRODUCTS, key, strict=True)
        if product in high and pair
        for field, quant in zip(_TORCHAO_PRODUCTS[product], pair, strict=True)
    ]
    return "\n".join([f"replace(\n    {config},", *off, ")"]) if off else config


def _torchao_lines() -> dict[Key, Line]:
    found: dict[Key, Line] = {}
    for size in range(3):
        for high in combinations(PRODUCTS, size):
            for name, recipe in (
                ("tensorwise", values.FLOAT8_TENSORWISE),
                ("rowwise", values.FLOAT8_ROWWISE),
                ("rowwise_with_gw_hp", values.FLOAT8_ROWWISE_GW_HP),
            ):
                key = _without(_key(recipe), high)
                found.setdefault(key, Line(_torchao_float8(name, _key(recipe), high), 16))
    for key in _TORCHAO_MXFP8:
        found[key] = Line("MXFP8TrainingOpConfig()", 32)
        found[_without(key, ["wgrad"])] = Line("MXFP8TrainingOpConfig(wgrad_with_hp=True)", 32)
    # torchao draws the signs of the Hadamard transform for each layer; these are the fixed ones.
    found[_TORCHAO_NVFP4] = Line(f"NVFP4TrainingConfig(rht_sign_vector={SIGNS})", 128, BFLOAT16)
    return found


# Both owners have the same scales of MXFP8 for every finite bfloat16. Blocks of NVFP4 differ: those of torchao
# have no scale below 2**-6.
_TORCHAO_MXFP8 = (_key(values.MXFP8), _owned(_key(values.MXFP8), "torchao"))
_TORCHAO_NVFP4 = _owned(_key(values.NVFP4), "torchao")
_TORCHAO = _torchao_lines()
_TORCHAO_IMPORTS = {
    "Float8LinearConfig": ["from dataclasses import replace", "import torch", _TORCHAO_FLOAT8],
    "MXFP8TrainingOpConfig": [
        "from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig",
        "from torchao.quantization import quantize_",
    ],
    "NVFP4TrainingConfig": [
        "from torchao.prototype.moe_training.nvfp4_training.nvfp4_training import NVFP4TrainingConfig",
        "from torchao.quantization import quantize_",
    ],
}


def _torchao(plan: Plan) -> list[str]:
    texts = [(_TORCHAO[key].text, paths) for key, paths in plan.groups.items()]
    imports = {
        line
        for text, _ in texts
        for name, lines in _TORCHAO_IMPORTS.items()
        if name in text
        for line in lines
    }
    found = [
        f"# Weights are quantized as they are: call model.to(torch.{plan.recipe.high}), or set FSDP's param_dtype.",
        *sorted(imports),
    ]
    for text, paths in texts:
        found += ["", *_listed(paths), f"config = {text}"]
        found += [
            "if missing := layers - {path for path, _ in model.named_modules()}:",
            '    raise ValueError(f"The model has no {missing}.")',
        ]
        if "MXFP8" in text:
            found += [
                "if biased := [path for path in layers if model.get_submodule(path).bias is not None]:",
                '    raise ValueError(f"torchao 0.18 drops the biases of layers in MXFP8: {biased}.")',
            ]
        found.append(
            "model = convert_to_float8_training(\n"
            "    model, config=config, module_filter_fn=lambda module, path: path in layers\n)"
            if "Float8" in text
            else "quantize_(model, config, filter_fn=lambda module, path: path in layers)"
        )
    return found


# torchtitan: a layer is chosen if its path contains one of some strings. Float8 names those that are left out,
# the others those that are converted, where no strings at all mean every layer.

_TORCHTITAN = {
    _key(values.FLOAT8_ROWWISE): Line("Float8LinearConverter.Config(recipe_name='rowwise', filter_fqns=", 16),
    _key(values.FLOAT8_ROWWISE_GW_HP): Line(
        "Float8LinearConverter.Config(recipe_name='rowwise_with_gw_hp', filter_fqns=", 16
    ),
    **{key: Line("MXFP8LinearConverter.Config(fqns=", 32, BFLOAT16) for key in _TORCHAO_MXFP8},
    _TORCHAO_NVFP4: Line("NVFP4LinearConverter.Config(fqns=", 128, BFLOAT16),
}


def _torchtitan(plan: Plan) -> list[str]:
    ((key, quantized),) = plan.groups.items()
    text = _TORCHTITAN[key].text
    if "filter_fqns" in text:
        chosen = _substrings(plan.kept, quantized)  # it leaves out the misfits by itself
        note = ["# emulate=True would train another recipe: tensorwise, with gradients in e5m2."]
    else:
        high = [*plan.kept, *plan.misfits]
        chosen, note = _substrings(quantized, high) if high else [], []
    name = text.partition(".")[0]
    return [
        *note,
        f"from torchtitan.components.quantization import {name}",
        "",
        f"converters=[{text}{chosen!r})],  # of model_registry",
    ]


def _substrings(wanted: list[str], others: list[str]) -> list[str]:
    """Return few and short strings, of whole names, of which each wanted path contains one and no other does."""
    matches: dict[str, set[str]] = {}
    for path in wanted:
        names = path.split(".")
        for first, last in combinations(range(len(names) + 1), 2):
            part = ".".join(names[first:last])
            for text in {part, "." * (first > 0) + part, part + "." * (last < len(names))}:
                matches.setdefault(text, set()).add(path)
            matches.setdefault("." * (first > 0) + part + "." * (last < len(names)), set()).add(path)
    for text in [text for text in matches if any(text in path for path in others)]:
        del matches[text]
    left, found = set(wanted), []
    while left:
        text = min(matches, key=lambda text: (-len(matches[text] & left), len(text), text), default="")
        if not text or not matches[text] & left:
            path = min(left)
            other = next(other for other in others if path in other)
            raise UsageError(
                f"torchtitan chooses layers by strings in their paths, and {path!r} is in {other!r}. Rename the "
                "layer, or write target='torchao'."
            )
        found.append(text)
        left -= matches[text]
    return sorted(found)


# Transformer Engine, and Megatron-LM and MaxText, which set it up.

_ENVIRONMENT = "# Leave the environment variables NVTE_* unset: some change what a recipe computes."
_HYBRID = "fp8_format=recipe.Format.HYBRID"


def _te_lines() -> dict[Key, Line]:
    found = {_key(values.FLOAT8_DELAYED): Line("recipe.DelayedScaling({})", 16)}
    for key, text, multiple in (
        (_key(values.FLOAT8_CURRENT), "recipe.Float8CurrentScaling({})", 16),
        (_key(values.FLOAT8_BLOCK), "recipe.Float8BlockScaling({})", 128),
        *((key, "recipe.MXFP8BlockScaling({})", 32) for key in _TORCHAO_MXFP8),
        (_key(values.MXFP8_E5M2_GRADIENTS), f"recipe.MXFP8BlockScaling({_HYBRID}{{}})", 32),
        (_key(values.NVFP4), "recipe.NVFP4BlockScaling({})", 16),
        (_NVFP4_NO_RHT, "recipe.NVFP4BlockScaling(disable_rht=True{})", 16),
        (
            _key(values.NVFP4_PLAIN),
            "recipe.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True{})",
            16,
        ),
    ):
        high = BFLOAT16 if "NVFP4" in text else ANY_HIGH
        found[key] = Line(text, multiple, high)
        comma = "" if "({}" in text else ", "
        override = text.format(f"{comma}backward_override='high_precision'")
        found[_without(key, ["dgrad", "wgrad"])] = Line(override, multiple, high)
    return {key: line._replace(text=line.text.format("")) for key, line in found.items()}


def _plainly(quant: Quant) -> Quant:
    return replace(quant, hadamard=False)


def _no_rht(key: Key) -> Key:
    fprop, dgrad, wgrad = (pair and (_plainly(pair[0]), _plainly(pair[1])) for pair in key)
    return fprop, dgrad, wgrad


_NVFP4_NO_RHT = _no_rht(_key(values.NVFP4))
_TE = _te_lines()


def _te(plan: Plan) -> list[str]:
    ((key, _),) = plan.groups.items()
    high = [*plan.kept, *plan.misfits]
    return [
        _ENVIRONMENT,
        "# Only Transformer Engine's own modules are quantized: each of the layers has to be a te.Linear.",
        *(["from functools import partial"] if high else []),
        "import transformer_engine.pytorch as te",
        "from transformer_engine.common import recipe",
        "",
        *(_TE_HIGH.format(layers="\n".join(_listed(high))).splitlines() if high else []),
        f"with te.autocast(recipe={_TE[key].text}):",
        "    y = model(x)",
    ]


_TE_HIGH = """\
def stay_high(forward, *args, **kwargs):
    with te.autocast(enabled=False):
        return forward(*args, **kwargs)


{layers}
for path in sorted(layers):
    layer = model.get_submodule(path)
    layer.forward = partial(stay_high, layer.forward)

"""

_MEGATRON = {
    # Its own defaults are a history of 1 and most_recent.
    _key(values.FLOAT8_DELAYED): Line(
        "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 1024 --fp8-amax-compute-algo max", 16
    ),
    _key(values.FLOAT8_CURRENT): Line("--fp8-format hybrid --fp8-recipe tensorwise", 16),
    _key(values.FLOAT8_BLOCK): Line("--fp8-format e4m3 --fp8-recipe blockwise", 128),
    **{key: Line("--fp8-format e4m3 --fp8-recipe mxfp8", 32) for key in _TORCHAO_MXFP8},
    _key(values.MXFP8_E5M2_GRADIENTS): Line("--fp8-format hybrid --fp8-recipe mxfp8", 32),
    _key(values.NVFP4): Line("--fp4-format e2m1 --fp4-recipe nvfp4", 16),
}
_MEGATRON = {key: line._replace(high=BFLOAT16) for key, line in _MEGATRON.items()}


def _outside(system: str, plan: Plan, paths: list[str]) -> list[str]:
    """Return the comment on layers that a system leaves high because they are outside its blocks."""
    unlike = [path for path in paths if path not in plan.kept + plan.misfits]
    if not unlike:
        return []
    return [f"# {system} keeps what is outside its blocks high, unlike the rehearsal: {', '.join(unlike)}."]


def _megatron(plan: Plan) -> list[str]:
    ((key, quantized),) = plan.groups.items()
    blocks: dict[str, tuple[str, int]] = {}
    for path in plan.names:
        if match := re.match(r"(.*?\.|)(\d+)\.", path):
            blocks[path] = match[1], int(match[2])
    comments = [
        _ENVIRONMENT,
        *_outside("Megatron-LM", plan, [path for path in plan.names if path not in blocks]),
    ]
    line = f"--bf16 {_MEGATRON[key].text}"
    if not (high := [path for path in [*plan.kept, *plan.misfits] if path in blocks]):
        return [*comments, line]
    other = _can(key, lambda system: system.leaves)
    if plan.recipe.delayed:
        raise UsageError(
            f"Megatron-LM refuses to keep {high[0]!r} high in delayed scaling: it has --first-last-layers-bf16 "
            f"for other recipes only. {other}"
        )
    low = {blocks[path] for path in quantized if path in blocks}
    count = max(number for _, number in blocks.values()) + 1
    first = min((number for _, number in low), default=count)
    last = max((number for _, number in low), default=-1)
    for path in high:
        if first <= blocks[path][1] <= last or len({stack for stack, _ in blocks.values()}) > 1 or not low:
            raise UsageError(
                f"Megatron-LM cannot keep {path!r} high: it keeps only the first and the last blocks of one "
                f"stack, each as a whole. {other}"
            )
    start, end = first, count - 1 - last
    return [
        *comments,
        f"{line} --first-last-layers-bf16 --num-layers-at-start-in-bf16 {start} "
        f"--num-layers-at-end-in-bf16 {end}",
    ]


_MAXTEXT = {
    _key(values.FLOAT8_DELAYED): Line("te_fp8_delayedscaling", 16, BFLOAT16),
    _key(values.FLOAT8_CURRENT): Line("te_fp8_currentscaling", 16, BFLOAT16),
    **{key: Line("te_mxfp8", 32, BFLOAT16) for key in _TORCHAO_MXFP8},
    _key(values.NVFP4): Line("te_nvfp4", 16, BFLOAT16),
    _NVFP4_NO_RHT: Line("te_nvfp4_no_rht", 16, BFLOAT16),
}


def _maxtext(plan: Plan) -> list[str]:
    ((key, _),) = plan.groups.items()
    outside = [path for path in plan.names if not re.search(r"layers|(^|\.)\d+\.", path)]
    for path in [*plan.kept, *plan.misfits]:
        if path not in outside:
            raise UsageError(
                f"MaxText cannot keep {path!r} high: a recipe is that of all layers of its decoder. "
                f"{_can(key, lambda system: system.leaves)}"
            )
    return [
        _ENVIRONMENT,
        *_outside("MaxText", plan, outside),
        # With qwix, MaxText ignores the recipes of Transformer Engine.
        "use_qwix_quantization: false",
        f"quantization: {_MAXTEXT[key].text}",
        "dtype: bfloat16",
    ]


# qwix: a rule says how each operand of a product is quantized. Its own way to the gradients has no recipe: it
# reuses the operands of the forward pass and multiplies the gradient by their scales.

_QWIX_TYPES = {
    **{("e4m3", block, "float32"): ("jnp.float8_e4m3fn", None) for block in ((0, 0), (1, 0))},
    **{("e5m2", block, "float32"): ("jnp.float8_e5m2", None) for block in ((0, 0), (1, 0))},
    **{("e2m1", block, "float32"): ("jnp.float4_e2m1fn", None) for block in ((0, 0), (1, 0))},
    ("e4m3", (1, 32), "e8m0"): ("'mxfp8'", 32),
    ("e2m1", (1, 32), "e8m0"): ("'mxfp4'", 32),
    ("e2m1", (1, 16), "e4m3"): ("'nvfp4'", 16),
}
_QWIX_PRODUCTS = {
    "fprop": ("lhs", "rhs"),
    "dgrad": ("dlhs_grad", "dlhs_residual"),
    "wgrad": ("drhs_grad", "drhs_residual"),
}


def _qwix_line(key: Key) -> Line | None:
    """Return the settings of a rule. The left operand is the activation, as in flax's layers."""
    settings: dict[str, str] = {"use_original_residuals": "True"}
    multiple, high = 1, ANY_HIGH
    for product, pair, side in zip(PRODUCTS, key, ("", "dlhs_", "drhs_"), strict=True):
        found = []
        for name, quant in zip(_QWIX_PRODUCTS[product], pair or (None, None), strict=True):
            settings[f"{name}_qtype"] = "None"
            if quant is None:
                continue
            kind = _QWIX_TYPES.get((quant.format, quant.block, quant.scale))
            if quant.owner != "qwix" or kind is None or quant.stochastic or quant.hadamard or quant.history:
                return None
            settings[f"{name}_qtype"], tile = kind
            if quant.block == (0, 0):
                settings[f"{name}_disable_channelwise_axes"] = "True"
            if quant.scale != "e8m0":  # whose scales it rounds to the operands' dtype
                high = frozenset(["float32"])
            found.append(tile)
        if len(set(found)) > 1:
            return None
        if found and found[0]:
            settings[f"{side}tile_size"] = str(found[0])
            multiple = max(multiple, found[0])
    text = "".join(f"            {name!r}: {value},\n" for name, value in settings.items())
    return Line(text, multiple, high) if any(key) else None


def _qwix(plan: Plan) -> list[str]:
    found = [
        "# The settings are those of qwix 0.1.8; later releases choose other scales of MXFP8.",
        "import qwix",
        "from jax import numpy as jnp",
        "",
        "provider = qwix.QtProvider([",
    ]
    for key, paths in plan.groups.items():
        line = _qwix_line(key)
        assert line is not None
        pattern = "|".join(re.escape(path.replace(".", "/")) for path in paths)
        found += [
            "    qwix.QtRule(",
            f"        module_path={pattern!r},",
            "        weight_qtype=jnp.float8_e4m3fn,  # of a rule without one, nothing counts",
            "        additional_qt_config={",
            *line.text.splitlines(),
            "        },",
            "    ),",
        ]
    return [*found, "])", "model = qwix.quantize_model(model, provider)  # in nnx, with the model's inputs"]


TARGETS: dict[str, System] = {
    "torchao": System(
        "torchao",
        _TORCHAO.get,
        _torchao,
        "its MXFP8 has wgrad_with_hp= only, and its NVFP4 nothing",
        mixes=True,
    ),
    "torchtitan": System(
        "torchtitan",
        _TORCHTITAN.get,
        _torchtitan,
        "its converters have no setting for a product, but that of recipes.FLOAT8_ROWWISE_GW_HP",
    ),
    "te": System(
        "Transformer Engine", _TE.get, _te, "backward_override= is of dgrad and wgrad together, in all layers"
    ),
    "megatron": System(
        "Megatron-LM",
        _MEGATRON.get,
        _megatron,
        "it has no setting for a product, as Transformer Engine drops what --no-fp8-wgrad hands it",
        leaves=False,
    ),
    "maxtext": System(
        "MaxText", _MAXTEXT.get, _maxtext, "a recipe is that of all products of its decoder", leaves=False
    ),
    "qwix": System("qwix", _qwix_line, _qwix, "it has no such operands", mixes=True),
}
"""The systems by name."""
