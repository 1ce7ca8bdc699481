"""What `export` writes computes what was rehearsed: it runs here where it can, and elsewhere it is read."""

from __future__ import annotations

import contextlib
import copy
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from preamp import casting, recipes
from preamp.errors import UsageError
from preamp.recipes import Quant, Recipe
from preamp.recipes.exporting import PRODUCTS, TARGETS, export
from preamp.torch import autocast

CONSTANTS = {name: value for name, value in vars(recipes).items() if isinstance(value, Recipe)}
SUBSETS = [frozenset(each) for size in range(4) for each in combinations(PRODUCTS, size)]
ALL = frozenset(PRODUCTS)
WGRAD = frozenset(["wgrad"])
NAMES = ["attention.wq", "attention.wo", "mlp.up", "mlp.down"]
BLOCKS = [f"layers.{block}.{name}" for block in range(12) for name in NAMES]
LAYERS = {**dict.fromkeys(BLOCKS, (256, 128)), "lm_head": (512, 128)}
HEAD = {"lm_head": ALL}


SIZES = {"layers.b": (128, 96), "layers.a": (64, 96), "layers.ba": (64, 96), "layers.odd": (24, 96)}


def owned(recipe: Recipe, owner: Any) -> Recipe:
    fprop, dgrad, wgrad = (
        pair and (replace(pair[0], owner=owner), replace(pair[1], owner=owner))
        for pair in (recipe.fprop, recipe.dgrad, recipe.wgrad)
    )
    return replace(recipe, fprop=fprop, dgrad=dgrad, wgrad=wgrad)


def without(recipe: Recipe, high: frozenset[str]) -> Recipe:
    return replace(recipe, **dict.fromkeys(high))


def cotangent(path: str, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(list(SIZES).index(path))
    return torch.randn(rows, SIZES[path][0], generator=generator).bfloat16()


def assert_alike(found: Tensor, expected: Tensor, what: str) -> None:
    """Sums in another order differ in their last bits, and by one bit of bfloat16 when they are rounded."""
    found, expected = found.float(), expected.float()
    atol = 2**-16 * float(expected.abs().max())
    assert torch.allclose(found, expected, rtol=2**-7, atol=atol), what


def attempt(*arguments: Any) -> tuple[str, str]:
    """Return what is written, or the error."""
    try:
        return export(*arguments), ""
    except UsageError as error:
        return "", str(error)


class Parallel(nn.Module):
    """Layers side by side, so that no rounding of one reaches another."""

    def __init__(self, sizes: dict[str, tuple[int, int]], dtype: torch.dtype, *, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = {
            path.removeprefix("layers."): nn.Linear(size[1], size[0], bias=bias)
            for path, size in sizes.items()
        }
        self.layers = nn.ModuleDict(layers).to(dtype)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self.layers.values()]


def results(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return the results of all layers and their gradients."""
    x = x.clone().requires_grad_()
    found = {}
    for path, y in zip(SIZES, model(x), strict=True):
        found[f"{path} fprop"] = y.detach()
        inputs, g = (x, model.get_submodule(path).weight), cotangent(path, len(x))
        found[f"{path} dgrad"], found[f"{path} wgrad"] = torch.autograd.grad(y, inputs, g)
    return found


def rehearsed(
    model: nn.Module, x: Tensor, recipe: Recipe, high: dict[str, frozenset[str]]
) -> dict[str, Tensor]:
    table = casting.DEFAULT
    for path, products in high.items():
        table = table.module(path, "high" if products == ALL else without(recipe, products))
    with autocast("cpu", recipe=recipe, casting=table, model=model):
        return results(model, x)


TORCHAO: list[tuple[Recipe, frozenset[str]]] = [
    *((recipes.FLOAT8_TENSORWISE, subset) for subset in SUBSETS),
    *((recipes.FLOAT8_ROWWISE, subset) for subset in SUBSETS),
    (recipes.FLOAT8_ROWWISE_GW_HP, frozenset()),
    (recipes.FLOAT8_ROWWISE_GW_HP, frozenset(["dgrad", "wgrad"])),
    *(
        (recipe, subset)
        for recipe in (recipes.MXFP8, owned(recipes.MXFP8, "torchao"))
        for subset in (ALL, WGRAD)
    ),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("recipe", "products"), TORCHAO)
def test_torchao_computes_what_was_rehearsed(recipe: Recipe, products: frozenset[str]) -> None:
    pytest.importorskip("torchao")
    high = {"layers.b": products}
    model = Parallel(SIZES, torch.bfloat16, bias="e8m0" not in repr(recipe))
    text = export("torchao", recipe, SIZES, high)
    # Kernels are for GPUs; the rest of the export runs as it is.
    text = text.replace(", config=config,", ", config=emulated(config),")
    text = text.replace("MXFP8TrainingOpConfig(", "MXFP8TrainingOpConfig(kernel_preference=EMULATED, ")
    text = text.replace(
        "import MXFP8TrainingOpConfig(kernel_preference=EMULATED, ", "import MXFP8TrainingOpConfig"
    )
    from torchao.quantization.quantize_.common import KernelPreference

    scope: dict[str, Any] = {"model": copy.deepcopy(model), "EMULATED": KernelPreference.EMULATED}
    scope["emulated"] = lambda config: replace(config, emulate=True)
    exec(text, scope)
    x = torch.randn(96, 96).bfloat16()
    theirs, ours = results(scope["model"], x), rehearsed(model, x, recipe, high)
    assert theirs.keys() == ours.keys()
    for name, expected in ours.items():
        path, product = name.split()
        is_high = (
            path == "layers.odd" or product in high.get(path, frozenset()) or not getattr(recipe, product)
        )
        if is_high:
            assert_alike(theirs[name], expected, name)
        else:
            assert torch.equal(theirs[name], expected), name


def test_torchao_refuses_to_drop_a_bias() -> None:
    pytest.importorskip("torchao")
    scope: dict[str, Any] = {"model": Parallel(SIZES, torch.bfloat16, bias=True)}
    with pytest.raises(ValueError, match=r"drops the biases.*layers\.a"):
        exec(export("torchao", recipes.MXFP8, SIZES, {}), scope)
    with pytest.raises(ValueError, match=r"has no .*layers\.c"):
        exec(export("torchao", recipes.FLOAT8_TENSORWISE, {**SIZES, "layers.c": (64, 64)}, {}), scope)


def test_scales_of_mxfp8_are_alike_in_torchao_and_transformer_engine() -> None:
    from preamp.torch import quantize

    numbers = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16).float()[:, None].expand(-1, 32)
    te = Quant(block=(1, 32), scale="e8m0", exponent="up")
    assert torch.equal(quantize(numbers, te), quantize(numbers, replace(te, owner="torchao")))


QWIX = owned(recipes.MXFP8, "qwix")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of flax, in qwix
@pytest.mark.parametrize("products", SUBSETS, ids=lambda each: "-".join(sorted(each)) or "none")
def test_qwix_computes_what_was_rehearsed(products: frozenset[str]) -> None:
    pytest.importorskip("qwix")
    import flax.linen as linen
    import jax
    import jax.numpy as jnp

    high = {"layers.b": products}
    model = Parallel(SIZES, torch.bfloat16, bias=False)

    def array(x: Tensor) -> Any:
        return jnp.asarray(x.detach().float().numpy(), jnp.bfloat16)

    class Layers(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return [
                linen.Dense(size[0], use_bias=False, dtype=jnp.bfloat16, name=path.partition(".")[2])(x)
                for path, size in SIZES.items()
            ]

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return Layers(name="layers")(x)

    scope: dict[str, Any] = {"model": Model()}
    exec(export("qwix", QWIX, SIZES, high), scope)
    weights = {
        path.partition(".")[2]: {"kernel": array(model.get_submodule(path).weight.T)} for path in SIZES
    }
    x = torch.randn(96, 96).bfloat16()

    @jax.jit
    def run(weights: Any, x: Any, g: Any) -> Any:
        y, back = jax.vjp(lambda w, x: scope["model"].apply({"params": {"layers": w}}, x), weights, x)
        zero = jax.tree.map(jnp.zeros_like, g)
        return y, [back([*zero[:place], g[place], *zero[place + 1 :]]) for place in range(len(y))]

    y, gradients = run(weights, array(x), [array(cotangent(path, 96)) for path in SIZES])
    ours = rehearsed(model, x, QWIX, high)
    for path, result, (dw, dx) in zip(SIZES, y, gradients, strict=True):
        for product, found in {
            "fprop": result,
            "dgrad": dx,
            "wgrad": dw[path.partition(".")[2]]["kernel"].T,
        }.items():
            found = torch.from_numpy(np.asarray(found, np.float32))
            assert_alike(found, ours[f"{path} {product}"], f"{path} {product}")


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_quantized_product_is_not_taken_for_a_high_one(product: str) -> None:
    model, x = Parallel(SIZES, torch.bfloat16, bias=False), torch.randn(96, 96).bfloat16()
    high = rehearsed(model, x, QWIX, {"layers.b": frozenset([product])})
    low = rehearsed(model, x, QWIX, {})
    with pytest.raises(AssertionError, match="it is"):
        assert_alike(low[f"layers.b {product}"], high[f"layers.b {product}"], "it is")


def converted(text: str, layers: dict[str, tuple[int, int]]) -> set[str]:
    """Return the layers that torchtitan's converter replaces, by its rules."""
    (call,) = re.findall(r"converters=\[(\w+)\.Config\((.*)\)\]", text)
    name, arguments = call
    options = eval(f"dict({arguments})")
    if name == "Float8LinearConverter":
        filtered = options.pop("filter_fqns")
        assert options == {
            "recipe_name": "rowwise_with_gw_hp" if "FLOAT8_ROWWISE_GW_HP" in text else "rowwise"
        }
        return {
            path
            for path, sizes in layers.items()
            if not any(each in path for each in filtered) and all(size % 16 == 0 for size in sizes)
        }
    fqns = options.pop("fqns")
    assert not options
    return {path for path in layers if not fqns or any(each in path for each in fqns)}


TITAN = {
    "float8": recipes.FLOAT8_ROWWISE,
    "gw_hp": recipes.FLOAT8_ROWWISE_GW_HP,
    "mxfp8": recipes.MXFP8,
    "nvfp4": owned(recipes.NVFP4, "torchao"),
}
PATHS = st.lists(st.sampled_from(["a", "b", "1", "11", "head", "lm_head"]), min_size=1, max_size=3).map(
    ".".join
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(TITAN)),
    st.dictionaries(PATHS, st.tuples(st.sampled_from([128, 256, 100]), st.booleans()), min_size=1),
)
def test_torchtitan_converts_exactly_the_layers(name: str, model: dict[str, tuple[int, bool]]) -> None:
    recipe = TITAN[name]
    layers = {path: (size, 128) for path, (size, _) in model.items()}
    high = {path: ALL for path, (_, is_high) in model.items() if is_high}
    wanted = {path for path, (size, is_high) in model.items() if size != 100 and not is_high}
    text, error = attempt("torchtitan", recipe, layers, high)
    if text:
        assert converted(text, layers) == wanted
    elif wanted:
        # No string can tell the one from the other: the other contains its whole path.
        named, around = re.findall(r"'([^']*)'", error)[:2]
        assert named in around
        assert named in high or name in ("mxfp8", "nvfp4")  # float8 leaves out the other sizes by itself
        assert (named in wanted) != (around in wanted)


@pytest.mark.parametrize("name", TITAN)
def test_torchtitan_is_told_in_few_words(name: str) -> None:
    high = {path: ALL for path in LAYERS if path.startswith("layers.1.") or path == "lm_head"}
    text = export("torchtitan", TITAN[name], LAYERS, high)
    assert converted(text, LAYERS) == set(LAYERS) - set(high)
    if "Float8" in text:
        assert "filter_fqns=['layers.1.', 'lm_head']" in text
        assert "# emulate=True would train another recipe" in text
    assert "emulate=" not in re.sub("#.*", "", text)


class Engine:
    """A Transformer Engine that says for each layer in which recipe it ran."""

    def __init__(self) -> None:
        self.regions: list[Any] = []
        self.ran: dict[str, Any] = {}

    @contextlib.contextmanager
    def autocast(self, *, enabled: bool = True, recipe: Any = None) -> Iterator[None]:
        self.regions.append((recipe or "default") if enabled else None)
        yield
        self.regions.pop()

    def run(self, text: str, layers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        package = ModuleType("transformer_engine")
        torch_side, common = ModuleType("transformer_engine.pytorch"), ModuleType("transformer_engine.common")
        torch_side.autocast = self.autocast  # type: ignore[attr-defined]
        package.pytorch = torch_side  # type: ignore[attr-defined]
        common.recipe = Recipes()  # type: ignore[attr-defined]
        for module in (package, torch_side, common):
            monkeypatch.setitem(sys.modules, module.__name__, module)

        def forward(path: str) -> Any:
            return lambda x: self.ran.update({path: self.regions[-1]})

        modules = {path: SimpleNamespace(forward=forward(path)) for path in layers}

        class Model:
            get_submodule = staticmethod(modules.__getitem__)

            def __call__(self, x: Any) -> None:
                for module in modules.values():
                    module.forward(x)

        exec(text, {"model": Model(), "x": None})


class Recipes:
    Format = SimpleNamespace(HYBRID="HYBRID")

    def __getattr__(self, name: str) -> Any:
        return lambda **options: (name, options)


TE: list[tuple[Recipe, frozenset[str], tuple[str, dict[str, Any]]]] = [
    (recipes.FLOAT8_DELAYED, frozenset(), ("DelayedScaling", {})),
    (recipes.FLOAT8_CURRENT, frozenset(), ("Float8CurrentScaling", {})),
    (recipes.FLOAT8_BLOCK, frozenset(), ("Float8BlockScaling", {})),
    (recipes.MXFP8, frozenset(), ("MXFP8BlockScaling", {})),
    (recipes.MXFP8_E5M2_GRADIENTS, frozenset(), ("MXFP8BlockScaling", {"fp8_format": "HYBRID"})),
    (recipes.NVFP4, frozenset(), ("NVFP4BlockScaling", {})),
    (
        recipes.NVFP4_PLAIN,
        frozenset(),
        ("NVFP4BlockScaling", {"disable_rht": True, "disable_stochastic_rounding": True}),
    ),
    (
        recipes.MXFP8,
        frozenset(["dgrad", "wgrad"]),
        ("MXFP8BlockScaling", {"backward_override": "high_precision"}),
    ),
]


@pytest.mark.parametrize(("recipe", "products", "expected"), TE)
def test_transformer_engine_runs_layers_in_their_recipes(
    recipe: Recipe, products: frozenset[str], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = {**LAYERS, "odd": (100, 128)}
    high = {path: ALL if path.startswith("layers.1.") else products for path in LAYERS} | {"odd": products}
    engine = Engine()
    text = export("te", recipe, layers, high)
    engine.run(text, layers, monkeypatch)
    assert engine.ran == {
        path: None if path.startswith("layers.1.") or path == "odd" else expected for path in layers
    }
    assert "NVTE_" in text  # environment variables change defaults


def flags(text: str) -> dict[str, str]:
    (line,) = (line for line in text.splitlines() if not line.startswith("#"))
    return dict(re.findall(r"--([\w-]+)(?: ([^-]\S*))?", line))


MEGATRON = {
    "FLOAT8_DELAYED": {
        "fp8-format": "hybrid",
        "fp8-recipe": "delayed",
        "fp8-amax-history-len": "1024",
        "fp8-amax-compute-algo": "max",
    },
    "FLOAT8_CURRENT": {"fp8-format": "hybrid", "fp8-recipe": "tensorwise"},
    "FLOAT8_BLOCK": {"fp8-format": "e4m3", "fp8-recipe": "blockwise"},
    "MXFP8": {"fp8-format": "e4m3", "fp8-recipe": "mxfp8"},
    "MXFP8_E5M2_GRADIENTS": {"fp8-format": "hybrid", "fp8-recipe": "mxfp8"},
    "NVFP4": {"fp4-format": "e2m1", "fp4-recipe": "nvfp4"},
}


@pytest.mark.parametrize("name", MEGATRON)
def test_megatron_is_told_every_setting(name: str) -> None:
    text = export("megatron", CONSTANTS[name], LAYERS, {})
    assert flags(text) == {"bf16": "", **MEGATRON[name]}
    assert "unlike the rehearsal: lm_head" in text
    assert "unlike" not in export("megatron", CONSTANTS[name], LAYERS, HEAD)


@given(st.sets(st.integers(0, 11), max_size=11), st.sampled_from(["", *BLOCKS]))
@settings(deadline=None)
def test_megatron_keeps_first_and_last_blocks_or_refuses(blocks: set[int], other: str) -> None:
    high = HEAD | {path: ALL for path in BLOCKS if int(path.split(".")[1]) in blocks or path == other}
    kept = [{path in high for path in BLOCKS if path.startswith(f"layers.{block}.")} for block in range(12)]
    text, error = attempt("megatron", recipes.NVFP4, LAYERS, high)
    if error:
        first = next((place for place, each in enumerate(kept) if False in each), 12)
        last = next((place for place in reversed(range(12)) if False in kept[place]), -1)
        assert any(True in each for each in kept[first : last + 1])
        assert "'te'" in error
        return
    start, end = 0, 0
    if "first-last-layers-bf16" in text:
        start = int(flags(text)["num-layers-at-start-in-bf16"])
        end = int(flags(text)["num-layers-at-end-in-bf16"])
    assert kept == [{block < start or block >= 12 - end} for block in range(12)]


def test_megatron_keeps_no_blocks_of_two_stacks() -> None:
    layers = {f"{stack}.{block}.mlp.up": (128, 128) for stack in ("encoder", "decoder") for block in range(4)}
    assert "first-last" not in export("megatron", recipes.MXFP8, layers, {})
    with pytest.raises(UsageError, match=r"'encoder\.0\.mlp\.up' high"):
        export("megatron", recipes.MXFP8, layers, {"encoder.0.mlp.up": ALL, "decoder.0.mlp.up": ALL})


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        (recipes.FLOAT8_DELAYED, "te_fp8_delayedscaling"),
        (recipes.FLOAT8_CURRENT, "te_fp8_currentscaling"),
        (recipes.MXFP8, "te_mxfp8"),
        (recipes.NVFP4, "te_nvfp4"),
    ],
)
def test_maxtext_is_told_its_name(recipe: Recipe, name: str) -> None:
    text = export("maxtext", recipe, LAYERS, HEAD)
    lines = dict(line.split(": ") for line in text.splitlines() if not line.startswith("#"))
    # With use_qwix_quantization, MaxText would quantize nothing.
    assert lines == {"use_qwix_quantization": "false", "quantization": name, "dtype": "bfloat16"}


def test_nvfp4_in_torchao_has_the_signs_of_the_rehearsal() -> None:
    from preamp.recipes.arithmetic import SIGNS

    text = export("torchao", owned(recipes.NVFP4, "torchao"), LAYERS, HEAD)
    assert f"rht_sign_vector={SIGNS}" in text


ONE = {"layers.3.mlp.up": WGRAD}
BLOCK = {path: ALL for path in BLOCKS if path.startswith("layers.3.")}
FIRST = {path: ALL for path in BLOCKS if path.startswith("layers.0.")}
EVERY = dict.fromkeys(LAYERS, WGRAD)
BACKWARD = frozenset(["dgrad", "wgrad"])


@pytest.mark.parametrize(
    ("target", "recipe", "high", "said"),
    [
        ("jax", recipes.MXFP8, {}, r"'torchao', 'torchtitan', 'te', 'megatron', 'maxtext', 'qwix'"),
        ("te", recipes.MXFP8, {"lm_hed": ALL}, r"high\['lm_hed'\]"),
        ("te", recipes.MXFP8, {"lm_head": frozenset(["fwd"])}, r"'fwd'"),
        ("te", recipes.MXFP8, dict.fromkeys(LAYERS, ALL), r"nothing to write"),
        ("torchao", recipes.MXFP8_E5M2_GRADIENTS, {}, r"torchao .*MXFP8_E5M2_GRADIENTS.*'te' or 'megatron'"),
        ("torchao", recipes.FLOAT8_DELAYED, {}, r"torchao .*FLOAT8_DELAYED.*'te' or 'megatron' or 'maxtext'"),
        (
            "torchao",
            recipes.FLOAT8_CURRENT,
            {},
            r"torchao does not .*, but those of recipes.FLOAT8_TENSORWISE",
        ),
        (
            "torchao",
            recipes.NVFP4,
            {},
            r"torchao does not .*, but those of recipes.NVFP4_TORCHAO",
        ),
        ("torchao", recipes.MXFP8, {"lm_head": frozenset(["fprop"])}, r"torchao .*fprop of 'lm_head'"),
        ("torchtitan", recipes.FLOAT8_TENSORWISE, {}, r"torchtitan .*'torchao'"),
        ("torchtitan", recipes.FLOAT8_ROWWISE, EVERY, r"torchtitan .*wgrad of .*FLOAT8_ROWWISE_GW_HP"),
        ("torchtitan", recipes.MXFP8, EVERY, r"torchtitan .*wgrad of .*'torchao'"),
        (
            "te",
            recipes.FLOAT8_TENSORWISE,
            {},
            r"Transformer Engine does not .*, but those of recipes.FLOAT8_CURRENT",
        ),
        ("te", recipes.MXFP8, ONE, r"Transformer Engine .*wgrad of 'layers.3.mlp.up'.*'torchao'"),
        ("te", recipes.FLOAT8_DELAYED, EVERY, r"Transformer Engine .*wgrad.*No target"),
        ("te", recipes.FLOAT8_DELAYED, dict.fromkeys(LAYERS, BACKWARD), r"dgrad and wgrad.*No target"),
        ("te", recipes.MXFP8, {"lm_head": BACKWARD}, r"dgrad and wgrad of 'lm_head'.*No target"),
        ("megatron", recipes.NVFP4_PLAIN, {}, r"Megatron-LM .*NVFP4_PLAIN.*'te'"),
        (
            "megatron",
            recipes.FLOAT8_DELAYED,
            FIRST,
            r"Megatron-LM .*'layers.0.\S*' high.*not with delayed.*'te'",
        ),
        ("megatron", recipes.MXFP8, BLOCK, r"Megatron-LM .*'layers.3.*first and the last.*'te'"),
        ("megatron", recipes.FLOAT8_CURRENT, EVERY, r"Megatron-LM .*wgrad.*--no-fp8-wgrad"),
        ("megatron", replace(recipes.MXFP8, high="float16"), {}, r"Megatron-LM .*high='bfloat16'"),
        ("maxtext", recipes.FLOAT8_BLOCK, {}, r"MaxText .*FLOAT8_BLOCK.*'te' or 'megatron'"),
        ("maxtext", recipes.MXFP8, BLOCK, r"MaxText .*'layers.3.*'te'"),
        ("qwix", recipes.MXFP8, {}, r"qwix does not .*, but those of recipes.MXFP8_QWIX"),
        ("qwix", recipes.FLOAT8_DELAYED, {}, r"qwix .*FLOAT8_DELAYED.*'te'"),
        ("qwix", owned(recipes.FLOAT8_CURRENT, "qwix"), {}, r"FLOAT8_CURRENT with owner='qwix'.*No target"),
        ("te", Recipe((Quant("e3m2"), Quant()), None, None), {}, r"Transformer Engine .*No target"),
    ],
)
def test_errors_name_what_cannot_be_and_what_can(target: str, recipe: Recipe, high: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        export(target, recipe, LAYERS, high)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CONSTANTS)
def test_each_constant_is_written_or_refused_with_a_remedy(target: str, name: str) -> None:
    text, error = attempt(target, CONSTANTS[name], LAYERS, HEAD)
    if text:
        assert f"# recipes.{name}." in text
        assert "high: lm_head" in text
        return
    assert f"recipes.{name}" in error
    for other in re.findall(r"'(\w+)'", error.partition("target=")[2]):
        assert other != target
        export(other, CONSTANTS[name], LAYERS, HEAD)


@pytest.mark.parametrize("target", TARGETS)
def test_sizes_that_the_target_refuses_are_refused_or_named(target: str) -> None:
    recipe = {"torchtitan": owned(recipes.MXFP8, "torchao"), "qwix": owned(recipes.MXFP8, "qwix")}.get(
        target, recipes.MXFP8
    )
    odd = "layers.5.mlp.odd"
    layers = {**LAYERS, odd: (144, 128)}
    with pytest.raises(UsageError, match=rf"'{odd}'.*32"):
        export(target, replace(recipe, multiple=16), layers, {})
    if target in ("megatron", "maxtext"):
        with pytest.raises(UsageError, match=f"'{odd}'"):
            export(target, recipe, layers, {})
    else:
        assert f"not multiples of 32: {odd} (144, 128)" in export(target, recipe, layers, {})
