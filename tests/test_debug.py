"""
test_debug.py: dumps hold a rollout to the last bit, training on them is the training of the run that wrote them, one side runs
without the other, and what debug.py prints stands at the right token.

Run: pytest tests/test_debug.py          Minutes: the first tests start train.py, with engines and trainers.
"""
import contextlib
import dataclasses
import fractions
import io
import json
import math
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from rich.console import Console

import algos
import debug
import placement
from buffer import DataSource, Sample, Status
from configs import base
from conftest import write_char_tokenizer
from helpers import RUN_FILE, make_cfg
from rollout import RolloutResult

pytestmark = pytest.mark.timeout(3000)       # twenty times what each takes on two idle cores
ROOT = pathlib.Path(__file__).parent.parent

# Answers with a tool's tokens behind them, rows of sft_data, two optimizer steps, a reference, and an object in the metadata.
HOOKS = '''
async def custom_generate_function(args, sample, sampling_params, evaluation=False):
    sample = await args.generate(sample, sampling_params)
    if not evaluation and sample.response_length:
        sample.append(args.tokenizer("ok.")["input_ids"], trainable=False)
        sample.metadata["seen"] = range(3)
    return sample
sft_data, sft_batch_size = rows, 4
use_kl_loss, kl_loss_coef = True, 0.01
num_steps_per_rollout = 2
eval_prompt_data = dict(sums=rows)
eval_interval = 2
eval_max_response_len = 1
deterministic = True
'''


# ---- Whole runs ------------------------------------------------------------------------------------------------------
def run(*args, fails: str | None = None) -> str:
    """train.py as a user starts it. -> what it printed; fails: what its error must say"""
    done = subprocess.run([sys.executable, "train.py", *map(str, args)], cwd=ROOT, capture_output=True, text=True, timeout=900)
    if fails:
        assert done.returncode == 1 and fails in done.stderr and "Traceback" not in done.stderr, done.stderr[-3000:]
    else:
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def metrics(folder: pathlib.Path, *kinds: str) -> list[dict]:
    """Of the steps from 0 on, those metrics whose names start with one of kinds; perf/ is the clock's."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k.startswith(kinds)} for row in rows if row["step"] >= 0]


@pytest.fixture(scope="module")
def run_file(tiny_model, tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("run") / "tiny.py"
    path.write_text(RUN_FILE.format(model=tiny_model) + HOOKS)
    return path


@pytest.fixture(scope="module")
def written(run_file, tmp_path_factory) -> pathlib.Path:
    """Four steps, each with its dump."""
    out = tmp_path_factory.mktemp("out")
    run(run_file, f"--output_dir={out}", "--run_name=written", "--save_debug_rollout_data=dumps/{rollout_id}.pt")
    return out / "written"


def test_training_on_dumps_is_the_same_training(run_file, written, tmp_path):
    """Step 0 by replay; a resume, step 1 by replay; a resume without dumps, steps 2 and 3 with engines: the metrics of the one
    run with engines throughout."""
    ours, load = tmp_path / "replay", f"--load_debug_rollout_data={written}/dumps/{{rollout_id}}.pt"
    out = run(run_file, f"--output_dir={tmp_path}", "--run_name=replay", load, "--num_rollout=1")
    assert "training on 1 dumps, without engines and evaluation\n" in out    # with no word about other rewards
    assert not (ours / "logs").exists() and not (ours / "samples.jsonl").exists()        # nobody has generated anything
    run(run_file, f"--resume={ours}", load, "--num_rollout=2")
    assert not (ours / "logs").exists()
    theirs = metrics(written, "train/", "rollout/")
    assert len(theirs) == 4 and theirs[1]["train/grad_norm"] > 0 and theirs[1]["train/sft_loss"] > 0
    assert metrics(ours, "train/", "rollout/", "eval/") == theirs[:2]
    run(run_file, f"--resume={ours}", "--num_rollout=4")
    everything = metrics(ours, "train/", "rollout/", "eval/")
    assert everything[2:] == metrics(written, "train/", "rollout/", "eval/")[2:] and "eval/sums" in everything[3]


def test_other_settings_are_taken_up_and_said(run_file, written, tmp_path):
    load = f"--load_debug_rollout_data={written}/dumps/{{rollout_id}}.pt"
    out = run(run_file, f"--output_dir={tmp_path}", "--run_name=x", load, "--num_rollout=1", "--grpo_std_normalization=false")
    assert "training on 1 dumps, without engines and evaluation; 1 have other rewards now" in out
    (ours,), theirs = metrics(tmp_path / "x", "train/"), metrics(written, "train/")[0]
    assert ours["train/grad_norm"] != theirs["train/grad_norm"] and ours["train/tokens"] == theirs["train/tokens"]


def test_async_dumps_are_trained_alike(run_file, tmp_path):
    run(run_file, f"--output_dir={tmp_path}", "--run_name=async", "--async_mode", "--colocate=false", "--num_rollout=3",
        "--skip_eval_before_train", f"--save_debug_rollout_data={tmp_path}/{{rollout_id}}.pt")
    assert debug.read(tmp_path / "2.pt")["samples"][0].weight_versions[0] == 1   # one step off
    run(run_file, f"--output_dir={tmp_path}", "--run_name=replay", "--async_mode", "--colocate=false", "--num_rollout=3",
        f"--load_debug_rollout_data={tmp_path}/{{rollout_id}}.pt")
    theirs = metrics(tmp_path / "async", "train/", "rollout/")
    assert len(theirs) == 3 and metrics(tmp_path / "replay", "train/", "rollout/") == theirs


def test_rollout_only_and_what_training_makes_of_it(run_file, written, tmp_path):
    dumps = tmp_path / "alone" / "dumps"
    out = run(run_file, f"--output_dir={tmp_path}", "--run_name=alone", "--debug_rollout_only", "--num_rollout=2",
              "--actor_num_gpus=8", "--rollout_num_gpus=1", "--save_debug_rollout_data=dumps/{rollout_id}.pt")
    assert "attention in training: none" in out      # nor is there a rank that could say
    ours, theirs = metrics(tmp_path / "alone", "train/", "rollout/", "eval/", "perf/step"), metrics(written, "rollout/", "eval/")
    assert not [key for row in ours for key in row if key.startswith("train/")] and all(row["perf/step_time"] > 0 for row in ours)
    assert ours[0]["rollout/raw_reward"] == theirs[0]["rollout/raw_reward"]      # the same weights, the same seeds
    assert ours[1]["rollout/raw_reward"] != theirs[1]["rollout/raw_reward"] and 0 <= ours[1]["eval/sums"] <= 1
    assert not (tmp_path / "alone" / "checkpoints").exists()
    contents = [debug.read(dumps / f"{step}.pt") for step in (0, 1)]
    assert [content["weight_version"] for content in contents] == [0, 0]
    assert {v for content in contents for s in content["samples"] for v in s.weight_versions} == {0, -1}     # -1: the tool's
    args = [run_file, f"--output_dir={tmp_path}", "--run_name=train", f"--load_debug_rollout_data={dumps}/{{rollout_id}}.pt"]
    run(*args, "--num_rollout=2", fails=f"{dumps}/1.pt: step 1: a sample is 1 weight updates old, max_staleness is 0")
    run(*args, "--num_rollout=3", "--max_staleness=1", fails=f"step 2 of 3 has no {dumps}/2.pt; set num_rollout=2")
    assert not (tmp_path / "train" / "metrics.jsonl").exists()   # nothing had started
    run(*args, "--num_rollout=2", "--max_staleness=1")
    assert [row["rollout/staleness/max"] for row in metrics(tmp_path / "train", "rollout/")] == [0, 1]


# ---- Files -----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer
    folder = str(tmp_path_factory.mktemp("tokenizer"))
    write_char_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)     # which knows its folder


@pytest.fixture
def cfg():
    return make_cfg(prompt_data=lambda: [dict(input=f"{a}+1=", label=a + 1) for a in range(5)], rollout_batch_size=2,
                    n_samples_per_prompt=2, save_debug_rollout_data="deep/{rollout_id}.pt", num_steps_per_rollout=1,
                    load_debug_rollout_data="/nowhere/{rollout_id}.pt")


def result_of(data: DataSource) -> RolloutResult:
    """Two groups of two, as from a rollout: rewards 0, 1, 2, 3."""
    samples = [sample for group in data.get_samples(2) for sample in group]
    for i, sample in enumerate(samples):
        sample.append([3 + i, 4], [-0.1 - i / 3, math.log(0.7)], version=0)
        sample.append([5], trainable=False)
        sample.reward, sample.status = float(i), Status.COMPLETED
        sample.metadata = {"object": range(2), "n": np.float32(0.5), "pair": (1, None), 7: [True, "x"]}
    rewards = algos.group_rewards(data.cfg, [s.reward for s in samples], [s.group_index for s in samples],
                                  [s.rollout for s in samples])
    return RolloutResult(samples, rewards, {"rollout/raw_reward": 1.5, "perf/generate_time": 3.0})


@pytest.fixture
def dumped(cfg, tokenizer, tmp_path):
    """dumped(change=function of the content, **settings) -> a Replay of one dump and the result that went into it."""
    def make(change=lambda content: None, step=0, **settings):
        data = DataSource(cfg, tokenizer, 100)
        result = result_of(data)
        debug.dump(cfg, tmp_path, step, result, data, data.state_dict())
        path = tmp_path / "deep" / f"{step}.pt"
        content = torch.load(path, weights_only=True)
        change(content)
        torch.save(content, path)
        own = dataclasses.replace(cfg, load_debug_rollout_data=str(tmp_path / "deep" / "{rollout_id}.pt"), **settings)
        return debug.Replay(own, DataSource(cfg, tokenizer, 100), 64, range(1)), result
    return make


def test_a_dump_is_the_rollout(dumped, tmp_path, capsys):
    replay, result = dumped()
    assert capsys.readouterr().out == "training on 1 dumps, without engines and evaluation\n"
    back = replay.generate(0)
    assert back.rewards == result.rewards and back.metrics == {"rollout/raw_reward": 1.5} and back.examples == []
    for ours, theirs in zip(back.samples, result.samples):
        # what is no plain data has become its text; everything that is trained is the same to the last bit
        assert ours.metadata == {"object": "range(0, 2)", "n": 0.5, "pair": [1, None], 7: [True, "x"]}
        assert dataclasses.replace(ours, metadata={}) == dataclasses.replace(theirs, metadata={})
    assert replay.data.state_dict()["offset"] == 2 and [g[0].prompt for g in replay.data.get_samples(1)] == ["2+1="]
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["0.pt"]       # no .part


def test_a_dump_cut_off_leaves_the_old_one(cfg, dumped, tmp_path, tokenizer, monkeypatch):
    dumped()
    before = (tmp_path / "deep" / "0.pt").read_bytes()

    def half(content, path):
        pathlib.Path(path).write_bytes(b"half")
        raise OSError("disk full")
    monkeypatch.setattr(torch, "save", half)
    data = DataSource(cfg, tokenizer, 100)
    with pytest.raises(OSError, match="disk full"):
        debug.dump(cfg, tmp_path, 0, result_of(data), data, data.state_dict())
    assert (tmp_path / "deep" / "0.pt").read_bytes() == before


def nothing(content):
    pass


def other_vocabulary(content):
    content["samples"][3]["tokens"][1] = 64


def without_rewards(content):
    for sample in content["samples"]:
        sample["reward"] = None


def without_masks(content):
    content["samples"][1]["loss_mask"] = torch.tensor([1])


@pytest.mark.parametrize("change, settings, says", [
    (other_vocabulary, {}, r"0.pt: it holds token id 64, the model knows 64 of them: another one made it; set hf_checkpoint to"),
    (nothing, dict(n_samples_per_prompt=4), r"0.pt: its groups have 2 samples, the run's 4; set n_samples_per_prompt=2"),
    (nothing, dict(rollout_batch_size=4), r"0.pt: it has 2 groups; set rollout_batch_size=2"),
    (nothing, dict(sft_batch_size=4), r"0.pt: it has 0 rows of sft_data, this run wants 4; set sft_data"),
    (nothing, dict(opd_teacher_url="http://x"), r"0.pt: it has no teacher's log-probs; use opd_teacher_load"),
    (nothing, dict(use_rollout_routing_replay=True), r"0.pt: sample 0: use_rollout_routing_replay needs the engine's routes"),
    (without_rewards, {}, r"0.pt: it has samples without a reward, as loss_type='sft' makes them; replay it with"),
    (without_masks, {}, r"0.pt: sample 1: loss_mask has 1 entries for 3 response tokens"),
    (lambda content: content.update(rollout_id=7), {}, r"0.pt: it is step 7's, not step 0's; was it renamed\?"),
    (lambda content: content["position"].update(rows=4), {}, r"0.pt: the checkpoint was made with 4 prompts"),
    (lambda content: content.pop("samples"), {}, r"0.pt is no dump that can be read \(KeyError"),
    (lambda content: content.update(x=fractions.Fraction(1)), {}, r"0.pt is no dump that can be read \(UnpicklingError")])
def test_dumps_that_do_not_fit(dumped, change, settings, says):
    with pytest.raises(ValueError, match=says):
        dumped(change, **settings)


def test_missing_and_broken_files(cfg, tokenizer, tmp_path, dumped):
    data = DataSource(cfg, tokenizer, 100)
    with pytest.raises(ValueError, match="step 0 of 2 has no /nowhere/0.pt; give the path that save_debug_rollout_data wrote"):
        debug.Replay(cfg, data, 64, range(2))
    dumped()
    own = dataclasses.replace(cfg, load_debug_rollout_data=str(tmp_path / "deep" / "{rollout_id}.pt"), lr_decay_style="cosine",
                              num_steps_per_rollout=2)
    with pytest.raises(ValueError, match="step 1 of 5 has no .*/1.pt; set num_rollout=1 and lr_decay_iters=10$"):
        debug.Replay(own, data, 64, range(5))
    for content in (b"", b"a text", (tmp_path / "deep" / "0.pt").read_bytes()[:700]):
        (tmp_path / "deep" / "0.pt").write_bytes(content)
        with pytest.raises(ValueError, match="0.pt is no dump that can be read .*; name one that save_debug_rollout_data has wr"):
            debug.Replay(own, data, 64, range(1))


# ---- Settings --------------------------------------------------------------------------------------------------------
def load(tmp_path, *args) -> base.Config:
    (tmp_path / "run.py").write_text(RUN_FILE.format(model="some/model") + "eval_prompt_data = dict(a=rows)\neval_interval = 1\n")
    return base.load(str(tmp_path / "run.py"), ["--actor_num_gpus=4", "--tensor_model_parallel_size=2", *args])


DUMPS = "--load_debug_rollout_data=d/{rollout_id}.pt"


@pytest.mark.parametrize("args, says", [
    (["--debug_rollout_only", DUMPS], "debug_rollout_only starts no trainers, .* no engines, so nothing is left to run; remove"),
    (["--debug_train_only"], "debug_train_only has nothing to train on; set load_debug_rollout_data to what"),
    ([DUMPS, "--save_debug_rollout_data=e/{rollout_id}.pt"], "would write again what load_debug_rollout_data reads; remove it"),
    (["--save_debug_rollout_data=d.pt"], "save_debug_rollout_data='d.pt' names the same file in every step; put {rollout_id} into"),
    (["--load_debug_rollout_data=d.pt"], "load_debug_rollout_data='d.pt' names the same file in every step"),
    (["--debug_rollout_only", "--resume"], "has nobody to load a checkpoint; remove resume, and give .*--hf_checkpoint=outputs"),
    (["--debug_rollout_only", "--loss_type=sft", "--eval_prompt_data={}", "--eval_interval=none"], "starts no engines and debug_"
     "rollout_only no trainers; remove debug_rollout_only")])
def test_settings_that_make_no_sense(tmp_path, args, says):
    with pytest.raises(ValueError, match=says):
        load(tmp_path, *args)


def test_one_side_alone_is_not_colocated(tmp_path):
    cfg = load(tmp_path, DUMPS, "--device=cuda", "--offload_train", "--update_weight_transport=tensor")
    assert cfg.debug_train_only and not (cfg.colocate or cfg.offload_train or cfg.offload_rollout or cfg.eval_prompt_data)
    assert not base.has_engines(cfg) and "engine" not in base.describe(cfg).partition("placement:")[2]
    cfg = load(tmp_path, "--debug_rollout_only", "--device=cuda")
    assert not (cfg.colocate or cfg.offload_train or cfg.offload_rollout) and cfg.eval_prompt_data and base.has_engines(cfg)
    assert cfg.rollout_num_gpus == 4 and cfg.sglang["weight_version"] == "0"     # engines where both would have been
    said = base.describe(cfg).partition("placement:")[2]
    assert said.startswith(" 0 trainer rank(s)") and "GPU 0: engine 0" in said and "GPU 3: engine 3" in said and "GPU 4" not in said


def test_gpus_are_asked_for_one_side_only(tmp_path):
    """A Ray that has four GPUs (only counted): enough for either side of a run that needs eight."""
    import ray
    ray.init("local", num_cpus=8, num_gpus=4, include_dashboard=False)
    both = dict(device="cuda", actor_num_gpus=3, critic_num_gpus=1, critic=dict(lr=1e-5), rollout_num_gpus=4,
                rollout_num_gpus_per_engine=2, start_timeout_s=240.0)
    try:
        for extra, counts in ((dict(debug_rollout_only=True), (0, 0, 2)), (dict(debug_train_only=True), (3, 1, 0))):
            with contextlib.ExitStack() as stack:
                found = placement.start_ray(make_cfg(**both, **extra), stack)
                assert (len(found.trainers), len(found.critics), len(found.engines)) == counts
        with contextlib.ExitStack() as stack, pytest.raises(ValueError, match="the run needs 8 GPUs, the Ray cluster has 4"):
            placement.start_ray(make_cfg(**both), stack)
    finally:
        ray.shutdown()


# ---- What is printed -------------------------------------------------------------------------------------------------
@pytest.fixture
def content(tokenizer):
    """Two groups of one. Sample 7: a and b by version 2, a tool's "ok", c by version 3, \\n by 3."""
    ids = {c: tokenizer(c)["input_ids"][0] for c in "1+=abokc\n"}
    sample = Sample(prompt="1+1=", tokens=[ids[c] for c in "1+1="], index=7, group_index=3, reward=0.5, label="2", status=Status.COMPLETED)
    sample.append([ids["a"], ids["b"]], [math.log(0.9), math.log(0.05)], version=2)
    sample.append([ids["o"], ids["k"]], trainable=False)
    sample.append([ids["c"], ids["\n"]], [math.log(0.005), math.log(0.3)], version=3)
    other = dataclasses.replace(sample, index=8, group_index=4, rollout_log_probs=[], weight_versions=[], remove_sample=True)
    return {"rollout_id": 3, "weight_version": 3, "samples": [sample, other], "rewards": [1.25, -1.0], "examples": [],
            "metrics": {}, "position": {}, "tokenizer": tokenizer.name_or_path}


def printed(content, tokenizer, index=None, group=None, limit=8, every=False, **console) -> str:
    out = io.StringIO()
    debug.show(content, Console(file=out, highlight=False, width=40, **console), tokenizer, index, group, limit, every)
    return out.getvalue()


def test_running_text_with_marks(content, tokenizer):
    lines = printed(content, tokenizer, index=7).splitlines()
    assert lines[0].startswith("rollout 3, for weights of version 3: 2 samples in 2 groups, 0 rows of sft_data; 1 of 1 shown")
    assert lines[3:] == ["index 7, group 3: completed, reward 0.5 (in its group +1.25), label '2'; 4 prompt and 6 response tokens, "
                         "version 2 to 3", "prompt:   1+1=", "response: <v2>ab{-3.0}[[ok]]<v3>c{-5.3}", "",
                         f"tokens:   6, 4 trained, 2 masked; mean log-prob {math.log(0.9 * 0.05 * 0.005 * 0.3) / 4:.4f}, "
                         f"lowest {math.log(0.005):.4f} at 4 ('c'); v2: 2; v3: 2"]


def test_a_line_for_each_token(content, tokenizer):
    lines = printed(content, tokenizer, group=3, every=True).splitlines()
    at = next(i for i, line in enumerate(lines) if line.split() == ["at", "id", "log-prob", "mask", "version", "token"])
    id_of = {c: str(tokenizer(c)["input_ids"][0]) for c in "abokc\n"}
    assert [line.split() for line in lines[at + 1:at + 7]] == [
        ["0", id_of["a"], "-0.1054", "1", "v2", "'a'"], ["1", id_of["b"], "-2.9957", "1", "v2", "'b'"],
        ["2", id_of["o"], "-", "0", "-", "'o'"], ["3", id_of["k"], "-", "0", "-", "'k'"],
        ["4", id_of["c"], "-5.2983", "1", ">v3", "'c'"], ["5", id_of["\n"], "-1.2040", "1", "v3", r"'\n'"]]


def test_colours_in_a_terminal(content, tokenizer):
    out = printed(content, tokenizer, index=7, force_terminal=True, color_system="standard", no_color=False)
    line = next(line for line in out.splitlines() if "response:" in line)
    assert re.search(r"a\x1b\[31mb\x1b\[0m\x1b\[2mo\x1b\[0m\x1b\[2mk\x1b\[0m\x1b\[36m<v3>\x1b\[0m\x1b\[1;37;41mc\x1b\[0m", line), repr(line)
    assert "[[" not in line and "{" not in line


def test_without_log_probs_versions_or_tokenizer(content, tokenizer):
    lines = printed(content, None, index=8).splitlines()
    ids = content["samples"][1].tokens[4:]
    assert lines[3].endswith("version unknown; removed by a hook: nothing of it is trained")
    assert lines[5] == "response:  {} {}[[ {} {}]] {} {}".format(*ids) and lines[6] == "tokens:   6, 4 trained, 2 masked"


def test_which_samples(content, tokenizer):
    assert "1 of 2 shown" in printed(content, tokenizer, limit=1)
    assert "index 8, group 4" not in printed(content, tokenizer, limit=1) and "index 8, group 4" in printed(content, tokenizer)
    with pytest.raises(ValueError, match="no such sample; --index goes from 7 to 8, --group from 3 to 4"):
        printed(content, tokenizer, index=9)


def test_a_character_of_several_tokens():
    """Bytes as tokens, as in a byte-level BPE: a character stands at its last byte, a broken one as what it is."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe)
    ids = fast("aé中\x1b")["input_ids"]
    assert debug.token_texts(fast, ids) == ["a", "", "é", "", "", "中", r"\x1b"]
    assert debug.token_texts(fast, ids[:2]) == ["a", "\ufffd"] and debug.token_texts(fast, [999]) == ["<id 999>"]


def test_the_command(content, tmp_path, tokenizer):
    """In a pipe: no colour codes; its own tokenizer, another, or none; errors of one line."""
    def command(*args):
        return subprocess.run([sys.executable, "debug.py", *map(str, args)], cwd=ROOT, capture_output=True, text=True, timeout=300,
                              env={k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "TTY_COMPATIBLE")})
    path = tmp_path / "d.pt"
    packed = content | {"samples": [debug.pack(s) for s in content["samples"]]}
    torch.save(debug.plain(packed), path)
    done = command(path, "--index", 7)
    assert done.returncode == 0 and "<v2>ab{-3.0}[[ok]]<v3>c{-5.3}" in done.stdout and "\x1b" not in done.stdout, done.stderr
    torch.save(debug.plain(packed | {"tokenizer": "/gone"}), path)
    done = command(path, "--group", 3)
    assert "/gone is not here, so there are ids instead of text; give --model a tokenizer's folder" in done.stdout
    assert "ab{" not in done.stdout
    assert "ab{-3.0}" in command(path, "--group", 3, "--model", tokenizer.name_or_path).stdout
    done = command(tmp_path / "none.pt")
    assert done.returncode == 1 and done.stderr.startswith(f"error: {tmp_path}/none.pt is no dump that can be read (FileNotFound")
