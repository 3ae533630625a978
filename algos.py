"""
algos.py: what is the maths? Advantages, KL and losses of RL for language models, each with its paper: torch only.

    rewards, groups --Estimator.rewards--> one number a sample     (on the driver, who sees whole groups)
    AdvantageInput [B, T] --Estimator.advantages--> A [B, T]       (on each data-parallel rank, for its samples)
    LossInput [R] --policy_loss | value_loss | sft_loss--> loss, sums to log

Test:  pytest tests/test_algos.py; `make layouts` trains by each estimator under each layout and compares
Knows nothing about: Ray, SGLang, Megatron. A process group is an argument; with None the same code runs on one process.
Shapes: B samples of a rank, T tokens of its longest response, R_i those of sample i; R response tokens of a micro-batch, one
sample after the other; n samples of a group. "Weight" alone is a token's share in the loss; sg(x) is x without its gradient.

Four policies, four names: `logp` (current weights), `old_logp` (trainer, before the first update on this rollout),
`rollout_logp` (what the engine reported when it sampled), `ref_logp` (the reference). A teacher is a fifth, `teacher_logp`.

Denominators: every sample carries a `loss_weight` that buffer.py fixes for the whole optimizer step, over all ranks,
before micro-batches are cut. A loss is then a plain sum, so it cannot depend on how samples are packed or split.
"""
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.nn.utils.rnn import pad_sequence

from logprobs import all_reduce


# ---- KL --------------------------------------------------------------------------------------------------------------
def kl_estimate(logp: Tensor, base_logp: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy || base) from a sample of the policy (joschu.net/blog/kl-approx.html). Same shape.

    As a loss, on policy: k1's gradient has mean zero, so it does nothing; k2's mean is the gradient of this KL; k3's that of
    KL(base || policy) (2510.01555). As a number k1 and k3 are unbiased, and k3 is never negative. low_var_kl is k3 clamped to
    10 as upstream: a token that far below the base pulls no more.
    """
    log_ratio = logp - base_logp
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio.square() / 2
    k3 = torch.exp(-log_ratio) - 1 + log_ratio
    return k3.clamp(-10, 10) if kind == "low_var_kl" else k3


# ---- Rewards: one number a sample, compared within its group --------------------------------------------------------------
def per_group(rewards: list[float], groups: list[int], rollouts: list[int], function: Callable) -> list[float]:
    """function(r [n], means [m], own [n]) -> [n]; r: rewards of one group's samples, means: of each of its rollouts.

    Mostly n = m and r = means. Where a rollout has several branches, r[i] belongs to means[own[i]], and a rollout counts once,
    however many branches it has. Groups are told apart by group_index, never by position, so unequal sizes are right (upstream
    falls back to one mean over the whole batch).
    """
    values, groups, rollouts = torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), torch.tensor(rollouts)
    out = torch.empty_like(values)
    for g in groups.unique():
        r = values[groups == g]
        r = r - r[0]                                      # so that equal rewards of 0.1 have no rounding left
        _, own, branches = rollouts[groups == g].unique(return_inverse=True, return_counts=True)
        out[groups == g] = function(r, r.new_zeros(len(branches)).index_add(0, own, r) / branches, own)
    return out.tolist()


def as_they_are(cfg, rewards: list[float], groups: list[int], rollouts: list[int]) -> list[float]:
    return list(rewards)


def minus_mean_over_std(cfg, rewards: list[float], groups: list[int], rollouts: list[int]) -> list[float]:
    """GRPO (2402.03300, outcome supervision): (r - mean) / (std + 1e-6) within each group; Dr.GRPO (2503.20783) leaves the std
    out. std is the unbiased one, as upstream. A group of one keeps only the mean's subtraction: 0."""
    divide = cfg.grpo_std_normalization
    return per_group(rewards, groups, rollouts, lambda r, means, own: (r - means.mean()) / (
        means.std() + 1e-6 if divide and len(means) > 1 else 1.0))


def minus_mean(cfg, rewards: list[float], groups: list[int], rollouts: list[int]) -> list[float]:
    """r - mean of the group: REINFORCE++'s variant with a baseline (2501.03262, eq. 6)."""
    return per_group(rewards, groups, rollouts, lambda r, means, own: r - means.mean())


def leave_one_out(cfg, rewards: list[float], groups: list[int], rollouts: list[int]) -> list[float]:
    """RLOO (2402.14740): r minus the mean of the group's other rollouts. A group of one: r - r = 0."""
    return per_group(rewards, groups, rollouts, lambda r, means, own: r - (
        (means.sum() - means[own]) / (len(means) - 1) if len(means) > 1 else means))


def length_penalty(cfg, length: int) -> float:
    """DAPO's soft overlong punishment (2503.14476, eq. 13): 0 up to rollout_max_response_len - overlong_buffer_len tokens,
    from there down in a straight line to -overlong_penalty_factor at the limit."""
    if cfg.overlong_buffer_len is None:
        return 0.0
    over = (length - (cfg.rollout_max_response_len - cfg.overlong_buffer_len)) / cfg.overlong_buffer_len
    return -cfg.overlong_penalty_factor * min(max(over, 0.0), 1.0)


def group_rewards(cfg, rewards: list[float], groups: list[int], rollouts: list[int]) -> list[float]:
    """Raw rewards -> what the estimator's `advantages` sees. groups, rollouts: group_index and Sample.rollout of each one."""
    rule = ADVANTAGES[cfg.advantage_estimator].rewards
    return rule(cfg, rewards, groups, rollouts) if cfg.rewards_normalization else list(rewards)


# ---- Advantages: one number a token, on the rank that has the sample -------------------------------------------------------
@dataclass
class AdvantageInput:
    """The samples of one data-parallel rank as rows, padded on the right. fp32; T at least 1"""
    rewards: Tensor                      # [B] from group_rewards
    mask: Tensor                         # [B, T] 1: trainable; 0: a tool's token, or padding
    old_logp: Tensor | None = None       # [B, T] where something reads it: kl_coef, distillation
    ref_logp: Tensor | None = None       # [B, T] with kl_coef
    teacher_logp: Tensor | None = None   # [B, T] with use_opd
    values: Tensor | None = None         # [B, T] with a critic

    def __post_init__(self):
        """A masked token's numbers mean nothing, and may be inf or NaN."""
        for name in ("old_logp", "ref_logp", "teacher_logp", "values"):
            if getattr(self, name) is not None:
                setattr(self, name, torch.where(self.mask != 0, getattr(self, name), 0))


def reward_at_each_token(cfg, x: AdvantageInput) -> Tensor:
    """A_t = the sample's reward, the same for each of its tokens (GRPO 2402.03300, outcome supervision). [B, T]"""
    return x.rewards[:, None] * x.mask


def token_rewards(cfg, x: AdvantageInput) -> Tensor:
    """r_t = -kl_coef KL_t, and the sample's reward at its last trainable token. [B, T]

    Upstream puts the reward at the last token, which may be a tool's. The KL is k1 whatever kl_loss_type says: the policy
    gradient with log(policy / reference) as a reward is the KL's own gradient, with k2 or k3 it is not (2510.01555).
    """
    last = x.mask.shape[1] - 1 - x.mask.flip(1).argmax(1, keepdim=True)                           # [B, 1] last trainable token
    out = torch.zeros_like(x.mask).scatter(1, last, x.rewards[:, None]) * x.mask                  # 0 where all is masked
    if cfg.kl_coef:
        out = out - cfg.kl_coef * kl_estimate(x.old_logp, x.ref_logp, "k1")
    return out


def discounted_sums(x: Tensor, decay: float, chunk: int = 128) -> Tensor:
    """y_t = x_t + decay y_{t+1}, along the last dimension of [B, T]. T steps one after the other would take T kernels, so:

    within chunks of c    y = x L, one product with L[s, t] = decay^(s - t) for s >= t
    between chunks        the same sum over the chunks' first elements, with decay^c
    """
    batch, total = x.shape
    if total <= 1:
        return x.clone()
    x = torch.nn.functional.pad(x, (0, -total % chunk)).unflatten(1, (-(-total // chunk), chunk)) # [B, T/c, c]
    i = torch.arange(chunk, device=x.device)
    powers = torch.where(i[:, None] >= i, decay ** (i[:, None] - i).clamp(min=0).to(x.dtype), 0)  # [c, c]
    y = x @ powers                                                                                # [B, T/c, c]
    if y.shape[1] > 1:
        starts = discounted_sums(y[:, :, 0], decay ** chunk, chunk)                               # [B, T/c] whole sums
        following = torch.nn.functional.pad(starts[:, 1:], (0, 1))                                # [B, T/c]
        y = y + following[:, :, None] * decay ** (chunk - i).to(x.dtype)                          # [B, T/c, c]
    return y.flatten(1)[:, :total]


class WithoutHoles:
    """Rows without their masked tokens, and back: what discounts over time counts the model's own tokens only (upstream counts
    a tool's too, so that a long tool answer would discount the turn before it). mask 1 1 0 1 gives place 0 1 4 2."""

    def __init__(self, mask: Tensor):
        self.mask, self.place = mask, None                                                        # [B, T]
        if (mask[:, 1:] > mask[:, :-1]).any():               # else no row has a hole, and all stand where they should
            place = mask.cumsum(1).long() - 1
            self.place = place.where(mask != 0, mask.shape[1])   # a column behind all others for what is masked

    def pack(self, x: Tensor) -> Tensor:
        """[B, T] -> [B, T], trainable tokens first, zeros behind them"""
        if self.place is None:
            return x * self.mask
        out = torch.nn.functional.pad(torch.zeros_like(x), (0, 1))
        return out.scatter(1, self.place, x * self.mask)[:, :-1]

    def unpack(self, x: Tensor) -> Tensor:
        """The inverse: each value back to its token, 0 at what is masked."""
        if self.place is None:
            return x * self.mask
        return torch.nn.functional.pad(x, (0, 1)).gather(1, self.place) * self.mask


def discounted_return(cfg, x: AdvantageInput) -> Tensor:
    """REINFORCE++ (2501.03262, eq. 4): the discounted sum of the rewards still to come, KL penalty included. [B, T]"""
    trained = WithoutHoles(x.mask)
    return trained.unpack(discounted_sums(trained.pack(token_rewards(cfg, x)), cfg.gamma))


def reward_and_kl_at_each_token(cfg, x: AdvantageInput) -> Tensor:
    """REINFORCE++ with a baseline: the sample's reward above its group's mean, minus kl_coef KL_t, as upstream. The paper
    (2501.03262, eq. 8) has the KL as a k2 loss: use_kl_loss with kl_loss_type="k2" in place of kl_coef. [B, T]"""
    flat = reward_at_each_token(cfg, x)
    return flat - cfg.kl_coef * kl_estimate(x.old_logp, x.ref_logp, "k1") if cfg.kl_coef else flat


def gae(cfg, x: AdvantageInput) -> Tensor:
    """Generalised advantage estimation (1506.02438, eq. 16): A_t = sum_l (gamma lambd)^l delta_{t+l} with
    delta_t = r_t + gamma V_{t+1} - V_t. V = 0 behind the last token, also of a truncated answer, whose reward says what it was
    worth as it is. [B, T]"""
    trained = WithoutHoles(x.mask)
    r, v = trained.pack(token_rewards(cfg, x)), trained.pack(x.values)
    delta = r + cfg.gamma * torch.nn.functional.pad(v[:, 1:], (0, 1)) - v
    return trained.unpack(discounted_sums(delta, cfg.gamma * cfg.lambd))


def whiten(a: Tensor, mask: Tensor, group=None) -> Tensor:
    """(A - mean) / sqrt(var + 1e-8) over the trainable tokens of all ranks of `group`; the variance is the unbiased one, as
    upstream. Every rank must call it, also one that has no sample. [B, T]"""
    a = torch.where(mask != 0, a, 0)         # a custom function's may be anything there
    count, total = all_reduce(torch.stack([mask.double().sum(), a.double().sum()]), ReduceOp.SUM, group)
    mean = total / count.clamp(min=1)
    square = all_reduce(((a - mean).square() * mask).sum().double(), ReduceOp.SUM, group)
    return ((a - mean) / (square / (count - 1).clamp(min=1) + 1e-8).sqrt() * mask).to(a.dtype)


def compute_advantages(cfg, data: dict, device="cpu", group=None) -> None:
    """Adds data["advantages"], and with a critic data["returns"], the values' target: lists of [R_i].

    Every rank of `group` (the data-parallel one) must call it, with its own samples. Order as upstream: the estimator or the
    custom function, then distillation, then whitening.
    """
    def rows(key):
        """list of [R_i] -> [B, T], T at least 1; a row too many at first, because a rank may have no sample"""
        return pad_sequence([*data[key], torch.zeros(1)], True)[:-1].float().to(device) if key in data else None

    x = AdvantageInput(torch.tensor(data["rewards"], device=device), rows("loss_masks"), rows("log_probs"),
                       rows("ref_log_probs"), rows("teacher_log_probs"), rows("values"))
    estimator = ADVANTAGES[cfg.advantage_estimator]
    if cfg.custom_advantage_function:
        cfg.custom_advantage_function(cfg, data)
        assert "advantages" in data, "custom_advantage_function must set data['advantages'], a tensor [R_i] for each sample"
        a = rows("advantages")
    else:
        a = estimator.advantages(cfg, x)                                                          # [B, T]

    def unpadded(values):                    # one copy from the device, not one a sample
        return [row[:n] for row, n in zip(values.cpu(), data["response_lengths"])]
    if x.values is not None:                 # whatever the estimator, A is "return minus value"
        data["returns"] = unpadded(a + x.values)
    if cfg.use_opd:                          # reverse KL to the teacher (2306.13649), at its own token: nothing is summed up
        a = a - cfg.opd_kl_coef * (x.old_logp - x.teacher_logp)
    if estimator.whitens if cfg.normalize_advantages is None else cfg.normalize_advantages:
        a = whiten(a, x.mask, group)
    data["advantages"] = unpadded(a)


# ---- Losses: what they see -------------------------------------------------------------------------------------------------
@dataclass
class LossInput:
    """Per response token of one micro-batch; who writes what: buffer.pack and model.py's head."""
    weight: Tensor                      # [R] loss_mask * the sample's loss_weight: all denominators are in here
    sample: Tensor                      # [R] int64: which of the micro-batch's samples a token belongs to, ascending
    logp: Tensor | None = None          # [R] current policy, differentiable
    entropy: Tensor | None = None       # [R] in nats, differentiable
    values: Tensor | None = None        # [R] a critic's, differentiable, in place of these two
    advantages: Tensor | None = None    # [R]
    old_logp: Tensor | None = None      # [R] None where nothing but the loss reads it and it is logp.detach(): one optimizer
    #                                     step per rollout (the first rollout has it all the same, as a check)
    rollout_logp: Tensor | None = None  # [R]
    ref_logp: Tensor | None = None      # [R]
    old_values: Tensor | None = None    # [R] before the first update on this rollout
    returns: Tensor | None = None       # [R] what the values should have been
    sft_weight: Tensor | None = None    # [R] weight of the tokens of sft_data, whose `weight` is 0
    sft_logp: Tensor | None = None      # [R] their logp, made below

    def __post_init__(self):
        """A masked token may hold inf or NaN (a log-prob that nobody asked for). It is zeroed here, before any loss sees it:
        masked afterwards, its gradient would be 0 * inf, which is NaN."""
        if self.sft_weight is not None and self.logp is not None:        # before the next lines zero it
            self.sft_logp = torch.where(self.sft_weight != 0, self.logp, 0)
        for name in vars(self).keys() - {"weight", "sample", "sft_weight", "sft_logp"}:
            if getattr(self, name) is not None:
                setattr(self, name, torch.where(self.weight != 0, getattr(self, name), 0))


def sample_sums(values: Tensor, x: LossInput) -> tuple[Tensor, Tensor]:
    """For each token: the sum over the trainable tokens of its own sample, and their number. [R] -> [R], [R]"""
    mask = (x.weight != 0).to(values.dtype)
    samples = int(x.sample[-1]) + 1 if len(x.sample) else 0
    total, count = (values.new_zeros(samples).index_add(0, x.sample, v)[x.sample] for v in (values * mask, mask))
    return total, count.clamp(min=1)


# ---- The clipped policy gradient, three ways: (cfg, x, logp - old_logp [R]) -> loss before weights, clipped [R] -----------
def ppo_clip(cfg, x: LossInput, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """PPO (1707.06347, eq. 7): max(-ratio A, -clip(ratio, 1 - eps, 1 + eps_high) A); eps_high > eps is DAPO's clip-higher
    (2503.14476, eq. 10); eps_clip_c bounds the loss where A < 0 (dual clip, 1912.09729, eq. 5)."""
    ratio = log_ratio.exp()
    plain, clipped = -ratio * x.advantages, -ratio.clamp(1 - cfg.eps_clip, 1 + cfg.eps_clip_high) * x.advantages
    loss = torch.maximum(plain, clipped)
    if cfg.eps_clip_c is not None:
        loss = torch.where(x.advantages < 0, torch.minimum(-cfg.eps_clip_c * x.advantages, loss), loss)
    return loss, clipped > plain


def gspo_clip(cfg, x: LossInput, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """GSPO (2507.18071, eq. 7): PPO's clip with one ratio for the whole sequence, exp of the mean log-ratio of its trainable
    tokens. The gradient goes through that mean, to all tokens alike, as in the paper's eq. 10 (and upstream)."""
    total, count = sample_sums(log_ratio, x)
    return ppo_clip(cfg, x, total / count)


def cispo_clip(cfg, x: LossInput, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """CISPO (MiniMax-M1 2506.13585, eq. 4 and 5): -sg(clip(ratio, 1 - eps, 1 + eps_high)) A logp. The ratio is a clipped
    weight, so no token loses its gradient. The paper has no lower bound in practice: eps_clip=1.0."""
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1 - cfg.eps_clip, 1 + cfg.eps_clip_high)
    return -weight * x.advantages * x.logp, weight != ratio


# ---- The table -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Estimator:
    advantages: Callable                     # (cfg, AdvantageInput) -> A [B, T]
    rewards: Callable = as_they_are          # (cfg, rewards, groups, rollouts) -> one number a sample
    clip: Callable = ppo_clip                # (cfg, LossInput, log_ratio [R]) -> loss, clipped [R]
    reads: tuple = ()                        # of kl_coef, gamma and lambd: those that have an effect on its advantages
    whitens: bool = False                    # where normalize_advantages leaves it open
    critic: bool = False                     # reads AdvantageInput.values


# FORK POINT: a new estimator is one function and one line here.
ADVANTAGES = {
    "grpo": Estimator(reward_at_each_token, minus_mean_over_std),
    "gspo": Estimator(reward_at_each_token, minus_mean_over_std, gspo_clip),
    "cispo": Estimator(reward_at_each_token, minus_mean_over_std, cispo_clip),
    "rloo": Estimator(reward_at_each_token, leave_one_out),
    "reinforce_plus_plus": Estimator(discounted_return, reads=("kl_coef", "gamma"), whitens=True),
    "reinforce_plus_plus_baseline": Estimator(reward_and_kl_at_each_token, minus_mean, reads=("kl_coef",), whitens=True),
    "ppo": Estimator(gae, reads=("kl_coef", "gamma", "lambd"), whitens=True, critic=True),
}


def check(cfg) -> None:
    """What configs/validate.py cannot know: the table above."""
    name = cfg.advantage_estimator
    if cfg.loss_type == "sft":
        return
    if name not in ADVANTAGES:
        raise ValueError(f"advantage_estimator={name!r} is not in algos.ADVANTAGES; use one of "
                         f"{', '.join(sorted(ADVANTAGES))}")
    one = ADVANTAGES[name]
    own = cfg.custom_advantage_function is not None
    rewarded = cfg.rm_type or cfg.custom_rm or not cfg.use_opd           # else distillation alone
    rules = [
        (cfg.kl_coef and "kl_coef" not in one.reads and not own,
         f"kl_coef={cfg.kl_coef} has no effect with advantage_estimator={name!r}, whose advantage is the sample's reward; set "
         "kl_coef=0, use_kl_loss=True and kl_loss_coef instead"),
        (cfg.n_samples_per_prompt == 1 and one.rewards is not as_they_are and cfg.rewards_normalization and rewarded
         and not own,
         f"advantage_estimator={name!r} compares the samples of one prompt, and a group of 1 always has advantage 0; set "
         "n_samples_per_prompt=2 or more"),
        (one.critic and "lr" not in cfg.critic, f"advantage_estimator={name!r} needs a critic; set "
         f"critic=dict(lr={10 * cfg.lr:g}), about ten times the actor's learning rate"),
        (not one.critic and (cfg.critic or cfg.critic_num_gpus or cfg.num_critic_only_steps),
         f"critic, critic_num_gpus and num_critic_only_steps have no effect with advantage_estimator={name!r}, which has no "
         "critic; remove them, or set advantage_estimator='ppo'"),
        (not own and any(getattr(cfg, key) != 1 and key not in one.reads for key in ("gamma", "lambd")),
         f"gamma={cfg.gamma}, lambd={cfg.lambd}: advantage_estimator={name!r} discounts nothing; leave them at 1.0 (gamma is "
         "for ppo and reinforce_plus_plus, lambd for ppo)"),
        (not cfg.grpo_std_normalization and one.rewards is not minus_mean_over_std,
         f"grpo_std_normalization=False has no effect with advantage_estimator={name!r}, which divides by no std; remove it"),
        (one.clip is gspo_clip and cfg.use_tis and cfg.tis_level == "token",
         "gspo weighs whole sequences, and a weight for each token would part them again; set tis_level='geometric'"),
        (one.clip is cispo_clip and cfg.eps_clip_c is not None,
         "eps_clip_c bounds PPO's loss, and cispo's has no such bound; leave it unset"),
    ]
    for broken, message in rules:
        if broken:
            raise ValueError(message)


# ---- Losses ----------------------------------------------------------------------------------------------------------------
def policy_loss(cfg, x: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient, KL and entropy terms -> (loss, sums to log). Every value is a sum over this micro-batch.

    loss = clipped policy gradient * importance weights - entropy_coef H + kl_loss_coef KL
    """
    old_logp = x.logp.detach() if x.old_logp is None else x.old_logp
    log_ratio = (x.logp - old_logp).clamp(-20, 20)         # [R] e^20 is far outside any clip; from e^88 the gradient is NaN
    pg_loss, clipped = ADVANTAGES[cfg.advantage_estimator].clip(cfg, x, log_ratio)
    metrics = {"pg_clipfrac": clipped.float(), "ppo_kl": -log_ratio, "entropy_loss": x.entropy}
    if cfg.use_tis:
        weight, outside = mismatch_weight(cfg, x, old_logp - x.rollout_logp)
        pg_loss = pg_loss * weight
        metrics |= {"tis": weight, "tis_clipfrac": outside.float()}
    if cfg.use_opsm:
        far = off_policy_samples(cfg, x, log_ratio)
        pg_loss = torch.where(far, 0, pg_loss)
        metrics["opsm_clipfrac"] = far.float()
    metrics["pg_loss"] = pg_loss

    per_token = pg_loss - cfg.entropy_coef * x.entropy
    if cfg.use_kl_loss:
        kl = kl_estimate(x.logp, x.ref_logp, cfg.kl_loss_type)
        if cfg.use_unbiased_kl:              # DeepSeek-V3.2 (2512.02556, eq. 7): the samples are the old policy's
            kl = log_ratio.exp() * kl
        per_token = per_token + cfg.kl_loss_coef * kl
        metrics["kl_loss"] = kl
    return finish(cfg, x, per_token, metrics)


def mismatch_weight(cfg, x: LossInput, log_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Importance weight trainer / engine, w = exp(old_logp - rollout_logp): the engine that sampled is not quite the trainer's
    policy (other kernels, fp8, older weights). -> weight, whether it was outside the bounds [R]

    tis_level  token: w_t;  sequence: the product of the sample's w_t;  geometric: their geometric mean
    tis_mode   truncate: clamp(w, tis_clip_low, tis_clip), TIS by token (fengyao.notion.site/off-policy-rl; its low bound is 0)
               mask: w where it lies inside, else 0: IcePop by token (2510.18855, eq. 2; it takes 0.5 and 5), MIS (rejection)
               by sequence. TIS truncates the trainer's weight only: PPO's own clip of logp against old_logp stays as it is
    """
    if cfg.tis_level != "token":
        total, count = sample_sums(log_weight, x)
        log_weight = total if cfg.tis_level == "sequence" else total / count
    weight = log_weight.exp()
    outside = (weight < cfg.tis_clip_low) | (weight > cfg.tis_clip)
    if cfg.tis_mode == "truncate":
        return weight.clamp(cfg.tis_clip_low, cfg.tis_clip), outside
    return torch.where(outside, 0, weight), outside


def off_policy_samples(cfg, x: LossInput, log_ratio: Tensor) -> Tensor:
    """Off-policy sequence masking (DeepSeek-V3.2 2512.02556, eq. 9): tokens with A < 0 of samples whose mean of old_logp -
    logp is above opsm_delta. The policy has left them already; they teach how the old one erred. The paper's old policy is
    the engine's: use_rollout_logprobs. -> whether to leave a token out [R]"""
    total, count = sample_sums(-log_ratio.detach(), x)
    return (x.advantages < 0) & (total / count > cfg.opsm_delta)


def value_loss(cfg, x: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
    """The critic's: max((V - G)^2, (clip(V, V_old - c, V_old + c) - G)^2), G the returns, c = value_clip (1811.02553, sec.
    4.1, from the code of PPO's authors; PPO's paper does not have the clip). No factor 1/2, as upstream."""
    near = x.old_values + (x.values - x.old_values).clamp(-cfg.value_clip, cfg.value_clip)
    plain, clipped = (x.values - x.returns).square(), (near - x.returns).square()
    per_token = torch.maximum(plain, clipped)
    return finish(cfg, x, per_token, {"value_loss": per_token, "value_clipfrac": (clipped > plain).float(),
                                      "values": x.old_values, "returns": x.returns})       # both before this rollout's updates


def sft_loss(cfg, x: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of the trainable tokens."""
    return finish(cfg, x, -x.logp, {"entropy_loss": x.entropy})


# FORK POINT: a loss of your own without an edit: custom_loss_function(args, LossInput) -> loss before weights [R], metrics
def custom_loss(cfg, x: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
    out = cfg.custom_loss_function(cfg, x)
    assert isinstance(out, tuple) and len(out) == 2, "custom_loss_function must return (loss [R], metrics {name: [R]})"
    per_token, metrics = out
    assert per_token.shape == x.weight.shape, (
        f"custom_loss_function returned a loss of shape {tuple(per_token.shape)} for {len(x.weight)} tokens; return one "
        "number a token, before any weight or mask: algos.finish applies those")
    return finish(cfg, x, per_token, metrics)


LOSSES = {"policy": policy_loss, "sft": sft_loss, "custom_loss": custom_loss}


def finish(cfg, x: LossInput, per_token: Tensor, metrics: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Weights and sums. Sums and counts travel separately until reduce_metrics; what ends in _max is reduced by max."""
    def total(values):
        return (values * x.weight).sum()

    loss = total(per_token)
    sums = {name: largest(values, x) if name.endswith("_max") else total(values).detach() for name, values in metrics.items()}
    sums |= {"weight": x.weight.sum(), "tokens": (x.weight != 0).sum().float()}
    if x.sft_logp is not None:               # rows of sft_data in the same micro-batch
        nll = -(x.sft_logp * x.sft_weight).sum()
        loss = loss + cfg.sft_loss_coef * nll
        sums["sft_loss"] = nll.detach()
    if x.logp is not None:                   # the invariant "a log-prob is never positive" is checked on it
        sums["logp_max"] = largest(x.logp, x)
    if x.logp is not None and x.rollout_logp is not None:  # do trainer and engine agree about the weights that sampled?
        own = x.logp if x.old_logp is None or cfg.use_rollout_logprobs else x.old_logp
        diff = (own - x.rollout_logp).detach().abs()
        sums |= {"train_rollout_logprob_abs_diff": total(diff), "train_rollout_logprob_abs_diff_max": largest(diff, x)}
    return loss, sums | {"loss": loss.detach()}


def largest(values: Tensor, x: LossInput) -> Tensor:
    """Of the trainable tokens; -inf where there is none."""
    return torch.cat([values.new_full((1,), -torch.inf), values[x.weight != 0]]).max().detach()


def reduce_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Sums over all micro-batches and ranks of one optimizer step -> what is logged under train/.

    A loss is what the optimizer saw (sft_loss before its coefficient). Everything else is a mean with the loss's own weights,
    which add up to 1 except under fixed_loss_length.
    """
    weight = max(sums["weight"], 1e-30)
    return {k: v if k in ("loss", "sft_loss") or k.endswith("_max") else v / weight
            for k, v in sums.items() if k not in ("weight", "tokens")}
