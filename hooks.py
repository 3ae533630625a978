"""
hooks.py: what does a hook get, and what may it import? Upstream's names, so that a slime user's function file works here when
its import lines are changed to `from hooks import ...`.

    setting in the run file              signature (args: every setting of the run, and what Rollout.args adds)
    custom_generate_function             async (args, sample, sampling_params[, evaluation]) -> Sample | list of siblings
    custom_rm                            [async] (args, sample, **kw) -> float | dict; group_rm: (args, samples, **kw) -> list
    dynamic_sampling_filter              (args, samples, **kw) -> DynamicFilterOutput | bool
    buffer_filter                        (args, rollout_id, buffer, num_samples) -> groups, taken out of the buffer
    rollout_sample_filter                (args, groups) -> None; sets sample.remove_sample
    custom_reward_post_process           (args, samples) -> (raw_rewards, rewards)
    data_source                          class (args): get_samples(n) -> groups, add_samples(groups), save(step), load(step)
    rollout_function                     [async] (args, rollout_id, data_source, evaluation=False) -> RolloutFnTrainOutput
    eval_function                        the same with evaluation=True -> RolloutFnEvalOutput
    custom_convert_samples_to_train_data (args, samples) -> dict of lists, one entry a sample

    from hooks import Sample, GenerateState, post           # slime.utils.types, .rollout.sglang_rollout, .utils.http_utils

Test:  pytest tests/test_hooks.py
Knows nothing about: how groups are made (rollout.py). What it checks is what training relies on.
"""
import asyncio
import contextvars
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sample import Sample, Status
from rewards import RewardError

# The run's Rollout, for functions that upstream gives no args; set in everything that Rollout starts.
running: contextvars.ContextVar = contextvars.ContextVar("running")


# ---- What hooks return -----------------------------------------------------------------------------------------------
@dataclass
class DynamicFilterOutput:
    """What a dynamic_sampling_filter may return instead of a bool."""
    keep: bool
    reason: str | None = None                # counted as rollout/dynamic_filter/drop_<reason>


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
class GenerateState:
    """Upstream's bundle of what a custom generate needs."""

    def __init__(self, args):
        self.args, self.tokenizer, self.processor = args, args.tokenizer, None
        self.semaphore = args.rollout.client.slots           # not needed: post() waits for it by itself
        self.sampling_params = args.rollout.sampling_params(args.rollout.cfg, Sample(index=0), evaluation=False)


async def post(url: str, payload: dict, max_retries: int = 0, headers: dict | None = None) -> Any:
    """A server's JSON answer. Of the router's /generate: whole, whatever engines die and weights change meanwhile."""
    return await running.get().client.post(url, payload)


async def generate(args, sample: Sample, sampling_params: dict) -> Sample:
    """The default generation of one sample."""
    return await args.generate(sample, sampling_params)


async def async_rm(args, sample: Sample, **kw) -> float | dict:
    """The reward by rm_type or custom_rm."""
    return await args.rollout.rewarder.score(args.rollout.cfg, sample, **kw)


async def batched_async_rm(args, samples: list[Sample], **kw) -> list:
    return await asyncio.gather(*(async_rm(args, sample, **kw) for sample in samples))


async def generate_and_rm_group(args, group: list[Sample], sampling_params: dict | None = None, evaluation: bool = False):
    """A group generated and scored, as the default rollout does it (with its sampling_params); None where it failed."""
    return await args.rollout.generate_group(args.rollout.cfg, group, evaluation)


def run(coroutine) -> Any:
    """For a rollout_function that is a plain def: upstream's slime.utils.async_utils.run."""
    return running.get().client.run(coroutine)


async def call(hook: Callable, *args, **kw) -> Any:
    """A hook that may be async; a plain one runs in a thread, so that it may block and call run()."""
    return await hook(*args, **kw) if inspect.iscoroutinefunction(hook) else await asyncio.to_thread(hook, *args, **kw)


# ---- What comes back -------------------------------------------------------------------------------------------------
def complete(sample: Sample, version: int) -> None:
    """A sample that a custom generate returns -> what training relies on, or a ValueError.

    Upstream's meaning of what is not set: no loss_mask is ones. weight_versions by request, not by token, cannot be used:
    then, and where there are none, `version` stands, of the engines when the hook was called (the oldest it can be).
    """
    n = sample.response_length
    if sample.status == Status.FAILED:
        raise RewardError(f"sample {sample.index}: custom_generate_function gave it up (FAILED); return ABORTED to have it "
                          "asked again, or leave its group out and count it with on_reward_error='skip'")
    if not sample.loss_mask:
        sample.loss_mask = [1] * n
    if any(sample.loss_mask) and not sample.rollout_log_probs:
        raise ValueError(f"sample {sample.index}: custom_generate_function set no rollout_log_probs for its trained tokens; "
                         "ask with return_logprob=True, and take meta_info['output_token_logprobs']")
    if len(sample.weight_versions) != n:
        sample.weight_versions = [version] * n
    sample.check()


def train_output(out) -> tuple[list[list[Sample]], dict]:
    """A rollout_function's output -> groups, metrics. Upstream's older form, the bare list, too."""
    samples, metrics = (out.samples, out.metrics or {}) if isinstance(out, RolloutFnTrainOutput) else (out, {})
    if samples and isinstance(samples[0], Sample):           # one flat list
        groups: dict[int, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.group_index, []).append(sample)
        samples = list(groups.values())
    for sample in (s for group in samples for s in group):
        complete(sample, running.get().client.weight_version)
        if sample.reward is None or sample.group_index is None or sample.index is None:
            raise ValueError(f"rollout_function returned sample {sample.index} of group {sample.group_index} with reward "
                             f"{sample.reward}; set all three (samples of data_source.get_samples have the numbers)")
    return samples, metrics


def eval_output(out) -> dict[str, float]:
    """An eval_function's output -> eval/* metrics."""
    data, metrics = (out.data, out.metrics or {}) if isinstance(out, RolloutFnEvalOutput) else (out, {})
    metrics = dict(metrics)
    for name, one in data.items():
        metrics[f"eval/{name}"] = sum(map(float, one["rewards"])) / len(one["rewards"])
        if "truncated" in one:
            metrics[f"eval/{name}-truncated_ratio"] = sum(map(bool, one["truncated"])) / len(one["truncated"])
    return metrics


def checked_rewards(rewards, samples: list[Sample]) -> list[float]:
    """Of custom_reward_post_process: as many as samples, finite."""
    rewards = torch.as_tensor(rewards, dtype=torch.float64)
    if len(rewards) != len(samples) or not rewards.isfinite().all():
        raise ValueError(f"custom_reward_post_process returned {len(rewards)} rewards for {len(samples)} samples, "
                         f"{int((~rewards.isfinite()).sum())} of them not finite; return (raw_rewards, rewards), one a sample")
    return rewards.tolist()


def train_data(raw: dict, samples: list[Sample], rewards: list[float]) -> dict[str, list]:
    """The dict of a custom_convert_samples_to_train_data -> as buffer.to_train_data makes it; upstream's keys.

    tokens, response_lengths and loss_masks are required; what is missing of the others is taken from the samples.
    """
    given = dict(raw)
    n = len(given.get("tokens", ()))
    for key in ("tokens", "response_lengths", "loss_masks"):
        if key not in given or len(given[key]) != n or n == 0:
            raise ValueError(f"custom_convert_samples_to_train_data returned {len(given.get(key, ()))} {key} for {n} tokens; "
                             "give tokens, response_lengths and loss_masks, one entry a sample")
    own = dict(rewards=rewards, raw_reward=[0.0] * n, truncated=[s.status == Status.TRUNCATED for s in samples],
               sample_indices=[s.index for s in samples], group_indices=[s.group_index for s in samples],
               rollout_ids=[s.index if s.rollout_id is None else s.rollout_id for s in samples],
               rollout_log_probs=[s.rollout_log_probs or [0.0] * s.response_length for s in samples])
    for key, values in own.items():
        if len(given.setdefault(key, values)) != n:
            raise ValueError(f"custom_convert_samples_to_train_data: {n} tokens for {len(samples)} samples; give {key} too")
    kinds = dict(tokens=torch.int64, loss_masks=torch.int64, rollout_log_probs=torch.float32)
    for key, dtype in kinds.items():
        given[key] = [torch.as_tensor(one, dtype=dtype) for one in given[key]]
    for i, (tokens, length, mask, logp) in enumerate(zip(*(given[k] for k in ("tokens", "response_lengths", "loss_masks",
                                                                             "rollout_log_probs")))):
        if not len(mask) == len(logp) == length < len(tokens):
            raise ValueError(f"custom_convert_samples_to_train_data, row {i}: {len(tokens)} tokens, response_length {length}, "
                             f"loss_mask {len(mask)}, rollout_log_probs {len(logp)}; the last three are of the response")
    return given


# ---- A data source of one's own --------------------------------------------------------------------------------------
class OwnData:
    """A user's data_source with the surface that the loop needs of buffer.DataSource: numbers, tokens, state."""

    def __init__(self, cfg, tokenizer, context_len: int, run_dir):
        self.cfg, self.tokenizer, self.context_len = cfg, tokenizer, context_len
        folder = str(run_dir / "checkpoints")
        args = types.SimpleNamespace(**vars(cfg), tokenizer=tokenizer, context_len=context_len, save=folder, load=folder)
        self.own, self.examples, self.skipped = cfg.data_source(args), None, {}
        self.next_group, self.next_index, self.steps = 0, 0, 0

    def __len__(self) -> int:
        return len(self.own) if hasattr(self.own, "__len__") else 0

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Fewer than asked for: the data has ended."""
        groups = self.own.get_samples(num_samples)
        for group in groups:
            if not group or not isinstance(group[0], Sample):
                raise ValueError("data_source.get_samples must return groups, lists of hooks.Sample; wrap each in a list")
            number = self.next_group if group[0].group_index is None else group[0].group_index
            self.next_group = max(self.next_group, number + 1)
            for sample in group:
                sample.group_index = number
                sample.index = self.next_index if sample.index is None else sample.index
                self.next_index = max(self.next_index, sample.index + 1)
                if not sample.tokens:        # upstream's custom generates tokenise by themselves
                    sample.tokens = self.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
        return groups

    def add_samples(self, groups: list[list[Sample]]) -> None:
        self.own.add_samples(groups)

    def get_examples(self) -> list[Sample]:
        return []

    def state_dict(self) -> dict:
        """Of a source that has state_dict(); else its save(step) is told, as upstream does, and writes where it likes."""
        state = {"next_group": self.next_group, "next_index": self.next_index, "steps": self.steps}
        if hasattr(self.own, "state_dict"):
            return state | {"own": self.own.state_dict()}
        self.own.save(self.steps)            # the loop asks once a step, so this counts them
        self.steps += 1
        return state

    def load_state_dict(self, state: dict) -> None:
        self.next_group, self.next_index, self.steps = state["next_group"], state["next_index"], state["steps"] + 1
        if "own" in state:
            self.own.load_state_dict(state["own"])
        else:
            self.own.load(state["steps"])
