"""
GRPO on Llama-3.1-70B-Instruct with two nodes of 8 H200, both sides sharing them in turns.

    python train.py configs/llama3_70b_grpo.py --dry-run            on a laptop: what would run where, and whether it fits
    python train.py configs/llama3_70b_grpo.py --ray_address=auto --prompt_data=my.jsonl
"""
device = "cuda"
hf_checkpoint = "meta-llama/Llama-3.1-70B-Instruct"
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
rollout_max_response_len = 4096

actor_num_gpus = 16               # tp 8 x dp 2: 70.6 B / 8 * (2 + 4 + 12 / 2) bytes = 106 GB a GPU
tensor_model_parallel_size = 8
sequence_parallel = True
rollout_num_gpus_per_engine = 8   # 2 engines: 141 GB of weights / 8 = 18 GB a GPU
colocate = True
max_tokens_per_gpu = 8192
megatron = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
sglang = dict(mem_fraction_static=0.7)

eps_clip_high = 0.28
use_kl_loss = True
kl_loss_coef = 0.001
lr = 1e-6
save_interval = 20
