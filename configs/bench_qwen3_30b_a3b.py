"""
Speed of the loop in the shape of Qwen3-30B-A3B, on one GPU: as many of its 48 layers as fit with all of training, random
weights, random prompts, answers of full length.

    python bench.py configs/bench_qwen3_30b_a3b.py               the whole loop
    python bench.py configs/bench_qwen3_30b_a3b.py --train=2048  the trainer alone
"""
from configs.bench_qwen3_4b import prompt_data
from configs.shapes import random_model as _random_model

# A layer: 128 experts x 3 x 2048 x 768 = 604 M, and 38 M of attention; x 18 bytes = 11.6 GB. 7 of them 81 GB, and 11 GB of
# embedding and head.
hf_checkpoint = _random_model("Qwen/Qwen3-30B-A3B", num_hidden_layers=7)

device = "cuda"
rm_type = "random"
rollout_batch_size = 32
n_samples_per_prompt = 8          # 256 samples of 256 + 1,024 tokens
rollout_max_response_len = 1024
num_rollout = 100
lr = 1e-6
colocate = True
max_tokens_per_gpu = 8192
