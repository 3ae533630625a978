"""
The demo for hundreds of steps on two engines, with a kill -9 every ten steps: an engine, the router, or a reward worker.

    python benchmarks/soak.py outputs/soak [--steps=200] [--seeds=1,2,3] [--every=10] [extra settings, --fully_async ...]

Per seed a run with kills and one without, from the same SFT model. Prints for each: accuracy before and after, what was struck and what
was restarted, groups asked for and what became of them (the loop asserts the sum in every step), and the memory of all processes (the
median in the second and in the last quarter of the run). Exits with 1 where a run did not end well.
"""
import json
import pathlib
import random
import statistics
import subprocess
import sys
import time

import psutil

ROOT = pathlib.Path(__file__).resolve().parent.parent
TARGETS = ("engine_0", "engine_1", "router", "reward_worker")
RUN_FILE = '''
from configs.demo_sft import rows
def prompt_data(): return rows(held_out=False)
def _held_out(): return rows(held_out=True)
def custom_rm(args, sample):                       # a plain def: it runs in the reward workers
    return float(sample.response == sample.label)
eval_prompt_data = dict(addition=dict(prompt_data=_held_out, eval_temperature=0.0))
label_key = "label"
rollout_batch_size, n_samples_per_prompt, over_sampling_batch_size, partial_rollout = 16, 8, 20, True
rollout_shuffle, rollout_max_response_len, eval_interval = True, 6, 50
lr, weight_decay, max_tokens_per_gpu = 5e-5, 0.0, 8192
rollout_num_gpus, max_engine_restarts, health_check_interval_s = 2, 1000, 5.0
sglang = dict(max_running_requests=128)
'''


def plan(seed: int, steps: int, every: int) -> dict[str, list[int]]:
    faults, draw = {}, random.Random(seed)
    for step in range(every // 2, steps, every):
        faults.setdefault(draw.choice(TARGETS), []).append(step)
    return faults


def memory_gb(process: psutil.Process) -> float:
    """Of the run and all that it started; pages that several share are counted once for each."""
    total = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            total += one.memory_info().rss
        except psutil.NoSuchProcess:
            pass
    return total / 1e9


def run(name: str, out: pathlib.Path, model: str, seed: int, steps: int, faults: dict, extra: list[str]) -> dict:
    file, log = out / "soak_run.py", out / f"{name}.log"
    mode = [] if any(one.startswith("--fully_async") for one in extra) else ["--colocate"]
    command = [sys.executable, "train.py", str(file), f"--output_dir={out}", f"--run_name={name}", f"--hf_checkpoint={model}",
               f"--num_rollout={steps}", f"--seed={seed}", f"--rollout_seed={seed}", f"--inject_faults={faults}", *mode, *extra]
    begin, memory = time.monotonic(), []
    with open(log, "w") as sink:
        process = subprocess.Popen(command, cwd=ROOT, stdout=sink, stderr=sink)
    while process.poll() is None:
        memory.append(memory_gb(psutil.Process(process.pid)))
        time.sleep(2)
    rows = [json.loads(line) for line in (out / name / "metrics.jsonl").read_text().splitlines()]
    said, quarter = log.read_text(), len(memory) // 4
    scores = [row["eval/addition"] for row in rows if "eval/addition" in row]
    groups = {key: sum(row.get(f"rollout/groups_{key}", 0) for row in rows) for key in ("trained", "filtered", "put_back", "failed")}
    return dict(run=name, exit=process.returncode, steps=len([row for row in rows if row["step"] >= 0]), before=scores[0], after=scores[-1],
                struck=said.count("inject_faults: struck"), engines=said.count("is back, with the trainers' weights"),
                routers=sum(row.get("rollout/router_restarts", 0) for row in rows), workers=rows[-1].get("rollout/reward_restarts", 0),
                **groups, gb_early=round(statistics.median(memory[quarter:2 * quarter]), 2), gb_late=round(statistics.median(memory[3 * quarter:]), 2),
                minutes=round((time.monotonic() - begin) / 60, 1))


def main() -> None:
    out, options = pathlib.Path(sys.argv[1]).resolve(), dict(steps="200", seeds="1,2,3", every="10", model="")
    extra = [arg for arg in sys.argv[2:] if arg[2:].partition("=")[0] not in options]
    options |= dict(arg[2:].split("=", 1) for arg in sys.argv[2:] if arg not in extra)
    out.mkdir(parents=True, exist_ok=True)
    (out / "soak_run.py").write_text(RUN_FILE)
    if not options["model"]:                 # the demo's first stage, once
        subprocess.run([sys.executable, "train.py", "configs/demo_sft.py", f"--output_dir={out}", "--run_name=sft"], cwd=ROOT, check=True)
        options["model"] = str(max((out / "sft" / "hf").glob("iter_*")))
    results = []
    for seed in map(int, options["seeds"].split(",")):
        for kind, every in (("kills", int(options["every"])), ("calm", 0)):
            faults = plan(seed, int(options["steps"]), every) if every else {}
            results.append(run(f"{kind}_{seed}", out, options["model"], seed, int(options["steps"]), faults, extra))
            print(json.dumps(results[-1]), flush=True)
    (out / "soak.jsonl").write_text("".join(json.dumps(one) + "\n" for one in results))
    sys.exit(any(one["exit"] or one["steps"] != int(options["steps"]) for one in results))


if __name__ == "__main__":
    main()
