"""
test_algos.py: the maths against references written here, against torch, and against itself cut in two.

    closed form | torch.distributions | plain Python loop | finite differences  ==  algos.py

Run:   pytest tests/test_algos.py       CPU only, about 15 s. Everything in fp64, so that a wrong formula cannot hide in rounding.
"""
import datetime
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import algos
from helpers import make_cfg, run_workers


def same(a, b, tol=1e-10):
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


# ---- log-probs and entropy -------------------------------------------------------------------------------------------
R, H, V, PADDED = 7, 5, 11, 14               # 3 rows of padding; with tp 2 the second rank holds columns 7..13


def logits_case(dtype=torch.float64, rows=PADDED, vocab=V):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(R, H, dtype=torch.float64, generator=g).to(dtype)
    weight = torch.randn(rows, H, dtype=torch.float64, generator=g).to(dtype)
    weight[vocab:] *= 50                     # padding rows that would win every softmax, if they were seen
    targets = torch.randint(0, vocab, (R,), generator=g)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def by_torch(hidden, weight, targets, temperature, vocab=V):
    d = torch.distributions.Categorical(logits=hidden @ weight[:vocab].T / temperature)
    return d.log_prob(targets), d.entropy()


def gradients(logp, entropy, *inputs):
    """Of a sum in which every entry of both outputs has a coefficient of its own."""
    a = torch.arange(1, len(logp) + 1, dtype=logp.dtype)
    return torch.autograd.grad((a * logp).sum() + (a.flip(0) * entropy).sum() / 3, inputs, retain_graph=True)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_equal_torch(chunk, temperature):
    hidden, weight, targets = logits_case()
    got = algos.log_probs_and_entropy(hidden, weight, targets, temperature=temperature, vocab_size=V, chunk=chunk)
    want = by_torch(hidden, weight, targets, temperature)
    for x, y in zip(got + gradients(*got, hidden, weight), want + gradients(*want, hidden, weight), strict=True):
        same(x, y)
    assert gradients(*got, weight)[0][V:].abs().max() == 0   # padding learns nothing


def test_log_probs_gradcheck():
    hidden, weight, targets = logits_case()

    def f(h, w):
        return algos.log_probs_and_entropy(h, w, targets, temperature=0.8, vocab_size=V, chunk=2)
    assert torch.autograd.gradcheck(f, (hidden, weight))


def test_log_probs_of_bf16_come_in_fp32():
    hidden, weight, targets = logits_case(torch.bfloat16)
    got = algos.log_probs_and_entropy(hidden, weight, targets, vocab_size=V, chunk=2)
    want = by_torch(hidden.double(), weight.double(), targets, 1.0)
    assert got[0].dtype == got[1].dtype == torch.float32
    for x, y in zip(got, want):
        torch.testing.assert_close(x.double(), y, rtol=2e-2, atol=2e-2)
    d_hidden, d_weight = gradients(*got, hidden, weight)
    assert d_hidden.dtype == d_weight.dtype == torch.bfloat16


def test_log_probs_extremes():
    hidden, weight, _ = logits_case()
    logp, entropy = algos.log_probs_and_entropy(hidden[:0], weight, torch.zeros(0, dtype=torch.int64), vocab_size=V)
    assert logp.shape == entropy.shape == (0,)
    big = (torch.eye(4, dtype=torch.float64) * 1e4).requires_grad_()   # softmax is a one-hot: log-probs 0 and -1e4
    logp, entropy = algos.log_probs_and_entropy(big, torch.eye(4, dtype=torch.float64), torch.tensor([0, 1, 2, 0]), vocab_size=4)
    assert logp.tolist() == [0, 0, 0, -1e4] and entropy.abs().max() == 0
    assert torch.isfinite(torch.autograd.grad(logp.sum() + entropy.sum(), big)[0]).all()


def tp_worker(rank, world, port):
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world, init_method=f"tcp://127.0.0.1:{port}",
                                         timeout=datetime.timedelta(seconds=120))
    out = []
    for vocab in (V, 6):                     # 6: the second rank holds padding only
        hidden, weight, targets = logits_case(vocab=vocab)
        rows = PADDED // world
        mine = weight[rows * rank:rows * (rank + 1)].detach().requires_grad_()
        got = algos.log_probs_and_entropy(hidden, mine, targets, temperature=0.7, vocab_size=vocab, chunk=3,
                                          vocab_start=rows * rank, group=torch.distributed.group.WORLD)
        out.append([x.detach() for x in got + gradients(*got, hidden, mine)])
    torch.distributed.destroy_process_group()
    return out


def test_vocabulary_parallel_equals_one_process():
    ranks = run_workers(tp_worker, 2)
    for case, vocab in enumerate((V, 6)):
        hidden, weight, targets = logits_case(vocab=vocab)
        want = by_torch(hidden, weight, targets, 0.7, vocab)
        d_hidden, d_weight = gradients(*want, hidden, weight)
        a, b = (rank[case] for rank in ranks)
        for one in (a, b):
            same(one[0], want[0])
            same(one[1], want[1])
        same(a[2] + b[2], d_hidden)          # each rank has its share; model.py's copy-to-region sums them
        same(torch.cat([a[3], b[3]]), d_weight)


# ---- KL --------------------------------------------------------------------------------------------------------------
def two_policies():
    g = torch.Generator().manual_seed(1)
    z, base = torch.randn(2, 6, dtype=torch.float64, generator=g)
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
    """E over the policy of the gradient (the sampling is not differentiated): k1 nothing, k2 reverse KL, k3 forward KL."""
    def mean_gradient(kind):
        z, base = two_policies()
        logp = z.log_softmax(-1)
        return torch.autograd.grad((logp.exp().detach() * algos.kl_estimate(logp, base, kind)).sum(), z)[0]

    z, base = two_policies()
    logp = z.log_softmax(-1)
    same(mean_gradient("k1"), torch.zeros(6, dtype=torch.float64))
    same(mean_gradient("k2"), torch.autograd.grad(kl(logp, base), z, retain_graph=True)[0])
    same(mean_gradient("k3"), torch.autograd.grad(kl(base, logp), z)[0])
    same(mean_gradient("low_var_kl"), mean_gradient("k3"))


def test_kl_values_by_hand():
    logp, base = torch.tensor([-1.0, -1.0, -9.0]), torch.tensor([-1.0, -2.0, -1.0])
    e = math.exp
    same(algos.kl_estimate(logp, base, "k1"), torch.tensor([0.0, 1.0, -8.0]))
    same(algos.kl_estimate(logp, base, "k2"), torch.tensor([0.0, 0.5, 32.0]))
    same(algos.kl_estimate(logp, base, "k3"), torch.tensor([0.0, e(-1), e(8) - 9]), 1e-6)
    same(algos.kl_estimate(logp, base, "low_var_kl"), torch.tensor([0.0, e(-1), 10.0]), 1e-6)   # clamped


# ---- rewards and advantages ------------------------------------------------------------------------------------------
REWARDS, GROUPS = [1.0, 0.0, 3.0, 0.0, 3.0, 5.0], [7, 2, 7, 2, 2, 9]   # sizes 2, 3, 1, interleaved
S2, S3 = math.sqrt(2), math.sqrt(3)          # the groups' unbiased stds: of (1, 3) and of (0, 0, 3)


@pytest.mark.parametrize("changes, want", [
    (dict(), [-1 / S2, -1 / S3, 1 / S2, -1 / S3, 2 / S3, 0]),
    (dict(grpo_std_normalization=False), [-1, -1, 1, -1, 2, 0]),                                      # Dr.GRPO
    (dict(rewards_normalization=False), REWARDS)])
def test_normalize_rewards_by_hand(changes, want):
    got = algos.normalize_rewards(make_cfg(**changes), REWARDS, GROUPS)
    assert got == pytest.approx(want, abs=2e-6)            # the 1e-6 beside the std


def test_equal_rewards_give_exactly_zero():
    assert algos.normalize_rewards(make_cfg(), [0.1] * 7, [0] * 7) == [0.0] * 7


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(-8, 8), st.integers(0, 3)), min_size=1, max_size=12), st.randoms(use_true_random=False),
       st.floats(0.5, 20), st.floats(-10, 10))
def test_normalize_rewards_invariances(pairs, rnd, scale, shift):
    cfg, (rewards, groups) = make_cfg(), zip(*pairs)
    base = algos.normalize_rewards(cfg, list(rewards), list(groups))
    order = list(range(len(pairs)))
    rnd.shuffle(order)
    moved = algos.normalize_rewards(cfg, [rewards[i] * scale + shift for i in order], [groups[i] for i in order])
    assert moved == pytest.approx([base[i] for i in order], abs=1e-4)
    for g in set(groups):                    # mean 0 in each group, std 1 unless all are equal
        own = torch.tensor([b for b, h in zip(base, groups) if h == g], dtype=torch.float64)
        assert abs(own.mean()) < 1e-9
        assert own.abs().max() == 0 or abs(own.std() - 1) < 1e-5


def test_grpo_advantages_are_the_reward_at_each_token():
    got = algos.grpo_advantages(make_cfg(), {"response_lengths": [2, 0, 3], "rewards": [0.5, 1.0, -2.0]})
    assert [t.tolist() for t in got] == [[0.5, 0.5], [], [-2.0] * 3]


def test_check_refuses_what_an_estimator_cannot_use():
    algos.check(make_cfg())
    algos.check(make_cfg(loss_type="sft", advantage_estimator="nothing"))
    with pytest.raises(ValueError, match="advantage_estimator='gpro' is not in .*; use one of .*grpo"):
        algos.check(make_cfg(advantage_estimator="gpro"))
    with pytest.raises(ValueError, match="kl_coef=0.1 has no effect .*'grpo'.*; set kl_coef=0, use_kl_loss=True"):
        algos.check(make_cfg(kl_coef=0.1))


# ---- the policy loss -------------------------------------------------------------------------------------------------
LOSS_CASES = {
    "plain": dict(),
    "clip higher": dict(eps_clip=0.1, eps_clip_high=0.4),
    "dual clip": dict(eps_clip_c=1.5),
    "k1": dict(use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type="k1"),
    "k2": dict(use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type="k2"),
    "low_var_kl": dict(use_kl_loss=True, kl_loss_coef=0.3),
    "entropy": dict(entropy_coef=0.2),
    "all": dict(eps_clip_high=0.3, eps_clip_c=2.0, use_kl_loss=True, kl_loss_coef=0.1, entropy_coef=0.05),
}


def loss_input(n=40):
    """Ratios from 0.3 to 3 and advantages of both signs, so that each side of each clip is hit; some tokens masked."""
    g = torch.Generator().manual_seed(3)

    def normal(scale):
        return scale * torch.randn(n, dtype=torch.float64, generator=g)
    logp = -normal(1.0).abs() - 0.1
    weight = torch.rand(n, dtype=torch.float64, generator=g) * (torch.arange(n) % 4 != 0)
    return dict(logp=logp, entropy=normal(1.0).abs(), weight=weight, advantages=normal(1.0), old_logp=logp + normal(0.5),
                rollout_logp=logp + normal(0.1), ref_logp=logp + normal(0.4))


def loss_by_loop(cfg, x):
    """The same loss, one token at a time, in Python floats: no max, no clamp, only the cases of the papers written out."""
    loss, sums = 0.0, dict.fromkeys(("pg_loss", "pg_clipfrac", "ppo_kl", "entropy_loss", "kl_loss", "diff"), 0.0)
    rows = zip(*(x[k].tolist() for k in ("logp", "entropy", "weight", "advantages", "old_logp", "rollout_logp", "ref_logp")))
    for logp, entropy, w, a, old, roll, ref in rows:
        if w == 0:
            continue
        r, low, high = math.exp(logp - old), 1 - cfg.eps_clip, 1 + cfg.eps_clip_high
        out = (a > 0 and r > high) or (a < 0 and r < low)   # already moved far enough in the good direction
        pg = -a * ((high if a > 0 else low) if out else r)
        if a < 0 and cfg.eps_clip_c is not None and pg > -a * cfg.eps_clip_c:
            pg = -a * cfg.eps_clip_c
        lr = logp - ref
        kl = {"k1": lr, "k2": lr * lr / 2, "low_var_kl": math.exp(-lr) - 1 + lr}[cfg.kl_loss_type]
        loss += w * (pg - cfg.entropy_coef * entropy + (cfg.kl_loss_coef * kl if cfg.use_kl_loss else 0))
        for name, v in zip(sums, (pg, out, old - logp, entropy, kl, abs(old - roll))):
            sums[name] += w * v
    return loss, sums


@pytest.mark.parametrize("case", LOSS_CASES)
def test_policy_loss_equals_a_loop(case):
    cfg, x = make_cfg(**LOSS_CASES[case]), loss_input()
    x["logp"].requires_grad_()
    x["entropy"].requires_grad_()
    loss, sums = algos.policy_loss(cfg, algos.LossInput(**x))
    want, want_sums = loss_by_loop(cfg, x)
    assert loss.item() == pytest.approx(want, abs=1e-9)
    want_sums["train_rollout_logprob_abs_diff"] = want_sums.pop("diff")
    assert 0 < want_sums["pg_clipfrac"] < float(x["weight"].sum())
    if not cfg.use_kl_loss:
        want_sums.pop("kl_loss")
    want_sums |= {"weight": float(x["weight"].sum()), "tokens": int((x["weight"] != 0).sum()), "loss": want,
                  "max_logp": x["logp"][x["weight"] != 0].max().item()}
    assert {k: float(v) for k, v in sums.items()} == pytest.approx(want_sums, abs=1e-6)

    got = torch.autograd.grad(loss, (x["logp"], x["entropy"]))
    for name, gradient in zip(("logp", "entropy"), got):   # central differences of the loop
        for i in range(len(gradient)):
            step = torch.zeros(len(gradient), dtype=torch.float64)
            step[i] = 1e-6
            up, down = (loss_by_loop(cfg, x | {name: x[name].detach() + s * step})[0] for s in (1, -1))
            assert float(gradient[i]) == pytest.approx((up - down) / 2e-6, abs=1e-6), (name, i)


def test_policy_loss_without_old_log_probs_is_on_policy():
    x = loss_input() | {"old_logp": None}
    x["logp"].requires_grad_()
    loss, sums = algos.policy_loss(make_cfg(), algos.LossInput(**x))
    same(loss, -(x["weight"] * x["advantages"]).sum())
    same(torch.autograd.grad(loss, x["logp"])[0], -x["weight"] * x["advantages"])   # REINFORCE
    assert float(sums["ppo_kl"]) == float(sums["pg_clipfrac"]) == 0


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["logp", "entropy", "advantages", "old_logp", "rollout_logp", "ref_logp"])
def test_masked_tokens_have_no_influence(name, junk):
    """Neither on the value, nor on a metric, nor (0 * inf!) on a gradient."""
    cfg = make_cfg(**LOSS_CASES["all"])

    def run(x):
        leaves = [x[k].detach().requires_grad_() for k in ("logp", "entropy")]
        loss, sums = algos.policy_loss(cfg, algos.LossInput(**x | dict(zip(("logp", "entropy"), leaves))))
        return sums, torch.autograd.grad(loss, leaves)

    x = loss_input()
    dirty = x | {name: torch.where(x["weight"] == 0, junk, x[name])}
    (sums, grads), (sums2, grads2) = run(x), run(dirty)
    assert {k: float(v) for k, v in sums.items()} == {k: float(v) for k, v in sums2.items()}
    for a, b in zip(grads, grads2):
        same(a, b)


def test_a_nan_at_a_trained_token_is_seen():
    x = loss_input()
    x["logp"][1] = math.nan
    assert math.isnan(algos.policy_loss(make_cfg(), algos.LossInput(**x))[0])


def test_a_loss_of_nothing_is_zero():
    x = loss_input() | {"weight": torch.zeros(40, dtype=torch.float64)}
    for chosen in (x, {k: v[:0] for k, v in x.items()}):
        chosen["logp"] = chosen["logp"].detach().requires_grad_()
        for loss_fn in algos.LOSSES.values():
            loss, sums = loss_fn(make_cfg(), algos.LossInput(**chosen))
            loss.backward()                  # an empty micro-batch must still have a graph
            assert float(loss) == 0 and float(sums["tokens"]) == 0


@pytest.mark.parametrize("case", LOSS_CASES)
def test_loss_is_a_sum_over_tokens(case):
    """Cut anywhere into micro-batches: the sums add up."""
    cfg, x = make_cfg(**LOSS_CASES[case]), loss_input()
    _, whole = algos.policy_loss(cfg, algos.LossInput(**x))
    parts = [algos.policy_loss(cfg, algos.LossInput(**{k: v[s] for k, v in x.items()}))[1]
             for s in (slice(0, 3), slice(3, 3), slice(3, 31), slice(31, 40))]
    for name, value in whole.items():
        merge = max if name == "max_logp" else sum
        assert merge(float(p[name]) for p in parts) == pytest.approx(float(value), abs=1e-9), name


# ---- SFT and metrics -------------------------------------------------------------------------------------------------
def test_sft_loss_is_cross_entropy():
    hidden, weight, targets = logits_case()
    trained = torch.tensor([0, 1, 1, 0, 1, 1, 1.0], dtype=torch.float64)
    logp, entropy = algos.log_probs_and_entropy(hidden, weight, targets, vocab_size=V)
    loss, sums = algos.sft_loss(make_cfg(), algos.LossInput(logp, entropy, trained / trained.sum()))
    want = torch.nn.functional.cross_entropy(hidden @ weight[:V].T, targets.where(trained != 0, -100))
    same(loss, want)
    for a, b in zip(torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(want, (hidden, weight))):
        same(a, b)
    assert float(sums["tokens"]) == 5


def test_reduce_metrics():
    sums = {"loss": 3.0, "pg_loss": 1.0, "weight": 0.5, "tokens": 40.0, "max_logp": -0.25}
    assert algos.reduce_metrics(sums) == {"loss": 3.0, "pg_loss": 2.0, "max_logp": -0.25}
    assert algos.reduce_metrics(sums | {"weight": 0.0, "pg_loss": 0.0})["pg_loss"] == 0   # nothing was trainable
