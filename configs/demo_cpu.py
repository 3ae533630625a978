"""
The whole loop on a laptop: a small model that adds two numbers right half of the time learns to do it nearly always.

    python train.py configs/demo_cpu.py          some minutes on 2 cores, no GPU

First configs/demo_sft.py imitates teachers who often forget the carry. Then GRPO: no more examples, only "right" or "wrong".
"""
from configs.demo_sft import rows


def training_rows() -> list[dict]:
    return rows(held_out=False)


def held_out_rows() -> list[dict]:
    return rows(held_out=True)


hf_checkpoint = "configs/demo_sft.py"    # a run file: that run goes first
prompt_data = training_rows
eval_prompt_data = dict(addition=dict(prompt_data=held_out_rows, eval_temperature=0.0))
label_key = "label"
rm_type = "exact"

rollout_batch_size = 64           # P prompts
n_samples_per_prompt = 8          # n: 512 samples a step
num_rollout = 50
rollout_shuffle = True
rollout_max_response_len = 6      # three digits and the end token, and room to be wrong
eval_interval = 10
save_interval = 10                # python train.py configs/demo_cpu.py --resume goes on from there

advantage_estimator = "grpo"
lr = 1e-4
weight_decay = 0.0

colocate = True                   # trainer and engine, one process each on the same cores; weights by shared memory
max_tokens_per_gpu = 8192         # 512 samples of 10 tokens: one micro-batch
sglang = dict(max_running_requests=256)
