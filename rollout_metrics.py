"""
rollout_metrics.py: what do the samples of a step, or of an evaluation, say in numbers?

    samples --of_step--> rollout/*, perf/*          groups of held-out prompts --of_evaluation--> eval/*

Rewards are means over rollouts: one with several branches counts once (Sample.rollout). Lengths are means over samples.

Test:  pytest tests/test_rollout.py        The README's "Metrics" says what each is.
Knows nothing about: engines, the loop.
"""
from collections import Counter, defaultdict
from math import comb

from sample import Sample, Status


def of_step(cfg, samples: list[Sample], seconds: float, version: int) -> dict[str, float]:
    """seconds: that generation took; version: of the engines' weights."""
    lengths = [s.response_length for s in samples]
    groups = defaultdict(list)
    for sample in samples:
        groups[sample.group_index].append(sample)
    rewards = [rollout_rewards(group, cfg.reward_key) for group in groups.values()]
    constant = Counter(round(group[0], 2) for group in rewards if max(group) == min(group))
    return {
        "rollout/raw_reward": mean(r for group in rewards for r in group), "rollout/response_len/mean": mean(lengths),
        "rollout/response_len/min": min(lengths), "rollout/response_len/max": max(lengths),
        "rollout/response_len/median": sorted(lengths)[len(lengths) // 2],
        "rollout/truncated_ratio": mean(s.status == Status.TRUNCATED for s in samples),
        "rollout/stale_tokens": mean(v < version for s in samples for v in s.trained_versions()),
        "perf/generate_time": seconds, "perf/tokens_per_gpu_per_sec": sum(lengths) / seconds / cfg.rollout_num_gpus,
        **turn_metrics("rollout/", samples), **{f"rollout/zero_std/count_{reward}": n for reward, n in constant.items()}}


def of_evaluation(cfg, name: str, groups: list[list[Sample]]) -> dict[str, float]:
    """groups: of each held-out prompt its samples, scored."""
    samples = [s for group in groups for s in group]
    rewards = [rollout_rewards(group, cfg.eval_reward_key) for group in groups]
    out = {f"eval/{name}": mean(r for group in rewards for r in group),
           f"eval/{name}-truncated_ratio": mean(s.status == Status.TRUNCATED for s in samples),
           f"eval/{name}-response_len": mean(s.response_length for s in samples), **turn_metrics(f"eval/{name}-", samples)}
    return out | ({f"eval/{name}-pass@{k}": v for k, v in pass_at_k(rewards).items()} if cfg.log_passrate else {})


def rollout_rewards(group: list[Sample], key: str | None) -> list[float]:
    """One number a rollout: where it has several branches, the mean of theirs."""
    branches = defaultdict(list)
    for sample in group:
        branches[sample.rollout].append(sample.get_reward_value(key))
    return [sum(each) / len(each) for each in branches.values()]


def pass_at_k(rewards: list[list[float]]) -> dict[int, float]:
    """Probability that at least one of k samples is right (reward > 0.5), k = 1, 2, 4, ...: 1 - C(n - c, k) / C(n, k),
    averaged over prompts (Codex 2107.03374, eq. 1: unbiased, unlike 1 - (1 - p)^k)."""
    n = min(len(group) for group in rewards)
    out, k = {}, 1
    while k <= n:
        out[k] = mean(1 - comb(len(g) - sum(r > 0.5 for r in g), k) / comb(len(g), k) for g in rewards)
        k *= 2
    return out


def turn_metrics(prefix: str, samples: list[Sample]) -> dict[str, float]:
    """Of conversations: turns of the model, calls of tools and those that failed, a sample."""
    if not any(s.turns for s in samples):
        return {}
    roles = [Counter(turn["role"] for turn in s.turns) for s in samples]
    return {f"{prefix}turns": mean(r["assistant"] for r in roles), f"{prefix}tool_calls": mean(r["tool"] for r in roles),
            f"{prefix}tool_errors": mean(sum("error" in turn for turn in s.turns) for s in samples)}


def mean(values) -> float:
    values = [float(v) for v in values]
    return sum(values) / len(values) if values else 0.0
