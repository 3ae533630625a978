"""
TRL's GRPOTrainer on the task of configs/smollm2_1gpu_grpo.py, to run beside it on the same GPU. TRL is not one of our packages:

    pip install trl==1.16
    python benchmarks/trl_smollm2.py FOLDER [STEPS] [DTYPE]   FOLDER: SmolLM2-135M-Instruct, or a hub name

DTYPE is that of the weights. float32 (under bf16 autocast) learns as our fp32 main weights do; bfloat16 is faster, and learns less.

Prints the seconds of every step; the first ones warm up.
"""
import sys
import time
from types import SimpleNamespace

import reasoning_gym
import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from configs import smollm2_1gpu_grpo as ours


def reward(completions, entry, **unused):
    """The run file's own, for TRL's data."""
    return [ours.custom_rm(None, SimpleNamespace(response=one[0]["content"], metadata=dict(source_dataset="chain_sum", entry=e)))
            for one, e in zip(completions, entry)]


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
    task = dict(ours.prompt_data)
    rows = [dict(prompt=[dict(role="user", content=e["question"])], entry=e)
            for e in reasoning_gym.create_dataset(task.pop("reasoning_gym"), **task)]
    config = GRPOConfig(
        output_dir="outputs/trl", num_generations=ours.n_samples_per_prompt, max_completion_length=ours.rollout_max_response_len,
        per_device_train_batch_size=ours.rollout_batch_size * ours.n_samples_per_prompt if cuda else 16,
        temperature=1.0, learning_rate=ours.lr, lr_scheduler_type="constant", beta=0.0, max_steps=steps, bf16=cuda,
        gradient_checkpointing=False, save_strategy="no", logging_steps=10, report_to="none",
        model_init_kwargs=dict(dtype=dtype))
    trainer = GRPOTrainer(folder, reward_funcs=reward, args=config, train_dataset=Dataset.from_list(rows),
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
