"""
hookdata.py: what do hooks give back, and can training rely on it?

    custom generate, rollout_function --siblings(), train_output()--> Samples with a mask, log-probs, versions, numbers
    custom convert --train_data()--> lists by key          data_source --OwnData--> numbered, tokenised groups, with a state

What cannot be trained as it is raises a ValueError that ends with the remedy.

Test:  pytest tests/test_hooks.py
Knows nothing about: how hooks are called (rollout.py), what they may import (hooks.py).
"""
import torch

import chat
from buffer import to_prompt
from hooks import Args, RolloutFnEvalOutput, RolloutFnTrainOutput, pop_first
from rewards import RewardError, to_reward
from sample import Sample, Status


# ---- Samples ----------------------------------------------------------------------------------------------------------
def siblings(out, sample: Sample, version: int, key: str | None, partial: bool) -> list[Sample]:
    """What a custom generate made of `sample` -> samples that training can rely on, or a ValueError."""
    made = out if isinstance(out, list) else [out]
    if not made or not all(isinstance(one, Sample) for one in made):
        raise ValueError(f"sample {sample.index}: custom_generate_function returned {out!r:.90}; return a Sample or a list")
    for one in made:
        one.group_index = sample.group_index if one.group_index is None else one.group_index
        one.index = sample.index if one.index is None else one.index
        if len(made) > 1 and one.rollout_id is None:
            one.rollout_id = sample.index    # one weight in the loss for all of them
        if partial or one.status != Status.ABORTED:          # else it is thrown away
            complete(one, version, key)
    return made


def complete(sample: Sample, version: int, key: str | None) -> None:
    """A sample that a hook made -> what training relies on, or a ValueError.

    Upstream's meaning of what is not set: no loss_mask is ones, PENDING is COMPLETED. weight_versions by request, not by
    token, cannot be used: then `version` stands, of the engines when the hook was called (the oldest it can be).
    """
    n = sample.response_length
    if sample.status == Status.FAILED:
        raise RewardError(f"sample {sample.index}: a hook gave it up (FAILED); return ABORTED to have it asked again, or "
                          "leave its group out and count it with on_reward_error='skip'")
    if sample.status == Status.PENDING:
        sample.status = Status.COMPLETED
    if not sample.loss_mask:
        sample.loss_mask = [1] * n
    if any(sample.loss_mask) and not sample.rollout_log_probs:
        raise ValueError(f"sample {sample.index}: a hook set no rollout_log_probs for its trained tokens; ask with "
                         "return_logprob=True, and take meta_info['output_token_logprobs']")
    sample.rollout_log_probs = sample.rollout_log_probs or [0.0] * n
    if len(sample.weight_versions) != n or not all(isinstance(v, int) for v in sample.weight_versions):
        sample.weight_versions = [version] * n
    sample.weight_versions = [version if m and v < 0 else v for v, m in zip(sample.weight_versions, sample.loss_mask)]
    if sample.reward is not None:
        sample.reward = to_reward(sample.reward, None, key)
    sample.check()


def train_output(out, cfg, version: int) -> tuple[list[list[Sample]], dict, int]:
    """A rollout_function's output -> groups, metrics, how many groups failed. Upstream's older form, the bare list, too."""
    samples, metrics = (out.samples, out.metrics or {}) if isinstance(out, RolloutFnTrainOutput) else (out, {})
    if samples and isinstance(samples[0], Sample):           # one flat list
        groups: dict[int, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.group_index, []).append(sample)
        samples = list(groups.values())
    samples = [[one for item in group for one in (item if isinstance(item, list) else [item])] for group in samples]
    n = len(samples)
    if cfg.on_reward_error == "skip":
        samples = [group for group in samples if all(one.status != Status.FAILED for one in group)]
    for sample in (s for group in samples for s in group):
        complete(sample, version, cfg.reward_key)
        if sample.reward is None or sample.group_index is None or sample.index is None:
            raise ValueError(f"rollout_function returned sample {sample.index} of group {sample.group_index} with reward "
                             f"{sample.reward}; set all three (samples of data_source.get_samples have the numbers)")
    return samples, metrics, n - len(samples)


def eval_output(out) -> tuple[dict[str, float], dict[str, list[Sample]]]:
    """An eval_function's output -> eval/* metrics, and the samples of each set where it has them."""
    data, metrics = (out.data, out.metrics or {}) if isinstance(out, RolloutFnEvalOutput) else (out, {})
    metrics = dict(metrics)
    for name, one in data.items():
        if not one["rewards"]:
            raise ValueError(f"eval_function returned no rewards for {name!r}; leave the set out, or give one a sample")
        metrics[f"eval/{name}"] = sum(map(float, one["rewards"])) / len(one["rewards"])
        if one.get("truncated"):
            metrics[f"eval/{name}-truncated_ratio"] = sum(map(bool, one["truncated"])) / len(one["truncated"])
    return metrics, {name: one.get("samples") or [] for name, one in data.items()}


def checked_rewards(rewards, samples: list[Sample]) -> list[float]:
    """Of custom_reward_post_process: as many as samples, finite."""
    rewards = torch.as_tensor(rewards, dtype=torch.float64).flatten()
    if len(rewards) != len(samples) or not rewards.isfinite().all():
        raise ValueError(f"custom_reward_post_process returned {len(rewards)} rewards for {len(samples)} samples, "
                         f"{int((~rewards.isfinite()).sum())} of them not finite; return (raw_rewards, rewards), one a sample")
    return rewards.tolist()


def train_data(raw: dict, own: dict) -> dict[str, list]:
    """The dict of a custom_convert_samples_to_train_data, upstream's keys, completed from `own`: buffer.to_train_data's.

    tokens, response_lengths and loss_masks are required. Any other key travels too, one entry a sample.
    """
    n = len(raw.get("tokens", ()))
    for key in ("tokens", "response_lengths", "loss_masks"):
        if len(raw.get(key, ())) != n or n == 0:
            raise ValueError(f"custom_convert_samples_to_train_data returned {len(raw.get(key, ()))} {key} for {n} rows of "
                             "tokens; give tokens, response_lengths and loss_masks, one entry a sample")
    data = {**own, **raw}
    for key, values in data.items():
        if len(values) != n:
            raise ValueError(f"custom_convert_samples_to_train_data: {n} tokens, but {len(values)} {key}; give {key} too, "
                             "one entry a sample")
    for key, dtype in dict(tokens=torch.int64, loss_masks=torch.int64, rollout_log_probs=torch.float32).items():
        data[key] = [torch.as_tensor(one, dtype=dtype) for one in data[key]]
    data["rewards"] = [float(one) for one in data["rewards"]]
    for i, (tokens, length, mask, logp) in enumerate(zip(*(data[k] for k in ("tokens", "response_lengths", "loss_masks",
                                                                            "rollout_log_probs")))):
        if not len(mask) == len(logp) == length < len(tokens):
            raise ValueError(f"custom_convert_samples_to_train_data, row {i}: {len(tokens)} tokens, response_length {length}, "
                             f"loss_mask {len(mask)}, rollout_log_probs {len(logp)}; the last three are of the response")
    return data


# ---- A data source of one's own --------------------------------------------------------------------------------------
class OwnData:
    """A user's data_source with the surface that the loop needs of buffer.DataSource: numbers, tokens, state, and the groups
    that were not needed. With partial_rollout those go to its own add_samples, as upstream has it."""

    def __init__(self, cfg, tokenizer, context_len: int, run_dir):
        self.cfg, self.tokenizer, self.context_len = cfg, tokenizer, context_len
        folder = str(run_dir / "checkpoints")
        self.own = cfg.data_source(Args(**vars(cfg) | dict(hf_checkpoint=tokenizer.name_or_path), tokenizer=tokenizer,
                                        context_len=context_len, save=folder, load=folder, rollout_global_dataset=True))
        self.examples, self.skipped, self.buffer, self.buffer_dropped = None, {}, [], 0
        self.next_group, self.next_index, self.steps = 0, 0, 0

    def __len__(self) -> int:
        return len(self.own) if hasattr(self.own, "__len__") else 0

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Fewer than asked for: the data has ended."""
        waiting = pop_first(None, None, self.buffer, num_samples)
        groups = self.own.get_samples(num_samples - len(waiting)) if len(waiting) < num_samples else []
        for group in groups:
            if not group or not isinstance(group[0], Sample):
                raise ValueError("data_source.get_samples must return groups, lists of hooks.Sample; wrap each in a list")
            number = self.next_group if group[0].group_index is None else group[0].group_index
            self.next_group = max(self.next_group, number + 1)
            for sample in group:
                sample.group_index = number
                sample.index = self.next_index if sample.index is None else sample.index
                self.next_index = max(self.next_index, sample.index + 1)
                if not sample.tokens:        # upstream's generate tokenises, and its Dataset applies the template
                    sample.tokens = self.tokenizer(self.text(sample), add_special_tokens=False)["input_ids"]
        return waiting + groups

    def text(self, sample: Sample) -> str:
        if isinstance(sample.prompt, str):
            return sample.prompt
        tools = [chat.schema(tool) for tool in self.cfg.tools] or sample.metadata.get("tools")
        text, known = to_prompt(self.cfg, self.tokenizer, sample.prompt, tools)
        sample.metadata |= known
        return text

    def add_samples(self, groups: list[list[Sample]]) -> None:
        (self.own.add_samples if self.cfg.partial_rollout or self.cfg.rollout_function else self.buffer.extend)(groups)

    def get_examples(self) -> list[Sample]:
        return []

    def state_dict(self) -> dict:
        """Of a source that has state_dict(); else its save(step) is told, as upstream does, and writes where it likes."""
        state = {"next_group": self.next_group, "next_index": self.next_index, "steps": self.steps,
                 "buffer": [[s.to_dict() for s in group] for group in self.buffer]}
        if hasattr(self.own, "state_dict"):
            state["own"] = self.own.state_dict()
        else:
            self.own.save(self.steps)
        self.steps += 1                      # the loop asks once a step, so this counts them
        return state

    def load_state_dict(self, state: dict) -> None:
        self.next_group, self.next_index, self.steps = state["next_group"], state["next_index"], state["steps"] + 1
        self.buffer = [[Sample.from_dict(d) for d in group] for group in state["buffer"]]
        if "own" in state:
            self.own.load_state_dict(state["own"])
        else:
            self.own.load(state["steps"])
