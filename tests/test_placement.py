"""
test_placement.py: who leaves the GPU, for models of known size on a GPU of 141 GB.

Run:   pytest tests/test_placement.py
Left out on purpose: Ray's placement itself; test_loop.py starts it.
"""
import types

import pytest

import placement
from helpers import make_cfg

H200 = 141 * 10**9
SMOLLM2 = types.SimpleNamespace(num_hidden_layers=30, hidden_size=576, vocab_size=49152), 135 * 10**6
QWEN3_4B = types.SimpleNamespace(num_hidden_layers=36, hidden_size=2560, vocab_size=151936), 4 * 10**9


def settle(model, **changes):
    return placement.share_memory(make_cfg(**dict(device="cuda", colocate=True, max_tokens_per_gpu=8192) | changes), *model, H200)


def test_small_models_stay():
    cfg = settle(SMOLLM2)
    assert (cfg.offload_train, cfg.offload_rollout) == (False, False)
    # 135M * 18 bytes + 8192 * 30 * 576 * 36 + a chunk of logits, and 5% for CUDA: 10%; the engine takes the rest of 90%
    training = 135e6 * 18 + 8192 * 30 * 576 * 36 + 8 * 2048 * 49152
    assert cfg.sglang["mem_fraction_static"] == pytest.approx(0.85 - training / H200, abs=0.006)


def test_large_models_take_turns():
    cfg = settle(QWEN3_4B)                   # 72 GB for the optimizer alone
    assert (cfg.offload_train, cfg.offload_rollout) == (True, True) and cfg.sglang["mem_fraction_static"] == 0.85
    eight = dict(actor_num_gpus=8, tensor_model_parallel_size=2)
    assert settle(QWEN3_4B, **eight).offload_train is False      # 4B * (6 + 12 / 4) / 2 = 18 GB a rank
    assert settle(QWEN3_4B, **eight, use_distributed_optimizer=False, max_tokens_per_gpu=32768).offload_train is True
    recompute = dict(megatron=dict(recompute_granularity="full"))
    assert settle(SMOLLM2, max_tokens_per_gpu=200_000).offload_train is True
    assert settle(SMOLLM2, max_tokens_per_gpu=200_000, **recompute).offload_train is False


def test_what_the_user_says_stands():
    cfg = settle(QWEN3_4B, offload_train=False, offload_rollout=False, sglang=dict(mem_fraction_static=0.2, page_size=16))
    assert (cfg.offload_train, cfg.offload_rollout) == (False, False)
    assert cfg.sglang == dict(mem_fraction_static=0.2, page_size=16)
    assert settle(SMOLLM2, offload_train=True).offload_train is True
    for apart in (dict(colocate=False), dict(device="cpu")):
        cfg = settle(QWEN3_4B, **apart)
        assert (cfg.offload_train, cfg.offload_rollout) == (False, False) and cfg.sglang == {}
