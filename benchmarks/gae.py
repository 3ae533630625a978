"""
gae.py: how long does GAE take for 256 answers of 16,384 tokens? The chunked scan of algos.py beside two plain loops.

    python benchmarks/gae.py [cpu | cuda]

by token    for each answer, for each token from the last to the first: the textbook's loop, in Python floats
by column   for each token from the last to the first, all answers at once: the loop of most RL libraries
ours        algos.gae, with a tenth of the tokens masked (a tool's), and algos.discounted_sums, the scan alone
"""
import sys
import time
import types

import torch

import algos

B, T, GAMMA, LAMBD = 256, 16384, 0.999, 0.95


def by_token(rewards: list[float], values: list[float]) -> list[float]:
    out, last, following = [0.0] * len(rewards), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        last = rewards[t] + GAMMA * following - values[t] + GAMMA * LAMBD * last
        out[t], following = last, values[t]
    return out


def by_column(rewards, values):
    out, last, following = torch.empty_like(rewards), torch.zeros_like(rewards[:, 0]), torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        last = rewards[:, t] + GAMMA * following - values[:, t] + GAMMA * LAMBD * last
        out[:, t], following = last, values[:, t]
    return out


def seconds(function, device: str, times: int = 5) -> tuple[float, object]:
    """Fastest of some -> seconds, result"""
    best, result = float("inf"), function()                # the first one compiles, chooses kernels, gets memory
    for _ in range(times):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        result = function()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return best, result


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(B, T, generator=generator).to(device)
    mask = (torch.rand(B, T, generator=generator) > 0.1).float().to(device)
    rewards = torch.rand(B, generator=generator).to(device)
    cfg = types.SimpleNamespace(gamma=GAMMA, lambd=LAMBD, kl_coef=0.0)

    whole = algos.AdvantageInput(rewards, torch.ones_like(mask), values=values)
    per_token = algos.token_rewards(cfg, whole)
    some = 8                                 # answers; the loop by token takes as long for each
    begin = time.perf_counter()
    rows = [by_token(r.tolist(), v.tolist()) for r, v in zip(per_token[:some].cpu(), values[:some].cpu())]
    token_s = (time.perf_counter() - begin) * B / some
    column_s, column = seconds(lambda: by_column(per_token, values), device, 2)
    delta = per_token + GAMMA * torch.nn.functional.pad(values[:, 1:], (0, 1)) - values
    ours = {"algos.gae, nothing masked": lambda: algos.gae(cfg, whole),
            "algos.gae, a tenth masked": lambda: algos.gae(cfg, algos.AdvantageInput(rewards, mask, values=values)),
            "algos.discounted_sums": lambda: algos.discounted_sums(delta, GAMMA * LAMBD)}
    print(f"{B} x {T} on {device}; by token {token_s:.2f} s ({some} of {B} measured), by column {column_s * 1e3:.1f} ms")
    for name, function in ours.items():
        s, got = seconds(function, device)
        print(f"{name:28} {s * 1e3:8.2f} ms   {token_s / s:7.0f} x by token   {column_s / s:7.1f} x by column")
        if "tenth" not in name:
            scale = column.abs().max()
            print(f"{'':28} largest difference to the loops, of the largest value: {(got - column).abs().max() / scale:.1e}, "
                  f"{(got[:some].cpu() - torch.tensor(rows)).abs().max() / scale.cpu():.1e}")


if __name__ == "__main__":
    main()
