"""
The demo by on-policy distillation alone: no reward; a teacher says of each token how likely it would have been.

    python train.py configs/demo_cpu.py                                                        makes the teacher
    python train.py configs/opd_cpu.py --opd_teacher_load=outputs/demo_cpu-.../hf/iter_0000050
"""
from configs.demo_cpu import *  # noqa: F403  everything of the demo, but:
from configs.demo_cpu import held_out_rows

rm_type = None
use_opd = True
n_samples_per_prompt = 1          # nothing is compared within a group: 512 prompts in place of 64 times 8
rollout_batch_size = 512
eval_prompt_data = dict(addition=dict(prompt_data=held_out_rows, eval_temperature=0.0, rm_type="exact"))
