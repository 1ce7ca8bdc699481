"""Write a rehearsed recipe as the lines that train with it in another system.

Read in torchao 0.18, torchtitan b5bcd76, Transformer Engine 2.20, Megatron-LM core 0.20, MaxText e591f30 and
qwix 0.1.8. What a system computes with other numbers than the rehearsal is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple, NoReturn, TypeAlias

from preamp.errors import UsageError
from preamp.recipes import values
from preamp.recipes.arithmetic import SIGNS
from preamp.recipes.values import CONSTANTS, PRODUCTS, Operands, Recipe

Key: TypeAlias = tuple[Operands, Operands, Operands]
"""The three products. Recipes with the same ones are written alike."""


class Line(NamedTuple):
    """How a system is told a recipe, and what each size of a weight must be a multiple of there."""

    text: str
    multiple: int


class Plan(NamedTuple):
    """Which layers are computed how.

    Attributes:
        recipe: of the rehearsal.
        groups: the layers that are quantized, by their products.
        kept: those that stay high because the rehearsal says so.
        misfits: those that do because of their sizes.
    """

    recipe: Recipe
    groups: dict[Key, list[str]]
    kept: list[str]
    misfits: list[str]

    @property
    def high(self) -> list[str]:
        """All layers that stay high."""
        return [*self.kept, *self.misfits]


class System(NamedTuple):
    """A system to write for.

    Attributes:
        title: its name in sentences.
        lines: how it is told each recipe that it has.
        write: returns the lines.
        why: why single products cannot stay high.
        mixes: whether layers may differ in which of their products are quantized.
        leaves: whether any layer may stay high.
        high: the high precisions that it computes in; those of NVFP4 are bfloat16 everywhere.
    """

    title: str
    lines: Mapping[Key, Line]
    write: Callable[[Plan], list[str]]
    why: str
    mixes: bool = False
    leaves: bool = True
    high: tuple[str, ...] = ("bfloat16", "float16")


def export(
    target: str, recipe: Recipe, layers: Mapping[str, tuple[int, int]], high: Mapping[str, frozenset[str]]
) -> str:
    """Return the lines that train with a recipe in another system.

    Args:
        target: a name in `TARGETS`.
        recipe: of the rehearsal.
        layers: the path of every linear layer in the rehearsal, such as "model.layers.0.mlp.down_proj", and
            its sizes (out_features, in_features).
        high: of layers that are not fully quantized, which of "fprop", "dgrad" and "wgrad" stay high.

    Raises:
        UsageError: for a target, a layer or a product that does not exist, and for what the target cannot
            compute, with one that can.
    """
    if target not in TARGETS:
        raise UsageError(f"target={target!r} does not exist. Write one of {', '.join(map(repr, TARGETS))}.")
    for path, products in high.items():
        if path not in layers or not products <= set(PRODUCTS):
            raise UsageError(
                f"high[{path!r}]={set(products)!r}: layers= has no such layer, or the products are not in "
                f"{PRODUCTS}."
            )
    system, plan = TARGETS[target], _plan(recipe, layers, high)
    if not plan.groups:
        raise UsageError(f"No layer is quantized, so there is nothing to write for {system.title}.")
    for key, paths in plan.groups.items():
        line = system.lines.get(key)
        if line is None or (len(plan.groups) > 1 and not system.mixes):
            _refuse(system, plan)
        for path in paths:
            if any(size % line.multiple for size in layers[path]):
                raise UsageError(
                    f"{system.title} refuses {path!r} of sizes {layers[path]}, which are not multiples of "
                    f"{line.multiple}. Rehearse with casting.DEFAULT.module({path!r}, 'high')."
                )
    if recipe.high not in (system.high if "e2m1" not in repr(recipe) else ("bfloat16",)):
        raise UsageError(
            f"{system.title} does not compute {_name(_key(recipe))} with high={recipe.high!r}. "
            "Write dataclasses.replace(recipe, high='bfloat16')."
        )
    return "\n".join([*_comments(plan, layers), *system.write(plan)]) + "\n"


def _plan(recipe: Recipe, layers: Mapping[str, tuple[int, int]], high: Mapping[str, frozenset[str]]) -> Plan:
    plan = Plan(recipe, {}, [], [])
    for path, sizes in layers.items():
        key = _without(_key(recipe), high.get(path, ()))
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
        found.append(f"# Kept high, because their sizes are not multiples of {recipe.multiple}: {sizes}.")
    if recipe.multiple > 1:
        found.append(f"# The number of tokens has to be a multiple of {recipe.multiple}, too.")
    return found


def _refuse(system: System, plan: Plan) -> NoReturn:
    """Raise the error for a recipe that a system does not have, or not in part."""
    whole, mixes = _key(plan.recipe), len(plan.groups) > 1
    if whole in system.lines:
        key = next(key for key in plan.groups if key != whole and (mixes or key not in system.lines))
        high = " and ".join(
            name for name, a, b in zip(PRODUCTS, key, whole, strict=True) if a is None and b is not None
        )
        raise UsageError(
            f"{system.title} cannot keep {high} of {plan.groups[key][0]!r} high: {system.why}. "
            f"{_able(key, lambda other: other.mixes or not mixes)}"
        )
    if other := next((key for key in system.lines if _bare(key) == _bare(whole)), None):
        raise UsageError(
            f"{system.title} does not have the numbers of {_name(whole)}, but those of {_name(other)}. "
            f"Rehearse that one. {_able(whole)}"
        )
    raise UsageError(f"{system.title} has nothing that computes {_name(whole)}. {_able(whole)}")


def _able(key: Key, fits: Callable[[System], bool] = lambda system: True) -> str:
    names = [repr(name) for name, system in TARGETS.items() if key in system.lines and fits(system)]
    return f"Write target={' or '.join(names)}." if names else "No target can: keep whole layers high."


def _key(recipe: Recipe) -> Key:
    return recipe.fprop, recipe.dgrad, recipe.wgrad


def _without(key: Key, high: Iterable[str]) -> Key:
    x, y, z = (None if name in high else pair for name, pair in zip(PRODUCTS, key, strict=True))
    return x, y, z


def _bare(key: Key) -> str:
    return re.sub(r"owner='\w+'", "", repr(key))


def _name(key: Key) -> str:
    """Return how a recipe is written, for an error or a comment."""
    constants = {_key(recipe): f"recipes.{name}" for name, recipe in CONSTANTS.items()}
    owner = next((pair[0].owner for pair in key if pair), "")
    alike = (
        f"{name} with owner={owner!r}" for other, name in constants.items() if _bare(other) == _bare(key)
    )
    return constants.get(key) or next(alike, "this recipe of your own")


def _lines(texts: Mapping[Recipe, str], multiple: int = 0) -> dict[Key, Line]:
    return {_key(recipe): Line(text, multiple or recipe.multiple) for recipe, text in texts.items()}


def _parts(recipe: Recipe) -> dict[Key, tuple[str, ...]]:
    """Return a recipe with each choice of products that stay high."""
    choices = [high for count in range(3) for high in combinations(PRODUCTS, count)]
    found: dict[Key, tuple[str, ...]] = {}
    for high in choices:
        found.setdefault(_without(_key(recipe), high), high)
    return {key: high for key, high in found.items() if any(key)}


# Transformer Engine and torchao have the same scales of MXFP8 for each finite bfloat16. Of NVFP4 they have
# others: in torchao, no scale of a block is below 2**-6.
_MXFP8 = [values.MXFP8, values.changed(values.MXFP8, owner="torchao")]
_NVFP4_UNROTATED = values.changed(values.NVFP4, hadamard=False)


# torchao: a function says which layers, by their paths. Any product of a float8 layer can be turned off.

_FIELDS = {
    "fprop": ("cast_config_input", "cast_config_weight"),
    "dgrad": ("cast_config_grad_output", "cast_config_weight_for_grad_input"),
    "wgrad": ("cast_config_grad_output_for_grad_weight", "cast_config_input_for_grad_weight"),
}
_DTYPES = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
_FLOAT8 = {
    "rowwise_with_gw_hp": values.FLOAT8_ROWWISE_GW_HP,
    "rowwise": values.FLOAT8_ROWWISE,
    "tensorwise": values.FLOAT8_TENSORWISE,
}


def _float8(name: str, high: tuple[str, ...]) -> str:
    config = f"Float8LinearConfig.from_recipe_name({name!r})"
    off = [
        f"    {field}=CastConfig(ScalingType.DISABLED, target_dtype=torch.{_DTYPES[quant.format]}),"
        for product in high
        for field, quant in zip(_FIELDS[product], getattr(_FLOAT8[name], product) or (), strict=False)
    ]
    return "\n".join(["replace(", f"    {config},", *off, ")"]) if off else config


_TORCHAO = {
    **{
        key: Line(_float8(name, high), 16)
        for name, recipe in _FLOAT8.items()
        for key, high in _parts(recipe).items()
    },
    **_lines(dict.fromkeys(_MXFP8, "MXFP8TrainingOpConfig()")),
    **_lines({replace(each, wgrad=None): "MXFP8TrainingOpConfig(wgrad_with_hp=True)" for each in _MXFP8}),
    # By itself it draws the signs of the Hadamard transform for each layer.
    **_lines({values.NVFP4_TORCHAO: f"NVFP4TrainingConfig(rht_sign_vector={SIGNS})"}, 128),
}
_QUANTIZE = "from torchao.quantization import quantize_"
_TRAINING = "from torchao.prototype.moe_training"
_IMPORTS = {
    "replace(": "from dataclasses import replace",
    "torch.": "import torch",
    "CastConfig": "from torchao.float8 import CastConfig, ScalingType",
    "Float8LinearConfig": "from torchao.float8 import Float8LinearConfig, convert_to_float8_training",
    "MXFP8": f"{_TRAINING}.config import MXFP8TrainingOpConfig\n{_QUANTIZE}",
    "NVFP4": f"{_TRAINING}.nvfp4_training.nvfp4_training import NVFP4TrainingConfig\n{_QUANTIZE}",
}
_FLOAT8_CALL = """\
model = convert_to_float8_training(
    model, config=config, module_filter_fn=lambda module, path: path in layers
)"""
_QUANTIZE_CALL = "quantize_(model, config, filter_fn=lambda module, path: path in layers)"
_CHECK = """\
if missing := layers - {path for path, _ in model.named_modules()}:
    raise ValueError(f"The model has no {missing}.")"""
_CHECK_BIAS = """\
if biased := [path for path in layers if model.get_submodule(path).bias is not None]:
    raise ValueError(f"torchao 0.18 drops the biases of layers in MXFP8: {biased}.")"""


def _set(paths: list[str]) -> str:
    return "\n".join(["layers = {", *(f"    {path!r}," for path in paths), "}"])


def _write_torchao(plan: Plan) -> list[str]:
    texts = {key: _TORCHAO[key].text for key in plan.groups}
    imports = {lines for part, lines in _IMPORTS.items() if any(part in text for text in texts.values())}
    found = [
        f"# torchao quantizes weights as they are: cast them to {plan.recipe.high}, or set FSDP param_dtype.",
        *sorted(imports),
    ]
    for key, text in texts.items():
        found += ["", _set(plan.groups[key]), _CHECK, *([_CHECK_BIAS] if "MXFP8" in text else [])]
        found += [f"config = {text}", _FLOAT8_CALL if "Float8" in text else _QUANTIZE_CALL]
    return found


# torchtitan: a layer is chosen if its path contains one of some strings. Float8 is told those that it leaves
# out, the others those that they convert, where no string at all means every layer.

_TORCHTITAN = {
    **_lines(
        {
            values.FLOAT8_ROWWISE: "Float8LinearConverter.Config(recipe_name='rowwise', filter_fqns={})",
            values.FLOAT8_ROWWISE_GW_HP: (
                "Float8LinearConverter.Config(recipe_name='rowwise_with_gw_hp', filter_fqns={})"
            ),
        }
    ),
    **_lines(dict.fromkeys(_MXFP8, "MXFP8LinearConverter.Config(fqns={})")),
    **_lines({values.NVFP4_TORCHAO: "NVFP4LinearConverter.Config(fqns={})"}, 128),
}


def _write_torchtitan(plan: Plan) -> list[str]:
    ((key, paths),) = plan.groups.items()
    text, found = _TORCHTITAN[key].text, []
    if "filter_fqns" in text:
        chosen = _substrings(plan.kept, paths)  # it leaves out misfits by itself
        found.append("# emulate=True would train another recipe: tensorwise, with gradients in e5m2.")
    else:
        chosen = _substrings(paths, plan.high) if plan.high else []
    name = text.partition(".")[0]
    return [
        *found,
        f"from torchtitan.components.quantization import {name}",
        "",
        f"converters=[{text.format(chosen)}],  # of model_registry",
    ]


def _substrings(wanted: list[str], others: list[str]) -> list[str]:
    """Return few and short strings of whole names: each wanted path contains one, and no other does."""
    matches: dict[str, set[str]] = {}
    for path in wanted:
        names = path.split(".")
        for first, last in combinations(range(len(names) + 1), 2):
            part = ".".join(names[first:last])
            for before in {"", "." * (first > 0)}:
                for after in {"", "." * (last < len(names))}:
                    matches.setdefault(before + part + after, set()).add(path)
    matches = {text: paths for text, paths in matches.items() if not any(text in path for path in others)}
    left, found = set(wanted), []
    while left:
        # A number says little by itself: "layers.1" is better than ".1".
        text = min(
            matches,
            key=lambda text: (-len(matches[text] & left), text.strip(".")[:1].isdigit(), len(text), text),
            default="",
        )
        if not text or not matches[text] & left:
            path = min(left)
            around = next(other for other in others if path in other)
            raise UsageError(
                f"torchtitan chooses layers by strings in their paths, and {path!r} is in {around!r}. Rename "
                "the layer, or write target='torchao'."
            )
        found.append(text)
        left -= matches[text]
    return sorted(found)


# Transformer Engine, and Megatron-LM and MaxText, which set it up.

_ENVIRONMENT = "# Leave the environment variables NVTE_* unset: some change what a recipe computes."
_TE_WHOLE = {
    values.FLOAT8_DELAYED: "DelayedScaling()",
    values.FLOAT8_CURRENT: "Float8CurrentScaling()",
    values.FLOAT8_BLOCK: "Float8BlockScaling()",
    values.MXFP8_E5M2_GRADIENTS: "MXFP8BlockScaling(fp8_format=recipe.Format.HYBRID)",
    **dict.fromkeys(_MXFP8, "MXFP8BlockScaling()"),
    values.NVFP4_PLAIN: "NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)",
    _NVFP4_UNROTATED: "NVFP4BlockScaling(disable_rht=True)",
    values.NVFP4: "NVFP4BlockScaling()",
}
_TE = {
    **_lines(
        {
            replace(each, dgrad=None, wgrad=None): (
                text[:-1] + ", " * (text[-2] != "(") + "backward_override='high_precision')"
            )
            for each, text in _TE_WHOLE.items()
            if not each.delayed
        }
    ),
    **_lines(_TE_WHOLE),
}
_STAY_HIGH = """\
{layers}


def stay_high(forward, *args, **kwargs):
    with te.autocast(enabled=False):
        return forward(*args, **kwargs)


for path in layers:
    layer = model.get_submodule(path)
    layer.forward = partial(stay_high, layer.forward)
"""


def _write_te(plan: Plan) -> list[str]:
    (key,) = plan.groups
    return [
        _ENVIRONMENT,
        "# Transformer Engine quantizes its own modules only: each layer has to be a te.Linear.",
        "from functools import partial",
        "",
        "import transformer_engine.pytorch as te",
        "from transformer_engine.common import recipe",
        "",
        *([_STAY_HIGH.format(layers=_set(plan.high))] if plan.high else []),
        f"with te.autocast(recipe=recipe.{_TE[key].text}):",
        "    y = model(x)",
    ]


_MEGATRON = _lines(
    {
        # By itself it has a history of 1 and most_recent.
        values.FLOAT8_DELAYED: (
            "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 1024 --fp8-amax-compute-algo max"
        ),
        values.FLOAT8_CURRENT: "--fp8-format hybrid --fp8-recipe tensorwise",
        values.FLOAT8_BLOCK: "--fp8-format e4m3 --fp8-recipe blockwise",
        **dict.fromkeys(_MXFP8, "--fp8-format e4m3 --fp8-recipe mxfp8"),
        values.MXFP8_E5M2_GRADIENTS: "--fp8-format hybrid --fp8-recipe mxfp8",
        values.NVFP4: "--fp4-format e2m1 --fp4-recipe nvfp4",
    }
)
_MAXTEXT = _lines(
    {
        values.FLOAT8_DELAYED: "te_fp8_delayedscaling",
        values.FLOAT8_CURRENT: "te_fp8_currentscaling",
        **dict.fromkeys(_MXFP8, "te_mxfp8"),
        values.NVFP4: "te_nvfp4",
        _NVFP4_UNROTATED: "te_nvfp4_no_rht",
    }
)


def _outside(title: str, paths: list[str]) -> list[str]:
    """Return the comment on quantized layers that a system itself keeps high."""
    text = f"# {title} keeps what is outside its blocks high, unlike the rehearsal: {', '.join(paths)}."
    return [text] if paths else []


def _block(path: str) -> tuple[str, int] | None:
    """Return the stack of blocks that a layer is in, and which block."""
    match = re.match(r"(.*?\.|)(\d+)\.", path)
    return match and (match[1], int(match[2]))


def _write_megatron(plan: Plan) -> list[str]:
    ((key, paths),) = plan.groups.items()
    low = [block for path in paths if (block := _block(path))]
    high = {path: block for path in plan.high if (block := _block(path))}
    flags = f"--bf16 {_MEGATRON[key].text}"
    if high:
        blocks = [*low, *high.values()]
        start, last = (
            min((number for _, number in low), default=0),
            max((number for _, number in low), default=0),
        )
        end = max(number for _, number in blocks) - last
        is_one_stack = low and len({stack for stack, _ in blocks}) == 1
        for path, (_, number) in high.items():
            if plan.recipe.delayed or not is_one_stack or start <= number <= last:
                raise UsageError(
                    f"Megatron-LM cannot keep {path!r} high: --first-last-layers-bf16 keeps whole blocks, "
                    "the first and the last of one stack, and not with delayed scaling. "
                    f"{_able(key, lambda system: system.leaves)}"
                )
        flags += f" --first-last-layers-bf16 --num-layers-at-start-in-bf16 {start}"
        flags += f" --num-layers-at-end-in-bf16 {end}"
    return [_ENVIRONMENT, *_outside("Megatron-LM", [path for path in paths if not _block(path)]), flags]


def _write_maxtext(plan: Plan) -> list[str]:
    ((key, paths),) = plan.groups.items()
    is_inside = re.compile(r"layers|(^|\.)\d+\.").search
    for path in filter(is_inside, plan.high):
        raise UsageError(
            f"MaxText cannot keep {path!r} high: its recipe is that of all layers of the decoder. "
            f"{_able(key, lambda system: system.leaves)}"
        )
    return [
        _ENVIRONMENT,
        *_outside("MaxText", [path for path in paths if not is_inside(path)]),
        "# With qwix, MaxText would ignore a recipe of Transformer Engine.",
        "use_qwix_quantization: false",
        f"quantization: {_MAXTEXT[key].text}",
        "dtype: bfloat16",
    ]


# qwix: its own way to gradients is no recipe, as it reuses the operands of the forward pass and multiplies
# the gradient by their scales. These settings quantize the operands of each product. They would not do for
# float8 and NVFP4, whose scales it rounds to the operands' dtype.

_SETTINGS = {
    "fprop": ("tile_size", "lhs_qtype", "rhs_qtype"),
    "dgrad": ("dlhs_tile_size", "dlhs_grad_qtype", "dlhs_residual_qtype"),
    "wgrad": ("drhs_tile_size", "drhs_grad_qtype", "drhs_residual_qtype"),
}


def _mxfp8(high: tuple[str, ...]) -> str:
    found: dict[str, str] = {}
    for product, names in _SETTINGS.items():
        settings = ("None", "None", "None") if product in high else ("32", "'mxfp8'", "'mxfp8'")
        found |= zip(names, settings, strict=True)
    return "".join(f"\n                {name!r}: {value}," for name, value in found.items())


_QWIX = {key: Line(_mxfp8(high), 32) for key, high in _parts(values.MXFP8_QWIX).items()}
_RULE = """\
        qwix.QtRule(
            module_path={path!r},
            weight_qtype=jnp.float8_e4m3fn,  # without these, nothing else of a rule counts
            act_qtype=jnp.float8_e4m3fn,
            additional_qt_config={{{settings}
            }},
        ),"""


def _write_qwix(plan: Plan) -> list[str]:
    rules = [
        _RULE.format(
            path="|".join(re.escape(path.replace(".", "/")) for path in paths), settings=_QWIX[key].text
        )
        for key, paths in plan.groups.items()
    ]
    return [
        "# In qwix 0.1.8; later releases choose other scales. The activation has to be the left operand.",
        "import qwix",
        "from jax import numpy as jnp",
        "",
        "provider = qwix.QtProvider(",
        "    [",
        *rules,
        "    ]",
        ")",
        "model = qwix.quantize_model(model, provider)  # in nnx, with the model's inputs",
    ]


TARGETS: dict[str, System] = {
    "torchao": System(
        "torchao",
        _TORCHAO,
        _write_torchao,
        "its MXFP8 has only wgrad_with_hp=, and its NVFP4 nothing",
        mixes=True,
    ),
    "torchtitan": System(
        "torchtitan",
        _TORCHTITAN,
        _write_torchtitan,
        "its converters have no setting for it, but there is recipes.FLOAT8_ROWWISE_GW_HP",
        high=("bfloat16",),
    ),
    "te": System(
        "Transformer Engine",
        _TE,
        _write_te,
        "backward_override= is of dgrad and wgrad in all layers, and not of delayed scaling",
    ),
    "megatron": System(
        "Megatron-LM",
        _MEGATRON,
        _write_megatron,
        "it has no setting for it, as Transformer Engine drops what --no-fp8-wgrad hands on",
        leaves=False,
        high=("bfloat16",),
    ),
    "maxtext": System(
        "MaxText",
        _MAXTEXT,
        _write_maxtext,
        "its recipe is that of all products of the decoder",
        leaves=False,
        high=("bfloat16",),
    ),
    "qwix": System("qwix", _QWIX, _write_qwix, "it has no such operands", mixes=True),
}
"""The systems by name."""
