"""
GSPO on Moonlight-16B-A3B, DeepSeek-V3's architecture in small, with one node of 8 H200, both sides in turns.

    python train.py configs/moonlight_16b_grpo.py --dry-run            on a laptop: what would run where, and whether it fits
    python train.py configs/moonlight_16b_grpo.py --prompt_data=my.jsonl
"""
device = "cuda"
hf_checkpoint = "moonshotai/Moonlight-16B-A3B-Instruct"
prompt_data = "data/dapo-math-17k.jsonl"  # yours, as zhuzilin/dapo-math-17k: {"prompt": [chat messages], "label": "34"}
input_key = "prompt"
label_key = "label"
apply_chat_template = True
rm_type = "deepscaler"
on_reward_error = "skip"          # math-verify gives up on some odd answers: count them, go on

# 128 prompts x 8 samples = 1,024 samples = 4 optimizer steps of 256
rollout_batch_size = 128
n_samples_per_prompt = 8
num_steps_per_rollout = 4
num_rollout = 500
rollout_shuffle = True
over_sampling_batch_size = 256
dynamic_sampling_filter = "hooks.check_reward_nonzero_std"
rollout_max_response_len = 4096

# tp 4 x dp 2; 8 of the 64 experts on each GPU. 14.4 B in experts / 8 * 18 bytes = 32 GB, 1.6 B others / 4 * 12 = 5 GB
actor_num_gpus = 8
tensor_model_parallel_size = 4
sequence_parallel = True          # required with experts
expert_model_parallel_size = 8
rollout_num_gpus_per_engine = 8   # 1 engine
colocate = True
max_tokens_per_gpu = 8192
megatron = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
sglang = dict(mem_fraction_static=0.7, trust_remote_code=True)    # its tokenizer is code of its own

advantage_estimator = "gspo"      # one ratio for the whole answer: a token's own changes with the experts it is sent to
eps_clip, eps_clip_high = 3e-4, 4e-4
use_tis, tis_level = True, "geometric"   # trainer and engine may choose other experts for the same token
lr = 1e-6
save_interval = 20
