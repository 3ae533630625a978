"""
What a family does on one GPU: three steps of a small random model with the parts of a large one in their real widths. Every
sync is checked tensor by tensor, and the trainer's log-probs are compared with the engine's.

    FAMILY=few_glm4_moe python train.py configs/check_family.py [--rollout_quantization=fp8]     names: configs/shapes.py
"""
import os as _os

from configs import shapes as _shapes

_families = {name: value for name, value in vars(_shapes).items() if name.startswith("few_")}
_name = _os.environ.get("FAMILY", "few_qwen3_moe")
if _name not in _families:
    raise SystemExit(f"FAMILY={_name!r} is unknown; set it to one of {', '.join(_families)}")
hf_checkpoint = _families[_name]


def prompt_data() -> list[dict]:
    return [dict(input=f"{a} + {b} = ") for a in range(32) for b in range(8)]


device = "cuda"
rm_type = "random"
rollout_batch_size, n_samples_per_prompt, num_rollout = 32, 8, 3
rollout_max_response_len = 128
colocate = True
lr = 1e-4                         # moves the weights, so that a lost sync shows
check_weight_update_interval = 1
on_invariant = "warn"
max_tokens_per_gpu = 8192
save_hf = False
use_rollout_routing_replay = hf_checkpoint is not _shapes.few_glm4
