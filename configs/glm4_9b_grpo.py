"""
GRPO on GLM-4-9B (or its thinking brother, zai-org/GLM-Z1-9B-0414) with 8 H200: 4 train, 4 generate.

    python train.py configs/glm4_9b_grpo.py --dry-run            on a laptop: what would run where, and whether it fits
    python train.py configs/glm4_9b_grpo.py --prompt_data=my.jsonl
"""
device = "cuda"
hf_checkpoint = "zai-org/GLM-4-9B-0414"
prompt_data = "data/dapo-math-17k.jsonl"  # yours, as zhuzilin/dapo-math-17k: {"prompt": [chat messages], "label": "34"}
input_key = "prompt"
label_key = "label"
apply_chat_template = True
rm_type = "deepscaler"
on_reward_error = "skip"          # math-verify gives up on some odd answers: count them, go on

# 32 prompts x 8 samples = 256 samples, one optimizer step
rollout_batch_size = 32
n_samples_per_prompt = 8
num_rollout = 500
rollout_shuffle = True
rollout_max_response_len = 8192

# two kv heads: tp is 2 at most. tp 2 x cp 2 x dp 1: 9.4 B / 2 * (2 + 4 + 12 / 2) bytes = 56 GB a GPU
actor_num_gpus = 4
tensor_model_parallel_size = 2
sequence_parallel = True
context_parallel_size = 2         # a micro-batch has 2 x 4,608 tokens: prompt and answer of one sample
max_tokens_per_gpu = 4608
rollout_num_gpus = 4
rollout_num_gpus_per_engine = 1   # 4 engines
megatron = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
sglang = dict(mem_fraction_static=0.8)

eps_clip_high = 0.28
use_kl_loss = True
kl_loss_coef = 0.001
lr = 1e-6
save_interval = 20
