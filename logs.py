"""
logs.py: where do the numbers go? One live line in the terminal, metrics.jsonl, TensorBoard, Weights & Biases if asked.

    train.py: with logs.phase("rollout"): ...     -> the live line's phase, and perf/rollout_time
              logs.step(step, metrics)            -> every sink, one plain line where there is no terminal
              logs.finish()                       -> held-out scores and samples before and after, and where the run is

Test:  pytest tests/test_logs.py
Knows nothing about: what a metric means (README's glossary does).
"""
import contextlib
import json
import os
import pathlib
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

HEADLINE = {"rollout/raw_reward": "reward", "train/loss": "loss", "train/grad_norm": "grad norm",
            "train/train_rollout_logprob_abs_diff": "logp diff", "rollout/response_len/mean": "length",
            "perf/step_time": "s/step"}      # metric -> what the terminal calls it
# NOTE: on-policy GRPO's loss says nothing (normalised advantages add up to 0), so the terminal shows it for SFT only.


class Logs:
    """The sinks of one run. Used as a context manager, so that the terminal is left in order after an error."""

    def __init__(self, cfg, run_dir: pathlib.Path, num_rollout: int, first_step: int = 0):
        self.cfg, self.run_dir, self.num_rollout = cfg, run_dir, num_rollout
        self.scores = [f"eval/{name}" for name in cfg.eval_prompt_data]
        self.console = Console(highlight=False)
        self.times: dict[str, float] = {}    # phase -> seconds in this step
        self.step_begin = time.perf_counter()
        self.progress = Progress(
            TextColumn("[bold]{task.fields[phase]:<10}"), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=self.console,
            disable=not self.console.is_terminal)
        self.task = self.progress.add_task("", total=num_rollout, completed=first_step, phase="start", numbers="")
        self.keep_until(first_step)
        self.file = open(run_dir / "metrics.jsonl", "a", encoding="utf-8")
        from torch.utils.tensorboard import SummaryWriter
        self.tensorboard = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step or None)
        self.wandb = None
        if cfg.use_wandb:
            try:
                import wandb
            except ImportError:
                raise ValueError("use_wandb=True but wandb is not installed; pip install wandb, "
                                 "or set use_wandb=False") from None
            self.wandb = wandb.init(project=cfg.wandb_project, name=run_dir.name, dir=str(run_dir))

    def keep_until(self, first_step: int) -> None:
        """A resumed run goes on behind the checkpoint: what the stopped run logged after it is taken out, and said so."""
        for name in ("samples.jsonl", "metrics.jsonl"):
            path, again = self.run_dir / name, set()
            if not path.exists():
                continue
            with open(path, encoding="utf-8") as old, open(f"{path}.new", "w", encoding="utf-8") as new:
                for line in old:
                    if not line.endswith("\n"):
                        continue             # its writer was killed in the middle of the line
                    if (step := json.loads(line)["step"]) < first_step:
                        new.write(line)
                    else:
                        again.add(step)
            os.replace(f"{path}.new", path)
            if again and name == "metrics.jsonl":
                self.print(f"resume at step {first_step}: {len(again)} logged steps after the checkpoint are done again")

    def __enter__(self):
        self.progress.start()
        return self

    def __exit__(self, *error) -> None:
        self.progress.stop()
        self.file.close()
        self.tensorboard.close()
        if self.wandb is not None:
            self.wandb.finish(exit_code=int(error[0] is not None))

    def print(self, *text) -> None:
        plain = all(isinstance(t, str) for t in text)            # a line of text is one line, also in a file or a pipe
        self.progress.console.print(*text, soft_wrap=plain)

    @contextlib.contextmanager
    def phase(self, name: str):
        """What the loop does now. The phases of a step and perf/other_time add up to perf/step_time."""
        self.progress.update(self.task, phase=name)
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.times[name] = self.times.get(name, 0.0) + time.perf_counter() - begin

    def groups_done(self, done: int, total: int) -> None:
        self.progress.update(self.task, phase=f"rollout {done}/{total}")

    def start_step(self) -> None:
        self.times, self.step_begin = {}, time.perf_counter()

    def step(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Write one step everywhere. -> the metrics with the step's times."""
        total = time.perf_counter() - self.step_begin
        metrics = metrics | {f"perf/{name}_time": seconds for name, seconds in self.times.items()}
        metrics |= {"perf/step_time": total, "perf/other_time": total - sum(self.times.values())}
        self.write(step, metrics)
        numbers = "  ".join(f"{short} {metrics[name]:.4g}" for name, short in HEADLINE.items() if name in metrics
                            and not (name == "train/loss" and "rollout/raw_reward" in metrics))
        self.progress.update(self.task, completed=step + 1, numbers=numbers)
        self.start_step()                    # what follows, a checkpoint say, is in the next step's times
        held_out = "  ".join(f"{k} {metrics[k]:.3f}" for k in self.scores if k in metrics)
        if not self.console.is_terminal or held_out:
            self.print(f"step {step + 1}/{self.num_rollout}: {numbers}  {held_out}")
        return metrics

    def before(self, metrics: dict[str, float]) -> None:
        """The evaluation before any training, logged as step -1."""
        self.write(-1, metrics)
        self.print("before training: " + "  ".join(f"{name} {metrics[name]:.3f}" for name in self.scores))

    def write(self, step: int, metrics: dict[str, float]) -> None:
        metrics = dict(sorted(metrics.items()))
        self.file.write(json.dumps({"step": step} | metrics) + "\n")
        self.file.flush()
        for name, value in metrics.items():
            self.tensorboard.add_scalar(name, value, step)
        if self.wandb is not None:
            self.wandb.log(metrics, step=step)

    def samples(self, step: int, samples: list) -> None:
        """A few samples of this step, as a table."""
        if not self.cfg.log_samples or not self.console.is_terminal:
            return
        table = Table(title=f"samples of step {step + 1}", title_justify="left", show_lines=False)
        for column in ("prompt", "response", "label", "reward"):
            table.add_column(column, overflow="fold", max_width=60)
        for s in samples[::max(1, len(samples) // self.cfg.log_samples)][:self.cfg.log_samples]:
            table.add_row(end_of(s.prompt), *(short_text(x) for x in (s.response, s.label, s.reward)))
        self.print(table)

    def finish(self) -> None:
        """Held-out scores and answers of the first and the last evaluation, side by side."""
        lines = [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]
        for name in self.cfg.eval_prompt_data:
            values = [line[f"eval/{name}"] for line in lines if f"eval/{name}" in line]
            if not values:                   # the run was stopped before the first one
                continue
            table = Table(title=f"{name}: {values[0]:.3f} before, {values[-1]:.3f} after", title_justify="left")
            for column in ("prompt", "right answer", "before", "after"):
                table.add_column(column, overflow="fold", max_width=50)
            for before, after in self.first_and_last(name)[:5]:
                row = before["label"], before["response"], after["response"]
                table.add_row(end_of(before["prompt"]), *map(short_text, row))
            self.print(table)
        self.print(f"run folder: {self.run_dir}  (tensorboard --logdir {self.run_dir})")

    def first_and_last(self, name: str) -> list[tuple[dict, dict]]:
        """The same held-out prompts at the first and at the last evaluation; first those that changed."""
        by_index: dict[int, list[dict]] = {}
        with open(self.run_dir / "samples.jsonl", encoding="utf-8") as f:
            for line in f:
                if f'"set": "{name}"' in line:
                    sample = json.loads(line)
                    by_index.setdefault(sample["index"], []).append(sample)
        pairs = [(s[0], s[-1]) for s in by_index.values()]
        return sorted(pairs, key=lambda pair: pair[0]["reward"] == pair[1]["reward"])


def end_of(prompt: str, limit: int = 120) -> str:
    """What is asked stands last; a chat template's words go before it."""
    prompt = " ".join(prompt.split())
    return short_text(prompt if len(prompt) <= limit else "... " + prompt[-limit:])


def short_text(value, limit: int = 300) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    text = text.replace("[", "\\[")          # rich reads [..] as style
    return text if len(text) <= limit else text[:limit // 2] + " ... " + text[-limit // 2:]
