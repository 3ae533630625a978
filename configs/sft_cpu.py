"""
The demo by plain supervised learning: the same sums with their right answers, from the same start.

    python train.py configs/sft_cpu.py
    python train.py configs/demo_cpu.py --num_rollout=0 --hf_checkpoint=outputs/sft_cpu-.../hf/iter_0000050       evaluates it
"""
from configs.demo_sft import rows


def right_rows() -> list[dict]:
    return rows(held_out=False)


hf_checkpoint = "configs/demo_sft.py"
prompt_data = right_rows
label_key = "label"
loss_type = "sft"

rollout_batch_size = 512          # as many answers a step as the demo has
num_rollout = 50
rollout_shuffle = True
lr = 1e-3
weight_decay = 0.0
max_tokens_per_gpu = 8192
