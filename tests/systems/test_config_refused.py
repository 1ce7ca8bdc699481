"""What a configuration cannot say is refused once, by name, with a line that works."""

from __future__ import annotations

import json
import re
import warnings
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preamp import ConfigError, InexactScale, dialects
from preamp.systems.deepspeed_config import load

from .test_config import HOMES, few, refusal


@few
@given(data=st.data())
def test_a_misspelt_key_is_refused_with_the_one_that_was_meant(data):
    section = data.draw(st.sampled_from(["", "fp16", "bf16"]))
    name = data.draw(st.sampled_from([name for name in HOMES[section] if len(name) > 4]))
    cut = data.draw(st.integers(1, len(name) - 1))
    misspelt = name[: cut - 1] + name[cut:] if data.draw(st.booleans()) else name[:cut] + "x" + name[cut:]
    config = {misspelt: 1} if not section else {section: {misspelt: 1}}
    message = refusal(config)
    assert message.startswith(f"{section}.{misspelt} is not a key" if section else f"{misspelt} is not a key")
    assert f'Write "{name}"' in message


@pytest.mark.parametrize(
    ("config", "where"),
    [
        ({"hysteresis": 2}, "Write it in fp16."),
        ({"bf16": {"loss_scale": 0}}, "Write it in fp16."),
        ({"fp16": {"gradient_clipping": 1.0}}, "Write it at the top level."),
        ({"dtype": "bfloat16"}, "Write it in torch_autocast."),
        ({"amp": {}}, 'Write "torch_autocast"'),
        ({"elasticity": {}}, "Take it out."),
        ({"fp16": {"zzz": 1}}, "Write one of enabled, auto_cast"),
    ],
)
def test_a_key_at_the_wrong_place_is_sent_home(config, where):
    assert where in refusal(config)


NUMBERS = [-1, 0, 0.5, -0.0, 2**2000, 10**400, float("nan"), float("inf")]
JUNK = (
    st.sampled_from([*NUMBERS, None, "auto", "yes", "128", True, [], [1], {}])
    | st.text(max_size=5)
    | st.integers()
    | st.floats()
    | st.binary(max_size=3)
)


PLACES = [(section, name) for section, keys in HOMES.items() for name in keys]


@settings(max_examples=100, deadline=None)
@given(place=st.sampled_from(PLACES), value=JUNK)
def test_any_value_is_read_or_refused_by_name_with_a_line_that_works(place, value):
    section, name = place
    beside = {"dtype": "bfloat16"} if section == "torch_autocast" else {}

    def config(line: dict[str, Any]) -> dict[str, Any]:
        return {section: beside | line} if section else line

    with warnings.catch_warnings(action="ignore", category=InexactScale), suppress(ConfigError):
        load(config({name: value}))
        assert value != "auto" or HOMES[section][name].ignored
        return
    path = f"{section}.{name}" if section else name
    found = re.fullmatch(rf'{path}: .* Write ("{name}": .*)\.', refusal(config({name: value})), re.DOTALL)
    load(config(json.loads(f"{{{found[1]}}}")))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"fp16": {"enabled": True, "hysteresis": 0}}, ["fp16.hysteresis: 0", '"hysteresis": 2']),
        ({"fp16": {"enabled": 1}}, ["fp16.enabled: 1", "neither true nor false"]),
        ({"fp16": {"hysteresis": 2.5}}, ["fp16.hysteresis: 2.5 is not a whole number"]),
        ({"fp16": {"hysteresis": True}}, ["fp16.hysteresis: true", '"hysteresis": 2']),
        ({"fp16": {"loss_scale": "dynamic"}}, ['"dynamic" is not a scale', '"loss_scale": 0']),
        ({"fp16": {"initial_scale_power": 2000}}, ["2000", "-126 to 127", '"initial_scale_power": 16']),
        ({"fp16": {"loss_scale_window": "auto"}}, ["Hugging Face", '"loss_scale_window": 1000']),
        ({"fp16": {"enabled": True, "min_loss_scale": 2**17}}, ["131072", "above the initial scale 65536"]),
        ({"fp16": {"enabled": True, "initial_scale_power": -4}}, ["above the initial scale 0.0625"]),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ["fp16 (float16) and bf16 (bfloat16)"]),
        (
            {"fp16": {"enabled": True}, "torch_autocast": {"enabled": True, "dtype": "bf16"}},
            ["fp16 (float16) and torch_autocast (bfloat16)"],
        ),
        ({"torch_autocast": {"enabled": True}}, ["dtype", '"dtype": "bfloat16"']),
        ({"torch_autocast": {"dtype": "float32"}}, ["not a low precision"]),
        ({"optimizer": {"type": "Adam", "params": {"lr": "auto"}}}, ["optimizer.params.lr", "Hugging Face"]),
        ({"optimizer": {"params": {}}}, ['no "type"']),
        ({"zero_optimization": {"stage": 4}}, ["stage of 0 to 3"]),
        ({"gradient_clipping": -1}, ["gradient_clipping: -1", '"gradient_clipping": 1.0']),
        ([], ["neither a file nor a mapping"]),
        (None, ["neither a file nor a mapping"]),
        ({"fp16": True}, ["fp16: true is not a section"]),
    ],
)
def test_a_configuration_that_cannot_work_is_one_clear_error(config, words):
    message = refusal(config)
    assert "\n" not in message
    assert all(word in message for word in words), message


BLANKS = {
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-6}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
}


def test_all_blanks_are_named_at_once():
    message = refusal({"fp16": {"enabled": True, "hysteresis": "auto"}, "bfloat16": "auto", **BLANKS})
    names = "fp16.hysteresis, bfloat16, train_batch_size, gradient_clipping, optimizer.params.lr"
    assert message.startswith(f'{names}: "auto" is a blank')
    assert message.endswith('Write "hysteresis": 2 and so on.')


def test_blanks_can_be_skipped_where_they_do_not_concern_the_scale():
    before = json.dumps(BLANKS)
    read = load({"fp16": {"enabled": True, "hysteresis": 4}, **BLANKS}, skip_blanks=True)
    assert read.policy == dialects.DEEPSPEED(hysteresis=4)
    assert (read.train_batch_size, read.max_norm) == (None, 1.0)
    assert read.optimizer == {"type": "AdamW", "params": {"eps": 1e-6}}
    assert read.zero_optimization == BLANKS["zero_optimization"]
    assert json.dumps(BLANKS) == before
    for section in ({"fp16": {"enabled": "auto"}}, {"bf16": "auto"}, {"torch_autocast": {"dtype": "auto"}}):
        with pytest.raises(ConfigError, match=r"^[a-z0-9_.]*: \"auto\" is a blank"):
            load({**section, **BLANKS}, skip_blanks=True)


@pytest.mark.parametrize(
    "section", [{"loss_scale": 8, "min_loss_scale": 1e9}, {"enabled": False, "min_scale": 1e9}]
)
def test_a_floor_that_no_scale_meets_is_none_of_our_business(section):
    load({"fp16": {"enabled": True, **section}})


def test_a_static_scale_that_rounds_warns_at_the_line_that_loads_it():
    with pytest.warns(InexactScale, match="scale=1000") as seen:
        load({"fp16": {"enabled": True, "loss_scale": 1000}})
    assert seen[0].filename == __file__
