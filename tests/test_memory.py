"""
test_memory.py: who leaves the GPU, for models of known size on 141 GB; and is the estimate what was measured?

Run:   pytest tests/test_memory.py
"""
import types

import pytest

import memory
from helpers import make_cfg

H200 = 141 * 10**9
SMOLLM2 = types.SimpleNamespace(num_hidden_layers=30, hidden_size=576, vocab_size=49152), 135 * 10**6
QWEN3_4B = types.SimpleNamespace(num_hidden_layers=36, hidden_size=2560, vocab_size=151936), 4 * 10**9
QWEN3_8B = types.SimpleNamespace(num_hidden_layers=36, hidden_size=4096, vocab_size=151936), 8 * 10**9


def settle(model, **changes):
    return memory.share_memory(make_cfg(**dict(device="cuda", colocate=True, max_tokens_per_gpu=8192) | changes), *model, H200)


def test_small_models_stay():
    cfg = settle(SMOLLM2)
    assert (cfg.offload_train, cfg.offload_rollout) == (False, False)
    # 135M * 18 bytes + 8192 * 30 * 576 * 36 + a chunk of logits: 5%; the engine takes the rest of 85%
    training = 135e6 * 18 + 8192 * 30 * 576 * 36 + 8 * 2048 * 49152
    assert cfg.sglang["mem_fraction_static"] == pytest.approx(0.85 - training / H200, abs=0.006)


def test_the_engine_alone_leaves():
    cfg = settle(QWEN3_4B)                   # 72 GB are kept all the time, 105 while training; three buckets of 2 GiB
    assert (cfg.offload_train, cfg.offload_rollout) == (False, True)
    assert cfg.sglang["mem_fraction_static"] == pytest.approx(0.85 - (72 + 6.4) / 141, abs=0.006)
    # 4B * (6 + 12 / 4) / 2 = 18 GB a rank, and activations
    assert settle(QWEN3_4B, actor_num_gpus=8, tensor_model_parallel_size=2).offload_rollout is False
    assert settle(SMOLLM2, max_tokens_per_gpu=140_000).offload_rollout is True


def test_large_models_take_turns(capsys):
    cfg = settle(QWEN3_8B)                   # 144 GB are kept: too many in any case
    assert (cfg.offload_train, cfg.offload_rollout) == (True, True)
    assert cfg.sglang["mem_fraction_static"] == pytest.approx(0.85 - (16 + 6.4) / 141, abs=0.006)
    assert "training may need 1" in capsys.readouterr().out


def test_activations_that_are_computed_again_take_no_memory():
    assert settle(SMOLLM2, max_tokens_per_gpu=200_000).offload_rollout is True
    full = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    assert settle(SMOLLM2, max_tokens_per_gpu=200_000, megatron=full).offload_rollout is False


@pytest.mark.parametrize("measured_gb, changes", [               # benchmarks/h200.md: peaks of a trainer on one H200
    (111.1, dict(max_tokens_per_gpu=8192)),
    (97.9, dict(max_tokens_per_gpu=16384, megatron=dict(recompute_granularity="full", recompute_method="block",
                                                        recompute_num_layers=26)))])
def test_the_estimate_is_what_was_measured(measured_gb, changes):
    cfg = make_cfg(device="cuda", log_probs_chunk_size=1024, **changes)
    hf_config, parameters = QWEN3_4B[0], 4.022e9
    estimate = parameters * 18 + memory.activations(cfg, hf_config) + 8 * 1024 * hf_config.vocab_size
    assert estimate / 1e9 == pytest.approx(measured_gb, rel=0.1)


def test_activations_of_a_layout():
    """Per token: 36 layers * 2560 * (10 + 26 / tp), all of it over tp with sequence parallelism, whatever pp is."""
    def per_token(**layout):
        return memory.activations(make_cfg(max_tokens_per_gpu=1, **layout), QWEN3_4B[0]) / (36 * 2560)
    assert per_token() == per_token(pipeline_model_parallel_size=4) == 36
    assert per_token(tensor_model_parallel_size=2) == 23
    assert per_token(tensor_model_parallel_size=2, sequence_parallel=True) == 18
    block = dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=9)
    assert per_token(pipeline_model_parallel_size=2, megatron=block) == 36 / 2 + 2 / 2       # 9 of each stage's 18


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
