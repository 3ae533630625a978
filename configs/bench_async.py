"""
What overlap gives: a trainer and an engine on a GPU each, answers of very different lengths, a reward that takes a second from
the middle of the run on. Random weights of Qwen3-0.6B's shape.

    python benchmarks/overlap.py outputs/overlap             this run, synchronous, one step off and fully asynchronous

The environment sets FREE_STEPS (half of the steps) and LONGEST (tokens of the longest answers).
"""
import asyncio
import os
import random

from configs.shapes import random_model

_random, _steps, _longest = random.Random(0), int(os.environ.get("FREE_STEPS", 8)), int(os.environ.get("LONGEST", 2048))
rollout_batch_size, n_samples_per_prompt, num_rollout = 32, 8, 2 * _steps + 3       # the last 3: engines run out of work
_slow_from = _steps * 32          # groups: the second half of the run
hf_checkpoint = random_model("Qwen/Qwen3-0.6B")
rollout_max_response_len = _longest


def prompt_data() -> list[dict]:
    return [dict(input="".join(chr(_random.randrange(32, 127)) for _ in range(128))) for _ in range(512)]


async def custom_generate_function(args, sample, sampling_params):
    """1/32 of the longest up to the longest, most of them short; random weights never end an answer."""
    length = int(_longest / 32 * 32 ** (random.Random(sample.index).random() ** 2))
    return await args.generate(sample, sampling_params | {"max_new_tokens": length, "ignore_eos": True})


async def custom_rm(args, sample):
    """A judge that takes its time, elsewhere."""
    await asyncio.sleep(1.0 if sample.group_index >= _slow_from else 0.0)
    return float(sample.index % 2)


lr = 1e-6
rollout_num_gpus = 1
sglang = dict(max_running_requests=256)      # what CUDA graphs are captured for; 500 at once took 40 ms a token, 256 took 7
max_tokens_per_gpu = 16384
check_weight_update_interval = 0
