"""
GSPO on Qwen3-30B-A3B, a mixture of 128 experts, with one node of 8 H200, both sides sharing them in turns.

    python train.py configs/qwen3_30b_a3b_grpo.py --dry-run            on a laptop: what would run where, and whether it fits
    python train.py configs/qwen3_30b_a3b_grpo.py --prompt_data=my.jsonl
"""
device = "cuda"
hf_checkpoint = "Qwen/Qwen3-30B-A3B"
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

# tp 4 x dp 2; 16 of the 128 experts on each GPU. 29.0 B in experts / 8 * 18 bytes = 65 GB, 1.5 B others / 4 * 12 = 5 GB
actor_num_gpus = 8
tensor_model_parallel_size = 4
sequence_parallel = True          # required with experts
expert_model_parallel_size = 8
rollout_num_gpus_per_engine = 4   # 2 engines, one kv head a GPU
colocate = True
max_tokens_per_gpu = 20480
megatron = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
sglang = dict(mem_fraction_static=0.7)

advantage_estimator = "gspo"      # one ratio for the whole answer: a token's own changes with the experts it is sent to
eps_clip, eps_clip_high = 3e-4, 4e-4
use_tis, tis_level = True, "geometric"   # trainer and engine may choose other experts for the same token
lr = 1e-6
save_interval = 20
