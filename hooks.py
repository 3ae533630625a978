"""
hooks.py: what does a hook get, and what may it import? Upstream's names, so that a slime user's function file works here when
its import lines are changed to `from hooks import ...`.

    setting in the run file              signature (args: Args, except where it says cfg: the Config alone)
    custom_generate_function             async (args, sample, sampling_params[, evaluation]) -> Sample | list of siblings
    custom_rm                            async (args, sample, **kw) -> float | dict; group_rm: (args, samples, **kw) -> list
                                         def: the same with cfg, on copies in another process
    dynamic_sampling_filter              (args, samples, **kw) -> DynamicFilterOutput | bool
    buffer_filter                        (cfg, rollout_id, buffer, num_samples) -> groups, taken out of the buffer
    rollout_sample_filter                (args, groups) -> None; sets sample.remove_sample
    custom_reward_post_process           (args, samples) -> (raw_rewards, rewards)
    data_source                          class (args): get_samples(n) -> groups, add_samples(groups), save(step), load(step)
    rollout_function                     [async] (args, rollout_id, data_source, evaluation=False) -> RolloutFnTrainOutput
    eval_function                        the same with evaluation=True -> RolloutFnEvalOutput
    custom_convert_samples_to_train_data (args, samples) -> dict of lists, one entry a sample

    from hooks import Sample, GenerateState, post           # slime.utils.types, .rollout.sglang_rollout, .utils.http_utils

Test:  pytest tests/test_hooks.py
Knows nothing about: how groups are made (rollout.py), what becomes of what hooks return (hookdata.py).
"""
import asyncio
import contextvars
import functools
import inspect
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from configs.base import import_function, unknown
from sample import Sample, Status
from workers import in_thread

# The run's Rollout, for functions that upstream gives no args; set in everything that Rollout starts.
running: contextvars.ContextVar = contextvars.ContextVar("running")


class Args(types.SimpleNamespace):
    """What hooks get as `args`: every setting, what Rollout adds, and what hooks themselves set. No setting reads it back."""

    def __getattr__(self, name: str):
        raise AttributeError(explain(name))

    def __deepcopy__(self, memo) -> "Args":  # hooks copy it to write to it; engines and event loops have no copies
        return Args(**vars(self))


@functools.cache                             # hooks ask getattr(args, name, default) for each sample
def explain(name: str) -> str:
    return f"args.{name}: {unknown(name)}"


# ---- What hooks return -----------------------------------------------------------------------------------------------
@dataclass
class DynamicFilterOutput:
    """What a dynamic_sampling_filter may return instead of a bool."""
    keep: bool
    reason: str | None = None                # counted as rollout/dynamic_filter/drop_<reason>
    keep_when_insufficient: bool = False     # keep it nevertheless where another group would have to be asked for


@dataclass
class RolloutFnTrainOutput:
    samples: list[list[Sample]]              # groups; their rewards set
    metrics: dict[str, float] | None = None


@dataclass
class RolloutFnEvalOutput:
    data: dict[str, dict[str, list]]         # name of a held-out set -> rewards, and perhaps truncated, samples
    metrics: dict[str, float] | None = None


def check_reward_nonzero_std(args, samples: list[Sample], **kw) -> DynamicFilterOutput:
    """DAPO's filter (2503.14476, sec. 3.2): a group whose rewards are all equal has advantage 0 and teaches nothing."""
    rewards = [s.get_reward_value(args) for s in samples]
    keep = max(rewards) - min(rewards) > 1e-6
    return DynamicFilterOutput(keep, None if keep else f"zero_std_{rewards[0]:.1f}")


def pop_first(args, rollout_id, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    """The default buffer_filter: what has waited longest."""
    groups = buffer[:num_samples]
    del buffer[:num_samples]
    return groups


# ---- What hooks call -------------------------------------------------------------------------------------------------
DataSource = object                          # upstream's abstract base of data sources; there is nothing to inherit
load_function = functools.partial(import_function, "load_function")


def load_tokenizer(folder: str, **kw):
    from transformers import AutoTokenizer   # 3 s to import: only where it is asked for
    return AutoTokenizer.from_pretrained(folder, **kw)


class GenerateState:
    """Upstream's bundle of what a custom generate needs."""

    def __init__(self, args):
        self.args, self.tokenizer, self.processor = args, args.tokenizer, None
        self.semaphore = args.rollout.client.slots           # not needed: post() waits for it by itself
        params = args.rollout.sampling_params(args.rollout.cfg, Sample(index=0), evaluation=False)
        self.sampling_params = {k: v for k, v in params.items() if k != "sampling_seed"}     # each sample has its own


def current():
    """The Rollout on whose behalf this runs."""
    rollout = running.get(None)
    if rollout is None:
        raise ValueError("hooks.post() and hooks.run() need to know whose engines are meant, and a thread of your own does "
                         "not; start it with asyncio.to_thread, or call generate_and_rm_group(args, ...) in it")
    return rollout


async def inside(rollout, coroutine) -> Any:
    """In the client's event loop, also from a thread that has another one."""
    if asyncio.get_running_loop() is rollout.client.loop:
        return await coroutine

    async def enter():
        running.set(rollout)
        return await coroutine
    return await asyncio.wrap_future(rollout.client.start(enter()))


async def post(url: str, payload: dict, max_retries: int = 0, headers: dict | None = None) -> Any:
    """A server's JSON answer. Of the router's /generate: whole, whatever engines die and weights change meanwhile. How often
    it is tried is the setting request_retries; max_retries is not read."""
    rollout = current()
    return await inside(rollout, rollout.client.post(url, payload, headers))


async def generate(args, sample: Sample, sampling_params: dict) -> Sample:
    """The default generation of one sample."""
    params = args.rollout.sampling_params(args.rollout.cfg, sample, evaluation=False) | sampling_params
    return await inside(args.rollout, args.generate(sample, params))


async def generate_and_rm(args, sample: Sample, sampling_params: dict | None = None, evaluation: bool = False):
    """One sample generated and scored, by custom_generate_function where there is one; a list where that returns several."""
    rollout = args.rollout
    out = await inside(rollout, rollout.generate_and_score(rollout.cfg, sample, evaluation, sampling_params))
    return out[0] if len(out) == 1 else out


async def generate_and_rm_group(args, group: list[Sample], sampling_params: dict | None = None, evaluation: bool = False):
    """A group generated and scored as the default rollout does it; where that failed (on_reward_error="skip") without rewards.
    sampling_params: what is not as the settings say."""
    rollout = args.rollout
    out = await inside(rollout, rollout.generate_group(rollout.cfg, group, evaluation, sampling_params))
    for sample in group if out is None else ():
        sample.status, sample.reward = Status.FAILED, None
    return group if out is None else out


async def async_rm(args, sample: Sample, **kw) -> float | dict:
    """The reward by rm_type or custom_rm."""
    return await inside(args.rollout, args.rollout.rewarder.score(args.rollout.cfg, sample, **kw))


async def batched_async_rm(args, samples: list[Sample], **kw) -> list:
    """Of several; with group_rm in one call of custom_rm."""
    if args.rollout.cfg.group_rm:
        return await async_rm(args, samples, **kw)
    return await asyncio.gather(*(async_rm(args, sample, **kw) for sample in samples))


def run(coroutine) -> Any:
    """For a rollout_function that is a plain def: upstream's slime.utils.async_utils.run."""
    client = current().client
    if threading.current_thread() is client.thread:
        coroutine.close()
        raise ValueError("hooks.run() would wait for itself here; make the hook async def, and await")
    return client.run(coroutine)


async def call(hook: Callable, *args, **kw) -> Any:
    """A hook that may be async; a plain one runs in a thread, so that it may block and call run()."""
    out = await in_thread(hook, *args, **kw)
    return await out if inspect.isawaitable(out) else out
