"""
mend.py: what is wrong in SGLang 0.5.17 for weights that change? An SGLang plug-in that sets it right, on every device.

    sglang (all processes) --entry point "sglang.srt.plugins"--> activate() --replaces--> one function of one model

Run:   nothing to run; `pip install -e .` registers the entry point, SGLang's processes find it by package metadata.
Test:  pytest tests/test_mend.py
Knows nothing about: the rest of nanoslime. Can go when SGLang does this itself.
"""
import json
import os
import pathlib

ENV = "NANOSLIME_ENGINE_MODEL"               # set by engines.py: the model's folder


def activate() -> None:
    """GLM-4.5's router keeps an fp32 copy of its weight from the first time it runs. After a weight sync it would go on with
    the old one, unseen: the checksums are of the weight itself. So it is made anew in every pass, which costs nothing."""
    folder = os.environ.get(ENV)
    if not folder or json.loads((pathlib.Path(folder) / "config.json").read_text()).get("model_type") != "glm4_moe":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType   # other models' processes need not import any of this
    HookRegistry.register("sglang.srt.models.glm4_moe.Glm4MoeGate.forward", fresh_router, HookType.REPLACE)


def fresh_router(gate, hidden):
    """[T, H] -> router logits [T, E] in fp32"""
    import torch
    return torch.nn.functional.linear(hidden.float(), gate.weight.float())
