"""
test_algos.py: the maths against references written here, from the papers, and against itself cut in two.

    closed form | plain Python loop | torch.autograd | central differences  ==  algos.py

Run:   pytest tests/test_algos.py       CPU only, about 15 s. In fp64, so that a wrong formula cannot hide in rounding.
"""
import datetime
import math
import statistics
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import algos
from helpers import make_cfg, run_workers

each_estimator = pytest.mark.parametrize("name", algos.ADVANTAGES)
seeds = st.integers(0, 10**6)
properties = settings(max_examples=150, deadline=None)


def same(a, b, tol=1e-10):
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def f64(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def pick(x, index):
    return {k: v[index] for k, v in x.items()}


def draws(seed):
    """-> normal(*shape): fp64 numbers of this seed's stream."""
    g = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=g)


# ---- KL -------------------------------------------------------------------------------------------------------------
def two_policies():
    z, base = draws(1)(2, 6)
    return z.requires_grad_(), base.log_softmax(-1)


def kl(p, q):
    return (p.exp() * (p - q)).sum()


@pytest.mark.parametrize("kind, mean", [("k1", "kl"), ("k3", "kl"), ("low_var_kl", "kl"), ("k2", "half square")])
def test_kl_estimators_mean_by_enumeration(kind, mean):
    """The expectation over a sample of the policy, by summing over the whole vocabulary."""
    z, base = two_policies()
    logp = z.log_softmax(-1)
    got = (logp.exp() * algos.kl_estimate(logp, base, kind)).sum()
    same(got, kl(logp, base) if mean == "kl" else (logp.exp() * (logp - base) ** 2).sum() / 2)


def test_kl_estimators_as_a_loss():
    """E over the policy of the gradient; sampling is not differentiated. k1: 0, k2: reverse KL, k3: forward KL."""
    def gradient(kind):
        z, base = two_policies()
        logp = z.log_softmax(-1)
        return torch.autograd.grad((logp.exp().detach() * algos.kl_estimate(logp, base, kind)).sum(), z)[0]

    z, base = two_policies()
    logp = z.log_softmax(-1)
    same(gradient("k1"), 0 * z.detach())
    same(gradient("k2"), torch.autograd.grad(kl(logp, base), z, retain_graph=True)[0])
    same(gradient("k3"), torch.autograd.grad(kl(base, logp), z)[0])
    same(gradient("low_var_kl"), gradient("k3"))


def test_kl_by_hand():
    e = math.exp
    for kind, want, slope in [("k1", (0, 1, -8), (1, 1, 1)), ("k2", (0, 0.5, 32), (0, 1, -8)),
                              ("k3", (0, e(-1), e(8) - 9), (0, 1 - e(-1), 1 - e(8))),
                              ("low_var_kl", (0, e(-1), 10), (0, 1 - e(-1), 0))]:          # clamped
        logp, base = f64(-1, -1, -9).requires_grad_(), f64(-1, -2, -1)
        got = algos.kl_estimate(logp, base, kind)
        same(got, f64(*want))
        same(torch.autograd.grad(got.sum(), logp)[0], f64(*slope))


# ---- Rewards: one number a sample -----------------------------------------------------------------------------------
REWARDS, GROUPS = [1.0, 0.0, 3.0, 0.0, 3.0, 5.0], [7, 2, 7, 2, 2, 9]   # sizes 2, 3, 1, interleaved
S2, S3 = math.sqrt(2) + 1e-6, math.sqrt(3) + 1e-6     # the groups' unbiased stds: of (1, 3) and of (0, 0, 3)
OVER_STD, CENTRED = [-1 / S2, -1 / S3, 1 / S2, -1 / S3, 2 / S3, 0], [-1, -1, 1, -1, 2, 0]
BY_STD, BY_GROUP = ("grpo", "gspo", "cispo"), ("grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline")


@pytest.mark.parametrize("name, changes, want", [
    *((name, dict(), OVER_STD) for name in BY_STD),
    *((name, dict(grpo_std_normalization=False), CENTRED) for name in BY_STD),               # Dr.GRPO
    ("rloo", dict(), [-2, -1.5, 2, -1.5, 3, 0]),
    ("reinforce_plus_plus_baseline", dict(), CENTRED),
    ("ppo", dict(), REWARDS), ("reinforce_plus_plus", dict(), REWARDS),
    *((name, dict(rewards_normalization=False), REWARDS) for name in algos.ADVANTAGES)])
def test_group_rewards_by_hand(name, changes, want):
    got = algos.group_rewards(make_cfg(advantage_estimator=name, **changes), REWARDS, GROUPS, list(range(6)))
    assert got == pytest.approx(want, abs=1e-9)


# Two rollouts: one of three branches with mean 1, one of two with mean 0. Their mean is 0.5, their std 1 / sqrt(2).
BRANCHES, BRANCHES_CENTRED = [1.0, -1.0, 1.0, 1.0, 1.0], [0.5, -1.5, 0.5, 0.5, 0.5]
BRANCHES_OVER_STD = [x / (math.sqrt(0.5) + 1e-6) for x in BRANCHES_CENTRED]


@pytest.mark.parametrize("name, changes, want", [
    ("grpo", dict(), BRANCHES_OVER_STD), ("grpo", dict(grpo_std_normalization=False), BRANCHES_CENTRED),
    ("reinforce_plus_plus_baseline", dict(), BRANCHES_CENTRED), ("rloo", dict(), [1, -2, 1, 0, 1]), ("ppo", dict(), BRANCHES)])
def test_a_rollout_counts_once_however_many_branches_it_has(name, changes, want):
    got = algos.group_rewards(make_cfg(advantage_estimator=name, **changes), BRANCHES, [4] * 5, [11, 12, 11, 12, 11])
    assert got == pytest.approx(want, abs=1e-9)


@pytest.mark.parametrize("name", BY_GROUP)
def test_equal_rewards_give_exactly_zero(name):
    assert algos.group_rewards(make_cfg(advantage_estimator=name), [0.1] * 7, [0] * 7, [0, 0, 1, 2, 3, 4, 4]) == [0.0] * 7


@properties
@given(st.lists(st.tuples(st.integers(-8, 8), st.integers(0, 3)), min_size=1, max_size=12), st.data(),
       st.floats(0.5, 20), st.floats(-10, 10))
def test_grpo_rewards_know_no_scale_shift_or_order(pairs, data, scale, shift):
    order, (rewards, groups) = data.draw(st.permutations(range(len(pairs)))), zip(*pairs)
    base = algos.group_rewards(make_cfg(), list(rewards), list(groups), list(range(len(pairs))))
    moved = algos.group_rewards(make_cfg(), [rewards[i] * scale + shift for i in order], [groups[i] for i in order], list(order))
    assert moved == pytest.approx([base[i] for i in order], abs=1e-4)      # the 1e-6 beside the std
    for g in set(groups):                    # mean 0 in each group, std 1 unless all are equal
        own = f64(*(b for b, h in zip(base, groups) if h == g))
        assert abs(own.mean()) < 1e-9
        assert own.abs().max() == 0 or abs(own.std() - 1) < 1e-5


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_length_penalty_is_eq_13_of_dapo(factor):
    cfg = make_cfg(rollout_max_response_len=100, overlong_buffer_len=20, overlong_penalty_factor=factor)
    for length in range(111):
        want = 0.0 if length <= 80 else -1.0 if length > 100 else (80 - length) / 20
        assert algos.length_penalty(cfg, length) == pytest.approx(want * factor, abs=1e-12), length
    assert algos.length_penalty(make_cfg(rollout_max_response_len=100), 100) == 0


# ---- Advantages: one number a token ---------------------------------------------------------------------------------
def advantages_by_loop(cfg, reward, mask, old, ref, values):
    """One sample. Trainable tokens are numbered as if there were no others; the sums are written out, no recursion."""
    name, at = cfg.advantage_estimator, [t for t, m in enumerate(mask) if m]
    n, gamma, out = len(at), cfg.gamma, [0.0] * len(mask)
    r = [-cfg.kl_coef * (old[t] - ref[t]) if cfg.kl_coef else 0.0 for t in at]
    if name in ("ppo", "reinforce_plus_plus") and n:
        r[-1] += reward
    v = [values[t] for t in at] + [0.0] if name == "ppo" else []
    for i in range(n):
        if name == "ppo":                    # eq. 16 of 1506.02438
            deltas = [r[j] + gamma * v[j + 1] - v[j] for j in range(n)]
            out[at[i]] = sum((gamma * cfg.lambd) ** (j - i) * deltas[j] for j in range(i, n))
        elif name == "reinforce_plus_plus":
            out[at[i]] = sum(gamma ** (j - i) * r[j] for j in range(i, n))
        else:
            out[at[i]] = reward + (r[i] if name == "reinforce_plus_plus_baseline" else 0.0)
    return out


@each_estimator
@properties
@given(seeds, st.integers(1, 4), st.integers(1, 9), st.sampled_from([1.0, 0.9, 0.0]), st.sampled_from([1.0, 0.8, 0.0]),
       st.sampled_from([0.0, 0.3]))
def test_advantages_equal_a_loop(name, seed, rows, width, gamma, lambd, kl_coef):
    """Where the mask is 0 there is NaN and inf; the order of the rows does not matter."""
    cfg, normal = make_cfg(advantage_estimator=name, gamma=gamma, lambd=lambd, kl_coef=kl_coef), draws(seed)
    mask = (normal(rows, width) > -0.3).double()
    junk = f64(math.nan, math.inf, -math.inf)[torch.arange(rows * width) % 3].view(rows, width)
    x = dict(rewards=normal(rows), mask=mask)
    x |= {k: torch.where(mask != 0, normal(rows, width), junk) for k in ("old_logp", "ref_logp", "values")}
    got = algos.ADVANTAGES[name].advantages(cfg, algos.AdvantageInput(**x))
    same(got, f64(*(advantages_by_loop(cfg, *row) for row in zip(*(v.tolist() for v in x.values())))))
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    same(algos.ADVANTAGES[name].advantages(cfg, algos.AdvantageInput(**pick(x, order))), got[order])


@pytest.mark.parametrize("name, changes, want", [
    ("ppo", dict(), [1.5, 0, 3, 0]),                                            # 4 - V: without discount
    ("ppo", dict(gamma=0.5, lambd=0.5), [-2 + 0.25 * 3, 0, 3, 0]),              # deltas: 0 + 1/2 - 2.5 and 4 - 1
    ("ppo", dict(kl_coef=0.1), [1.5 - 0.1 - 0.2, 0, 3 - 0.2, 0]),
    ("reinforce_plus_plus", dict(gamma=0.5, kl_coef=0.1), [-0.1 + 0.5 * 3.8, 0, 3.8, 0]),
    ("reinforce_plus_plus_baseline", dict(kl_coef=0.1), [3.9, 0, 3.8, 0]),
    ("grpo", dict(), [4, 0, 4, 0])])
def test_advantages_by_hand(name, changes, want):
    """Reward 4; a tool's token between two trainable ones, and one of padding."""
    x = algos.AdvantageInput(rewards=f64(4), mask=f64([1, 0, 1, 0]), old_logp=f64([-1, -5, -1, -5]),
                             ref_logp=f64([-2, 0, -3, 0]), values=f64([2.5, 9, 1, 9]))
    same(algos.ADVANTAGES[name].advantages(make_cfg(advantage_estimator=name, **changes), x), f64(want))


@pytest.mark.parametrize("chunk", [2, 3, 128])
@pytest.mark.parametrize("decay", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("width", [0, 1, 2, 3, 127, 128, 129, 1000])
def test_discounted_sums_equal_a_loop(width, decay, chunk):
    x = draws(width)(3, width)
    want = torch.zeros(3, width + 1, dtype=torch.float64)
    for t in reversed(range(width)):
        want[:, t] = x[:, t] + decay * want[:, t + 1]
    same(algos.discounted_sums(x, decay, chunk), want[:, :-1])


def whiten_by_loop(rows, masks):
    """rows: lists of floats, of all ranks."""
    flat = [a for row, mask in zip(rows, masks) for a, m in zip(row, mask) if m]
    mean = statistics.fmean(flat) if flat else 0.0
    scale = math.sqrt((statistics.variance(flat) if len(flat) > 1 else 0.0) + 1e-8)
    return [[(a - mean) / scale if m else 0.0 for a, m in zip(row, mask)] for row, mask in zip(rows, masks)]


@pytest.mark.parametrize("rows, width, keep", [(4, 6, 0.7), (1, 1, 1), (3, 5, 0), (0, 6, 0), (0, 0, 0), (1, 9, 0.5)])
def test_whiten_equals_a_loop(rows, width, keep):
    a = 5 + 3 * draws(rows)(rows, width)
    mask = (torch.rand(rows, width, generator=torch.Generator().manual_seed(1)) < keep).double()
    same(algos.whiten(a, mask), f64(*whiten_by_loop(a.tolist(), mask.tolist())).view(rows, width))


def test_whiten_does_not_see_what_is_masked():
    a, mask = f64([1, 2, 4]), f64([1, 0, 1])
    same(algos.whiten(torch.where(mask != 0, a, math.nan), mask), algos.whiten(a, mask))


# ---- compute_advantages: the lists of buffer.to_train_data ----------------------------------------------------------
LENGTHS = [3, 0, 5, 2, 4]


def train_data(samples=slice(None)):
    """Tool tokens inside sample 2; nothing of sample 3 is trainable; sample 1 is empty."""
    normal = draws(4)
    masks = [torch.tensor(mask) for mask in ([1, 1, 1], [], [1, 0, 0, 1, 1], [0, 0], [1, 1, 1, 0])]
    data = dict(response_lengths=LENGTHS, rewards=[1.5, 7.0, -0.5, 0.25, 0.0], loss_masks=masks)
    for name in ("log_probs", "ref_log_probs", "teacher_log_probs", "values"):
        data[name] = [normal(n).float() for n in LENGTHS]
    return {k: v[samples] for k, v in data.items()}


def compute_by_loop(cfg, data):
    """-> advantages, returns: lists of lists."""
    masks, old, ref, teacher, values = ([v.tolist() for v in data[k]] for k in (
        "loss_masks", "log_probs", "ref_log_probs", "teacher_log_probs", "values"))
    a = [advantages_by_loop(cfg, *sample) for sample in zip(data["rewards"], masks, old, ref, values)]
    returns = [[x + v if m else 0.0 for x, v, m in zip(*rows)] for rows in zip(a, values, masks)]
    if cfg.use_opd:
        a = [[x - cfg.opd_kl_coef * (p - q) if m else 0.0 for x, p, q, m in zip(*rows)]
             for rows in zip(a, old, teacher, masks)]
    whitens = cfg.advantage_estimator in ("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
    if cfg.normalize_advantages or (cfg.normalize_advantages is None and whitens):
        a = whiten_by_loop(a, masks)
    return a, returns


@each_estimator
@pytest.mark.parametrize("changes", [
    dict(), dict(normalize_advantages=True), dict(normalize_advantages=False),
    dict(use_opd=True, opd_kl_coef=0.7), dict(use_opd=True, normalize_advantages=False)], ids=str)
@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
def test_compute_advantages_equals_a_loop(name, changes, kl_coef):
    cfg, data = make_cfg(advantage_estimator=name, gamma=0.9, lambd=0.8, kl_coef=kl_coef, **changes), train_data()
    want, returns = compute_by_loop(cfg, data)
    reads = dict(log_probs=kl_coef or cfg.use_opd, ref_log_probs=kl_coef, teacher_log_probs=cfg.use_opd,
                 values=name == "ppo")
    data = {k: v for k, v in data.items() if reads.get(k, True)}     # what nobody reads may be missing
    algos.compute_advantages(cfg, data)
    for i in range(len(LENGTHS)):
        assert data["advantages"][i].tolist() == pytest.approx(want[i], abs=1e-6)
        if name == "ppo":
            trained = data["loss_masks"][i] != 0
            same(data["returns"][i][trained].double(), f64(*returns[i])[trained], 1e-6)
    assert ("returns" in data) == (name == "ppo")


@each_estimator
@pytest.mark.parametrize("samples", [slice(0, 0), slice(1, 2), slice(3, 4)])
def test_compute_advantages_of_nothing_trainable(name, samples):
    data = train_data(samples)
    algos.compute_advantages(make_cfg(advantage_estimator=name), data)
    assert [a.tolist() for a in data["advantages"]] == [[0.0] * n for n in LENGTHS[samples]]


def test_custom_advantage_function():
    def mine(args, data):
        data["advantages"] = [torch.full((n,), args.gamma) for n in data["response_lengths"]]

    data = train_data()
    algos.compute_advantages(make_cfg(gamma=0.25, custom_advantage_function=mine), data)
    assert [a.tolist() for a in data["advantages"]] == [[0.25] * n for n in LENGTHS]
    data = train_data()                      # what follows an estimator follows this too
    algos.compute_advantages(make_cfg(gamma=0.25, custom_advantage_function=mine, use_opd=True), data)
    for a, p, q, mask in zip(*(data[k] for k in ("advantages", "log_probs", "teacher_log_probs", "loss_masks"))):
        same(a[mask != 0], (0.25 - p + q)[mask != 0], 1e-6)
    with pytest.raises(AssertionError, match="must set data..advantages"):
        algos.compute_advantages(make_cfg(custom_advantage_function=lambda args, data: None), train_data())


RANKS = [(slice(0, 2), slice(2, 5)), (slice(0, 5), slice(5, 5)), (slice(0, 0), slice(0, 5))]   # of train_data


def whiten_worker(rank, world, port):
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world, init_method=f"tcp://127.0.0.1:{port}",
                                         timeout=datetime.timedelta(seconds=120))
    out = []
    for split in RANKS:
        data, (a, mask) = train_data(split[rank]), (t[split[rank]] for t in whiten_case())
        algos.compute_advantages(make_cfg(advantage_estimator="ppo"), data, group=torch.distributed.group.WORLD)
        out.append((algos.whiten(a, mask, torch.distributed.group.WORLD), data["advantages"], data["returns"]))
    torch.distributed.destroy_process_group()
    return out


def whiten_case():
    return 5 + draws(8)(5, 6), (draws(9)(5, 6) > -0.5).double()


def test_whitening_on_two_ranks_equals_one_process():
    ranks, data = run_workers(whiten_worker, 2), train_data()
    algos.compute_advantages(make_cfg(advantage_estimator="ppo"), data)
    for (a, adv, returns), (b, adv2, returns2) in zip(*ranks):
        same(torch.cat([a, b]), algos.whiten(*whiten_case()))
        for got, want in ((adv + adv2, data["advantages"]), (returns + returns2, data["returns"])):
            same(torch.cat(got), torch.cat(want), 1e-6)


# ---- The policy loss ------------------------------------------------------------------------------------------------
KL = dict(use_kl_loss=True, kl_loss_coef=0.3)
TIS = dict(use_tis=True, tis_clip=1.3)
LOSS_CASES = {
    "plain": dict(),
    "clip higher": dict(eps_clip=0.1, eps_clip_high=0.4),
    "dual clip": dict(eps_clip_c=1.5),
    **{kind: KL | dict(kl_loss_type=kind) for kind in ("k1", "k2", "k3", "low_var_kl")},
    "unbiased k1": KL | dict(kl_loss_type="k1", use_unbiased_kl=True),
    "unbiased low_var_kl": KL | dict(use_unbiased_kl=True),
    "entropy": dict(entropy_coef=0.2),
    "gspo": dict(advantage_estimator="gspo", eps_clip=0.05, eps_clip_high=0.1),
    "gspo dual clip": dict(advantage_estimator="gspo", eps_clip=0.02, eps_clip_c=1.05),
    "cispo": dict(advantage_estimator="cispo", eps_clip=0.3, eps_clip_high=0.5),
    "tis": TIS,
    **{f"tis {level} {mode}": dict(use_tis=True, tis_level=level, tis_mode=mode, tis_clip=high, tis_clip_low=low)
       for level, low, high in (("token", 0.9, 1.05), ("sequence", 0.6, 2), ("geometric", 0.95, 1.08))
       for mode in ("truncate", "mask")},
    "opsm": dict(use_opsm=True, opsm_delta=0.05),
    "gspo all": dict(advantage_estimator="gspo", eps_clip=0.1, use_opsm=True, entropy_coef=0.1, **KL, **TIS,
                     tis_level="sequence"),
    "cispo all": dict(advantage_estimator="cispo", use_opsm=True, entropy_coef=0.1, **KL, **TIS),
    "engine's log-probs": dict(use_rollout_logprobs=True),
    "all": dict(eps_clip_high=0.3, eps_clip_c=2.0, entropy_coef=0.05, use_unbiased_kl=True, use_opsm=True, **KL, **TIS,
                tis_mode="mask"),
}
PER_TOKEN = ("logp", "entropy", "advantages", "old_logp", "rollout_logp", "ref_logp")
LARGEST = ("logp_max", "train_rollout_logprob_abs_diff_max")    # the metrics that are no sums


def loss_input(sizes=(6, 4, 13, 0, 3, 14), seed=3):
    """Ratios from 0.3 to 3 and advantages of both signs, so that each side of each clip is hit. A quarter is
    masked, and the whole of sample 4; sample 3 is empty."""
    n, normal = sum(sizes), draws(seed)
    sample = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes, dtype=torch.int64))
    logp, shift = -normal(n).abs() - 0.1, 0.2 * normal(len(sizes))[sample]
    weight = (0.1 + normal(n).abs()) * (normal(n) > -0.7) * (sample != 4)
    return dict(weight=weight, sample=sample, logp=logp, entropy=normal(n).abs(), advantages=normal(n),
                old_logp=logp + shift + 0.4 * normal(n), rollout_logp=logp + shift + 0.2 * normal(n),
                ref_logp=logp + 0.4 * normal(n))


def policy_by_loop(cfg, x):
    """policy_loss in floats: no max, no clamp, the papers' cases. x["still"]: the logp that stop-gradient sees."""
    x = {k: v.tolist() if torch.is_tensor(v) else v for k, v in x.items()}
    logp, still, roll = x["logp"], x.get("still", x["logp"]), x["rollout_logp"]
    old = still if x["old_logp"] is None else x["old_logp"]
    trained = [i for i, w in enumerate(x["weight"]) if w]
    own = {s: [i for i in trained if x["sample"][i] == s] for s in set(x["sample"])}

    def mean(p, q):
        """Of p - q over the trainable tokens of i's sample."""
        return sum(p[j] - q[j] for j in others) / len(others)

    sums = defaultdict(float, tokens=len(trained))
    for i in trained:
        a, low, high, others = x["advantages"][i], 1 - cfg.eps_clip, 1 + cfg.eps_clip_high, own[x["sample"][i]]
        if cfg.advantage_estimator == "cispo":
            r = math.exp(still[i] - old[i])
            out = r < low or r > high
            pg = -(low if r < low else high if r > high else r) * a * logp[i]
        else:
            r = math.exp(mean(logp, old) if cfg.advantage_estimator == "gspo" else logp[i] - old[i])
            out = (a > 0 and r > high) or (a < 0 and r < low)   # already moved far enough in the good direction
            pg = -a * ((high if a > 0 else low) if out else r)
            if a < 0 and cfg.eps_clip_c is not None and r > cfg.eps_clip_c:
                pg = -a * cfg.eps_clip_c
        terms = dict(weight=1, pg_clipfrac=out, ppo_kl=old[i] - logp[i], entropy_loss=x["entropy"][i])
        if cfg.use_tis:
            tis = math.exp({"token": old[i] - roll[i], "geometric": mean(old, roll),
                            "sequence": mean(old, roll) * len(others)}[cfg.tis_level])
            terms["tis_clipfrac"] = tis < cfg.tis_clip_low or tis > cfg.tis_clip
            if terms["tis_clipfrac"]:
                tis = 0.0 if cfg.tis_mode == "mask" else cfg.tis_clip if tis > cfg.tis_clip else cfg.tis_clip_low
            terms["tis"] = tis
            pg *= tis
        if cfg.use_opsm:
            terms["opsm_clipfrac"] = a < 0 and mean(old, logp) > cfg.opsm_delta
            pg *= not terms["opsm_clipfrac"]
        loss = pg - cfg.entropy_coef * x["entropy"][i]
        if cfg.use_kl_loss:
            lr = logp[i] - x["ref_logp"][i]
            k = {"k1": lr, "k2": lr * lr / 2}.get(cfg.kl_loss_type, math.exp(-lr) - 1 + lr)
            terms["kl_loss"] = k * (math.exp(logp[i] - old[i]) if cfg.use_unbiased_kl else 1)
            loss += cfg.kl_loss_coef * terms["kl_loss"]
        diff = abs((logp if x["old_logp"] is None or cfg.use_rollout_logprobs else old)[i] - roll[i])
        for name, value in (terms | dict(pg_loss=pg, loss=loss, train_rollout_logprob_abs_diff=diff)).items():
            sums[name] += x["weight"][i] * value
        for name, value in zip(LARGEST, (logp[i], diff)):
            sums[name] = value if name not in sums or value > sums[name] else sums[name]
    return sums["loss"], dict(sums)


def run(function, cfg, x, leaves=("logp", "entropy")):
    """-> loss, metrics as floats, {name: gradient [R]}"""
    x = x | {k: x[k].detach().clone().requires_grad_() for k in leaves}
    loss, sums = function(cfg, algos.LossInput(**x))
    grads = torch.autograd.grad(loss, [x[k] for k in leaves], allow_unused=True, materialize_grads=True)
    return float(loss.detach()), {k: float(v) for k, v in sums.items()}, dict(zip(leaves, grads))


def check_gradients(by_loop, cfg, x, grads):
    """Central differences of the loop."""
    for name, gradient in grads.items():
        for i, step in enumerate(1e-6 * torch.eye(len(gradient), dtype=torch.float64)):
            up, down = (by_loop(cfg, x | {"still": x.get("logp"), name: x[name] + s * step})[0] for s in (1, -1))
            assert float(gradient[i]) == pytest.approx((up - down) / 2e-6, abs=1e-6), (name, i)


@pytest.mark.parametrize("old", ["old_logp", None])
@pytest.mark.parametrize("case", LOSS_CASES)
def test_policy_loss_equals_a_loop(case, old):
    cfg, x = make_cfg(**LOSS_CASES[case]), loss_input()
    x |= {} if old else {"old_logp": None}
    loss, sums, grads = run(algos.policy_loss, cfg, x)
    want, want_sums = policy_by_loop(cfg, x)
    assert loss == pytest.approx(want, abs=1e-9)
    assert sums == pytest.approx(want_sums, abs=1e-6)
    check_gradients(policy_by_loop, cfg, x, grads)
    for name in {"pg_clipfrac", "tis_clipfrac", "opsm_clipfrac"} & sums.keys() if old else ():
        assert 0 < sums[name] < sums["weight"], f"{name}: a case in which nothing, or everything, is clipped is none"


def only_trained(x, data):
    """A masked token might as well not be there."""
    return [torch.where(x["weight"] != 0)[0]]


def reordered(x, data):
    """The order of samples does not matter."""
    return [torch.cat([torch.where(x["sample"] == s)[0] for s in data.draw(st.permutations(range(6)))])]


def cut(x, data):
    """Micro-batches add up. By sequence (gspo, MIS, OPSM) a cut inside a sample would not do."""
    first = x["sample"] < data.draw(st.integers(0, 6))
    return [torch.where(first)[0], torch.where(~first)[0]]


@pytest.mark.parametrize("change", [only_trained, reordered, cut])
@properties
@given(st.sampled_from(sorted(LOSS_CASES)), seeds, st.lists(st.integers(0, 5), min_size=6, max_size=6),
       st.sampled_from([math.nan, math.inf, -math.inf]), st.data())
def test_policy_loss_is_the_same(change, case, seed, sizes, junk, data):
    """Value, metrics and (0 * inf!) gradient. Junk where nothing is trained."""
    cfg, x = make_cfg(**LOSS_CASES[case]), loss_input(sizes, seed)
    x |= {k: torch.where(x["weight"] != 0, x[k], junk) for k in PER_TOKEN}
    indices = change(x, data)
    parts = []
    for index in indices:                    # samples numbered anew
        part = pick(x, index) | dict(sample=torch.unique_consecutive(x["sample"][index], return_inverse=True)[1])
        parts.append(run(algos.policy_loss, cfg, part))
    loss, sums, grads = run(algos.policy_loss, cfg, x)
    merged = {name: (max if name in LARGEST else sum)(part[1][name] for part in parts) for name in sums}
    assert sums == pytest.approx(merged, abs=1e-9) and sums["loss"] == loss
    for name, gradient in grads.items():
        want = torch.zeros_like(gradient)
        for index, part in zip(indices, parts):
            want[index] = part[2][name]
        same(gradient, want)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode, far, want", [("truncate", 500, 2), ("truncate", -500, 0), ("mask", 500, 0)])
def test_an_infinite_importance_weight_is_bounded(level, mode, far, want):
    x = loss_input()
    x |= dict(rollout_logp=x["old_logp"] - far)
    _, plain, _ = run(algos.policy_loss, make_cfg(), x)
    _, sums, grads = run(algos.policy_loss, make_cfg(use_tis=True, tis_level=level, tis_mode=mode), x)
    assert sums["pg_loss"] == pytest.approx(want * plain["pg_loss"], abs=1e-6)
    assert all(map(math.isfinite, [*sums.values(), *grads["logp"]]))


@pytest.mark.parametrize("case", LOSS_CASES)
def test_a_nan_at_a_trained_token_is_seen(case):
    x = loss_input()
    x["logp"][x["weight"].nonzero()[0]] = math.nan
    assert math.isnan(run(algos.policy_loss, make_cfg(**LOSS_CASES[case]), x)[0])


# ---- The other losses -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("junk", [0.0, math.nan])
@pytest.mark.parametrize("case", ["plain", "gspo all", "cispo all", "all"])
def test_sft_tokens_beside_the_samples(case, junk):
    """Their loss is added, and no RL term sees them, whatever their advantages and other log-probs are."""
    cfg, x = make_cfg(**LOSS_CASES[case], sft_loss_coef=0.6), loss_input()
    own = (x["weight"] == 0) & (torch.arange(40) % 3 != 0)
    sft_weight = torch.where(own, draws(6)(40).abs(), 0)
    dirty = x | {k: torch.where(own, junk, x[k]) for k in PER_TOKEN if k != "logp"} | dict(sft_weight=sft_weight)
    (loss, sums, grads), (loss2, sums2, grads2) = (run(algos.policy_loss, cfg, y) for y in (x, dirty))
    nll = -float((sft_weight * x["logp"]).sum())
    assert loss2 == pytest.approx(loss + 0.6 * nll, abs=1e-9)
    assert sums2 == pytest.approx(sums | dict(sft_loss=nll, loss=loss2), abs=1e-9)
    same(grads2["logp"], grads["logp"] - 0.6 * sft_weight)
    same(grads2["entropy"], grads["entropy"])


def value_input():
    x, normal = loss_input(), draws(5)
    v = normal(40)
    return dict(weight=x["weight"], sample=x["sample"], values=v, old_values=v + 0.4 * normal(40), returns=normal(40))


def value_by_loop(cfg, x):
    """The larger of two errors: of the value, and of where it is if it may move by value_clip only."""
    sums = defaultdict(float, tokens=int((x["weight"] != 0).sum()))
    for w, v, old, g in zip(*(x[k].tolist() for k in ("weight", "values", "old_values", "returns"))):
        near = (old + math.copysign(cfg.value_clip, v - old) if abs(v - old) > cfg.value_clip else v) - g
        clipped = abs(near) > abs(v - g)
        loss = (near if clipped else v - g) ** 2
        terms = dict(weight=1, loss=loss, value_loss=loss, value_clipfrac=clipped, values=old, returns=g)
        for name, value in terms.items():
            sums[name] += w * value
    return sums["loss"], dict(sums)


def test_value_loss_equals_a_loop():
    cfg, x = make_cfg(value_clip=0.3), value_input()
    loss, sums, grads = run(algos.value_loss, cfg, x, ["values"])
    want, want_sums = value_by_loop(cfg, x)
    assert loss == pytest.approx(want, abs=1e-9)
    assert sums == pytest.approx(want_sums, abs=1e-9) and 0 < sums["value_clipfrac"] < sums["weight"]
    check_gradients(value_by_loop, cfg, x, grads)
    dirty = {k: v if k in ("weight", "sample") else torch.where(x["weight"] == 0, math.nan, v) for k, v in x.items()}
    loss2, sums2, grads2 = run(algos.value_loss, cfg, dirty, ["values"])
    assert (loss2, sums2) == (loss, sums)
    same(grads2["values"], grads["values"])


def test_sft_loss_is_cross_entropy():
    normal, trained = draws(0), f64(0, 1, 1, 0, 1, 1, 1)
    logits, targets = normal(7, 11).requires_grad_(), torch.arange(7) % 4
    d = torch.distributions.Categorical(logits=logits)
    x = algos.LossInput(trained / trained.sum(), torch.zeros(7, dtype=torch.int64), d.log_prob(targets), d.entropy())
    loss, sums = algos.sft_loss(make_cfg(loss_type="sft"), x)
    want = torch.nn.functional.cross_entropy(logits, targets.where(trained != 0, -100))
    same(loss, want)
    same(torch.autograd.grad(loss, logits)[0], torch.autograd.grad(want, logits)[0])
    assert float(sums["tokens"]) == 5


def squares(args, x):
    return args.gamma * x.logp ** 2, {"mine": x.entropy}


def test_custom_loss_is_weighted_and_summed():
    x, cfg = loss_input(), make_cfg(loss_type="custom_loss", custom_loss_function=squares, gamma=0.5)
    loss, sums, grads = run(algos.LOSSES["custom_loss"], cfg, x)
    assert loss == sums["loss"] == pytest.approx(float((x["weight"] * x["logp"] ** 2).sum()) / 2, abs=1e-9)
    assert sums["mine"] == pytest.approx(float((x["weight"] * x["entropy"]).sum()), abs=1e-9)
    same(grads["logp"], x["weight"] * x["logp"])
    for wrong in (lambda args, x: (x.logp.sum(), {}), lambda args, x: (x.logp[1:], {})):
        with pytest.raises(AssertionError, match=r"loss of shape .* for 40 tokens; return one"):
            algos.custom_loss(make_cfg(custom_loss_function=wrong), algos.LossInput(**x))


@pytest.mark.parametrize("function", [*algos.LOSSES.values(), algos.value_loss], ids=lambda f: f.__name__)
@pytest.mark.parametrize("case", ["plain", "gspo all", "cispo all", "all"])
def test_a_loss_of_nothing_is_zero(function, case):
    whole = loss_input() | value_input()
    for x in (whole | dict(weight=0 * whole["weight"]), pick(whole, slice(0, 0))):
        leaf = {k: x[k].clone().requires_grad_() for k in ("logp", "values")}
        loss, sums = function(make_cfg(**LOSS_CASES[case], custom_loss_function=squares), algos.LossInput(**x | leaf))
        loss.backward()                      # an empty micro-batch must still have a graph
        assert float(loss) == 0 == float(sums["tokens"])
        assert not any(t.grad is not None and t.grad.any() for t in leaf.values())


def test_reduce_metrics():
    sums = {"loss": 3.0, "sft_loss": 1.5, "pg_loss": 1.0, "weight": 0.5, "tokens": 40.0, "logp_max": -0.25}
    assert algos.reduce_metrics(sums) == {"loss": 3.0, "sft_loss": 1.5, "pg_loss": 2.0, "logp_max": -0.25}
    assert algos.reduce_metrics(sums | {"weight": 0.0, "pg_loss": 0.0})["pg_loss"] == 0   # nothing was trainable


# ---- What an estimator cannot use -----------------------------------------------------------------------------------
def by(name, **changes):
    return dict(advantage_estimator=name) | changes


@pytest.mark.parametrize("changes, message, mend", [
    (by("gpro"), "advantage_estimator='gpro' is not in .*; use one of .*grpo", by("rloo")),
    (by("gpro"), "'gpro' is not in", dict(loss_type="sft")),
    *((by(name, kl_coef=0.1), f"kl_coef=0.1 has no effect .*'{name}'.*; set kl_coef=0, use_kl_loss=True", fix)
      for name in ("grpo", "gspo", "cispo", "rloo")
      for fix in (dict(kl_coef=0), by("reinforce_plus_plus"), by("reinforce_plus_plus_baseline"))),
    *((by(name, n_samples_per_prompt=1), f"'{name}' .* group of 1 .*; set n_samples_per_prompt=2", fix)
      for name in BY_GROUP for fix in (dict(n_samples_per_prompt=2), dict(use_opd=True), by("reinforce_plus_plus"))),
    (by("ppo", kl_coef=0.1, n_samples_per_prompt=1), "'ppo' needs a critic; set crit", dict(critic=dict(lr=1e-5))),
    (dict(critic=dict(lr=1e-5)), "'grpo', which has no critic; remove", by("ppo")),
    (dict(critic_num_gpus=1), "'grpo', which has no critic; remove", dict(critic_num_gpus=None)),
    (dict(num_critic_only_steps=2), "'grpo', which has no critic; remove", dict(num_critic_only_steps=0)),
    (by("gspo", use_tis=True), "gspo weighs whole sequences.*; set tis_level=", dict(tis_level="geometric")),
    (by("gspo", use_tis=True), "gspo weighs whole sequences.*; set tis_level=", dict(tis_level="sequence")),
    (by("cispo", eps_clip_c=3.0), "eps_clip_c bounds PPO's loss.*; leave it unset", dict(eps_clip_c=None))], ids=str)
def test_check_refuses_what_has_no_effect_and_takes_its_remedy(changes, message, mend):
    with pytest.raises(ValueError, match=message):
        algos.check(make_cfg(**changes))
    algos.check(make_cfg(**changes | mend))


def test_a_maximum_of_a_custom_loss_is_a_maximum():
    x = algos.LossInput(f64([0.5, 0.5, 0]), torch.tensor([0, 0, 0]), logp=f64([-1, -2, -3]))
    cfg = make_cfg(loss_type="custom_loss", custom_loss_function=lambda cfg, x: (-x.logp, {"size_max": f64([1, 3, 9])}))
    assert float(algos.custom_loss(cfg, x)[1]["size_max"]) == 3


def test_distillation_alone_needs_no_group_but_a_reward_does():
    alone = dict(use_opd=True, opd_teacher_load="t", n_samples_per_prompt=1)
    algos.check(make_cfg(**alone))
    with pytest.raises(ValueError, match="a group of 1 always has advantage 0"):
        algos.check(make_cfg(rm_type="exact", **alone))
    algos.check(make_cfg(n_samples_per_prompt=1, gamma=0.9, custom_advantage_function=print))
    with pytest.raises(ValueError, match="grpo_std_normalization=False has no effect with advantage_estimator='rloo'"):
        algos.check(make_cfg(advantage_estimator="rloo", grpo_std_normalization=False))
