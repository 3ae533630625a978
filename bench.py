"""
bench.py: how fast, against what limit? The loop of a run file, phase by phase, beside the bare engine on the same prompts.

    python bench.py configs/demo_cpu.py [--steps=5] [--any_config_field=value]

    each step:  bare engine <- the same prompts -> Rollout.generate -> train -> push_weights -> log
Prints a table and writes bench.json (a run folder beside it). Start-up and the first step, which warms up, are reported apart.
A ratio compares two things that ran next to each other in the same step: this is what to trust on a noisy machine.

Test:  pytest tests/test_bench.py
Knows nothing about: held-out scores, checkpoints.
"""
import asyncio
import contextlib
import datetime
import json
import pathlib
import platform
import sys
import time

import aiohttp

import buffer
import train
from configs import base


def bare_engine(engines, payloads: list[dict]) -> tuple[float, int]:
    """All payloads straight to the engines, in turns, with no router, sample or reward. -> seconds, tokens generated"""
    async def one(session, i, payload):
        async with session.post(engines.urls[i % len(engines.urls)] + "/generate", json=payload) as answer:
            answer.raise_for_status()
            return len((await answer.json())["meta_info"]["output_token_logprobs"])

    async def everything():
        timeout = aiohttp.ClientTimeout(total=1800)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            begin = time.perf_counter()
            tokens = await asyncio.gather(*(one(session, i, p) for i, p in enumerate(payloads)))
            return time.perf_counter() - begin, sum(tokens)
    return asyncio.run(everything())


def measure(cfg: base.Config, run_dir: pathlib.Path, steps: int) -> dict:
    """Run the loop and the bare engine side by side for `steps` steps. -> the report, with one row of seconds a step"""
    begin, rows = time.perf_counter(), []
    with contextlib.ExitStack() as stack:
        engines, trainers, rollout, logs, _, _, dp_size = train.start(cfg, run_dir, stack)
        start_s = time.perf_counter() - begin
        for step in range(steps + 1):        # the first one warms up
            groups = rollout.data.get_samples(cfg.rollout_batch_size)
            payloads = [{"input_ids": list(s.tokens), "return_logprob": True,
                         "sampling_params": rollout.sampling_params(cfg, s, False)} for group in groups for s in group]
            rollout.data.add_samples(groups)                     # the loop takes waiting groups first: the same prompts
            engines.flush_cache()                                # both start with an empty prefix cache
            if step % 2:                                         # neither side always goes first
                bare_s, bare_tokens = bare_engine(engines, payloads)
                engines.flush_cache()
            logs.start_step()
            row = one_step(cfg, step, dp_size, trainers, engines, rollout, logs)
            if not step % 2:
                engines.flush_cache()
                bare_s, bare_tokens = bare_engine(engines, payloads)
            rows.append(row | {"bare_s": bare_s, "bare_tokens": bare_tokens})
    return summary(cfg, rows[1:], start_s)


def one_step(cfg: base.Config, step: int, dp_size: int, trainers, engines, rollout, logs) -> dict[str, float]:
    """train.py's step for engines that share no GPU with the trainers. -> its seconds and counts"""
    with logs.phase("rollout"):
        result = rollout.generate(step)
    with logs.phase("train"):
        data = buffer.to_train_data(cfg, result.samples, result.rewards)
        answer = trainers.train(data, buffer.plan(cfg, data, dp_size))
        metrics = result.metrics | train.train_metrics(answer)
        train.check_invariants(cfg, step, answer["steps"], metrics, logs.print)
    with logs.phase("update_weights"):
        metrics |= trainers.push_weights(engines, step + 1)
        rollout.weight_version = step + 1
    metrics = logs.step(step, metrics)
    return {"step_s": metrics["perf/step_time"], "rollout_s": metrics["perf/rollout_time"],
            "train_s": metrics["perf/train_time"], "update_weights_s": metrics["perf/update_weights_time"],
            "in_trainers_s": answer["times"]["train_time"], "optimizer_s": answer["times"]["actor_train_time"],
            "rollout_tokens": sum(s.response_length for s in result.samples),
            "train_tokens": sum(len(s.tokens) for s in result.samples), "bytes": metrics["perf/update_weights_bytes"]}


def summary(cfg: base.Config, rows: list[dict], start_s: float) -> dict:
    """Means and rates over the measured steps."""
    n = len(rows)
    mean = {key: sum(row[key] for row in rows) / n for key in rows[0]}
    loop_rate, bare_rate = mean["rollout_tokens"] / mean["rollout_s"], mean["bare_tokens"] / mean["bare_s"]
    parts = {key: mean[f"{key}_s"] for key in ("rollout", "train", "update_weights")}
    return {
        "date": f"{datetime.datetime.now():%Y-%m-%d %H:%M}", "machine": f"{platform.machine()}, {cfg.device}", "steps": n,
        "start_s": start_s,
        "rollout_tokens_per_s": loop_rate, "bare_engine_tokens_per_s": bare_rate,
        "rollout_over_bare_engine": loop_rate / bare_rate,
        "train_tokens_per_s": mean["train_tokens"] / mean["optimizer_s"], "update_weights_bytes": mean["bytes"],
        "seconds_per_step": {"step": mean["step_s"]} | parts | {"other": mean["step_s"] - sum(parts.values())},
        # Everything but generating and the trainers' own work: sync, hand-over of data, logging.
        "fixed_cost_s": mean["step_s"] - mean["rollout_s"] - mean["in_trainers_s"],
        "rows": rows, "config": base.to_dict(cfg)}


def table(report: dict) -> str:
    """The report for people: what a step is made of, and at what rate."""
    seconds = report["seconds_per_step"]
    rates = {"rollout": f"{report['rollout_tokens_per_s']:.0f} tokens/s; the bare engine "
                        f"{report['bare_engine_tokens_per_s']:.0f}: ratio {report['rollout_over_bare_engine']:.2f}",
             "train": f"{report['train_tokens_per_s']:.0f} tokens/s in the optimizer steps",
             "update_weights": f"{report['update_weights_bytes'] / 1e6:.1f} MB",
             "step": f"of which fixed (all but generating and the trainers' work): {report['fixed_cost_s']:.3f} s"}
    lines = [f"{report['date']}  {report['machine']}  {report['steps']} steps after 1 to warm up; "
             f"start-up {report['start_s']:.1f} s", f"{'phase':<16}{'s/step':>9}{'share':>8}   rate"]
    for name in ("rollout", "train", "update_weights", "other", "step"):
        lines.append(f"{name:<16}{seconds[name]:>9.3f}{seconds[name] / seconds['step']:>8.0%}   {rates.get(name, '')}")
    return "\n".join(lines)


def main() -> None:
    args = sys.argv[1:]
    if not args or args[0].startswith("-"):
        sys.exit(__doc__)
    try:
        given = [a for a in args[1:] if a.startswith("--steps=")]
        steps = int(given[-1].removeprefix("--steps=")) if given else 5
        base.need(steps > 0, "--steps must be 1 or more: the first step only warms up")
        cfg = base.load(args[0], [a for a in args[1:] if a not in given])
        train.check(cfg)
        if cfg.loss_type == "sft":
            raise ValueError("loss_type='sft' has no rollout to compare; bench a run file with loss_type='policy'")
    except ValueError as error:
        sys.exit(f"error: {error}")
    run_dir = train.find_run_dir(cfg, f"bench_{pathlib.Path(args[0]).stem}")
    run_dir.mkdir(parents=True, exist_ok=True)
    report = measure(cfg, run_dir, steps)
    (run_dir / "bench.json").write_text(json.dumps(report, indent=1, default=str))
    print(table(report))
    print(f"written: {run_dir / 'bench.json'}")


if __name__ == "__main__":                   # spawned processes import this file again
    main()
