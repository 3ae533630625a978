"""
GRPO on Qwen3-0.6B on one GPU that trainer and engine share.

    python train.py configs/qwen3_0p6b_1gpu_grpo.py --prompt_data=my.jsonl
"""
device = "cuda"
hf_checkpoint = "Qwen/Qwen3-0.6B"
prompt_data = "data/gsm8k_train.jsonl"       # rows {"question": "...", "answer": "18"}
input_key = "question"
label_key = "answer"
apply_chat_template = True
apply_chat_template_kwargs = dict(enable_thinking=False)
rm_type = "math"
on_reward_error = "skip"

rollout_batch_size = 32
n_samples_per_prompt = 8
num_rollout = 200
rollout_shuffle = True
rollout_max_response_len = 1024

lr = 1e-6
colocate = True
max_tokens_per_gpu = 16384
save_interval = 50
