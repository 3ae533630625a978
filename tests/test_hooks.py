"""
test_hooks.py: does each hook do what its name says, for real? The README's examples as they stand there; files as slime's users
write them, of which only the import lines are changed; what hooks may get wrong. One real SGLang server.

    hooks_examples.md --blocks--> run files --base.load--> Rollout.generate, evaluate --> values that are worked out here
    slime_style/*.py  --import lines--> modules, hooks by name --^

Test:  pytest tests/test_hooks.py      (about 60 s on two cores: one SGLang start)
"""
import asyncio
import contextlib
import functools
import importlib
import json
import pathlib
import re
import subprocess
import sys
import time

import pytest
import torch

import hookdata
import hooks
from algos import group_rewards
from buffer import DataSource, plan, to_train_data
from configs import base
from configs.validate import validate
from helpers import assert_log_probs, running_engines
from hooks import DynamicFilterOutput, Sample
from rewards import RewardError
from rollout import Rollout
from sample import Status

HERE = pathlib.Path(__file__).parent
README = HERE.parent / "README.md"


def section() -> str:
    """README's "Hooks", from which the blocks are taken."""
    return README.read_text().partition("\n## Hooks\n")[2].partition("\n## ")[0]


CONTEXT = 2048                               # tokens: the tiny model's max_position_embeddings
BASE = '''
def rows():
    return [dict(input=f"{a}+{b}=", label=str(a + b)) for a in range(5) for b in range(8)]
prompt_data = rows
label_key = "label"
async def share_of_digits(args, sample, **kwargs):
    return sum(c.isdigit() for c in sample.response) / max(len(sample.response), 1)
custom_rm = share_of_digits
rollout_batch_size = 2
n_samples_per_prompt = 3
rollout_max_response_len = 12
num_rollout = 2
'''


def blocks() -> dict[str, str]:
    """Each example by the setting that its last lines make; custom_rm twice."""
    found = re.findall(r"```python\n(.*?)```", section(), re.DOTALL)
    names = [re.findall(r"^(\w+) = ", text, re.MULTILINE) for text in found]
    return {" ".join(own): text for own, text in zip(names, found)}


# ---- What is shared ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def engines(tiny_model, tmp_path_factory):
    with running_engines(tmp_path_factory.mktemp("run"), tiny_model, rollout_num_gpus=1) as engines:
        engines.post("/update_weight_version", {"new_version": "0", "abort_all_requests": False})
        yield engines


@pytest.fixture
def load(tiny_model, tmp_path):
    """load(text, **settings) -> Config of a run file that ends with the text; an own data source has no prompt_data."""
    def build(text="", **settings):
        file = tmp_path / "run_file.py"
        own = "prompt_data = ''\n" if "\ndata_source =" in text or settings.get("data_source") else ""
        file.write_text(f"hf_checkpoint = {tiny_model!r}\n" + BASE + own + text)
        values = base.read_run_file(str(file)) | settings
        base.check_types(values)
        validate(cfg := base.resolve(base.Config(**values)))
        return cfg
    return build


@pytest.fixture
def make(engines, tokenizer, tmp_path, load):
    """make(text, **settings) -> Rollout; closed after the test."""
    with contextlib.ExitStack() as stack:
        def build(text="", tokenizer=tokenizer, **settings) -> Rollout:
            cfg = load(text, **settings)
            kind = functools.partial(hookdata.OwnData, run_dir=tmp_path) if cfg.data_source else DataSource
            rollout = Rollout(cfg, engines, kind(cfg, tokenizer, CONTEXT), {}, tmp_path)
            stack.callback(rollout.close)
            return rollout
        yield build


@pytest.fixture
def slime(tmp_path, monkeypatch):
    """slime(name) -> the module of slime_style/, with nothing but its import lines changed."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def build(name):
        text, n = re.subn(r"^from slime\.[\w.]+ import", "from hooks import", (HERE / "slime_style" / f"{name}.py").read_text(),
                          flags=re.MULTILINE)
        assert n >= 2 and "slime." not in text.partition('"""\n')[2]
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        return importlib.import_module(name)
    return build


def groups_of(samples) -> list[list]:
    groups = {}
    for sample in samples:
        groups.setdefault(sample.group_index, []).append(sample)
    return list(groups.values())


def said(tokenizer, sample, trained: int) -> str:
    return tokenizer.decode([t for t, m in zip(sample.response_ids(), sample.loss_mask) if m == trained])


# ---- The README's examples, as they stand there ------------------------------------------------------------------------
def test_every_hook_has_an_example_of_at_most_ten_lines():
    text = section()
    table = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert len(table) == 10 and {name.split()[0] for name in blocks()} >= set(table)
    for name, block in blocks().items():
        lines = [line for line in block.splitlines() if line.strip()]
        assert len(lines) <= 10, f"{name}: {len(lines)} lines"


def example(name: str) -> str:
    return next(text for key, text in blocks().items() if key == name)


def test_example_custom_generate(make, tokenizer, reference):
    result = make(example("custom_generate_function")).generate(0)
    assert len(result.samples) == 6
    for s in result.samples:
        assert said(tokenizer, s, 0) == " wait, " and s.response_length == 12 or s.status == Status.COMPLETED
        first = s.loss_mask.index(0)
        assert first <= 4 and s.loss_mask == [1] * first + [0] * 7 + [1] * (s.response_length - first - 7)
        assert_log_probs(reference, s, mask=s.loss_mask)


def test_example_custom_rm(make):
    result = make(example("custom_rm reward_key")).generate(0)
    for s in result.samples:
        right = s.label in s.response
        assert s.reward == {"score": pytest.approx(right - 0.01 * s.response_length), "right": right}
    scores = [s.reward["score"] for s in result.samples]
    assert result.metrics["rollout/raw_reward"] == pytest.approx(sum(scores) / 6)


def test_example_group_rm(make):
    rollout = make(example("custom_rm group_rm"))
    for group in groups_of(rollout.generate(0).samples):
        shortest = min(s.response_length for s in group)
        assert [s.reward for s in group] == [float(s.response_length == shortest) for s in group]


def test_example_dynamic_filter(make):
    coarse = "\nasync def coarse(args, sample):\n    return float(sample.response[:1] in '0123')\ncustom_rm = coarse\n"
    result = make(coarse + example("dynamic_sampling_filter"), rollout_batch_size=4).generate(0)
    assert all(len({s.reward for s in group}) == 2 for group in groups_of(result.samples))
    dropped = result.metrics["rollout/dynamic_filter/drop_all_equal"]
    assert dropped == result.metrics["rollout/groups_filtered"] > 0 and result.metrics["rollout/groups_trained"] == 4


def test_example_buffer_filter(make):
    rollout = make(example("buffer_filter partial_rollout"))
    groups = rollout.data.get_samples(4)
    for group, n in zip(groups, (2, 9, 0, 5)):
        for sample in group:
            sample.append([5] * n, [-1.0] * n, version=0)
    rollout.data.add_samples(groups)
    result = rollout.generate(0)
    assert [group[0].group_index for group in groups_of(result.samples)] == [1, 3]       # 9 and 5 tokens
    assert all(s.tokens[-s.response_length:][:5] == [5] * 5 for s in result.samples)
    assert [group[0].group_index for group in rollout.data.buffer] == [0, 2]


def test_example_sample_filter(make):
    rollout = make(example("rollout_sample_filter"), rollout_batch_size=8, rollout_max_response_len=40)      # a third end before
    result = rollout.generate(0)
    cut = [s.status == Status.TRUNCATED for s in result.samples]
    assert any(cut) and not all(cut) and [s.remove_sample for s in result.samples] == cut
    data = to_train_data(rollout.cfg, result.samples, result.rewards)
    assert [int(mask.sum()) for mask in data["loss_masks"]] == [0 if c else s.response_length
                                                                for c, s in zip(cut, result.samples)]


def test_example_reward_post_process(make):
    rollout = make(example("custom_reward_post_process"))
    result = rollout.generate(0)
    raw = torch.tensor([s.reward for s in result.samples], dtype=torch.float64).view(2, 3)
    want = raw - (raw.sum(1, keepdim=True) - raw) / 2
    torch.testing.assert_close(torch.tensor(result.rewards, dtype=torch.float64).view(2, 3), want)
    assert to_train_data(rollout.cfg, result.samples, result.rewards)["rewards"] == result.rewards


def test_example_convert(make):
    rollout = make(example("custom_convert_samples_to_train_data"))
    result = rollout.generate(0)
    assert [mask.tolist() for mask in result.data["loss_masks"]] == [
        [1] * min(4, s.response_length) + [0] * (s.response_length - 4) for s in result.samples]
    own = to_train_data(rollout.cfg, result.samples, result.rewards)
    assert result.data.keys() == own.keys()
    for key in ("rewards", "raw_reward", "group_indices", "rollout_ids", "sample_indices", "truncated"):
        assert result.data[key] == own[key], key
    assert len(plan(rollout.cfg, result.data, 1)) == 1 and sum(result.data["loss_weights"]) > 0


def test_example_data_source(make):
    rollout = make(example("data_source"))
    assert [s.prompt for s in rollout.generate(0).samples] == ["1+1="] * 3 + ["2+1="] * 3
    again = make(example("data_source"))
    again.load_state_dict(json.loads(json.dumps(rollout.state_dict())))
    samples = again.generate(1).samples
    assert [s.prompt for s in samples] == ["3+1="] * 3 + ["4+1="] * 3
    assert [(s.group_index, s.index) for s in samples] == [(2 + i // 3, 6 + i) for i in range(6)]


def test_example_rollout_function(make):
    result = make(example("rollout_function")).generate(0)
    assert result.metrics["rollout/my_number"] == 7.0 and result.metrics["rollout/groups_trained"] == 2
    assert [s.index for s in result.samples] == list(range(6)) and all(s.response_length > 0 for s in result.samples)
    assert result.rewards == group_rewards(base.Config(), [s.reward for s in result.samples], [0, 0, 0, 1, 1, 1], list(range(6)))


def test_example_eval_function(make, tmp_path):
    rollout = make(example("eval_function"))
    metrics = rollout.evaluate(3)
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(r["step"], r["set"], r["prompt"]) for r in rows] == [(3, "sums", "1+1="), (3, "sums", "2+2=")]
    assert metrics == {"eval/sums": pytest.approx(sum(r["reward"] for r in rows) / 2)}
    assert rollout.evaluate(4) == metrics, "greedy, as the hook asks"


# ---- Files as slime's users write them ---------------------------------------------------------------------------------
@pytest.mark.parametrize("send", ["text", "input_ids"])
@pytest.mark.parametrize("template", [False, True])
def test_search_agent(make, slime, tokenizer, reference, send, template, tiny_model):
    module = slime("search_agent")
    module.SETTINGS["send"] = send
    if template:
        from transformers import AutoTokenizer
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        tokenizer.chat_template = "{% for m in messages %}q {{ m.content }}\n{% endfor %}a "
    rollout = make("reward_key = 'score'\n", tokenizer, custom_generate_function="search_agent.generate",
                   custom_rm="search_agent:reward_func", apply_chat_template=template)
    for step in range(10):                   # a random model: until one of its samples searches
        result = rollout.generate(step)
        if any(0 in s.loss_mask for s in result.samples):
            break
    assert any(0 in s.loss_mask for s in result.samples), "no sample searched"
    for s in result.samples:
        assert s.prompt.startswith("q ") == template
        assert s.tokens[:-s.response_length] == tokenizer(s.prompt, add_special_tokens=False)["input_ids"]
        assert re.fullmatch(r"(\n\(found \d+\)\n)*", said(tokenizer, s, 0))
        found = said(tokenizer, s, 0).count("found")
        assert s.reward == {"score": found + 0.5 * (s.label in s.response), "found": found}
        assert s.weight_versions == [0] * s.response_length       # upstream's are strings, one a request
        assert not s.loss_mask[-1] or s.status == Status.TRUNCATED or s.tokens[-1] == tokenizer.eos_token_id
        if send == "input_ids":              # as text, the engine reads other tokens than it wrote where decoding loses some
            assert_log_probs(reference, s, mask=s.loss_mask)
    data = to_train_data(rollout.cfg, result.samples, result.rewards)
    assert [int(m.sum()) for m in data["loss_masks"]] == [sum(s.loss_mask) for s in result.samples]


def test_tool_agent(make, slime, tokenizer, reference):
    slime("tool_agent")
    result = make(custom_generate_function="tool_agent:generate", custom_rm="tool_agent.reward_func").generate(0)
    for s in result.samples:
        assert said(tokenizer, s, 0) == " tool = 42 ", "a list that the hook holds on to must grow with the sample"
        assert tokenizer.decode(s.tokens[:-s.response_length]) == "use the tool. " + s.prompt
        assert s.reward == pytest.approx(1 + sum(s.loss_mask) / 100) and s.tool_call_count == 1
        assert_log_probs(reference, s, mask=s.loss_mask)
    assert len({id(s.tokens) for s in result.samples}) == 6


def test_tool_agent_scored_by_groups(make, slime):
    slime("tool_agent")
    rollout = make(custom_generate_function="tool_agent.generate", custom_rm="tool_agent:group_reward", group_rm=True)
    for group in groups_of(rollout.generate(0).samples):
        lengths = [sum(s.loss_mask) for s in group]
        assert [s.reward for s in group] == [float(n == max(lengths)) for n in lengths]


def test_many_agents(make, slime):
    slime("many_agents")
    rollout = make(custom_generate_function="many_agents.generate")
    result = rollout.generate(0)
    assert len(result.samples) == 2 * 3 * 4
    digits = [sum(c.isdigit() for c in s.response) / max(len(s.response), 1) for s in result.samples]
    for i in range(0, 24, 4):                # solvers twice, who have doubled their reward, then critics, scored by the loop
        four = result.samples[i:i + 4]
        assert {s.rollout_id for s in four} == {four[0].index} and len({s.index for s in four}) == 1
        assert [s.reward for s in four] == pytest.approx([2 * digits[i], 2 * digits[i + 1], digits[i + 2], digits[i + 3]])
    data = to_train_data(rollout.cfg, result.samples, result.rewards)
    plan(rollout.cfg, data, 1)
    for i in range(0, 24, 4):                # one weight for the four: 1 of 6 rollouts
        tokens = [int(m.sum()) for m in data["loss_masks"][i:i + 4]]
        assert sum(w * n for w, n in zip(data["loss_weights"][i:i + 4], tokens)) == pytest.approx(1 / 6)


def test_filters(make, slime):
    slime("filters")
    rollout = make(dynamic_sampling_filter="filters.keep_some", buffer_filter="filters:newest_first",
                   rollout_sample_filter="filters.drop_longest", custom_reward_post_process="filters.ranks",
                   over_sampling_batch_size=6)
    result = rollout.generate(0)
    for group in groups_of(result.samples):
        assert sum(s.reward for s in group) / 3 > 0.2
        longest = max(group, key=lambda s: (s.response_length, s.index))
        assert [s.remove_sample for s in group] == [s is longest for s in group]
    low = result.metrics.get("rollout/dynamic_filter/drop_low_3", 0)
    assert low == result.metrics["rollout/groups_filtered"]
    for i in (0, 3):
        assert sorted(result.rewards[i:i + 3]) == [0, 1, 2]
        raw = [s.reward for s in result.samples[i:i + 3]]
        assert [raw[k] for k in sorted(range(3), key=lambda k: result.rewards[i + k])] == sorted(raw)
    rollout.data.add_samples([rollout.data.new_group() for _ in range(2)])
    waiting = sorted(group[0].index for group in rollout.data.buffer)
    assert [g[0].index for g in rollout.data.get_samples(2)] == waiting[:-3:-1]


def test_convert(make, slime):
    slime("filters")
    rollout = make(custom_convert_samples_to_train_data="filters.convert")
    result = rollout.generate(0)
    for i, s in enumerate(result.samples):
        assert result.data["tokens"][i].tolist() == s.tokens and result.data["rewards"][i] == pytest.approx(s.reward - 0.5)
        assert result.data["loss_masks"][i].tolist() == [1 - i % 2] * s.response_length
        torch.testing.assert_close(result.data["rollout_log_probs"][i], torch.tensor(s.rollout_log_probs))
    assert result.data["total_lengths"] == [len(s.tokens) for s in result.samples]
    plan(rollout.cfg, result.data, 1)
    assert [w > 0 for w in result.data["loss_weights"]] == [True, False] * 3


def test_own_rollout_and_evaluation(make, slime):
    slime("own_rollout")
    rollout = make(data_source="own_rollout.Counting", rollout_function="own_rollout.generate_rollout",
                   eval_function="own_rollout:generate_rollout", eval_interval=1)
    result = rollout.generate(0)
    assert [s.prompt for s in result.samples] == ["0+0="] * 3 + ["1+1="] * 3
    assert all(1 <= s.response_length <= 5 for s in result.samples) and result.metrics["rollout/own"] == 0
    metrics = rollout.evaluate(7)
    assert metrics["eval/own"] == 7 and 0 <= metrics["eval/sums"] <= 1 and "eval/sums-truncated_ratio" in metrics
    assert rollout.evaluate(8) == metrics | {"eval/own": 8}


@pytest.mark.parametrize("asked", [2, 5])
def test_state_by_save_and_load(make, slime, tmp_path, asked):
    slime("own_rollout")
    settings = dict(data_source="own_rollout.Counting", over_sampling_batch_size=asked)
    rollout = make(**settings)

    def step_of(rollout, step):              # -> the state, groups trained, and all that were asked for
        trained = [(s.group_index, s.index, s.prompt) for s in rollout.generate(step).samples]
        state = json.loads(json.dumps(rollout.state_dict()))
        return state, trained, sorted(trained + [(d["group_index"], d["index"], d["prompt"])
                                                 for group in state["buffer"] for d in group])
    first, _, _ = step_of(rollout, 0)
    state, trained, asked_for = step_of(rollout, 1)
    assert (tmp_path / "checkpoints/rollout/global_dataset_state_dict_1.pt").exists()
    assert len(first["buffer"]) == asked - 2, "a read-only source must not lose those that were not needed"
    again = make(**settings)
    again.load_state_dict(first)
    again_state, again_trained, again_asked_for = step_of(again, 1)
    assert again_asked_for == asked_for and again_state.keys() == state.keys() and state["steps"] == again_state["steps"] == 1
    assert asked > 2 or again_trained == trained         # else those that are finished first are trained
    assert again_state["next_group"] == state["next_group"] == {2: 4, 5: 7}[asked]


def test_a_data_source_that_ends(make, slime):
    slime("own_rollout")
    rollout = make(data_source="own_rollout.Counting", rollout_batch_size=8)
    assert [len(groups_of(rollout.generate(step).samples)) for step in range(2)] == [8, 4]     # it has 12 prompts
    with pytest.raises(RuntimeError, match="no group to train on.*has the data source ended"):
        rollout.generate(2)


def test_rollout_in_a_thread_with_a_loop_of_its_own(make, slime):
    slime("tool_agent")
    slime("own_rollout")
    result = make(rollout_function="own_rollout.generate_in_a_thread", custom_generate_function="tool_agent.generate").generate(0)
    assert [s.index for s in result.samples] == list(range(6)) and all(0 in s.loss_mask for s in result.samples)


def test_rollout_that_puts_back(make, slime):
    slime("own_rollout")
    rollout = make(rollout_function="own_rollout:add_back")
    steps = [[g[0].group_index for g in groups_of(rollout.generate(step).samples)] for step in range(3)]
    assert steps == [[0, 1], [2, 3], [4, 5]] and [g[0].group_index for g in rollout.data.buffer] == [6, 7]


@pytest.mark.timeout(900)
def test_a_whole_run(tiny_model, tmp_path):
    """train.py with hooks from the data to the trainers; one step and one more, resumed, are two steps."""
    names = ("data_source", "rollout_sample_filter", "custom_reward_post_process", "custom_convert_samples_to_train_data",
             "eval_function")
    (tmp_path / "own.py").write_text(f"hf_checkpoint = {tiny_model!r}\n" + BASE + "prompt_data = ''\nlr = 1e-3\n"
                                     + "\n".join(example(name) for name in names))

    def rows_of(name, *args):
        done = subprocess.run([sys.executable, "train.py", str(tmp_path / "own.py"), "--deterministic", *args],
                              cwd=HERE.parent, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in row.items() if not k.startswith("perf/") and "retries" not in k} for row in rows]
    out = f"--output_dir={tmp_path}"
    whole = rows_of("whole", out, "--run_name=whole")
    assert [row["step"] for row in whole] == [-1, 0, 1] and "eval/sums" in whole[0] and whole[2]["train/grad_norm"] > 0
    samples = [json.loads(line) for line in (tmp_path / "whole" / "samples.jsonl").read_text().splitlines()]
    assert [s["prompt"] for s in samples if s["set"] == "train"][::3] == ["1+1=", "2+1=", "3+1=", "4+1="]
    assert [s["step"] for s in samples if s["set"] == "sums"][::2] == [-1, 1]
    rows_of("cut", out, "--run_name=cut", "--num_rollout=1")
    cut = rows_of("cut", f"--resume={tmp_path / 'cut'}")
    assert cut[-1] == whole[-1] and "eval/sums" in cut[-1]


# ---- What hooks may get wrong --------------------------------------------------------------------------------------------
def given(**own):
    """A custom generate that makes a sample by hand: two tokens, and these fields."""
    async def generate(args, sample, params):
        sample.tokens, sample.response_length = sample.tokens + [5, 6], 2
        for key, value in (dict(rollout_log_probs=[-1.0, -2.0], reward=0.5, status=Status.COMPLETED) | own).items():
            setattr(sample, key, value)
        return sample
    return generate


@pytest.mark.parametrize("own, want", [
    (dict(loss_mask=None), dict(loss_mask=[1, 1])), (dict(loss_mask=[]), dict(loss_mask=[1, 1])),
    (dict(loss_mask=[0, 0], rollout_log_probs=None), dict(rollout_log_probs=[0.0, 0.0])),
    (dict(weight_versions=["3"]), dict(weight_versions=[0, 0])), (dict(weight_versions=["3", "4"]), dict(weight_versions=[0, 0])),
    (dict(weight_versions=[0, 0]), dict(weight_versions=[0, 0])), (dict(weight_versions=[-1, 0]), dict(weight_versions=[0, 0])),
    (dict(weight_versions=[-1, 0], loss_mask=[0, 1]), dict(weight_versions=[-1, 0])), (dict(status=Status.PENDING), dict(status=Status.COMPLETED)),
    (dict(reward=torch.tensor(0.25)), dict(reward=0.25))], ids=str)
def test_what_a_hook_leaves_open(make, own, want):
    for s in make(custom_generate_function=given(**own)).generate(0).samples:
        assert {key: getattr(s, key) for key in want} == want
        assert s.reward == want.get("reward", 0.5), "the hook's own reward is kept"


@pytest.mark.parametrize("own, message", [
    (dict(rollout_log_probs=None), "no rollout_log_probs.*ask with return_logprob=True"),
    (dict(rollout_log_probs=[-1.0]), "rollout_log_probs has 1 entries for 2 response tokens"),
    (dict(loss_mask=[1]), "loss_mask has 1 entries"), (dict(reward=float("nan")), "finite number"),
    (dict(status=Status.FAILED), "gave it up"), (dict(response_length=99), "99")], ids=str)
def test_what_training_cannot_use(make, own, message):
    with pytest.raises((ValueError, RewardError), match=message):
        make(custom_generate_function=given(**own)).generate(0)


def test_failed_samples_are_counted(make):
    async def every_third_group(args, sample, params):
        sample = await args.generate(sample, params)
        sample.status = Status.FAILED if sample.group_index % 3 == 0 else sample.status
        return sample
    result = make(custom_generate_function=every_third_group, on_reward_error="skip").generate(0)
    assert all(s.group_index % 3 for s in result.samples) and result.metrics["rollout/groups_failed"] >= 1


def test_groups_that_failed_in_a_whole_rollout_are_counted(make):
    async def every_second_group(args, sample, params):
        sample = await args.generate(sample, params)
        sample.status = Status.FAILED if sample.group_index % 2 else sample.status
        return sample
    rollout = make(example("rollout_function"), custom_generate_function=every_second_group, on_reward_error="skip")
    result = rollout.generate(0)
    assert {s.group_index for s in result.samples} == {0}
    assert result.metrics["rollout/groups_failed"] == result.metrics["rollout/groups_trained"] == 1


def test_group_numbers_that_are_not_unique(make):
    class Same:
        def __init__(self, args):
            self.n = args.n_samples_per_prompt

        def get_samples(self, num_samples):
            return [[Sample(prompt="1+1=", group_index=7) for _ in range(self.n)] for _ in range(num_samples)]

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass
    with pytest.raises(ValueError, match=r"two groups with the same group_index, of \[7, 7\].*leave group_index to us"):
        make(data_source=Same).generate(0)


@pytest.mark.parametrize("out", [None, [], "text", [None]], ids=str)
def test_no_sample_returned(make, out):
    async def nothing(args, sample, params):
        return out
    with pytest.raises(ValueError, match="return a Sample or a list"):
        make(custom_generate_function=nothing).generate(0)


def test_siblings_made_anew_get_numbers(make):
    async def two(args, sample, params):
        return [Sample(tokens=sample.tokens + [5 + i], response_length=1, rollout_log_probs=[-1.0], reward=float(i),
                       status=Status.COMPLETED) for i in range(2)]
    samples = make(custom_generate_function=two).generate(0).samples
    assert [(s.group_index, s.index, s.rollout_id) for s in samples] == [(i // 6, i // 2, i // 2) for i in range(12)]


def test_aborted_samples_are_asked_again(make):
    seen = set()

    async def at_second_sight(args, sample, params):
        if sample.index not in seen:
            seen.add(sample.index)
            sample.tokens.append(5)          # left as it is: not complete, and not looked at
            sample.response_length, sample.status = 1, Status.ABORTED
            return sample
        return await args.generate(sample, params)
    result = make(custom_generate_function=at_second_sight).generate(0)
    assert result.metrics["rollout/groups_put_back"] == 2 and [s.index for s in result.samples] == list(range(6))
    assert all(s.tokens[-s.response_length - 1] != 5 for s in result.samples)


def test_keep_when_insufficient(make):
    def none(args, samples):
        return DynamicFilterOutput(False, "never", keep_when_insufficient=True)
    result = make(dynamic_sampling_filter=none, over_sampling_batch_size=3).generate(0)
    assert result.metrics["rollout/groups_filtered"] == 1 == result.metrics["rollout/dynamic_filter/drop_never"]
    assert result.metrics["rollout/groups_trained"] == 2


def test_a_buffer_filter_that_doubles(make):
    rollout = make(buffer_filter=lambda args, rollout_id, buffer, n: buffer[:n])
    rollout.data.add_samples(rollout.data.get_samples(2))
    with pytest.raises(ValueError, match="left 2 of them in the buffer"):
        rollout.generate(0)


@pytest.mark.parametrize("name, out, message", [
    ("custom_reward_post_process", ([], [1.0]), "1 rewards for 6 samples"),
    ("custom_reward_post_process", ([], [float("nan")] * 6), "6 of them not finite"),
    ("custom_convert_samples_to_train_data", {"tokens": [[1, 2]]}, "0 response_lengths for 1 rows of tokens"),
    ("custom_convert_samples_to_train_data", {"tokens": [[1, 2]], "response_lengths": [1], "loss_masks": [[1]]}, "but 6 .*give"),
    ("custom_convert_samples_to_train_data", {"tokens": [[1, 2]] * 6, "response_lengths": [2] * 6, "loss_masks": [[1, 1]] * 6},
     "row 0: 2 tokens, response_length 2"),
    ("rollout_function", [[Sample(tokens=[1, 2], response_length=1, rollout_log_probs=[0.0], index=1, group_index=0)]],
     "reward None; set all three"),
    ("eval_function", {"sums": {"rewards": []}}, "no rewards for 'sums'")], ids=str)
def test_outputs_that_cannot_be_used(make, name, out, message):
    rollout = make(**{name: lambda *args, **kw: out})
    with pytest.raises(ValueError, match=message):
        rollout.evaluate(0) if name == "eval_function" else rollout.generate(0)


def test_a_rollout_function_has_a_limit(make):
    async def forever(args, rollout_id, data_source, evaluation=False):
        await asyncio.sleep(1000)
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="rollout_function was not done in 1 s"):
        make(rollout_function=forever, generate_timeout_s=1.0).generate(0)
    assert time.monotonic() - begin < 20


def test_run_inside_of_the_loop_is_refused(make):
    def filter_that_waits(args, samples):
        return hooks.run(asyncio.sleep(0))
    with pytest.raises(ValueError, match="would wait for itself"):
        make(dynamic_sampling_filter=filter_that_waits).generate(0)
    with pytest.raises(ValueError, match="asyncio.to_thread"):
        asyncio.run(hooks.post("http://127.0.0.1:1", {}))


def test_args(make, tiny_model):
    rollout = make(custom_rm=lambda args, sample: 0.0)
    args = rollout.args
    assert (args.hf_checkpoint, args.rollout_max_context_len, args.rollout_batch_size) == (tiny_model, CONTEXT, 2)
    assert getattr(args, "no_such_thing", 7) == 7
    for name, near in dict(custom_rm_path="custom_rm", rollout_batchsize="rollout_batch_size").items():
        with pytest.raises(AttributeError, match=f"args.{name}: unknown setting .*{near}"):
            getattr(args, name)


# ---- Combinations in which a hook would do nothing ---------------------------------------------------------------------
def hook(*args, **kw):
    return None


async def async_hook(*args, **kw):
    return None


class Source:
    def get_samples(self, n): ...
    def save(self, step): ...
    def load(self, step): ...


class NoState:
    def get_samples(self, n): ...


@pytest.mark.parametrize("settings, message", [
    (dict(rollout_function=hook, dynamic_sampling_filter=hook), "dynamic_sampling_filter has no effect with rollout_function"),
    (dict(rollout_function=hook, partial_rollout=True), "partial_rollout has no effect with rollout_function"),
    (dict(rollout_function=hook, fully_async=True), "remove fully_async"),
    (dict(data_source=Source, buffer_filter=hook), "buffer_filter has no effect with data_source"),
    (dict(data_source=NoState), "NoState has no load and no save"),
    (dict(data_source=Source, partial_rollout=True), "an add_samples"),
    (dict(custom_reward_post_process=hook, overlong_buffer_len=4), "overlong_buffer_len has no effect"),
    (dict(custom_reward_post_process=hook, grpo_std_normalization=False), "compares the rewards itself"),
    (dict(custom_convert_samples_to_train_data=hook, overlong_filtering=True), "overlong_filtering has no effect"),
    (dict(dynamic_sampling_filter=async_hook), "dynamic_sampling_filter is not awaited"),
    (dict(custom_generate_function=hook), "must be async def"),
    (dict(eval_interval=1), "nothing to evaluate on"),
    (dict(loss_type="sft", rollout_sample_filter=hook), "rollout_sample_filter has no effect with loss_type")], ids=str)
def test_without_effect(load, settings, message):
    with pytest.raises(ValueError, match=message):
        load(**settings)


def test_with_effect(load):
    load(rollout_function=hook, custom_generate_function=async_hook, buffer_filter=hook, group_rm=True)
    load(eval_function=async_hook, eval_interval=1)
    load(data_source=Source)
