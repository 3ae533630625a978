"""
Speed of the loop in the shape of Qwen3-4B, on one GPU: random weights, random prompts, answers of full length.

    python bench.py configs/bench_qwen3_4b.py                    the whole loop
    python bench.py configs/bench_qwen3_4b.py --train=2048       the trainer alone
"""
import random

from configs.shapes import qwen3_4b as hf_checkpoint

device = "cuda"
_random = random.Random(0)


def prompt_data() -> list[dict]:
    """256 characters are 256 tokens; random weights never end an answer, so each has rollout_max_response_len tokens."""
    return [dict(input="".join(chr(_random.randrange(32, 127)) for _ in range(256))) for _ in range(512)]


rm_type = "random"
rollout_batch_size = 32
n_samples_per_prompt = 8          # 256 samples of 256 + 1,024 tokens
rollout_max_response_len = 1024
num_rollout = 100
lr = 1e-6
colocate = True
max_tokens_per_gpu = 8192
