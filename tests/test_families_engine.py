"""
test_families_engine.py: does SGLang compute each family as transformers does? A real server with a tiny random model of each
family, before and after other weights are pushed into it.

    config --transformers--> folders A, B    engine of A: log-probs, experts, checksums == A's --push B--> the same with B

Test:  pytest tests/test_families_engine.py     (about 4 minutes on two cores: an SGLang start for each family)
Left out on purpose: trainers, so this is about the engine alone; GPUs, where other kernels compute the same.
"""
import base64
import json
import pathlib

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

import weights_sync
from conftest import write_char_tokenizer
from engines import Engines, call
from helpers import make_cfg

pytestmark = [pytest.mark.slow, pytest.mark.skipif(torch.cuda.is_available(), reason="cpu.py is for machines with no GPU")]

SMALL = dict(vocab_size=101, hidden_size=64, intermediate_size=88, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False,
             bos_token_id=None, eos_token_id=1, pad_token_id=0)
GLM = dict(head_dim=16, attention_bias=True, partial_rotary_factor=0.5)
# 24: no multiple of 32, which SGLang's own CPU engine would round it up to.
MIXTURE = dict(moe_intermediate_size=24, num_experts_per_tok=2, norm_topk_prob=True)
SHARED = dict(n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=1.5) | MIXTURE
# The first three keys of MLA are in DeepSeek's own config.json, and SGLang asks for them; transformers knows none of them.
MLA = dict(moe_layer_freq=1, topk_method="noaux_tc", scoring_func="sigmoid", n_group=2, topk_group=1, num_key_value_heads=4,
           kv_lora_rank=32, q_lora_rank=48, qk_rope_head_dim=16, qk_nope_head_dim=24, v_head_dim=20) | SHARED
YARN = dict(rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=32.0, original_max_position_embeddings=16,
                                 beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0))

FAMILIES = {"glm4": ("Glm4", GLM),
            "qwen3_moe": ("Qwen3Moe", dict(head_dim=16, num_experts=8) | MIXTURE),
            "glm4_moe": ("Glm4Moe", dict(use_qk_norm=False) | GLM | SHARED),
            "glm4_moe_norm": ("Glm4Moe", dict(use_qk_norm=True) | GLM | SHARED),
            "deepseek_v3": ("DeepseekV3", MLA),
            "deepseek_v3_yarn": ("DeepseekV3", MLA | YARN | dict(q_lora_rank=None)),
            "mimo": ("Qwen2", {})}           # transformers knows no MiMo; without its extra layers it is a Qwen2
# What a MiMo checkpoint brings along; SGLang executes it when it may (trust_remote_code).
MIMO_CODE = "from transformers import Qwen2Config\n\n\nclass MiMoConfig(Qwen2Config):\n    model_type = 'mimo'\n"
PROMPTS = [[5, 17, 30], [5, 17, 30, 22, 9, 41, 77, 100, 3], [8, 8, *range(10, 60)]]    # the second finds the first cached


@torch.no_grad()
def write_model(family: str, folder: pathlib.Path, seed: int):
    """A random model, also where a new one has ones (norms) or zeros (a router's biases) -> the model"""
    kind, settings = FAMILIES[family]
    config = getattr(transformers, f"{kind}Config")(**SMALL | settings)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.float32).eval()
    random = torch.Generator().manual_seed(seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" not in name:           # the rotary angles are no weights
            noise = torch.randn(tensor.shape, generator=random)
            tensor.copy_(1 + 0.3 * noise if "norm" in name else 0.2 * noise)
    model.save_pretrained(folder)
    write_char_tokenizer(str(folder))
    if family == "mimo":
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | dict(
            architectures=["MiMoForCausalLM"], model_type="mimo", auto_map={"AutoConfig": "configuration_mimo.MiMoConfig"})))
        (folder / "configuration_mimo.py").write_text(MIMO_CODE)
    return model


@torch.no_grad()
def assert_engine_computes_with(model, url: str, mixture: bool) -> None:
    """What the engine samples has the model's log-probs, and went through the model's experts."""
    chosen = {}                              # layer -> [T, K], of the last call
    for i, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "experts"):    # called with (hidden states, chosen experts, their weights)
            layer.mlp.experts.register_forward_pre_hook(lambda module, args, i=i: chosen.update({i: args[1]}))
    for prompt in PROMPTS:
        answer = call("POST", url + "/generate", dict(
            input_ids=prompt, return_logprob=True, return_routed_experts=mixture,
            sampling_params=dict(temperature=1.0, max_new_tokens=8, ignore_eos=True)), 60.0)
        tokens, meta = torch.tensor([prompt + answer["output_ids"]]), answer["meta_info"]
        want = model(tokens).logits[0].log_softmax(-1).gather(1, tokens[0, 1:, None])[len(prompt) - 1:, 0]   # [R]
        have = torch.tensor([logp for logp, _, _ in meta["output_token_logprobs"]])
        torch.testing.assert_close(have, want, atol=1e-4, rtol=0)
        if mixture:                          # of all tokens but the last, which went through no layer; dense layers: zeros
            routed = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
            routed = torch.from_numpy(routed.reshape(tokens.shape[1] - 1, len(model.model.layers), -1).copy())   # [T-1, L, K]
            for i in range(routed.shape[1]):
                rows = chosen[i][:-1].sort().values if i in chosen else torch.zeros(routed[:, i].shape)
                assert torch.equal(routed[:, i].sort().values.long(), rows.long()), f"layer {i}"


def push(url: str, tensors: dict[str, torch.Tensor]) -> None:
    # NOTE: all in one. Half of what SGLang fuses by hand (MLA's q_a_proj, kv_a_proj_with_mqa) in another request is lost.
    bucket = weights_sync.to_bucket(list(tensors.items()))
    handle = weights_sync.WeightSync.handle(None, bucket)    # of no trainer
    call("POST", url + "/update_weights_from_tensor", dict(
        serialized_named_tensors=[handle], load_format="flattened_bucket", flush_cache=True), 60.0)


@pytest.fixture(scope="module")
def ray_runs():
    import ray
    ray.init("local", num_cpus=8, include_dashboard=False)
    yield
    ray.shutdown()


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_computes_as_transformers_does(family, tmp_path, ray_runs):
    first, second = write_model(family, tmp_path / "a", 1), write_model(family, tmp_path / "b", 2)
    strategy = torch.multiprocessing.get_sharing_strategy()
    mixture = hasattr(first.model.layers[-1].mlp, "experts")
    cfg = make_cfg(start_timeout_s=400.0, rollout_num_gpus=1, sglang=dict(
        enable_return_routed_experts=mixture, trust_remote_code=family == "mimo"))
    with Engines(cfg, tmp_path, str(tmp_path / "a")) as engines:
        def check(folder: str) -> None:
            expected = weights_sync.expected_checksums(load_file(tmp_path / folder / "model.safetensors"), 1, 2, "cpu")
            answers = engines.post("/weights_checker", {"action": "checksum"})
            assert weights_sync.compare_checksums(expected, answers, [0]) == 0, "parameters were left out"

        check("a")
        assert_engine_computes_with(first, engines.urls[0], mixture)
        with pytest.raises(RuntimeError, match="differs from the trainer"):
            check("b")
        torch.multiprocessing.set_sharing_strategy("file_system")    # as WeightSync does
        try:
            push(engines.urls[0], load_file(tmp_path / "b" / "model.safetensors"))
        finally:
            torch.multiprocessing.set_sharing_strategy(strategy)
        check("b")
        assert_engine_computes_with(second, engines.urls[0], mixture)
