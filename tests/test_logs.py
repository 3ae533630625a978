"""
test_logs.py: does every number arrive in every sink, once, under its own step; and do the times add up?

Run:   pytest tests/test_logs.py
Left out on purpose: how the live line looks; Weights & Biases itself (its stand-in records what it is given).
"""
import json
import sys
import time
import types

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from helpers import make_cfg
from logs import Logs, end_of, short_text


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_every_sink_gets_every_number(tmp_path, monkeypatch, capsys):
    given, finished = [], []
    run = types.SimpleNamespace(log=lambda metrics, step: given.append((step, metrics)),
                                finish=lambda exit_code: finished.append(exit_code))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **kw: run))
    with Logs(make_cfg(use_wandb=True), tmp_path, 2) as logs:
        for step in range(2):
            logs.start_step()
            logs.step(step, {"train/loss": 0.5 + step, "rollout/raw_reward": 0.25})
    rows = lines(tmp_path)
    assert [row["step"] for row in rows] == [0, 1] and [row["train/loss"] for row in rows] == [0.5, 1.5]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    for row, (step, metrics) in zip(rows, given):
        assert row == {"step": step} | metrics
        for name, value in metrics.items():
            assert {e.step: e.value for e in events.Scalars(name)}[step] == pytest.approx(value, rel=1e-6)
    assert finished == [0]
    out = capsys.readouterr().out            # no terminal: one plain line a step
    assert [line.split(":")[0] for line in out.splitlines()] == ["step 1/2", "step 2/2"] and "reward 0.25" in out


def test_a_missing_wandb_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="wandb is not installed; pip install wandb, or set use_wandb=False"):
        Logs(make_cfg(use_wandb=True), tmp_path, 2)


def test_times_add_up(tmp_path):
    with Logs(make_cfg(), tmp_path, 2) as logs:
        logs.start_step()
        with logs.phase("rollout"):
            time.sleep(0.02)
        for _ in range(2):                   # a phase may come in two pieces
            with logs.phase("train"):
                time.sleep(0.01)
        with pytest.raises(KeyError), logs.phase("save"):        # an error is timed like anything else
            raise KeyError
        first = logs.step(0, {})
        second = logs.step(1, {})
    parts = sum(v for k, v in first.items() if k != "perf/step_time")
    assert parts == pytest.approx(first["perf/step_time"], abs=1e-9) and first["perf/other_time"] >= 0
    assert first["perf/rollout_time"] >= 0.02 <= first["perf/train_time"]
    assert set(second) == {"perf/step_time", "perf/other_time"}  # every step has its own clock


def test_resume_takes_out_what_the_checkpoint_does_not_know(tmp_path, capsys):
    with Logs(make_cfg(), tmp_path, 5) as logs:
        for step in range(4):
            logs.step(step, {"x": float(step)})
    with open(tmp_path / "samples.jsonl", "w") as f:
        f.write("".join(json.dumps({"step": step}) + "\n" for step in (-1, 0, 1, 2, 2, 3)) + '{"step": 3, "prom')     # killed there
    with Logs(make_cfg(), tmp_path, 5, first_step=2) as logs:
        logs.step(2, {"x": 20.0})
    assert [(row["step"], row["x"]) for row in lines(tmp_path)] == [(0, 0.0), (1, 1.0), (2, 20.0)]
    assert [json.loads(line)["step"] for line in (tmp_path / "samples.jsonl").read_text().splitlines()] == [-1, 0, 1]
    assert "resume at step 2: 2 logged steps after the checkpoint are done again" in capsys.readouterr().out


def test_finish_shows_the_same_prompts_before_and_after(tmp_path, capsys):
    def sample(step, index, response, reward, kind="sums"):
        return json.dumps({"step": step, "set": kind, "index": index, "prompt": f"[{index}]+1=", "label": str(index + 1),
                           "response": response, "reward": reward})
    rows = [sample(-1, 0, "1", 1.0), sample(-1, 1, "wrong", 0.0), sample(0, 7, "x", 0.0, "train"), sample(1, 1, "2", 1.0),
            sample(1, 0, "1", 1.0)]
    with Logs(make_cfg(eval_prompt_data={"sums": "sums.jsonl"}), tmp_path, 2) as logs:
        (tmp_path / "samples.jsonl").write_text("".join(row + "\n" for row in rows))
        logs.before({"eval/sums": 0.5, "eval/sums-truncated_ratio": 0.0})
        logs.write(1, {"eval/sums": 1.0, "eval/sums-truncated_ratio": 0.0})
        pairs = logs.first_and_last("sums")
        logs.finish()
    assert [(a["index"], a["response"], b["response"]) for a, b in pairs] == [(1, "wrong", "2"), (0, "1", "1")]
    out = capsys.readouterr().out
    assert "before training: eval/sums 0.500" in out and "sums: 0.500 before, 1.000 after" in out and "[1]+1=" in out and str(tmp_path) in out.replace("\n", "")
    assert "truncated" not in out            # a count is no score


def test_short_text():
    assert short_text(0.123456) == "0.123" and short_text("a" * 301) == "a" * 150 + " ... " + "a" * 150
    assert short_text("[red]") == "\\[red]"  # not a colour
    assert end_of("system: be good\n" * 20 + "2+3=") == "... " + ("system: be good " * 20 + "2+3=")[-120:] and end_of("2+3=") == "2+3="
