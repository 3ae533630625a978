"""Filters, reward shaping and conversion as a slime user writes them."""
import torch

from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.utils.types import Sample


def keep_some(args, samples: list[Sample], **kwargs):
    rewards = [sample.get_reward_value(args) for sample in samples]
    keep = torch.tensor(rewards, dtype=torch.float64).mean() > 0.2
    return DynamicFilterOutput(keep=keep, reason=None if keep else f"low_{args.n_samples_per_prompt}")


def newest_first(args, rollout_id, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    assert rollout_id is None
    buffer.sort(key=lambda group: -group[0].index)
    num_to_pop = min(len(buffer), num_samples)
    samples = buffer[:num_to_pop]
    del buffer[:num_to_pop]
    return samples


def drop_longest(args, data: list[list[Sample]]) -> None:
    for group in data:
        max(group, key=lambda sample: (sample.response_length, sample.index)).remove_sample = True


def ranks(args, samples: list[Sample]):
    raw_rewards = [sample.get_reward_value(args) for sample in samples]
    rewards = torch.tensor(raw_rewards).reshape(-1, args.n_samples_per_prompt).argsort(dim=-1).argsort(dim=-1)
    return raw_rewards, rewards.flatten().tolist()


def convert(args, samples: list[Sample]) -> dict:
    train_data = {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [sample.get_reward_value(args) - 0.5 for sample in samples],
        "raw_reward": [sample.get_reward_value(args) for sample in samples],
        "truncated": [1 if sample.status == Sample.Status.TRUNCATED else 0 for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "loss_masks": [],
        "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
    }
    for sample in samples:
        if sample.loss_mask is None:
            sample.loss_mask = [1] * sample.response_length
        assert len(sample.loss_mask) == sample.response_length
        train_data["loss_masks"].append([0] * sample.response_length if sample.index % 2 else sample.loss_mask)
    train_data["total_lengths"] = [len(tokens) for tokens in train_data["tokens"]]
    return train_data
