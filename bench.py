"""
bench.py: how fast, against what limit? The loop of a run file, phase by phase, beside the bare engine on the same prompts.

    python bench.py configs/demo_cpu.py [--steps=5] [--any_config_field=value]       the whole loop
        each step:  bare engine <- the same prompts -> Rollout.generate -> train -> push_weights -> log
    python bench.py configs/demo_cpu.py --train=2048 [--steps=5]                     the trainer alone, on one device
        each step:  2 micro-batches of max_tokens_per_gpu random tokens, in sequences of 2048; beside a bare matrix product

Prints a table and writes bench.json (a run folder beside it). Start-up and the first step, which warms up, are reported apart.
Limits are measured beside it, right after the loop: a bare matrix product, and a bare copy of as many bytes as a weight sync.
A ratio compares two things that ran next to each other in the same step: this is what to trust on a noisy machine.

Test:  pytest tests/test_bench.py
Knows nothing about: held-out scores, checkpoints.
"""
import asyncio
import contextlib
import dataclasses
import datetime
import json
import pathlib
import platform
import sys
import time

import aiohttp

import buffer
import checks
import train
from configs import base
from engines import free_port


PHASES = ("rollout", "engines_sleep", "trainers_wake", "train", "engines_wake_weights", "update_weights", "trainers_sleep",
          "engines_wake_cache")
SYNC = ("pause", "send", "check", "resume")  # parts of update_weights


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
        cfg = dataclasses.replace(cfg, num_critic_only_steps=0)              # every step does all that a step does
        cfg, engines, trainers, rollout, logs, _, _ = train.start(cfg, run_dir, stack)
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
            row = one_step(cfg, step, trainers, engines, rollout, logs)
            if not step % 2:
                engines.flush_cache()
                bare_s, bare_tokens = bare_engine(engines, payloads)
            rows.append(row | {"bare_s": bare_s, "bare_tokens": bare_tokens})
    report = summary(cfg, rows[1:], start_s)
    return report | {"matrix_tflops": matrix_rate(cfg), "bare_copy_s": report["update_weights_bytes"] / copy_rate(cfg)}


def one_step(cfg: base.Config, step: int, trainers, engines, rollout, logs) -> dict[str, float]:
    """train.py's step, with a phase for each part of the hand-over. -> its seconds and counts"""
    with logs.phase("rollout"):
        result = rollout.generate(step)
    memory = {"generating": held_gb(cfg)}
    with logs.phase("engines_sleep"):
        if cfg.offload_rollout:
            engines.sleep()
    memory["between"] = held_gb(cfg)         # where offloaded: what is left of both sides
    with logs.phase("trainers_wake"):
        if cfg.offload_train:
            trainers.wake()
    with logs.phase("train"):
        answer = train.learn(cfg, step, result, trainers)
        metrics = checks.examine(cfg, step, result, answer, logs.print)
    memory["training"] = held_gb(cfg)
    with logs.phase("engines_wake_weights"):
        if cfg.offload_rollout:
            engines.wake(["weights"])
    with logs.phase("update_weights"):
        metrics |= rollout.sync(lambda: trainers.push_weights(engines, step + 1), step + 1)
    with logs.phase("trainers_sleep"):
        if cfg.offload_train:
            trainers.sleep()
    with logs.phase("engines_wake_cache"):
        if cfg.offload_rollout:
            engines.wake(["kv_cache", "cuda_graph"])
    metrics = logs.step(step, metrics)
    return {f"{name}_s": metrics[f"perf/{name}_time"] for name in PHASES + ("step",)} | {
            "in_trainers_s": answer["times"]["train_time"], "optimizer_s": answer["times"]["actor_train_time"],
            "rollout_tokens": sum(s.response_length for s in result.samples),
            "train_tokens": sum(len(s.tokens) for s in result.samples), "bytes": metrics["perf/update_weights_bytes"],
            "train_tflops": metrics["perf/actor_train_tflops"], "memory": memory} | {
            f"sync_{part}_s": metrics.get(f"perf/update_weights/{part}_time", 0.0) for part in SYNC}


def summary(cfg: base.Config, rows: list[dict], start_s: float) -> dict:
    """Means and rates over the measured steps."""
    n = len(rows)
    mean = {key: sum(row[key] for row in rows) / n for key in rows[0] if key != "memory"}
    memory = rows[-1]["memory"]              # when -> process -> GB
    processes = {name for held in memory.values() for name in held}
    loop_rate, bare_rate = mean["rollout_tokens"] / mean["rollout_s"], mean["bare_tokens"] / mean["bare_s"]
    parts = {name: mean[f"{name}_s"] for name in PHASES}
    return {
        "date": f"{datetime.datetime.now():%Y-%m-%d %H:%M}", "machine": f"{platform.machine()}, {cfg.device}", "steps": n,
        "start_s": start_s,
        "rollout_tokens_per_s": loop_rate, "bare_engine_tokens_per_s": bare_rate,
        "rollout_over_bare_engine": loop_rate / bare_rate,
        "train_tokens_per_s": mean["train_tokens"] / mean["optimizer_s"], "train_tflops": mean["train_tflops"],
        "update_weights_bytes": mean["bytes"],
        "gpu_0_gb": {name: {when: held.get(name, 0.0) for when, held in memory.items()} for name in sorted(processes)},
        "seconds_per_step": {"step": mean["step_s"]} | parts | {"other": mean["step_s"] - sum(parts.values())},
        "sync_seconds": {part: mean[f"sync_{part}_s"] for part in SYNC},
        # Everything but generating and the trainers' own work: sync, hand-over of data, logging.
        "fixed_cost_s": mean["step_s"] - mean["rollout_s"] - mean["in_trainers_s"],
        "rows": rows, "config": base.to_dict(cfg)}


def table(report: dict) -> str:
    """The report for people: what a step is made of, and at what rate."""
    seconds = report["seconds_per_step"]
    rates = {"rollout": f"{report['rollout_tokens_per_s']:.0f} tokens/s; the bare engine "
                        f"{report['bare_engine_tokens_per_s']:.0f}: ratio {report['rollout_over_bare_engine']:.2f}",
             "train": f"{report['train_tokens_per_s']:.0f} tokens/s, {report['train_tflops']:.3g} TFLOP/s a GPU in the "
                      f"optimizer steps; a bare matrix product {report['matrix_tflops']:.3g}",
             "update_weights": f"{report['update_weights_bytes'] / 1e6:.1f} MB: " + ", ".join(
                 f"{part} {report['sync_seconds'][part]:.3f}" for part in report["sync_seconds"])
                 + f"; a bare copy {report['bare_copy_s']:.3f}",
             "step": f"of which fixed (all but generating and the trainers' work): {report['fixed_cost_s']:.3f} s"}
    lines = [f"{report['date']}  {report['machine']}  {report['steps']} steps after 1 to warm up; "
             f"start-up {report['start_s']:.1f} s", f"{'phase':<21}{'s/step':>9}{'share':>8}   rate"]
    for name in (*PHASES, "other", "step"):
        if seconds[name] >= 0.0005 or name == "other":           # nobody leaves the GPU where both sides fit
            lines.append(f"{name:<21}{seconds[name]:>9.3f}{seconds[name] / seconds['step']:>8.0%}   {rates.get(name, '')}")
    for process, gb in report["gpu_0_gb"].items():
        lines.append(f"memory of GPU 0, {process}: {gb['generating']:.1f} GB when generation ends, {gb['between']:.1f} before "
                     f"trainers wake up, {gb['training']:.1f} when training ends")
    return "\n".join(lines)


# ---- Limits --------------------------------------------------------------------------------------------------------------
def held_gb(cfg: base.Config) -> dict[str, float]:
    """What each process holds on the first GPU: its name -> GB; nan where the driver does not tell."""
    if cfg.device == "cpu":
        return {}
    import psutil
    import pynvml
    import torch
    pynvml.nvmlInit()                        # which counts GPUs as the machine does, not as CUDA_VISIBLE_DEVICES does
    gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)
    names = {one.pid: one.info["name"] for one in psutil.process_iter(["name"])}
    return {f"{names.get(one.pid, 'process')} {one.pid}":
            float("nan") if one.usedGpuMemory is None else one.usedGpuMemory / 1e9 for one in processes}


def matrix_rate(cfg: base.Config) -> float:
    """TFLOP/s of a bare square matrix product: what this device can do now."""
    import torch
    n, repeats = (8192, 20) if cfg.device == "cuda" else (1024, 3)
    a = torch.randn(n, n, device=cfg.device, dtype=getattr(torch, cfg.dtype))
    return 2 * n**3 / seconds_of(lambda: a @ a, repeats, cfg.device) / 1e12


def copy_rate(cfg: base.Config) -> float:
    """Bytes/s of a bare copy from where trainers are to where engines are: the same device, or another GPU."""
    import torch
    size = 2**30 if cfg.device == "cuda" else 2**26
    last = cfg.actor_num_gpus if cfg.device == "cuda" and not cfg.colocate else 0
    a = torch.empty(size, dtype=torch.uint8, device=cfg.device)
    b = torch.empty_like(a, device=f"cuda:{last}" if cfg.device == "cuda" else None)
    return size / seconds_of(lambda: b.copy_(a), 8, cfg.device)


def seconds_of(work, repeats: int, device: str) -> float:
    import torch
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    work()
    wait()
    begin = time.perf_counter()
    for _ in range(repeats):
        work()
    wait()
    return (time.perf_counter() - begin) / repeats


# ---- The trainer alone -------------------------------------------------------------------------------------------------
def measure_training(cfg: base.Config, run_dir: pathlib.Path, seqlen: int, steps: int) -> dict:
    """Optimizer steps of one rank on made-up samples, with no engine and no Ray. -> the report"""
    import torch

    import algos
    import layers
    import model
    begin = time.perf_counter()
    cfg = dataclasses.replace(cfg, use_kl_loss=False, kl_loss_coef=0.0)          # made-up samples have no reference
    folder = train.resolve_model(cfg, run_dir)
    grid = model.init_distributed(cfg, 0, 1, "127.0.0.1", free_port("127.0.0.1"))
    trainer = model.MegatronModel(cfg, grid, folder, steps + 1)
    count = 2 * max(1, cfg.max_tokens_per_gpu // seqlen)
    ids = torch.randint(0, trainer.vocab_size, (count, seqlen), generator=torch.Generator().manual_seed(cfg.seed))
    data = made_up_data(cfg, ids.tolist())
    plan = buffer.plan(dataclasses.replace(cfg, global_batch_size=count, num_steps_per_rollout=1), data, 1)
    batches = [trainer.pack(data, one) for one in plan[0][0]]
    start_s, rows = time.perf_counter() - begin, []
    for _ in range(steps + 1):
        rate = matrix_rate(cfg)
        begin = time.perf_counter()
        trainer.train_step(batches, lambda x: algos.policy_loss(cfg, x))         # ends with its metrics on the host
        rows.append({"step_s": time.perf_counter() - begin, "matrix_tflops": rate})
    torch.distributed.destroy_process_group()
    rows = rows[1:]
    seconds = sum(row["step_s"] for row in rows) / len(rows)
    tokens, flops = count * seqlen, trainer.train_flops([seqlen] * count)
    peak = torch.cuda.max_memory_allocated() if cfg.device == "cuda" else 0
    return {
        "date": f"{datetime.datetime.now():%Y-%m-%d %H:%M}", "machine": f"{platform.machine()}, {cfg.device}",
        "steps": len(rows), "start_s": start_s, "micro_batches": len(batches), "tokens": tokens, "seqlen": seqlen,
        "seconds_per_step": {"step": seconds}, "train_tokens_per_s": tokens / seconds, "tflops": flops / seconds / 1e12,
        "matrix_tflops": sum(row["matrix_tflops"] for row in rows) / len(rows), "peak_gb": peak / 1e9,
        "attention": layers.attention_name(trainer.config, trainer.device),
        "rows": rows, "config": base.to_dict(cfg)}


def made_up_data(cfg: base.Config, rows: list[list[int]]) -> dict[str, list]:
    """Training data that nobody sampled: a row's first token asks, the others answer; all with advantage 1."""
    import torch
    samples = []
    for i, row in enumerate(rows):
        samples.append(buffer.Sample(group_index=i, index=i, tokens=row[:1], reward=0.0))
        samples[-1].append(row[1:], [0.0] * (len(row) - 1))
    data = buffer.to_train_data(cfg, samples, [1.0] * len(rows))
    return data | {"advantages": [torch.ones(n) for n in data["response_lengths"]]}


def training_table(report: dict) -> str:
    share = report["tflops"] / report["matrix_tflops"]
    least, most = (of(row["step_s"] for row in report["rows"]) for of in (min, max))
    return (f"{report['date']}  {report['machine']}  {report['steps']} steps after 1 to warm up; "
            f"start-up {report['start_s']:.1f} s\n"
            f"{report['micro_batches']} micro-batches, {report['tokens']} tokens in sequences of {report['seqlen']}: "
            f"{report['seconds_per_step']['step']:.3f} s/step ({least:.3f} to {most:.3f}), "
            f"{report['train_tokens_per_s']:.0f} tokens/s\n"
            f"{report['tflops']:.1f} TFLOP/s; a bare matrix product {report['matrix_tflops']:.1f}: share {share:.2f}; "
            f"peak memory {report['peak_gb']:.1f} GB; attention: {report['attention']}")


# ---- Command line ------------------------------------------------------------------------------------------------------
def option(args: list[str], name: str, default: int) -> int:
    """The last --name=value, taken out of args."""
    given = [a for a in args if a.startswith(f"--{name}=")]
    args[:] = [a for a in args if a not in given]
    value = int(given[-1].partition("=")[2]) if given else default
    base.need(value > 0 or not given, f"--{name} must be 1 or more")
    return value


def main() -> None:
    args = sys.argv[1:]
    if not args or args[0].startswith("-"):
        sys.exit(__doc__)
    try:
        steps, seqlen = option(args, "steps", 5), option(args, "train", 0)
        cfg = base.load(args[0], args[1:])
        train.check(cfg)
        base.need(seqlen or cfg.loss_type != "sft", "loss_type='sft' has no rollout to compare; bench a run file with "
                  "loss_type='policy', or the trainer alone with --train=2048")
        base.need(not seqlen or cfg.actor_num_gpus == 1, "--train measures one rank; add --actor_num_gpus=1 "
                  "--tensor_model_parallel_size=1 --pipeline_model_parallel_size=1 --sequence_parallel=False "
                  "--rollout_num_gpus=1 --rollout_num_gpus_per_engine=1")
        base.need(not cfg.resume, "a bench starts anew; leave --resume out")
        base.need(not cfg.debug_rollout_only and not cfg.debug_train_only, "a bench measures both sides; leave "
                  "debug_rollout_only and debug_train_only out")
        run_dir = train.find_run_dir(cfg, f"bench_{pathlib.Path(args[0]).stem}")
    except ValueError as error:
        sys.exit(f"error: {error}")
    run_dir.mkdir(parents=True, exist_ok=True)
    try:
        report = measure_training(cfg, run_dir, seqlen, steps) if seqlen else measure(cfg, run_dir, steps)
    except base.InputError as error:
        sys.exit(f"error: {error}")
    (run_dir / "bench.json").write_text(json.dumps(report, indent=1, default=str))
    print(training_table(report) if seqlen else table(report))
    print(f"written: {run_dir / 'bench.json'}")


if __name__ == "__main__":                   # spawned processes import this file again
    main()
