"""
test_bench.py: does bench.py report what happened? The arithmetic on rows made by hand, then one real run.

Run:   pytest tests/test_bench.py      (about 40 s: one start of Ray, Megatron and SGLang)
Left out on purpose: how fast anything is; a timed test fails on a busy machine and says nothing on an idle one.
"""
import json
import pathlib
import subprocess
import sys

import pytest

import bench
from helpers import RUN_FILE, make_cfg

pytestmark = pytest.mark.timeout(1000)
ROOT = pathlib.Path(bench.__file__).parent


def test_summary():
    row = {f"{name}_s": 0.0 for name in bench.PHASES} | dict(
        step_s=4.0, rollout_s=2.0, train_s=1.0, update_weights_s=0.5, in_trainers_s=0.75, optimizer_s=0.5,
        rollout_tokens=100, train_tokens=200, train_tflops=300.0, bytes=8, bare_s=1.0, bare_tokens=80,
        memory=dict(generating={"engine 1": 100.0, "trainer 2": 3.0}, between={"engine 1": 5.0, "trainer 2": 3.0},
                    training={"engine 1": 5.0, "trainer 2": 90.0}),
        sync_pause_s=0.1, sync_send_s=0.2, sync_check_s=0.0, sync_resume_s=0.2)
    other = row | dict(step_s=6.0, rollout_s=4.0, rollout_tokens=140, bare_tokens=40)
    report = bench.summary(make_cfg(), [row, other], 12.0)
    assert report["rollout_tokens_per_s"] == 240 / 6 and report["bare_engine_tokens_per_s"] == 120 / 2
    assert report["rollout_over_bare_engine"] == pytest.approx(40 / 60)
    assert report["train_tokens_per_s"] == 400 and report["update_weights_bytes"] == 8
    assert report["seconds_per_step"] == {name: 0.0 for name in bench.PHASES} | dict(
        step=5.0, rollout=3.0, train=1.0, update_weights=0.5, other=0.5)
    assert report["fixed_cost_s"] == 5.0 - 3.0 - 0.75
    text = bench.table(report | dict(matrix_tflops=790.0, bare_copy_s=0.004))
    for said in ("ratio 0.67", "start-up 12.0 s", "1.250 s", "300 TFLOP/s", "product 790", "a bare copy 0.004",
                 "memory of GPU 0, engine 1: 100.0 GB when generation ends, 5.0 before trainers wake up, 5.0 when training ends",
                 "memory of GPU 0, trainer 2: 3.0 GB when generation ends, 3.0 before trainers wake up, 90.0 when training ends"):
        assert said in text


def test_a_real_run(tiny_model, tmp_path):
    run_file = tmp_path / "tiny.py"
    run_file.write_text(RUN_FILE.format(model=tiny_model))
    done = subprocess.run([sys.executable, "bench.py", str(run_file), "--steps=2", f"--output_dir={tmp_path}", "--run_name=b"],
                          cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "b" / "bench.json").read_text())
    assert len(report["rows"]) == 2 and report["config"]["hf_checkpoint"] == tiny_model
    for row in report["rows"]:               # an answer has 1 to 8 tokens, a prompt has 4
        assert 16 <= row["rollout_tokens"] <= 128 and 16 <= row["bare_tokens"] <= 128
        assert row["train_tokens"] == row["rollout_tokens"] + 16 * 4
        assert 0 < row["in_trainers_s"] <= row["train_s"] < row["step_s"] and row["bare_s"] > 0
        assert row["train_tflops"] > 0
    assert report["matrix_tflops"] > 0 and report["bare_copy_s"] > 0
    parts = dict(report["seconds_per_step"])
    assert parts.pop("step") == pytest.approx(sum(parts.values())) and all(v >= 0 for v in parts.values())
    steps = [json.loads(line) for line in (tmp_path / "b" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps] == [0, 1, 2]           # the first one warmed up
    assert "ratio" in done.stdout and str(tmp_path / "b" / "bench.json") in done.stdout


def test_the_trainer_alone(tiny_model, tmp_path):
    run_file = tmp_path / "tiny.py"
    run_file.write_text(RUN_FILE.format(model=tiny_model))
    done = subprocess.run([sys.executable, "bench.py", str(run_file), "--train=16", "--steps=2", "--max_tokens_per_gpu=64",
                           "--use_kl_loss", "--kl_loss_coef=0.1",    # for which a made-up batch has no reference
                           f"--output_dir={tmp_path}", "--run_name=t"], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "t" / "bench.json").read_text())
    assert (report["micro_batches"], report["tokens"], report["seqlen"], len(report["rows"])) == (2, 128, 16, 2)
    # By hand: 2 layers, hidden 64, 4 heads and 2 kv heads of 16, ffn 128, 64 tied rows.
    layer = 64 * (4 + 2 + 2) * 16 + 64 * 64 + 3 * 64 * 128 + 2 * 64 + 2 * 16
    flops = 8 * 16 * (6 * (2 * layer + 64 + 64 * 64) + 3 * 2 * 2 * 64 * 8 * 2)
    assert report["tflops"] == pytest.approx(flops / report["seconds_per_step"]["step"] / 1e12)
    assert "2 micro-batches, 128 tokens" in done.stdout and "attention: torch's scaled_dot_product" in done.stdout


@pytest.mark.parametrize("args, message", [
    (["configs/qwen3_4b_grpo.py", "--device=cpu", "--rollout_num_gpus_per_engine=1", "--train=64"], "--train measures one rank"),
    (["configs/demo_cpu.py", "--resume"], "a bench starts anew; leave --resume out"),
    (["configs/demo_cpu.py", "--steps=0"], "--steps must be 1 or more"),
    (["configs/demo_sft.py"], "loss_type='sft' has no rollout to compare"),
    (["configs/demo_cpu.py", "--rolout_batch_size=2"], "did you mean 'rollout_batch_size'")])
def test_mistakes(args, message):
    done = subprocess.run([sys.executable, "bench.py", *args], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr
