"""
GRPO on Qwen3-4B with four GPUs of one machine, both sides sharing them in turns; or two that train and two that generate.

    python train.py configs/qwen3_4b_4gpu_grpo.py
    python train.py configs/qwen3_4b_4gpu_grpo.py --colocate=False --actor_num_gpus=2 --rollout_num_gpus=2
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

actor_num_gpus = 4                # tp 2 x dp 2
tensor_model_parallel_size = 2
sequence_parallel = True
rollout_num_gpus_per_engine = 2   # two engines of tp 2 behind the router
colocate = True
max_tokens_per_gpu = 8192

eps_clip_high = 0.28
lr = 1e-6
save_interval = 20
