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
import copy
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
    """Run the loop and the bare engine side by side for `steps` steps. -> the report"""
    begin = time.perf_counter()
    rows = []
    with contextlib.ExitStack() as stack:
        engines, trainers, rollout, logs, _, _, dp_size = train.start(cfg, run_dir, stack)
        start_s = time.perf_counter() - begin
        for step in range(steps + 1):        # the first one warms up
            groups = rollout.data.get_samples(cfg.rollout_batch_size)
            payloads = [{"input_ids": s.tokens, "sampling_params": rollout.sampling_params(cfg, s, False), "return_logprob": True}
                        for group in copy.deepcopy(groups) for s in group]
            order = [0, 1] if step % 2 else [1, 0]               # neither side always goes first
            row = {}
            for which in order:
                engines.flush_cache()                            # both start with an empty prefix cache
                if which == 0:
                    row["bare_s"], row["bare_tokens"] = bare_engine(engines, payloads)
                else:
                    rollout.data.add_samples(groups)             # the loop takes waiting groups first: the same prompts
                    logs.start_step()
                    with logs.phase("rollout"):
                        result = rollout.generate(step)
            loop_begin = logs.step_begin = time.perf_counter() - logs.times["rollout"]
            times = logs.times
            with logs.phase("train"):
                data = buffer.to_train_data(cfg, result.samples, result.rewards)
                plan = buffer.plan(cfg, data, dp_size)
                answer = trainers.train(data, plan)
            metrics = result.metrics | train.train_metrics(answer)
            train.check_invariants(cfg, step, answer["steps"], metrics, logs.print)
            with logs.phase("update_weights"):
                metrics |= trainers.push_weights(engines, step + 1)
                rollout.weight_version = step + 1
            logs.step(step, metrics)
            row |= {f"{k}_s": v for k, v in times.items()} | {f"{k}_s": v for k, v in answer["times"].items()}
            row |= {"step_s": time.perf_counter() - loop_begin, "rollout_tokens": sum(s.response_length for s in result.samples),
                    "train_tokens": sum(len(s.tokens) for s in result.samples), "bytes": metrics["perf/update_weights_bytes"]}
            rows.append(row)
    rows = rows[1:]
    total = {k: sum(row[k] for row in rows) for k in rows[0]}
    n = len(rows)
    loop_rate, bare_rate = total["rollout_tokens"] / total["rollout_s"], total["bare_tokens"] / total["bare_s"]
    return {
        "config": base.to_dict(cfg), "machine": f"{platform.processor() or platform.machine()}, {cfg.device}", "steps": n,
        "date": f"{datetime.datetime.now():%Y-%m-%d %H:%M}", "start_s": start_s,
        "rollout_tokens_per_s": loop_rate, "bare_engine_tokens_per_s": bare_rate, "rollout_over_bare_engine": loop_rate / bare_rate,
        "train_tokens_per_s": total["train_tokens"] / total["actor_train_time_s"], "update_weights_bytes": total["bytes"] / n,
        "seconds_per_step": {k: total[f"{k}_s"] / n for k in ("step", "rollout", "train", "update_weights")}
        | {"other": (total["step_s"] - total["rollout_s"] - total["train_s"] - total["update_weights_s"]) / n},
        # Everything but generating and the trainers' own work: sync, hand-over of data, logging.
        "fixed_cost_s": (total["step_s"] - total["rollout_s"] - total["train_time_s"]) / n, "rows": rows}


def table(report: dict) -> str:
    s = report["seconds_per_step"]
    lines = [f"{report['date']}  {report['machine']}  {report['steps']} steps after 1 to warm up; start-up {report['start_s']:.1f} s",
             f"{'phase':<16}{'s/step':>9}{'share':>8}   rate"]
    rates = {"rollout": f"{report['rollout_tokens_per_s']:.0f} tokens/s; the bare engine {report['bare_engine_tokens_per_s']:.0f}: "
                        f"ratio {report['rollout_over_bare_engine']:.2f}",
             "train": f"{report['train_tokens_per_s']:.0f} tokens/s in the optimizer steps",
             "update_weights": f"{report['update_weights_bytes'] / 1e6:.1f} MB"}
    for name in ("rollout", "train", "update_weights", "other"):
        lines.append(f"{name:<16}{s[name]:>9.3f}{s[name] / s['step']:>8.0%}   {rates.get(name, '')}")
    lines.append(f"{'step':<16}{s['step']:>9.3f}{1:>8.0%}   of which fixed (all but generate and train): {report['fixed_cost_s']:.3f} s")
    return "\n".join(lines)


def main() -> None:
    args = sys.argv[1:]
    if not args or args[0].startswith("-"):
        sys.exit(__doc__)
    steps = [a for a in args if a.startswith("--steps=")]
    try:
        cfg = base.load(args[0], [a for a in args[1:] if a not in steps])
        train.check(cfg)
        if cfg.loss_type == "sft":
            raise ValueError("loss_type='sft' has no rollout to compare; bench a run file with loss_type='policy'")
    except ValueError as error:
        sys.exit(f"error: {error}")
    run_dir = train.find_run_dir(cfg, f"bench_{pathlib.Path(args[0]).stem}")
    run_dir.mkdir(parents=True, exist_ok=True)
    report = measure(cfg, run_dir, int(steps[0].partition("=")[2]) if steps else 5)
    (run_dir / "bench.json").write_text(json.dumps(report, indent=1, default=str))
    print(table(report))
    print(f"written: {run_dir / 'bench.json'}")


if __name__ == "__main__":                   # spawned processes import this file again
    main()
