"""
test_mend.py: does GLM-4.5's router in SGLang follow its weights? And does SGLang find the plug-in that sees to it?

    router, run once --other weights--> stock: logits of the old ones    ours: of the new ones

Test:  pytest tests/test_mend.py     (20 s, the import of SGLang)
"""
import importlib.metadata
import json
import types

import torch

import mend


def test_the_router_follows_its_weights():
    from sglang.srt.models.glm4_moe import Glm4MoeGate
    gate = Glm4MoeGate(types.SimpleNamespace(n_routed_experts=4, hidden_size=8)).to(torch.bfloat16)
    hidden, new = torch.randn(3, 8, dtype=torch.bfloat16), torch.randn(4, 8, dtype=torch.bfloat16)
    with torch.no_grad():
        gate.weight.zero_()
        gate(hidden)                         # keeps its copy
        gate.weight.copy_(new)
        want = hidden.float() @ new.float().T
        assert gate(hidden).abs().max() == 0, "SGLang follows by itself now: mend.py can go"
        torch.testing.assert_close(mend.fresh_router(gate, hidden), want)


def test_only_where_the_engine_has_such_a_model(tmp_path, monkeypatch):
    from sglang.srt.plugins.hook_registry import HookRegistry
    seen = []
    monkeypatch.setattr(HookRegistry, "register", lambda *args: seen.append(args[0]))
    for kind, hooks in (("qwen3", []), ("glm4_moe", ["sglang.srt.models.glm4_moe.Glm4MoeGate.forward"])):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        monkeypatch.setenv(mend.ENV, str(tmp_path))
        mend.activate()
        assert seen == hooks
    monkeypatch.delenv(mend.ENV)
    mend.activate()                          # SGLang started by somebody else
    assert len(seen) == 1


def test_sglang_finds_it():
    found = {one.name: one.value for one in importlib.metadata.entry_points(group="sglang.srt.plugins")}
    assert found.get("nanoslime_mend") == "mend:activate", "pip install -e . once more: the entry point is new"
