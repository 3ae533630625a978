"""
The calculator agent's first stage: a random 0.8M-parameter Qwen3 learns to call a tool from teachers with bad habits.

    python train.py configs/calculator_sft.py          (configs/calculator_cpu.py runs it by itself)

Sums most teachers calculate with the tool. For differences most type another sign. Products most think they know by heart. So
the model learns how a call is written and that its result is the answer, but seldom to call when, and as, it should.
"""
import random

from transformers.utils import get_json_schema

from configs.calculator import calculator, questions
from configs.calculator_model import make_model

_TEACHERS = {"+": (7, 1, 2), "-": (2, 7, 1), "*": (2, 1, 7)}     # of ten: call well, with another sign, not at all


def teachers_rows() -> list[dict]:
    """Each question as one of ten teachers answers it."""
    draw, rows = random.Random(0), []
    for row in questions(held_out=False):
        text, sign = row["input"], row["input"][2]
        how = draw.choices(("well", "badly", "not"), _TEACHERS[sign])[0]
        turns, answer = [], calculator(f"{draw.randint(10, 99)}{draw.choice('+-*')}{draw.randint(10, 99)}")     # a guess
        if how != "not":
            typed = text if how == "well" else text.replace(sign, draw.choice("+-*".replace(sign, "")))
            answer, call = calculator(typed), {"name": "calculator", "arguments": {"expression": typed}}
            turns = [{"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
                     {"role": "tool", "name": "calculator", "content": answer}]
        rows.append({"input": [{"role": "user", "content": text}, *turns, {"role": "assistant", "content": answer}],
                     "tools": [get_json_schema(calculator)]})
    return rows


hf_checkpoint = make_model
prompt_data = teachers_rows
tool_key = "tools"
apply_chat_template = True
loss_type = "sft"

rollout_batch_size = 128          # examples a step
num_rollout = 240                 # 30,720 examples of 24,057 rows
rollout_shuffle = True
lr = 3e-3
lr_warmup_iters = 20
lr_decay_style = "cosine"
weight_decay = 0.0
max_tokens_per_gpu = 8192
