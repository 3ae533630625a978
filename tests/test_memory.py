"""
test_memory.py: who leaves the GPU, for models of known size on 141 GB? (Whether the bytes are right: test_plan.py.)

Run:   pytest tests/test_memory.py
"""
import pytest

import memory
import plan
from configs.shapes import PUBLISHED
from helpers import make_cfg
from test_plan import config

H200 = 141 * 10**9
SMOLLM2 = config(dict(model_type="llama", hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
                      num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True))
QWEN3_4B, QWEN3_8B = config(PUBLISHED["Qwen/Qwen3-4B"]), config(PUBLISHED["Qwen/Qwen3-8B"])


def settle(model, **changes):
    return memory.share_memory(make_cfg(**dict(device="cuda", dtype="bfloat16", colocate=True, max_tokens_per_gpu=8192) | changes), model, H200)


def test_small_models_stay():
    cfg = settle(SMOLLM2)
    assert (cfg.offload_train, cfg.offload_rollout) == (False, False)
    # 135M * 18 bytes, activations (4 H, 3 * 12 heads of 64, 3 ffn; bf16), a chunk of logits: 7%; the engine has the rest of 85%
    training = 135e6 * 18 + 8192 * 30 * 2 * (4 * 576 + 3 * 12 * 64 + 3 * 1536) + 8 * 2048 * 49152
    assert cfg.sglang["mem_fraction_static"] == pytest.approx(0.85 - training / H200, abs=0.006)


def test_the_engine_alone_leaves():
    cfg = settle(QWEN3_4B)                   # 72 GB are kept all the time, 105 while training; three buckets of 2 GiB
    assert (cfg.offload_train, cfg.offload_rollout) == (False, True)
    assert cfg.sglang["mem_fraction_static"] == pytest.approx(0.85 - (72 + 6.4) / 141, abs=0.006)
    # 4B * (6 + 12 / 4) / 2 = 18 GB a rank, and activations
    assert settle(QWEN3_4B, actor_num_gpus=8, tensor_model_parallel_size=2).offload_rollout is False
    assert settle(SMOLLM2, max_tokens_per_gpu=140_000).offload_rollout is True


def test_large_models_take_turns():
    cfg = settle(QWEN3_8B)                   # 144 GB are kept: too many in any case
    assert (cfg.offload_train, cfg.offload_rollout) == (True, True)
    assert cfg.sglang["mem_fraction_static"] == pytest.approx(0.85 - (16 + 6.4) / 141, abs=0.006)
    assert plan.problems(cfg, QWEN3_8B, H200)[0].startswith("training may need 1")


def test_activations_that_are_computed_again_take_no_memory():
    assert settle(SMOLLM2, max_tokens_per_gpu=200_000).offload_rollout is True
    full = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    assert settle(SMOLLM2, max_tokens_per_gpu=200_000, megatron=full).offload_rollout is False


def test_an_engine_of_a_given_size_is_left_its_room():
    """tp 2 x dp 4: 18 GB are kept, 23 GB needed. Beside the 0.3 of a useful engine that is little; beside 0.7 it is not."""
    layout = dict(actor_num_gpus=8, tensor_model_parallel_size=2)
    assert settle(QWEN3_4B, **layout).offload_rollout is False
    assert settle(QWEN3_4B, **layout, sglang=dict(mem_fraction_static=0.7)).offload_rollout is True


def test_a_critic_beside_the_actor_counts():
    critic = dict(lr=1e-5)
    assert settle(QWEN3_4B, critic=critic).offload_train is True           # 2 * 72 GB are kept
    assert settle(QWEN3_4B, critic=critic, critic_num_gpus=1).offload_train is False         # elsewhere


def test_what_the_user_says_stands():
    cfg = settle(QWEN3_4B, offload_train=False, offload_rollout=False, sglang=dict(mem_fraction_static=0.2, page_size=16))
    assert (cfg.offload_train, cfg.offload_rollout) == (False, False)
    assert cfg.sglang == dict(mem_fraction_static=0.2, page_size=16)
    assert settle(SMOLLM2, offload_train=True).offload_train is True
    for apart in (dict(colocate=False), dict(device="cpu")):
        cfg = settle(QWEN3_4B, **apart)
        assert (cfg.offload_train, cfg.offload_rollout) == (False, False) and cfg.sglang == {}
