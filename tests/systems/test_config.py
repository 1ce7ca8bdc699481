"""What a DeepSpeed configuration means here, beside the installed DeepSpeed, and the way back."""

from __future__ import annotations

import copy
import inspect
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preamp import ConfigError, Static, dialects
from preamp.systems.deepspeed_config import Settings, load
from preamp.systems.deepspeed_config.keys import AUTOCAST, BF16, FP16, HOMES, REMOVED, TOP
from tests import originals
from tests.strategies import play, scripts

__all__ = ["HOMES", "refusal"]

DOCUMENT = """
{
"fp16": {
"enabled": true,
"loss_scale": 0, // 0表示使用动态损失缩放
"initial_scale_power": 32, // 初始缩放因子为2^32
"scale_window": 1000, // 连续稳定迭代次数
"hysteresis": 2, // 滞后调整次数
"min_scale": 1 // 最小缩放因子
}
}
"""


def deepspeed_config() -> Any:
    from deepspeed.runtime import config

    return config


def precision_config() -> Any:
    from deepspeed.runtime import precision_config

    return precision_config


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "ds_config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refusal(config: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        load(config)
    assert "Write " in str(refused.value) or "Take it out" in str(refused.value)
    return str(refused.value)


# What configurations are drawn of: DeepSpeed's own words first.


def some(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keys)


few = settings(max_examples=25, deadline=None)
flags = st.booleans()
counts = st.integers(1, 10**6)
fp16_sections = some(
    auto_cast=flags,
    loss_scale=st.sampled_from([0, 0.0, 1, 128.0, 2**20]),
    initial_scale_power=st.integers(4, 40),
    loss_scale_window=st.integers(1, 5) | st.just(1e3),
    hysteresis=st.integers(1, 4),
    consecutive_hysteresis=flags,
    min_loss_scale=st.sampled_from([1, 2, 7, 16]),
).map(lambda section: {"enabled": True, **section})
precisions = (
    fp16_sections.map(lambda section: {"fp16": section})
    | some(check_grad_overflow=flags).map(lambda section: {"bf16": {"enabled": True, **section}})
    | st.sampled_from(["float16", "bfloat16", "bf16", "torch.half"]).map(
        lambda dtype: {"torch_autocast": {"enabled": True, "dtype": dtype}}
    )
    | st.just({})
)
optimizers = st.just({"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.999]}})
others = some(
    gradient_clipping=st.sampled_from([0, 0.0, 1, 0.5]),
    train_micro_batch_size_per_gpu=counts,
    gradient_accumulation_steps=counts,
    optimizer=optimizers,
    scheduler=st.just({"type": "WarmupLR", "params": {"warmup_num_steps": 10}}),
    zero_optimization=st.sampled_from([{"stage": 2, "overlap_comm": False}, {"stage": 0}, {}]),
    steps_per_print=counts,
    data_types=st.just({"grad_accum_dtype": "fp32"}),
)
configs = st.tuples(precisions, others).map(lambda parts: parts[0] | parts[1])


# Beside the installed DeepSpeed


@settings(max_examples=20, deadline=None)
@given(section=fp16_sections, script=scripts)
def test_fp16_means_what_it_means_to_the_installed_deepspeed(section, script):
    read, theirs = load({"fp16": section}), precision_config().DeepSpeedFP16Config(**section)
    assert (read.precision, read.cast_inputs) == ("float16", theirs.auto_cast)
    if theirs.loss_scale:
        assert read.policy == Static(theirs.loss_scale)
        return
    arguments = theirs.dynamic_loss_scale_args()
    arguments["hysteresis"] = arguments.pop("delayed_shift")
    scales, gave_up = originals.deepspeed(arguments, script)
    states = play(read.policy, script)
    assert [state.scale for state in states] == scales[: None if gave_up is None else -1]


def test_what_is_absent_has_the_installed_deepspeeds_default():
    theirs = deepspeed_config().DeepSpeedConfig({"train_batch_size": 1})
    assert load({}).max_norm == theirs.gradient_clipping == 1.0
    for mode in ({"fp16": {}}, {"bf16": {}}, {"torch_autocast": {}}, {}):
        assert load(mode) == Settings(max_norm=1.0)
    assert load({"fp16": {"auto_cast": True, "hysteresis": 3}}) == Settings(max_norm=1.0)  # not enabled
    models = (precision_config().DeepSpeedFP16Config(), precision_config().DeepSpeedBF16Config())
    for model, keys in zip(models, (FP16, BF16), strict=True):
        ours = {name: key.default for name, key in keys.items() if name in type(model).model_fields}
        ours |= {"initial_scale_power": 16} if keys is FP16 else {}
        assert ours == model.model_dump()
    assert load({"fp16": {"enabled": True}}).policy == dialects.DEEPSPEED.policy
    assert load({"bf16": {"enabled": True}}).policy == Static(1.0)


class Recorder(dict):
    """A configuration that notes which keys somebody asks for."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return self

    def __copy__(self) -> Recorder:
        return self


def test_the_keys_are_those_that_the_installed_deepspeed_asks_for():
    config = Recorder({"train_batch_size": 1})
    deepspeed_config().DeepSpeedConfig(config)
    known = {name for key in TOP for name in (key, *TOP[key].aliases)}
    by_initialize = {"data_parallel_size", "sequence_parallel_size"}
    assert known - by_initialize == config.asked - set(deepspeed_config()._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    assert set(REMOVED) == set(deepspeed_config()._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    import deepspeed

    source = inspect.getsource(deepspeed.initialize)
    assert all(
        f'"{name}"' in source or f"'{name}'" in source or name.upper() in source for name in by_initialize
    )


def test_the_keys_of_sections_and_their_other_names_are_deepspeeds():
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    arguments = set(inspect.signature(DynamicLossScaler).parameters) - {"dtype"}
    names = {name for key in FP16 for name in (key, *FP16[key].aliases)}
    assert names == set(precision_config().DeepSpeedFP16Config.model_fields) | arguments
    assert set(BF16) == set(precision_config().DeepSpeedBF16Config.model_fields)
    constants = deepspeed_config()
    assert set(AUTOCAST) == {
        constants.TORCH_AUTOCAST_ENABLED,
        constants.TORCH_AUTOCAST_DTYPE,
        constants.TORCH_AUTOCAST_LOWER_PRECISION_SAFE_MODULES,
    }


# The document's example


@pytest.mark.parametrize("least", ["1", "1e-4"])
def test_the_documents_example_means_what_its_author_meant(tmp_path, least):
    text = DOCUMENT.replace('"min_scale": 1', f'"min_scale": {least}')
    read = load(write(tmp_path, text))
    assert read.precision == "float16"
    assert read.policy == dialects.DEEPSPEED(
        init_scale=2.0**32, scale_window=1000, hysteresis=2, min_scale=float(least)
    )
    assert play(read.policy, "1" * 100)[-1].scale == float(least)
    with pytest.raises(ValueError, match="Extra inputs"):  # what DeepSpeed makes of it
        precision_config().DeepSpeedFP16Config(enabled=True, scale_window=1000, min_scale=1)


# Both vocabularies


@few
@given(config=configs, data=st.data())
def test_other_names_mean_the_same(config, data):
    renamed = copy.deepcopy(config)
    for section, keys in ((renamed.get("fp16", {}), FP16), (renamed, TOP)):
        for name in [name for name in section if keys[name].aliases and data.draw(flags)]:
            kept = data.draw(flags)
            section[keys[name].aliases[0]] = section[name] if kept else section.pop(name)
    assert load(renamed) == load(config)


@pytest.mark.parametrize(
    ("section", "name", "alias", "values"),
    [("fp16", name, alias, (3, 4)) for name, key in FP16.items() for alias in key.aliases]
    + [("fp16", "initial_scale_power", "init_scale", (4, 32))],
)
def test_two_names_of_one_key_must_agree(section, name, alias, values):
    given = {"enabled": True, name: values[0], alias: values[1]}
    message = refusal({section: given})
    assert all(word in message for word in (name, alias, "differ"))


def test_two_spellings_of_bf16_must_agree():
    assert load({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}).precision == "bfloat16"
    assert "bf16 and bfloat16" in refusal({"bf16": {"enabled": True}, "bfloat16": {"enabled": False}})


def test_what_only_the_arguments_know_can_be_configured_here():
    read = load({"fp16": {"enabled": True, "raise_error_at_min_scale": False}})
    assert read.policy == dialects.DEEPSPEED(raise_error_at_min_scale=False)


def test_the_first_scale_can_be_given_as_a_number():
    for section in ({"init_scale": 2**20}, {"init_scale": 2.0**20, "initial_scale_power": 20}):
        assert load({"fp16": {"enabled": True, **section}}).policy.start().scale == 2.0**20


# Files


noise = st.sampled_from(["", " ", "\n", '// it\'s "odd", {[\n', '/* a, } * / \n "b */', "# x: [1,\n", "\t"])


@few
@given(config=configs, data=st.data())
def test_comments_and_last_commas_change_nothing(tmp_path_factory, config, data):
    pieces = re.findall(r'"[^"]*"|[\[\]{},:]|[^\[\]{},:"\s]+', json.dumps(config))
    rest = pieces[1:]
    commas = [
        "," if b in "]}" and a not in "[{" and data.draw(flags) else ""
        for a, b in zip(pieces, rest, strict=False)
    ]
    text = "".join(p + c + data.draw(noise) for p, c in zip(pieces, [*commas, ""], strict=True))
    assert load(write(tmp_path_factory.getbasetemp(), text)) == load(config)


def test_slashes_and_commas_in_text_are_text(tmp_path):
    text = '{"wandb": {"a//b": "#c,}", "d": "/* \\" */,]"}} // e'
    assert load(write(tmp_path, text)).ignored == {"wandb": {"a//b": "#c,}", "d": '/* " */,]'}}


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{\n  // one\n  "fp16": }', "line 3, column 11"),
        ('{/* one\n two */ "fp16" 1}', "line 2, column 16"),
        ('{"a": 1} x', "line 1, column 10"),
        ("", "line 1, column 1"),
        ("{,}", "line 1, column 2"),
        ('{"fp16": {', "line 1, column 11"),
        ('{"steps_per_print": 10}\n/* never closed', "line 2, column 1"),
    ],
)
def test_an_error_in_a_file_says_where_it_is(tmp_path, text, where):
    path = write(tmp_path, text)
    assert refusal(path).startswith(f"{path}: {where}: ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"fp16": {}, "fp16": {"enabled": true}}', '"fp16" is given twice: {}, then {"enabled": true}'),
        ('{"fp16": {"hysteresis": 1, "hysteresis": 1}}', '"hysteresis" is given twice'),
        ("[" * 100_000, "nested too deep"),
        ('{"steps_per_print": ' + "1" * 5000 + "}", "a number cannot be read"),
        (b'{"fp16": "\xff"}', "byte 10 is not UTF-8"),
        ("[1]", "[1], not a section"),
        ("3", "3, not a section"),
    ],
)
def test_a_hostile_file_is_one_clear_error(tmp_path, text, words):
    assert words in refusal(str(write(tmp_path, text)))


@few
@given(text=st.binary() | st.text(alphabet='{}[]",:/*#\n 1te-').map(str.encode))
def test_any_file_is_read_or_refused(tmp_path_factory, text):
    path = write(tmp_path_factory.getbasetemp(), text)
    with suppress(ConfigError):
        load(path)
        return
    assert refusal(path).startswith(f"{path}: ")


def test_a_byte_order_mark_is_no_part_of_a_configuration(tmp_path):
    assert load(write(tmp_path, b'\xef\xbb\xbf{"gradient_clipping": 2}')).max_norm == 2.0
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "absent.json")


# Settings


@few
@given(config=configs)
def test_settings_are_of_their_own(config):
    before, config = config, copy.deepcopy(config)
    read = load(config)
    again = load(config)
    for value in config.values():
        if isinstance(value, dict):
            value.clear()
    assert read == again == load(before)


def test_what_means_nothing_here_is_named_and_kept():
    config = {
        "fp16": {"enabled": True, "fp16_master_weights_and_grads": False},
        "bf16": {"immediate_grad_update": True},
        "gradient_allreduce_op": "sum",
        "wandb": {"enabled": "auto"},
    }
    read = load(config)
    assert read.ignored == {
        "fp16.fp16_master_weights_and_grads": False,
        "bf16.immediate_grad_update": True,
        "gradient_allreduce_op": "sum",
        "wandb": {"enabled": "auto"},
    }


def test_autocast_takes_the_rule_of_fp16_or_torchs():
    autocast = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
    assert load(autocast).policy == dialects.TORCH.policy
    both = load({**autocast, "fp16": {"enabled": True, "hysteresis": 3}})
    assert both.autocast
    assert both.policy == dialects.DEEPSPEED(hysteresis=3)
    bf16 = load({"torch_autocast": {"enabled": True, "dtype": "bf16"}, "bf16": {"enabled": True}})
    assert (bf16.precision, bf16.policy, bf16.autocast) == ("bfloat16", Static(1.0), True)


@pytest.mark.parametrize(
    "given",
    [{"precision": "fp16"}, {"policy": "dynamic"}, {"autocast": True}, {"max_norm": 0.0}, {"max_norm": "1"}],
)
def test_settings_that_are_none_are_refused(given):
    with pytest.raises(ConfigError, match=f"{next(iter(given))}=.*Write "):
        Settings(**given)


def test_a_dialect_is_its_policy():
    assert Settings(precision="float16", policy=dialects.DEEPSPEED).policy == dialects.DEEPSPEED.policy
