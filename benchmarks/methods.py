"""
methods.py: does every method learn? The demo from the same start by each estimator, one after the other; table and figure.

    python benchmarks/methods.py outputs/methods          about 40 minutes on 2 cores; what is there already is not run again

Writes benchmarks/methods.svg (needs matplotlib) and prints held-out accuracy at each evaluation, and minutes of each run.
"""
import json
import pathlib
import subprocess
import sys
import time

METHODS = {                                  # name -> run file and what differs from configs/demo_cpu.py
    "grpo": ["configs/demo_cpu.py"],
    "dr_grpo": ["configs/demo_cpu.py", "--grpo_std_normalization=False", "--fixed_loss_length=6"],
    "gspo": ["configs/demo_cpu.py", "--advantage_estimator=gspo"],
    "cispo": ["configs/demo_cpu.py", "--advantage_estimator=cispo"],
    "rloo": ["configs/demo_cpu.py", "--advantage_estimator=rloo"],
    "reinforce_plus_plus": ["configs/demo_cpu.py", "--advantage_estimator=reinforce_plus_plus"],
    "reinforce_plus_plus_baseline": ["configs/demo_cpu.py", "--advantage_estimator=reinforce_plus_plus_baseline"],
    "ppo": ["configs/ppo_cpu.py"],
    "opd, no reward": ["configs/opd_cpu.py", "--opd_teacher_load={out}/grpo/hf/iter_0000050"],
    "sft": ["configs/sft_cpu.py"],           # has no engine, so its result is evaluated by a run of no steps
}
EVALUATE = ["configs/demo_cpu.py", "--num_rollout=0", "--hf_checkpoint={out}/sft/hf/iter_0000050"]


def run(name: str, args: list[str], out: pathlib.Path) -> float:
    """One run -> minutes of it."""
    done = out / f"{name}.minutes"
    if not done.exists():
        begin = time.perf_counter()
        args = [arg.format(out=out) for arg in args]
        if name != "start" and not any(arg.startswith("--hf_checkpoint") for arg in args):
            args.append(f"--hf_checkpoint={out}/start/hf/iter_0000400")
        with open(out / f"{name}.log", "w") as log:
            subprocess.run([sys.executable, "train.py", *args, f"--output_dir={out}", f"--run_name={name}"], check=True,
                           stdout=log, stderr=subprocess.STDOUT, timeout=1800)
        done.write_text(str((time.perf_counter() - begin) / 60))
    return float(done.read_text())


def curve(folder: pathlib.Path) -> dict[int, float]:
    """Optimizer steps taken -> held-out accuracy."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"] + 1: line["eval/addition"] for line in lines if "eval/addition" in line}


def draw(curves: dict[str, dict[int, float]], path: pathlib.Path) -> None:
    import matplotlib
    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(figsize=(8, 4.5))
    for style, (name, points) in enumerate(curves.items()):
        axes.plot(points.keys(), points.values(), "--" if len(points) == 2 else "-", label=name, marker="osv^D*"[style % 6],
                  markersize=4)              # dashed: only its ends were evaluated
    axes.set(xlabel="step (512 answers)", ylabel="held-out sums solved, greedy", ylim=(0.5, 1.02))
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    out = pathlib.Path(sys.argv[1]).absolute()
    out.mkdir(parents=True, exist_ok=True)
    run("start", ["configs/demo_sft.py"], out)
    curves, minutes = {}, {}
    for name, args in METHODS.items():
        minutes[name] = run(name, args, out)
        curves[name] = curve(out / name)
        if name == "sft":
            run("sft_evaluated", EVALUATE, out)
            curves[name] = {0: curves["grpo"][0], 50: curve(out / "sft_evaluated")[0]}
        print(f"{name:30} {'  '.join(f'{step}: {value:.3f}' for step, value in curves[name].items())}   "
              f"{minutes[name]:.1f} min", flush=True)
    draw(curves, pathlib.Path(__file__).parent / "methods.svg")


if __name__ == "__main__":
    main()
