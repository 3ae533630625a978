"""
helpers.py: what several test files call. A Config without a run file, engines that run, log-probs by transformers, and worker
processes that cannot hang a test.

    run_workers(function, world, ...) --spawn--> function(rank, world, port, ...) in each process --> [result of each rank]

Left out on purpose: fixtures; those are in conftest.py.
"""
import contextlib
import dataclasses
import functools
import gc
import io
import multiprocessing
import os
import pathlib
import queue
import time
import traceback
from collections.abc import Callable

import psutil
import torch

import configs.base
from buffer import DataSource
from configs.base import Config, load
from engines import Engines, free_port
from sample import Sample


# A whole run on the tiny model; .format(model=its folder).
RUN_FILE = '''
hf_checkpoint = {model!r}
def rows():
    return [dict(input=f"{{a}}+{{b}}=", label=str(a + b)) for a in range(10) for b in range(10)]
prompt_data = rows
label_key = "label"
def first_digit(args, sample):
    """A reward with some spread on a random model: the share of digits in the answer."""
    import os, time
    if sample.index >= int(os.environ.get("REWARDS_HANG_FROM", 10**9)):      # holds a run at the step of this sample
        time.sleep(1000)
    return sum(c.isdigit() for c in sample.response) / max(len(sample.response), 1)
custom_rm = first_digit
rollout_batch_size = 4
n_samples_per_prompt = 4
rollout_max_response_len = 8
rollout_shuffle = True
num_rollout = 4
save_interval = 2
lr = 1e-3
colocate = True
'''


def sums() -> list[dict]:
    """Rows for the tiny model."""
    return [dict(input=f"{a}+{b}=", label=str(a + b)) for a in range(5) for b in range(8)]


async def share_of_digits(args, sample):
    """A reward with some spread on a random model."""
    return sum(c.isdigit() for c in sample.response) / max(len(sample.response), 1)


@torch.no_grad()
def assert_log_probs(model, sample, temperature: float = 1.0, mask: list[int] | None = None) -> None:
    """rollout_log_probs are those that `model`, of transformers, gives; and 0 where mask is 0."""
    tokens = torch.tensor([sample.tokens])
    all_logp = (model(tokens).logits[0] / temperature).log_softmax(-1)                       # [T, V]
    want = all_logp.gather(1, tokens[0, 1:, None])[-sample.response_length:, 0]              # [R]
    want = want if mask is None else want * torch.tensor(mask)
    torch.testing.assert_close(torch.tensor(sample.rollout_log_probs), want, atol=1e-4, rtol=0)


@functools.cache
def run_config(run_file: str) -> Config:
    """Of a run file in configs/."""
    return load(str(pathlib.Path(configs.base.__file__).parent / run_file))


def prompts(run_file: str, rows: list[dict], tokenizer) -> list[Sample]:
    """The rows as that run would read them."""
    return DataSource(dataclasses.replace(run_config(run_file), prompt_data=lambda: rows), tokenizer, 256).prompts


def make_cfg(**changes) -> Config:
    """The defaults with what load() would have filled in for a CPU, and these changes; not validated."""
    resolved = dict(device="cpu", dtype="float32", eps_clip_high=changes.get("eps_clip", 0.2), max_logprob_diff=1e-4,
                    health_check_interval_s=10.0,
                    max_staleness=8 * changes.get("partial_rollout", False) + changes.get("async_mode", False))
    return dataclasses.replace(Config(), **resolved | changes)


@contextlib.contextmanager
def running_engines(log_dir: pathlib.Path, model: str, ray_options: dict | None = None, **changes):
    """Engines of the folder `model` under a Ray of their own; changes: of the Config."""
    import ray
    ray.init("local", num_cpus=8, include_dashboard=False, **(ray_options or {}))
    try:
        with Engines(make_cfg(**dict(start_timeout_s=400.0) | changes), log_dir, model) as engines:
            gc.collect()
            gc.freeze()                      # as train.py: a collection stops this process for half a second
            yield engines
    finally:                                 # also where the start fails: other modules have their own Ray
        ray.shutdown()


def wait_for(condition: Callable, timeout_s: float, process) -> None:
    """Until condition() holds; `process`, a train.py, must live until then."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, "train.py ended early: " + (process.stdout.read()[-3000:] if process.stdout else "")
        assert time.monotonic() < end, f"not reached in {timeout_s} s"
        time.sleep(0.05)


def run_workers(function: Callable, world: int, *args, limit_s: float = 120) -> list:
    """-> what function(rank, world, port, *args) returned on each rank. `function` must be importable by its name.

    A worker that raises or dies fails the test at once with its traceback; all that is left is killed.
    """
    context = multiprocessing.get_context("spawn")
    results, port = context.Queue(), free_port("127.0.0.1")
    # NOTE: not daemons, because those may have no children, and Megatron writes checkpoints in some.
    workers = [context.Process(target=_work, args=(results, function, rank, world, port, *args)) for rank in range(world)]
    for worker in workers:
        worker.start()
    end, out = time.monotonic() + limit_s, {}
    try:
        while len(out) < world:
            assert time.monotonic() < end, f"{function.__name__}: only ranks {sorted(out)} of {world} were done in {limit_s} s"
            try:
                rank, error, data = results.get(timeout=0.2)
            except queue.Empty:
                dead = {r: w.exitcode for r, w in enumerate(workers) if w.exitcode and r not in out}
                assert not dead, f"{function.__name__}: workers died without a word, rank: exit code {dead}"
                continue
            assert error is None, f"rank {rank} of {world} failed:\n{error}"
            out[rank] = torch.load(io.BytesIO(data), weights_only=False)
        return [out[rank] for rank in range(world)]
    finally:
        for worker in workers:
            worker.join(5 if len(out) == world else 0)
            if worker.is_alive():
                worker.kill()


def _work(results, function, rank, world, port, *args):
    torch.set_num_threads(1)                 # ranks share the cores; more threads only fight
    try:
        data = io.BytesIO()                  # as bytes: a tensor in a queue is shared memory of a process that is leaving
        torch.save(function(rank, world, port, *args), data)
        results.put((rank, None, data.getvalue()))
    except BaseException:
        results.put((rank, traceback.format_exc(), b""))


def output_of(process: psutil.Process) -> str:
    """The file that its stdout goes to."""
    try:
        return os.readlink(f"/proc/{process.pid}/fd/1")
    except OSError:                          # it has ended, or is somebody else's
        return ""
