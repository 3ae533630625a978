"""
Does generation wait for training, training for generation, or either for rewards? configs/bench_async.py in each way to run it.

    python benchmarks/overlap.py outputs/overlap [extra settings of train.py]

Rows: synchronous, fully asynchronous, one step off, synchronous with over-sampling and partial rollouts; each with a free reward and
with one of a second (halves of one run). Columns, means over a half's steps after its first two (the run's last three belong to
neither: there is nothing left to generate): seconds of a step; of its parts, generation R, training T, sync S; what the parts allow,
R + T + S one after the other and max(R, T) + S side by side (R, T and S of the synchronous run); tokens that the engine wrote a
second of the time in which it may write.
"""
import json
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
WAYS = {"synchronous": [], "fully asynchronous": ["--fully_async"], "one step off": ["--async_mode"],
        "synchronous, partial": ["--over_sampling_batch_size=64", "--partial_rollout"]}


def halves(rows: list[dict]) -> list[dict[str, float]]:
    """Of each half of the run the means over its steps but the first two."""
    out, n = [], (len(rows) - 3) // 2
    for part in (rows[2:n], rows[n + 2:2 * n]):
        def mean(key, part=part):
            return sum(row.get(key, 0.0) for row in part) / len(part)
        step, sync = mean("perf/step_time"), mean("perf/update_weights_time")
        out.append(dict(step=step, R=mean("perf/rollout_time"), T=mean("perf/train_time"), S=sync, other=mean("perf/other_time"),
                        trained=mean("train/tokens"), generated=mean("perf/generated_tokens"),
                        stale=mean("rollout/staleness/mean"), diff=mean("train/train_rollout_logprob_abs_diff")))
    return out


def main() -> None:
    out, extra = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2:]
    print("| way | reward | step s | R | T | S | sum | max + S | engine tok/s | ratio to free | staleness |\n|" + "---|" * 11)
    parts = {}
    for way, settings in WAYS.items():
        name = way.replace(",", "").replace(" ", "_")
        command = [sys.executable, "train.py", "configs/bench_async.py", f"--output_dir={out}", f"--run_name={name}", *settings, *extra]
        done = out / f"{name}.done"          # called again, it goes on with the ways that are missing
        if not done.exists():
            shutil.rmtree(out / name, ignore_errors=True)
            out.mkdir(parents=True, exist_ok=True)
            with open(out / f"{name}.log", "w") as log:
                subprocess.run(command, cwd=ROOT, check=True, stdout=log, stderr=log)
            done.touch()
        rows = [json.loads(line) for line in (out / name / "metrics.jsonl").read_text().splitlines()]
        free_rate = None
        for reward, one in zip(("free", "1 s"), halves([row for row in rows if row["step"] >= 0])):
            first = parts.setdefault(reward, one)                # the synchronous run's
            # Synchronous engines can only write while the loop is in its rollout; the others all the time but the sync.
            rate = one["generated"] / (one["R"] if name.startswith("sync") else one["step"] - one["S"])
            free_rate = free_rate or rate
            print(f"| {way} | {reward} | {one['step']:.2f} | {one['R']:.2f} | {one['T']:.2f} | {one['S']:.2f} | "
                  f"{first['R'] + first['T'] + first['S']:.2f} | {max(first['R'], first['T']) + first['S']:.2f} | {rate:,.0f} | "
                  f"{rate / free_rate:.2f} | {one['stale']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
