"""
TRL's GRPOTrainer on the task of configs/smollm2_1gpu_grpo.py, to run beside it on the same GPU. TRL is not one of our packages:

    pip install trl==1.16
    python benchmarks/trl_smollm2.py FOLDER [STEPS] [DTYPE]   FOLDER: SmolLM2-135M-Instruct, or a hub name

DTYPE is that of the weights. float32 (under bf16 autocast) learns as our fp32 main weights do; bfloat16 is faster, and learns less.

Prints the seconds of every step; the first ones warm up.
"""
import re
import sys
import time

import reasoning_gym
import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

TASK = dict(size=4000, seed=1, min_terms=2, max_terms=2, min_digits=1, max_digits=2)


def last_number(completions, entry, **unused):
    """As configs/smollm2.py: the task's own verifier on the last number of the answer."""
    score = reasoning_gym.get_score_answer_fn("chain_sum")
    found = [re.findall(r"-?\d+", one[0]["content"]) for one in completions]
    return [float(bool(f) and score(f[-1], e) == 1) for f, e in zip(found, entry)]


class Clock(TrainerCallback):
    begin, seconds = 0.0, []

    def on_step_begin(self, args, state, control, **unused):
        Clock.begin = time.perf_counter()

    def on_step_end(self, args, state, control, **unused):
        Clock.seconds.append(time.perf_counter() - Clock.begin)


def main() -> None:
    folder, steps = sys.argv[1], int((sys.argv[2:] or ["60"])[0])
    dtype = getattr(torch, (sys.argv[3:] or ["float32"])[0])
    cuda = torch.cuda.is_available()
    rows = [dict(prompt=[dict(role="user", content=e["question"])], entry=e)
            for e in reasoning_gym.create_dataset("chain_sum", **TASK)]
    config = GRPOConfig(
        output_dir="outputs/trl", per_device_train_batch_size=256 if cuda else 16, num_generations=8, max_completion_length=48,
        temperature=1.0, learning_rate=1e-5, lr_scheduler_type="constant", beta=0.0, max_steps=steps, bf16=cuda,
        gradient_checkpointing=False, save_strategy="no", logging_steps=10, report_to="none",
        model_init_kwargs=dict(dtype=dtype))
    trainer = GRPOTrainer(folder, reward_funcs=last_number, args=config, train_dataset=Dataset.from_list(rows),
                          processing_class=AutoTokenizer.from_pretrained(folder), callbacks=[Clock()])
    begin = time.perf_counter()
    trainer.train()
    total, seconds = time.perf_counter() - begin, Clock.seconds
    print("seconds of each step:", " ".join(f"{s:.2f}" for s in seconds))
    late = seconds[len(seconds) // 6:]
    print(f"TRL, {dtype} weights: {steps} steps in {total:.1f} s; {sum(late) / len(late):.3f} s a step after the first "
          f"{len(seconds) - len(late)}")


if __name__ == "__main__":
    main()
