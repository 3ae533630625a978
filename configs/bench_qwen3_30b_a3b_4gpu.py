"""
Speed of the loop with Qwen3-30B-A3B on four GPUs: all of its 48 layers with half of the optimizer on the CPU, or as many as
fit without that; random weights, random prompts, answers of full length.

    python bench.py configs/bench_qwen3_30b_a3b_4gpu.py
    LAYERS=36 python bench.py configs/bench_qwen3_30b_a3b_4gpu.py --megatron.optimizer_cpu_offload=False
"""
import os as _os

from configs.bench_qwen3_30b_a3b import *  # noqa: F403
from configs.shapes import random_model as _random_model

hf_checkpoint = _random_model("Qwen/Qwen3-30B-A3B", num_hidden_layers=int(_os.environ.get("LAYERS", "48")))

actor_num_gpus = 4
expert_model_parallel_size = 4    # a rank has 32 experts of each layer, and all of the attention
rollout_num_gpus_per_engine = 4
megatron = dict(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5,
                recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
# By plan 104 GB of 30B's training stay on each GPU and 351 GB in all on the CPU: trainers cannot leave as well.
offload_train = False
offload_rollout = True
