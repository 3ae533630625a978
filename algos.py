"""
algos.py: what is the maths? Log-probs, KL, advantages, losses: torch only.

    hidden states [R, H], output matrix [V/tp, H] --log_probs_and_entropy--> logp, entropy [R]
    rewards, groups ------------------------------advantages-------------> A [R]
    logp, old_logp, ref_logp, rollout_logp, A ----policy_loss------------> loss, metrics

Test:  pytest tests/test_algos.py
Knows nothing about: Ray, SGLang, Megatron. A process group is an argument; with None the same code runs on one process.
Shapes: R response tokens of a micro-batch (all its samples, one after the other), V vocabulary, H hidden, c chunk.

Four policies, four names: `logp` (current weights), `old_logp` (trainer, before the first update on this rollout),
`rollout_logp` (what the engine reported when it sampled), `ref_logp` (the reference).

Denominators: every sample carries a `loss_weight` that buffer.py fixes for the whole optimizer step, over all ranks,
before micro-batches are cut. A loss is then a plain sum, so it cannot depend on how samples are packed or split.
"""
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


# ---- One kernel instead of many --------------------------------------------------------------------------------------
def fused(function: Callable) -> Callable:
    """`function` as one kernel on a GPU (torch.compile), which reads and writes the whole tensor once, not at each operation.
    On a CPU as it is: there it would need a C++ compiler, and save little."""
    @functools.cache
    def compiled():                                      # at its first use: the compiler alone takes seconds to import
        torch._dynamo.config.recompile_limit = 64        # one for each width, with and without gradient, view or not
        return torch.compile(function, dynamic=True)

    def call(x, *args):
        if not x.is_cuda:
            return function(x, *args)
        run = compiled()
        torch._dynamo.mark_static(x, x.dim() - 1)        # rows vary from batch to batch, the width is the model's
        return run(x, *args)
    return call


# ---- Log-probs -------------------------------------------------------------------------------------------------------
@fused
def _largest(z, temperature, columns):
    return _scaled(z, temperature, columns).amax(-1)


@fused
def _softmax_sums(z, top, column, inside, temperature, columns):
    """-> [3, c]: sum of exp(z - top); the target's z - top, on the rank that has it; sum of exp(z - top) (z - top)."""
    z = _scaled(z, temperature, columns) - top[:, None]
    p = z.exp()
    target = z.gather(-1, column[:, None])[:, 0].where(inside, 0)
    return torch.stack([p.sum(-1), target, (p * z.clamp(min=-1e30)).sum(-1)])             # clamp: 0 * -inf would be NaN


@fused
def _logits_grad(z, column, inside, lse, entropy, d_logp, d_entropy, temperature, columns):
    """d logp / dz = onehot - p;  dH / dz = -p (log p + H). -> dz [c, V/tp] in the dtype of z"""
    log_p = (_scaled(z, temperature, columns) - lse[:, None]).clamp(min=-1e30)
    dz = -log_p.exp() * (d_logp[:, None] + d_entropy[:, None] * (log_p + entropy[:, None]))
    here = (torch.arange(z.shape[1], device=z.device) == column[:, None]) & inside[:, None]
    return ((dz + d_logp[:, None].where(here, 0)) / temperature).to(z.dtype)


def _scaled(z, temperature, columns):
    """Logits over the temperature, in fp32. Columns beyond the true vocabulary are padding that lets TP ranks share evenly:
    they get no probability."""
    z = z.to(_wide(z)) / temperature
    return z if columns >= z.shape[1] else z.masked_fill(torch.arange(z.shape[1], device=z.device) >= columns, -torch.inf)


class _LogProbsAndEntropy(torch.autograd.Function):
    """Output matrix, softmax, log-prob of the target and entropy in one: logits exist for one chunk at a time.

    Vocabulary-parallel (Megatron-LM 1909.08053, sec. 3): each TP rank holds V/tp rows of the matrix and sees part of each
    logit row; max, sum of exponentials and the target's logit are all-reduced. The backward pass recomputes the chunk.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, vocab_start, vocab_size, chunk, group):
        logp, entropy, lse = (torch.empty(len(targets), dtype=_wide(hidden), device=hidden.device) for _ in range(3))
        for s in range(0, len(targets), chunk):
            part = slice(s, s + chunk)
            z = hidden[part] @ weight.T                                                   # [c, V/tp]
            column, inside = _column(targets[part], vocab_start, weight)                  # [c]
            top = _all_reduce(_largest(z, temperature, vocab_size - vocab_start), dist.ReduceOp.MAX, group)
            sums = _softmax_sums(z, top, column, inside, temperature, vocab_size - vocab_start)
            total, target, pz = _all_reduce(sums, dist.ReduceOp.SUM, group)
            logp[part] = target - total.log()
            entropy[part] = total.log() - pz / total                                      # H = log Z - sum p z
            lse[part] = top + total.log()
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        ctx.args = temperature, vocab_start, vocab_size, chunk
        return logp, entropy

    @staticmethod
    def backward(ctx, d_logp, d_entropy):
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        temperature, vocab_start, vocab_size, chunk = ctx.args
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=_wide(weight))  # fp32: a bf16 sum over chunks would lose small terms
        for s in range(0, len(targets), chunk):
            part = slice(s, s + chunk)
            z = hidden[part] @ weight.T
            column, inside = _column(targets[part], vocab_start, weight)
            dz = _logits_grad(z, column, inside, lse[part], entropy[part], d_logp[part], d_entropy[part], temperature,
                              vocab_size - vocab_start)
            d_hidden[part] = dz @ weight        # this rank's share: summed over TP ranks by whoever made `hidden`
            add_product(d_weight, dz.T, hidden[part])
        return d_hidden, d_weight.to(weight.dtype), None, None, None, None, None, None


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _column(targets, vocab_start, weight):
    """The target's column on this rank [c], and whether it lies here [c]."""
    column = targets - vocab_start
    return column.clamp(0, weight.shape[0] - 1), (column >= 0) & (column < weight.shape[0])


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, with a wide total and narrow factors. On a GPU in one kernel: the product is never written by itself."""
    if total.is_cuda and total.dtype != a.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def _all_reduce(x: Tensor, op, group) -> Tensor:
    """Forward only. Every rank of `group` must call it; on one process it costs nothing."""
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(x, op, group=group)
    return x


def log_probs_and_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float = 1.0, vocab_size: int,
                          chunk: int = 1024, vocab_start: int = 0, group=None) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each distribution, in nats.

    hidden [R, H]: state that predicts each target; weight [V/tp, H]: this rank's rows of the output matrix, the first of
    which is row `vocab_start`; targets [R]: global token ids. Divides logits by the rollout temperature, because the policy
    that sampled was softmax(z / temperature). Returns logp [R], entropy [R] in fp32, differentiable.
    """
    return _LogProbsAndEntropy.apply(hidden, weight, targets, temperature, vocab_start, vocab_size, chunk, group)


# ---- KL --------------------------------------------------------------------------------------------------------------
def kl_estimate(logp: Tensor, base_logp: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy || base) from a sample of the policy (joschu.net/blog/kl-approx.html). [R]

    k1 is unbiased but its gradient as a loss has zero mean on policy; k3 = low_var_kl is unbiased, never negative, and its
    gradient pulls towards the base. Upstream clamps low_var_kl to [-10, 10]; so do we, for that name only.
    """
    log_ratio = logp - base_logp
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio.square() / 2
    k3 = torch.exp(-log_ratio) - 1 + log_ratio
    return k3.clamp(-10, 10) if kind == "low_var_kl" else k3


# ---- Advantages ------------------------------------------------------------------------------------------------------
def normalize_rewards(cfg, rewards: list[float], groups: list[int]) -> list[float]:
    """GRPO's reward (2402.03300, eq. 3 ff.): (r - mean) / (std + 1e-6) within each group. One number a sample.

    Groups are told apart by group_index, never by position, so unequal sizes are right (upstream falls back to one mean over
    the whole batch). std is the unbiased one, as upstream. A group of one keeps only the mean's subtraction: 0.
    """
    if not cfg.rewards_normalization:
        return list(rewards)
    values = torch.tensor(rewards, dtype=torch.float64)
    groups = torch.tensor(groups)
    out = torch.empty_like(values)
    for g in groups.unique():
        r = values[groups == g]
        centred = r - r[0]                                # so that equal rewards of 0.1 have no rounding left
        centred = centred - centred.mean()
        if cfg.grpo_std_normalization and len(r) > 1:
            centred = centred / (r.std() + 1e-6)
        out[groups == g] = centred
    return out.tolist()


def grpo_advantages(cfg, data: dict) -> list[Tensor]:
    """A_t = the sample's normalised reward, the same for each of its tokens (2402.03300). list of [R_i]"""
    return [torch.full((n,), reward) for n, reward in zip(data["response_lengths"], data["rewards"])]


# FORK POINT: a new estimator is one function (cfg, rollout_data) -> list of per-token advantages, and one line here. It sees
# the samples of its own data-parallel rank only: what compares the samples of a prompt belongs in normalize_rewards.
@dataclass(frozen=True)
class Estimator:
    advantages: Callable
    uses_kl_coef: bool = False     # puts the KL into the reward


ADVANTAGES = {
    "grpo": Estimator(grpo_advantages),
}


def check(cfg) -> None:
    """What validate() in configs/base.py cannot know: the table above."""
    if cfg.loss_type == "sft":
        return
    if cfg.advantage_estimator not in ADVANTAGES:
        raise ValueError(f"advantage_estimator={cfg.advantage_estimator!r} is not in algos.ADVANTAGES; "
                         f"use one of {', '.join(sorted(ADVANTAGES))}")
    if cfg.kl_coef and not ADVANTAGES[cfg.advantage_estimator].uses_kl_coef:
        raise ValueError(f"kl_coef={cfg.kl_coef} has no effect with advantage_estimator={cfg.advantage_estimator!r}, whose "
                         "advantage is the group-normalised reward; set kl_coef=0, use_kl_loss=True and kl_loss_coef instead")


# ---- Losses ----------------------------------------------------------------------------------------------------------
@dataclass
class LossInput:
    """Per response token of one micro-batch; who writes what: buffer.pack and actor.py."""
    logp: Tensor                        # [R] current policy, differentiable
    entropy: Tensor                     # [R] in nats, differentiable
    weight: Tensor                      # [R] loss_mask * the sample's loss_weight: all denominators are in here
    advantages: Tensor | None = None    # [R]
    old_logp: Tensor | None = None      # [R] None: one optimizer step per rollout, so old := logp.detach()
    rollout_logp: Tensor | None = None  # [R]
    ref_logp: Tensor | None = None      # [R]

    def __post_init__(self):
        """A masked token may hold inf or NaN (a log-prob that nobody asked for). It is zeroed here, before any loss sees it:
        masked afterwards, its gradient would be 0 * inf, which is NaN."""
        for name in ("logp", "entropy", "advantages", "old_logp", "rollout_logp", "ref_logp"):
            if getattr(self, name) is not None:
                setattr(self, name, torch.where(self.weight != 0, getattr(self, name), 0))


def policy_loss(cfg, x: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy gradient, KL and entropy terms -> (loss, sums to log). Every value is a sum over this micro-batch.

    pg    PPO (1707.06347, eq. 7): max(-ratio A, -clip(ratio, 1 - eps, 1 + eps_high) A), ratio = exp(logp - old_logp);
          eps_high > eps is DAPO's clip-higher (2503.14476, eq. 10); eps_clip_c bounds the loss where A < 0 (1912.09729, eq. 5)
    total pg - entropy_coef H + kl_loss_coef KL
    """
    old_logp = x.logp.detach() if x.old_logp is None else x.old_logp
    ppo_kl = old_logp - x.logp                                             # [R] k1 of (old || current)
    ratio = torch.exp(-ppo_kl)
    plain = -ratio * x.advantages
    clipped = -ratio.clamp(1 - cfg.eps_clip, 1 + cfg.eps_clip_high) * x.advantages
    pg_loss = torch.maximum(plain, clipped)
    if cfg.eps_clip_c is not None:
        pg_loss = torch.where(x.advantages < 0, torch.minimum(-cfg.eps_clip_c * x.advantages, pg_loss), pg_loss)

    per_token = pg_loss - cfg.entropy_coef * x.entropy
    metrics = {"pg_loss": pg_loss, "pg_clipfrac": (clipped > plain).float(), "ppo_kl": ppo_kl, "entropy_loss": x.entropy}
    if cfg.use_kl_loss:
        kl = kl_estimate(x.logp, x.ref_logp, cfg.kl_loss_type)
        per_token = per_token + cfg.kl_loss_coef * kl
        metrics["kl_loss"] = kl
    if x.rollout_logp is not None:
        metrics["train_rollout_logprob_abs_diff"] = (old_logp - x.rollout_logp).abs()
    return _finish(per_token, x, metrics)


def sft_loss(cfg, x: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of the trainable tokens."""
    return _finish(-x.logp, x, {"entropy_loss": x.entropy})


def _finish(per_token: Tensor, x: LossInput, metrics: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    def total(values):
        return (values * x.weight).sum()

    loss = total(per_token)
    sums = {name: total(values).detach() for name, values in metrics.items()}
    sums |= {"loss": loss.detach(), "weight": x.weight.sum(), "tokens": (x.weight != 0).sum().float()}
    # Highest log-prob seen: the invariant "a log-prob is never positive" is checked on it. Reduced by max, not by sum.
    floor = x.logp.new_full((1,), -torch.inf)              # the maximum of nothing
    sums["max_logp"] = torch.cat([floor, torch.where(x.weight != 0, x.logp, -torch.inf)]).max().detach()
    return loss, sums


LOSSES = {"policy": policy_loss, "sft": sft_loss}


def reduce_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Sums over all micro-batches and ranks of one optimizer step -> what is logged under train/.

    A loss is what the optimizer saw. Everything else is a mean with the loss's own weights, which add up to 1 except under
    fixed_loss_length.
    """
    weight = max(sums["weight"], 1e-30)
    raw = ("loss", "max_logp")
    return {k: v if k in raw else v / weight for k, v in sums.items() if k not in ("weight", "tokens")}
