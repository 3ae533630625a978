"""
GRPO on Qwen3-4B with two GPUs: one trains, the other generates the next step's samples meanwhile (one step off).

    python train.py configs/qwen3_4b_2gpu_separate.py --prompt_data=my.jsonl
"""
device = "cuda"
hf_checkpoint = "Qwen/Qwen3-4B"
prompt_data = "data/dapo-math-17k.jsonl"  # yours, as zhuzilin/dapo-math-17k: {"prompt": [chat messages], "label": "34"}
input_key = "prompt"
label_key = "label"
apply_chat_template = True
rm_type = "deepscaler"
on_reward_error = "skip"

rollout_batch_size = 32
n_samples_per_prompt = 8          # 256 samples a step
num_rollout = 500
rollout_shuffle = True
rollout_max_response_len = 4096

actor_num_gpus = 1                # GPU 0; the engine gets GPU 1, weights travel by NCCL
rollout_num_gpus = 1
async_mode = True                 # each sample is one weight update old, and says so: rollout/staleness/max
max_tokens_per_gpu = 8192

eps_clip_high = 0.28
lr = 1e-6
save_interval = 20
