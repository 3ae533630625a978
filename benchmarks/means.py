"""
Means of a run's seconds and rewards over its steps, as cpu.md and h200.md quote them.

    python benchmarks/means.py outputs/RUN [FIRST]       FIRST: the first step that counts; the ones before it warm up
"""
import json
import pathlib
import sys

NAMES = ("rollout/raw_reward", "train/train_rollout_logprob_abs_diff")           # beside all of perf/


def main() -> None:
    first = int((sys.argv[2:] or ["0"])[0])
    rows = [json.loads(line) for line in (pathlib.Path(sys.argv[1]) / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] >= first and "perf/step_time" in row]
    for row in rows:                         # all but generating, training and what is done every few steps
        row["perf/rest"] = row["perf/step_time"] - sum(row.get(f"perf/{part}_time", 0.0) for part in
                                                       ("generate", "train", "eval", "save"))
    names = sorted({name for row in rows for name in row if name.startswith("perf/") or name in NAMES})
    print(f"{len(rows)} steps from {first} on{'mean':>45}{'least':>12}{'most':>12}{'steps':>8}")
    for name in names:
        values = [row[name] for row in rows if name in row]
        print(f"{name:<52}{sum(values) / len(values):>12.4g}{min(values):>12.4g}{max(values):>12.4g}{len(values):>8}")


if __name__ == "__main__":
    main()
