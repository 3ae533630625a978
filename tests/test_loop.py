"""
test_loop.py: the whole loop, real and end to end: train.py as a user starts it, on a tiny model.

Run: pytest tests/test_loop.py          Minutes: each run starts Ray, Megatron and SGLang.
"""
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
import torch

from helpers import RUN_FILE, wait_for

pytestmark = pytest.mark.timeout(3000)      # twenty times what each takes on two idle cores
ROOT = pathlib.Path(__file__).parent.parent


def run(args: list[str], timeout_s: float = 900, **kw) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "train.py", *args], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, **kw)


def metrics(folder: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def exact(rows: list[dict]) -> list[dict]:
    """What must be the same in two runs: everything but the clock, and what depends on it."""
    return [{k: v for k, v in row.items() if not k.startswith("perf/") and k != "rollout/request_retries"} for row in rows]


@pytest.fixture(scope="module")
def run_file(tiny_model, tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("run") / "tiny.py"
    path.write_text(RUN_FILE.format(model=tiny_model))
    return path


@pytest.fixture(scope="module")
def whole_run(run_file, tmp_path_factory) -> pathlib.Path:
    """Four steps in one go, deterministic, with a KL term and an evaluation."""
    out = tmp_path_factory.mktemp("out")
    done = run([str(run_file), f"--output_dir={out}", "--run_name=whole", "--deterministic", *KL])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return out / "whole"


KL = ["--use_kl_loss", "--kl_loss_coef=0.01", "--num_steps_per_rollout=2"]


def test_metrics_hold(whole_run):
    rows = metrics(whole_run)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-4
        assert row["rollout/groups_trained"] == 4
        parts = ["rollout", "offload", "train", "save", "update_weights", "eval", "other"]
        assert sum(row.get(f"perf/{p}_time", 0.0) for p in parts) == pytest.approx(row["perf/step_time"], rel=1e-6)
        assert all(isinstance(v, (int, float)) for v in row.values())
    assert rows[-1]["train/kl_loss"] > 0             # the policy has left the reference


def test_outputs_open(whole_run):
    """config.json, samples.jsonl, TensorBoard events, and a checkpoint that transformers loads."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from transformers import AutoModelForCausalLM, AutoTokenizer
    assert json.loads((whole_run / "config.json").read_text())["num_rollout"] == 4
    samples = [json.loads(line) for line in (whole_run / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 4 * 16 and {s["weight_versions"][0] for s in samples if s["step"] == 2} == {2}
    events = EventAccumulator(str(whole_run / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("rollout/raw_reward")] == [0, 1, 2, 3]
    folder = whole_run / "hf" / "iter_0000004"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    out = model.generate(**tokenizer("1+2=", return_tensors="pt"), max_new_tokens=4)
    assert len(tokenizer.decode(out[0])) > len("1+2=")
    assert sorted(p.name for p in (whole_run / "checkpoints").iterdir()) == [
        "iter_0000002", "iter_0000004", "latest_checkpointed_iteration.txt"]


def cut_behind_two_steps(folder: pathlib.Path, args: list[str], hang_from: int) -> None:
    """A run in folder/cut, its driver killed as soon as it has a checkpoint; rewards hang from sample hang_from on."""
    process = subprocess.Popen([sys.executable, "train.py", *args, f"--output_dir={folder}", "--run_name=cut"], cwd=ROOT,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
                               env=os.environ | {"REWARDS_HANG_FROM": str(hang_from)})
    marker = folder / "cut" / "checkpoints" / "latest_checkpointed_iteration.txt"
    try:
        wait_for(marker.exists, 900, process)
    finally:
        process.kill()
        process.wait()
    assert int(marker.read_text()) == 2


def test_exact_resume(run_file, whole_run, tmp_path):
    """2N steps, and N steps, SIGKILL, resume, N steps: the same metrics, bit for bit."""
    cut_behind_two_steps(tmp_path, [str(run_file), "--deterministic", *KL], hang_from=32)      # the first sample of step 2
    done = run([str(run_file), f"--resume={tmp_path / 'cut'}", "--deterministic", *KL])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert exact(metrics(tmp_path / "cut")) == exact(metrics(whole_run))
    again = [str(run_file), f"--resume={tmp_path / 'cut'}", "--deterministic", *KL]
    done = run(again)
    assert done.returncode == 1 and "is finished, 4 of 4 steps; --num_rollout=8 goes on" in done.stderr
    done = run([*again, "--num_rollout=5", "--lr=0.0005"])
    assert done.returncode == 0 and "resumed with another lr: 0.001 before, 0.0005 now" in done.stdout, done.stderr[-3000:]
    rows = metrics(tmp_path / "cut")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4] and rows[-1]["train/lr"] == 0.0005


NEVER_SCORED = '''
async def share_of_digits(args, sample):
    """Who hangs here holds no worker, so the others get their rewards."""
    import asyncio, os
    if sample.index >= int(os.environ.get("REWARDS_HANG_FROM", 10**9)):
        await asyncio.sleep(1000)
    return sum(c.isdigit() for c in sample.response) / max(len(sample.response), 1)
custom_rm = share_of_digits
'''


@pytest.mark.parametrize("mode, hang_from", [
    (["--over_sampling_batch_size=6", "--partial_rollout"], 8 * 4),          # begun and put back in step 1
    (["--fully_async", "--colocate=False"], 8 * 4)], ids=["partial", "fully_async"])       # begun with the first ones
def test_resume_with_groups_under_way(run_file, tmp_path, mode, hang_from):
    """SIGKILL behind two steps, while rewards hang from sample hang_from on. Groups that were begun go on from the tokens that
    they have; over the whole run each is trained once, or waits in the last checkpoint."""
    def waiting(step) -> list[dict]:
        data = torch.load(tmp_path / "cut" / "checkpoints" / f"iter_{step:07}" / "common.pt", weights_only=False)["extra"]["data"]
        groups = data["ready"] + data["under_way"] if "ready" in data else data["buffer"]
        return [sample for group in groups for sample in group]

    own = tmp_path / "own.py"
    own.write_text(run_file.read_text() + NEVER_SCORED)
    cut_behind_two_steps(tmp_path, [str(own), *mode], hang_from)
    begun = waiting(2)
    assert len({s["group_index"] for s in begun}) >= 2 and sum(s["response_length"] for s in begun) > 0
    done = run([str(own), f"--resume={tmp_path / 'cut'}", *mode])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "cut" / "samples.jsonl").read_text().splitlines()]
    trained = {row["index"]: row for row in rows}
    assert len(rows) == 4 * 16 == len(trained) and [row["step"] for row in rows] == sorted(4 * 16 * [0, 1, 2, 3])[::4]
    left = [s["index"] for s in waiting(4)]
    assert sorted([*trained, *left]) == list(range(64 + len(left)))
    for sample in begun:
        row = trained[sample["index"]]       # all are, before new ones
        assert row["step"] >= 2 and row["response"].startswith(sample["response"])
        assert set(sample["weight_versions"]) <= set(row["weight_versions"]) and row["response_length"] <= 8


PPO = '''
advantage_estimator, kl_coef, lambd = "ppo", 0.01, 0.95
critic = dict(lr=1e-2)
num_critic_only_steps = 1
save_interval = 1
sft_data, sft_batch_size = rows, 4
deterministic = True
'''


def test_ppo_with_examples_resumes_exactly(run_file, tmp_path):
    """A critic that learns alone at first, and rows of sft_data in each step: 3 steps, and 2 steps, resume, 1 step. The
    first save is before the actor's Adam has made a step."""
    ppo = tmp_path / "ppo.py"
    ppo.write_text(run_file.read_text() + PPO)
    for name, steps, more in (("whole", 3, []), ("cut", 2, []), ("cut", 3, [f"--resume={tmp_path / 'cut'}"])):
        done = run([str(ppo), f"--output_dir={tmp_path}", f"--run_name={name}", f"--num_rollout={steps}", *more])
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = metrics(tmp_path / "whole")
    assert exact(metrics(tmp_path / "cut")) == exact(rows) and len(rows) == 3
    assert "train/loss" not in rows[0]       # only the critic learnt
    assert all(row["train/critic-value_loss"] > 0 and row["perf/critic_train_time"] > 0 for row in rows)
    assert rows[0]["train/critic-values"] == 0 != rows[1]["train/critic-values"]
    assert rows[1]["train/sft_loss"] > 0 and rows[1]["train/ppo_kl"] == pytest.approx(0, abs=1e-6)
    assert rows[1]["train/train_rollout_logprob_abs_diff"] < 1e-4
    import convert
    import families
    assert families.has_value_head(convert.HFReader(tmp_path / "whole" / "hf" / "critic" / "iter_0000003").hf_config)
    done = run([str(ppo), f"--hf_checkpoint={tmp_path / 'whole' / 'hf' / 'critic' / 'iter_0000003'}", f"--output_dir={tmp_path}"])
    assert done.returncode == 1 and "a critic or a reward model; give a causal language model as hf_checkpoint" in done.stderr


def test_sigterm_saves_and_exits(run_file, tmp_path):
    """In asynchronous mode, where samples of the next step are under way when the signal comes."""
    args = [str(run_file), f"--output_dir={tmp_path}", "--run_name=term", "--num_rollout=1000", "--save_interval=900",
            "--async_mode", "--colocate=false"]
    process = subprocess.Popen([sys.executable, "train.py", *args], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_for((tmp_path / "term" / "samples.jsonl").exists, 900, process)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=900)
    finally:
        process.kill()                       # nothing to kill where all went well
    assert process.returncode == 0 and "go on with the same command and --resume" in out, out[-3000:]
    saved = int((tmp_path / "term" / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    rows = metrics(tmp_path / "term")
    assert saved == rows[-1]["step"] + 1
    assert [row["rollout/staleness/max"] for row in rows] == [0] + [1] * (len(rows) - 1)    # one step off


def test_stages_and_layouts(run_file, tmp_path):
    """A run file as hf_checkpoint runs first (SFT, no engine); then TP 2 with sequence parallelism, two engines, gloo sync."""
    sft = tmp_path / "sft.py"
    sft.write_text(run_file.read_text() + 'loss_type = "sft"\nnum_rollout = 3\nrollout_batch_size = 16\ncolocate = False\n')
    args = [str(run_file), f"--hf_checkpoint={sft}", f"--output_dir={tmp_path}", "--run_name=two", "--num_rollout=2", "--actor_num_gpus=2",
            "--tensor_model_parallel_size=2", "--sequence_parallel", "--rollout_num_gpus=2", "--update_weight_transport=distributed"]
    done = run(args, 1800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    losses = [row["train/loss"] for row in metrics(tmp_path / "two" / "stage_sft")]
    assert losses[-1] < losses[0]
    assert len(metrics(tmp_path / "two")) == 2


@pytest.mark.parametrize("args, says", [
    (["--megatron.transformer_impl=transformer_engine"], "needs device='cuda' and Transformer Engine: pip "),
    (["--megatron.attention_dropout=0.1"], "attention_dropout would make the trainer's model another than the engine's"),
    (["--megatron.fp8=hybrid"], "training in fp8 or fp4 is not covered"),
    (["--megatron.transformer_impl=apex"], "transformer_impl='apex' is unknown; use 'local'"),
    (["--hf_checkpoint=/nowhere"], "error: model folder /nowhere not found; give a folder with config.json, or a hub name"),
    (["--resume=/nowhere"], "error: --resume: /nowhere holds no checkpoint; name the folder of a run"),
    (["--rm_type=exactt", "--custom_rm=None"], "error: unknown rm_type 'exactt'; did you mean 'exact'?")])
def test_mistakes_leave_nothing_behind(run_file, tmp_path, args, says):
    done = run([str(run_file), f"--output_dir={tmp_path / 'out'}", *args], 240)
    assert done.returncode == 1 and says in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_mistake_in_the_users_own_code_keeps_its_traceback(run_file, tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text(run_file.read_text() + "def hf_checkpoint(folder): raise ValueError('in my own function')\n")
    done = run([str(broken), f"--output_dir={tmp_path}", "--run_name=x"], 240)
    assert done.returncode == 1 and "ValueError: in my own function" in done.stderr and "broken.py" in done.stderr


def test_what_only_reading_shows_is_said_before_anything_starts(run_file, tmp_path):
    done = run([str(run_file), f"--output_dir={tmp_path}", "--run_name=x", "--prompt_data=nowhere.jsonl"], 240)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "error: data file nowhere.jsonl not found; give a .jsonl or .parquet file" in done.stderr
    assert not (tmp_path / "x" / "logs").exists()
