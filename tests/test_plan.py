"""
test_plan.py: are the counts transformers' own, the bytes what was measured, and does every run file of a real size fit?

Run:   pytest tests/test_plan.py       CPU only, no weights; `-s` prints the table of benchmarks/h200.md
"""
import dataclasses
import json
import pathlib
import types

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import memory
import plan
import sizes
from configs import base
from configs.shapes import PUBLISHED, qwen3_4b
from helpers import make_cfg

CONFIGS = pathlib.Path(base.__file__).parent
H200 = plan.GPU_MIB["H200"] * 2**20
GB = 1e9


def config(name, **changes):
    """The config of a published model, or of one like it."""
    values = PUBLISHED[name] | changes
    kind = values["model_type"].replace("kimi_k2", "deepseek_v3")
    return AutoConfig.for_model(kind, **{key: value for key, value in values.items() if key != "model_type"})


def real_count(c) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(c)
    return sum(p.numel() for p in model.parameters())


# ---- Parameters --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_models(name):
    assert sizes.parameters(config(name)).total == real_count(config(name))
