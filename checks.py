"""
checks.py: which numbers must hold? Looked at in every step of every run; a breach says what it means and what to do.

    the trainers' answer --train_metrics--> train/*, perf/*      samples --staleness--> rollout/staleness/*
                                  both --check_invariants--> nothing, or an error (on_invariant="warn": a line)

Test:  pytest tests/test_checks.py
Knows nothing about: how the numbers came about. Other checks stand where they belong: group accounting in rollout.py, weight
checksums in weights_sync.py, finite losses in model.py.
"""


def examine(cfg, step: int, result, answer: dict, warn) -> dict[str, float]:
    """Everything of this file for one step -> its metrics. result: rollout.RolloutResult; answer: Trainers.train's."""
    metrics = result.metrics | train_metrics(answer) | staleness(cfg, step, result.samples)
    check_invariants(cfg, step, answer["steps"], metrics, warn)
    return metrics


def train_metrics(answer: dict) -> dict[str, float]:
    """The trainers' answer -> train/*: means over the optimizer steps of this rollout; perf/*: seconds."""
    steps, times, critic = answer["steps"], answer["times"], answer.get("critic", {"steps": [], "times": {}})
    metrics = means(steps, "train/") | means(critic["steps"], "train/critic-")
    metrics |= {f"perf/{k}": v for k, v in (times | critic["times"]).items() if k != "train_time"}
    if steps:                                # but for num_critic_only_steps
        tokens, seconds = sum(s["tokens"] for s in steps), times["actor_train_time"]
        metrics |= {"train/tokens": tokens, "perf/actor_train_tok_per_s": tokens / seconds,
                    "perf/actor_train_tflops": answer["flops"] / seconds / 1e12}                 # of one GPU
    return metrics


def means(steps: list[dict], prefix: str) -> dict[str, float]:
    """Over the optimizer steps of one rollout; of what ends in _max the largest."""
    out = {}
    for key in sorted(set().union(*steps) - {"logp_max", "tokens"}):
        values = [one[key] for one in steps if key in one]
        out[prefix + key] = max(values) if key.endswith("_max") else sum(values) / len(steps)
    return out


def staleness(cfg, step: int, samples: list) -> dict[str, float]:
    """How many weight updates behind the trainers (whose version is `step`) the oldest trained token of each sample is."""
    behind = [step - min(versions) for versions in (s.trained_versions() for s in samples) if versions]
    if not behind:                           # rows of a file, or a hook that knows no versions
        return {}
    if max(behind) > cfg.max_staleness:
        raise RuntimeError(f"step {step}: a sample is {max(behind)} weight updates old, max_staleness is {cfg.max_staleness}; "
                           "set it higher, or mask_offpolicy_in_partial_rollout=True to train none of its old tokens")
    return {"rollout/staleness/mean": sum(behind) / len(behind), "rollout/staleness/max": max(behind)}


def check_invariants(cfg, step: int, steps: list[dict], metrics: dict, warn) -> None:
    """Cheap checks of every step. A breach says what it means and what to look at first."""
    breaches = []
    if not steps:                            # only the critic learnt
        return
    if cfg.loss_type == "policy":
        tight = 1e-6 if cfg.dtype == "float32" else 1e-3
        if abs(steps[0]["ppo_kl"]) > tight and not cfg.use_rollout_logprobs:
            breaches.append(f"ppo_kl of the first optimizer step is {steps[0]['ppo_kl']:.3g} instead of 0: old and current "
                            "log-probs come from the same weights, so the two passes differ. Dropout? A weight swap that "
                            "did not come back?")
        if step == cfg.num_critic_only_steps and cfg.use_kl_loss and not cfg.ref_load and abs(steps[0]["kl_loss"]) > tight:
            breaches.append(f"kl_loss is {steps[0]['kl_loss']:.3g} at step 0 although the reference is the initial policy: "
                            "the reference's weights are others. Did the swap in actor.TrainActor.train bring them back?")
    if cfg.loss_type != "sft":               # the first optimizer step's: its log-probs are of the weights that sampled
        diff, stale = steps[0]["train_rollout_logprob_abs_diff"], metrics.get("rollout/staleness/max", 0)
        comparable = not stale and cfg.rollout_top_p == 1 and cfg.rollout_top_k == -1
        if diff > cfg.max_logprob_diff and (comparable or cfg.true_on_policy_mode):
            breaches.append(f"mean |logp - rollout_logp| is {diff:.3g}, above max_logprob_diff {cfg.max_logprob_diff:.3g}: "
                            "trainer and engine do not agree about the same tokens. Usual causes, in order: a weight sync "
                            "that did not arrive (set check_weight_update_interval=1), a chat template or token added by a "
                            "hook after sampling, another dtype or quantisation in the engine, a temperature that one side "
                            "does not know")
    if max(s["logp_max"] for s in steps) > 1e-5:
        breaches.append(f"a log-prob is {max(s['logp_max'] for s in steps):.3g} > 0, which no probability has: look for "
                        "padded vocabulary rows or a softmax that was not reduced over all tensor-parallel ranks")
    for breach in breaches:
        if cfg.on_invariant == "raise":
            raise RuntimeError(f"step {step}: {breach}. To go on all the same: --on_invariant=warn")
        warn(f"WARNING step {step}: {breach}")
