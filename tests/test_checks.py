"""
test_checks.py: does each check speak up when its number is off, with a remedy, and keep silent when it is not?

Run:   pytest tests/test_checks.py
"""
import pytest

import checks
from buffer import Sample
from helpers import make_cfg

STEP = dict(ppo_kl=0.0, kl_loss=0.0, logp_max=-0.1, train_rollout_logprob_abs_diff=1e-6)
METRICS = {"rollout/staleness/max": 0}


def check(step=0, cfg=(), metrics=(), **numbers):
    said = []
    checks.check_invariants(make_cfg(**dict(cfg)), step, [STEP | numbers], METRICS | dict(metrics), said.append)
    return said


WRONG = [
    (dict(ppo_kl=2e-6), "ppo_kl of the first optimizer step is 2e-06 instead of 0.*Dropout"),
    (dict(kl_loss=0.1, cfg=dict(use_kl_loss=True)), "kl_loss is 0.1 at step 0"),
    (dict(train_rollout_logprob_abs_diff=2e-4), r"\|logp - rollout_logp\| is 0.0002.*Usual causes"),
    (dict(train_rollout_logprob_abs_diff=2e-4, cfg=dict(loss_type="custom_loss")), r"\|logp - rollout_logp\| is 0.0002"),
    (dict(train_rollout_logprob_abs_diff=2e-4, cfg=dict(true_on_policy_mode=True, rollout_top_p=0.9)), r"rollout_logp\| is 0.0002"),
    (dict(logp_max=0.01), "a log-prob is 0.01 > 0"),
]


@pytest.mark.parametrize("case, says", WRONG)
def test_a_breach_stops_the_run_or_warns(case, says):
    with pytest.raises(RuntimeError, match=f"step 0: .*{says}.*--on_invariant=warn"):
        check(**case)
    warned = check(**case | {"cfg": dict(case.get("cfg", {}), on_invariant="warn")})
    assert len(warned) == 1 and warned[0].startswith("WARNING step 0: ")


@pytest.mark.parametrize("case", [
    dict(), dict(step=3, kl_loss=0.1, cfg=dict(use_kl_loss=True)),                          # the policy has moved
    dict(kl_loss=0.1, cfg=dict(use_kl_loss=True, ref_load="elsewhere")),
    dict(ppo_kl=5e-4, cfg=dict(dtype="bfloat16")),
    dict(ppo_kl=0.1, cfg=dict(use_rollout_logprobs=True)),                                  # the engine's, not a second pass
    dict(train_rollout_logprob_abs_diff=0.1, metrics={"rollout/staleness/max": 1}),         # other weights
    dict(train_rollout_logprob_abs_diff=0.1, cfg=dict(rollout_top_p=0.9)),
    dict(train_rollout_logprob_abs_diff=0.1, cfg=dict(loss_type="sft"))])
def test_no_false_alarm(case):
    assert check(**case) == []


def test_only_the_first_optimizer_step_is_on_policy():
    later = STEP | dict(ppo_kl=0.3, train_rollout_logprob_abs_diff=0.3)
    checks.check_invariants(make_cfg(), 0, [STEP, later], METRICS, pytest.fail)
    checks.check_invariants(make_cfg(), 0, [], METRICS, pytest.fail)       # only the critic learnt


def sample(*tokens):
    """tokens: (version, trained)"""
    return Sample(weight_versions=[v for v, _ in tokens], loss_mask=[m for _, m in tokens])


def test_staleness():
    samples = [sample((3, 1), (5, 1)), sample((5, 1), (-1, 0)), sample((0, 0), (4, 1)), sample((-1, 0))]
    assert checks.staleness(make_cfg(max_staleness=2), 5, samples) == {
        "rollout/staleness/mean": 1.0, "rollout/staleness/max": 2}                          # 2, 0, 1; the last one trains nothing
    with pytest.raises(RuntimeError, match="2 weight updates old, max_staleness is 1.*set it higher"):
        checks.staleness(make_cfg(max_staleness=1), 5, samples)
    assert checks.staleness(make_cfg(max_staleness=0), 5, [sample((-1, 1))]) == {}          # a hook that knows no versions


def test_train_metrics():
    answer = {"steps": [dict(loss=1.0, tokens=10, logp_max=-1.0, grad_norm=2.0), dict(loss=3.0, tokens=30, logp_max=-2.0)],
              "times": {"actor_train_time": 2.0, "train_time": 3.0}, "flops": 6e12}
    assert checks.train_metrics(answer) == {"train/loss": 2.0, "train/grad_norm": 1.0, "train/tokens": 40,
                                            "perf/actor_train_time": 2.0, "perf/actor_train_tok_per_s": 20.0,
                                            "perf/actor_train_tflops": 3.0}
    critic = {"steps": [dict(value_loss=1.0), dict(value_loss=2.0)], "times": {"critic_train_time": 4.0}}
    alone = {"steps": [], "times": {"train_time": 1.0}, "flops": 0.0, "critic": critic}
    assert checks.train_metrics(alone) == {"train/critic-value_loss": 1.5, "perf/critic_train_time": 4.0}


def test_of_a_maximum_the_largest_is_logged():
    assert checks.means([dict(diff=1.0, diff_max=5.0), dict(diff=2.0, diff_max=3.0)], "x/") == {"x/diff": 1.5, "x/diff_max": 5.0}
