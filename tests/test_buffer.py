"""
test_buffer.py: samples, data, packing, against brute-force loops and invariances.

    rows in a temporary folder --DataSource--> groups;  random samples --plan, pack--> the same sums by plain loops?

Run:   pytest tests/test_buffer.py       CPU only, no network, about 15 s. The tokenizer has one token per character.
"""
import dataclasses
import json
import pickle
import random
from types import SimpleNamespace

import pytest
import torch
from conftest import write_char_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

import buffer
from buffer import ENGINE_RESERVE, DataSource, Sample, Status
from configs.base import eval_config
from helpers import make_cfg

TEMPLATE = ("{% if tools %}tools {% for t in tools %}{{ t.name }} {% endfor %}{{ '\\n' }}{% endif %}"
            "{% for m in messages %}({{ m.role }}) {{ m.content }}{{ '<eos>' if m.role == 'assistant' }}\n{% endfor %}"
            "{% if add_generation_prompt %}({% if short %}a{% else %}assistant{% endif %}) {% endif %}")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    tokenizer = write_char_tokenizer(str(tmp_path_factory.mktemp("tokenizer")))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def rows_file(tmp_path):
    def write(rows, name="d.jsonl"):
        path = tmp_path / name
        path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
        return str(path)
    return write


def source(tokenizer, rows, context_len=200, **changes) -> DataSource:
    return DataSource(make_cfg(prompt_data=(lambda: rows), **changes), tokenizer, context_len)


def questions(n):
    return [{"input": f"q{i}", "label": str(i)} for i in range(n)]


# ---- Sample ----------------------------------------------------------------------------------------------------------
def test_append_keeps_everything_aligned():
    s = Sample(index=3, tokens=[1, 2])
    s.append([5, 6], [-0.5, -0.25], version=1)
    s.append([7], trainable=False, version=1)              # a tool's output
    s.append([8, 9], [-1.0, -2.0], version=2)
    assert s.tokens == [1, 2, 5, 6, 7, 8, 9] and s.response_length == 5
    assert s.loss_mask == [1, 1, 0, 1, 1]
    assert s.rollout_log_probs == [-0.5, -0.25, 0.0, -1.0, -2.0]
    assert s.weight_versions == [1, 1, 1, 2, 2]
    s.append([4], [-3.0], trainable=False)                 # log-probs of what is not trained are not kept
    assert s.rollout_log_probs[-1] == 0.0 and s.loss_mask[-1] == 0
    s.check()


@pytest.mark.parametrize("log_probs, what", [(None, "no"), ([-1.0], "1"), ([-1.0] * 3, "3")])
def test_append_refuses_missing_log_probs(log_probs, what):
    s = Sample(index=3, tokens=[1])
    with pytest.raises(ValueError, match=f"sample 3: 2 trainable tokens came with {what} log-probs; give one for each"):
        s.append([5, 6], log_probs)
    assert s.tokens == [1] and s.response_length == 0


def test_append_does_not_touch_shared_lists():
    prompt = [1, 2]
    a, b = Sample(tokens=prompt), Sample(tokens=prompt)
    a.append([3], [-1.0])
    assert prompt == b.tokens == [1, 2] and b.loss_mask == []


@pytest.mark.parametrize("changes, message", [
    (dict(loss_mask=[1]), "loss_mask has 1 entries for 2 response tokens; extend responses with sample.append"),
    (dict(loss_mask=[]), "loss_mask has 0 entries"),
    (dict(rollout_log_probs=[-1.0]), "rollout_log_probs has 1 entries"),
    (dict(weight_versions=[1, 1, 1]), "weight_versions has 3 entries"),
    (dict(tokens=[8]), "response_length 2 .* 1 tokens; tokens must be the prompt's ids"),
    (dict(tokens=[8, 9]), "response_length 2 .* 2 tokens; tokens must be the prompt's ids")])   # nothing predicts the first
def test_check_finds_samples_built_wrong_by_hand(changes, message):
    Sample(tokens=[7, 8, 9], response_length=2, loss_mask=[1, 1]).check()   # the other two lists may be absent
    with pytest.raises(ValueError, match=message):
        Sample(**dict(tokens=[7, 8, 9], response_length=2, loss_mask=[1, 1]) | changes).check()


def test_sample_round_trip_through_json():
    s = Sample(group_index=1, index=2, prompt=[{"role": "user", "content": "hi"}], tokens=[1], label={"a": [1]},
               reward={"x": 0.5}, status=Status.ABORTED, metadata={"k": {"n": 1}}, remove_sample=True, rollout_id=9)
    s.append([3, 4], [-0.1, -0.2], version=4)
    d = json.loads(json.dumps(s.to_dict()))
    assert Sample.from_dict(d) == s and type(Sample.from_dict(d).status) is Status
    assert Sample.from_dict(d | {"from_the_future": 1}) == s
    assert s.get_reward_value("x") == 0.5 and Sample(reward=2.0).get_reward_value(None) == 2.0


# ---- Reading rows ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cut, want", [("", range(10)), ("@[2:5]", range(2, 5)), ("@[:3]", range(3)), ("@[7:]", range(7, 10)),
                                       ("@[-2:]", range(8, 10))])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_files_and_slices(rows_file, tmp_path, kind, cut, want):
    path = rows_file(questions(10))
    if kind == "parquet":
        import pyarrow
        import pyarrow.parquet
        path = str(tmp_path / "d.parquet")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(questions(10)), path)
    rows, skipped = buffer.read_rows(make_cfg(), path + cut)
    assert rows == [questions(10)[i] for i in want] and not skipped


@pytest.mark.parametrize("line, what", [
    ('{"input": "a"', "delimiter"), ("", "an empty line"), ("   ", "an empty line"), ("[1, 2]", "a list instead of an object"),
    ('{"prompt": "a"}', r"no key 'input', only \['prompt'\]; set input_key"), ("caf\udce9", "utf-8")])
def test_bad_lines(tmp_path, line, what):
    path = tmp_path / "bad.jsonl"
    lines = ['{"input": "one"}', line, '{"input": "three"}']
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogateescape")   # the last one is Latin-1
    with pytest.raises(ValueError, match=rf"bad\.jsonl:2: .*{what}.*on_bad_line='skip'"):
        buffer.read_rows(make_cfg(), str(path))
    rows, skipped = buffer.read_rows(make_cfg(on_bad_line="skip"), str(path))
    assert [r["input"] for r in rows] == ["one", "three"] and skipped == {"bad_line": 1}


@pytest.mark.parametrize("path, message", [
    ("nowhere.jsonl", "nowhere.jsonl not found; give a .jsonl or .parquet"), ("{dir}/d.csv", "only .jsonl and .parquet are read"),
    ("{dir}/d.jsonl@[20:30]", "has no rows; check the slice")])
def test_files_that_cannot_be_read(rows_file, tmp_path, path, message):
    rows_file(questions(10))
    rows_file(questions(10), "d.csv")
    with pytest.raises(ValueError, match=message):
        buffer.read_rows(make_cfg(), path.format(dir=tmp_path))


def test_rows_that_only_the_data_source_finds_bad(tokenizer):
    rows = [{"input": "fine", "answer": "1"}, {"input": "no label"}, {"input": [{"role": "user", "content": "hi"}], "answer": "2"}]
    with pytest.raises(ValueError, match="row 1: no key 'answer'.*set input_key/label_key, apply_chat.*set on_bad_line='skip'"):
        source(tokenizer, rows, label_key="answer")
    with pytest.raises(ValueError, match="row 1: the prompt is a list of messages; set apply_chat_template=True"):
        source(tokenizer, rows[::2], label_key="answer")
    data = source(tokenizer, rows, label_key="answer", on_bad_line="skip")
    assert len(data) == 1 and data.skipped == {"bad_line": 2}


def test_reasoning_gym_rows():
    cfg = make_cfg(input_key="question", label_key="answer")
    task = dict(reasoning_gym="chain_sum", size=4, seed=1, min_terms=2, max_terms=2)
    rows, _ = buffer.read_rows(cfg, task)
    assert len(rows) == 4 and rows == buffer.read_rows(cfg, task)[0] != buffer.read_rows(cfg, task | {"seed": 2})[0]
    for row in rows:
        assert row["question"] and row["metadata"]["rm_type"] == "reasoning_gym"
        assert row["metadata"]["entry"]["answer"] == row["answer"]
    told = buffer.read_rows(make_cfg(input_key="question"), task | {"instruction": "Only the number."})[0]
    assert [row["question"] for row in told] == [row["question"] + "\nOnly the number." for row in rows]
    for wrong in (dict(reasoning_gym="chain_summ"), task | {"min_termz": 1}, task | {"min_terms": 9}):
        with pytest.raises(ValueError, match=f"reasoning_gym task '{wrong['reasoning_gym']}'.*DATASETS"):
            buffer.read_rows(cfg, wrong)


# ---- Prompts ---------------------------------------------------------------------------------------------------------
def test_prompt_and_label(tokenizer):
    data = source(tokenizer, [{"text": "abc", "y": 7, "extra": {"rm_type": "exact"}}], input_key="text", label_key="y",
                  metadata_key="extra")
    s = data.prompts[0]
    assert (s.prompt, s.label, s.metadata) == ("abc", 7, {"rm_type": "exact"})
    assert s.tokens == tokenizer("abc")["input_ids"] and len(s.tokens) == 3 and s.response_length == 0


def test_chat_template(tokenizer):
    tools = [{"name": "calculator"}]
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    rows = [{"input": "hi", "tools": None}, {"input": turns, "tools": tools}]
    s, t = source(tokenizer, rows, apply_chat_template=True, tool_key="tools").prompts
    assert s.prompt == "(user) hi\n(assistant) " and "tools" not in s.metadata
    assert t.prompt == "tools calculator \n(system) s\n(user) hi\n(assistant) " and t.metadata["tools"] == tools
    assert tokenizer.decode(t.tokens) == t.prompt
    short = source(tokenizer, rows[:1], apply_chat_template=True, apply_chat_template_kwargs=dict(short=True)).prompts[0]
    assert short.prompt == "(user) hi\n(a) "


def test_long_and_empty_prompts_are_counted(tokenizer):
    rows = [{"input": "a" * n} for n in (3, 5, 6, 0, 20)]
    data = source(tokenizer, rows, rollout_max_prompt_len=5)
    assert [len(p.tokens) for p in data.prompts] == [3, 5]
    assert data.skipped == {"prompt_too_long": 2, "prompt_empty": 1}
    assert len(source(tokenizer, rows, rollout_max_context_len=6 + ENGINE_RESERVE)) == 3     # leaves the room that SGLang wants
    assert len(source(tokenizer, rows, context_len=5 + ENGINE_RESERVE)) == 2
    with pytest.raises(ValueError, match=r"no usable prompt in 5 rows .*'prompt_too_long': 4.*limit is 2 tokens: raise"):
        source(tokenizer, rows, rollout_max_prompt_len=2)


# ---- The data source's order and state -------------------------------------------------------------------------------
def prompts_of(groups):
    return [g[0].prompt for g in groups]


def test_groups_and_epochs(tokenizer):
    data = source(tokenizer, questions(3), n_samples_per_prompt=2)
    groups = data.get_samples(2) + data.get_samples(6)
    assert prompts_of(groups) == ["q0", "q1", "q2"] * 2 + ["q0", "q1"] and data.epoch == 2
    flat = [s for g in groups for s in g]
    assert [s.index for s in flat] == list(range(16)) and [s.group_index for s in flat] == [i // 2 for i in range(16)]
    flat[0].metadata["mine"] = 1             # samples share nothing that a hook might write to
    flat[0].append([1], [-1.0])
    assert not flat[1].metadata and not flat[6].metadata and flat[1].response_length == 0 == flat[6].response_length


def test_shuffle_depends_on_seed_and_epoch_only(tokenizer):
    def two_epochs(**changes):
        data = source(tokenizer, questions(20), n_samples_per_prompt=1, **changes)
        return prompts_of(data.get_samples(20)), prompts_of(data.get_samples(20))
    plain, again = two_epochs()
    first, second = two_epochs(rollout_shuffle=True)
    assert plain == again == [f"q{i}" for i in range(20)]
    assert sorted(first) == sorted(second) == sorted(plain) and len({tuple(x) for x in (plain, first, second)}) == 3
    assert (first, second) == two_epochs(rollout_shuffle=True) != two_epochs(rollout_shuffle=True, rollout_seed=1)


def test_what_is_put_back_comes_first(tokenizer):
    data = source(tokenizer, questions(5), n_samples_per_prompt=1)
    a, b, c = data.get_samples(3)
    data.add_samples([c])
    data.add_samples([a])
    assert prompts_of(data.get_samples(1)) == ["q2"]
    assert prompts_of(data.get_samples(2)) == ["q0", "q3"]
    data.add_samples([a, b, c])
    data.cfg = make_cfg(n_samples_per_prompt=1, buffer_filter=lambda args, rollout_id, waiting, n: [waiting.pop()])
    assert prompts_of(data.get_samples(2)) == ["q2", "q4"] and prompts_of(data.buffer) == ["q0", "q1"]


@pytest.mark.parametrize("before", [0, 3, 7, 8])
def test_state_dict_goes_on_exactly(tokenizer, before):
    def fresh():
        return source(tokenizer, questions(4), n_samples_per_prompt=2, rollout_shuffle=True)
    one, two = fresh(), fresh()
    waiting = one.get_samples(before)[:1]
    for group in waiting:
        group[0].append([3, 4], [-1.0, -2.0], version=1)
        group[0].status = Status.ABORTED
    one.add_samples(waiting)
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert one.get_samples(9) == two.get_samples(9)
    with pytest.raises(ValueError, match="made with 4 prompts, prompt_data now has 3; resume with the data of the run"):
        source(tokenizer, questions(3)).load_state_dict(one.state_dict())


# ---- SFT -------------------------------------------------------------------------------------------------------------
def trained_text(tokenizer, s):
    s.check()
    response = s.tokens[-s.response_length:]
    return [tokenizer.decode([t for t, m in zip(response, s.loss_mask) if m == bit]) for bit in (1, 0)]


def sft(tokenizer, row, **changes):
    data = source(tokenizer, [row], loss_type="sft", **changes)
    group, = data.get_samples(1)
    assert len(group) == 1                   # n_samples_per_prompt is for RL
    return group[0]


def test_sft_single_turn(tokenizer):
    s = sft(tokenizer, {"input": "1+1=", "label": 2})
    assert tokenizer.decode(s.tokens) == "1+1=2<eos>" and trained_text(tokenizer, s) == ["2<eos>", ""]
    assert (s.response, s.status) == ("2", Status.COMPLETED)
    chat = sft(tokenizer, {"input": "1+1=", "label": 2}, apply_chat_template=True)
    assert tokenizer.decode(chat.tokens) == "(user) 1+1=\n(assistant) 2<eos>\n"             # what is behind its end is not its own
    assert trained_text(tokenizer, chat) == ["2<eos>", "\n"]
    with pytest.raises(ValueError, match="needs an answer: set label_key, or end the messages with an assistant turn"):
        sft(tokenizer, {"input": "1+1="})


def turns(*contents, **extra):
    roles = ["user", "assistant"] * len(contents)
    return [{"role": r, "content": c} | (extra.get(c) or {}) for r, c in zip(roles, contents)]


def test_sft_multi_turn(tokenizer):
    s = sft(tokenizer, {"input": turns("a", "b", "c", "d")})
    assert tokenizer.decode(s.tokens) == "(user) a\n(assistant) b<eos>\n(user) c\n(assistant) d<eos>\n"
    assert trained_text(tokenizer, s) == ["b<eos>d<eos>", "\n(user) c\n(assistant) \n"]
    assert tokenizer.decode(s.tokens[:-s.response_length]) == "(user) a\n(assistant) "


def test_sft_step_loss_mask(tokenizer):
    s = sft(tokenizer, {"input": turns("a", "b", "c", "d", b={"step_loss_mask": 0})})
    assert trained_text(tokenizer, s) == ["d<eos>", "\n"]
    assert tokenizer.decode(s.tokens[:-s.response_length]).endswith("b<eos>\n(user) c\n(assistant) ")
    with pytest.raises(ValueError, match="no token of this conversation is trained; has every assistant turn step_loss_mask=0"):
        sft(tokenizer, {"input": turns("a", "b", b={"step_loss_mask": 0})})


def test_sft_two_assistant_turns_in_a_row(tokenizer):
    """The header of the second is the template's, not the model's."""
    rows = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "assistant", "content": "c"}]
    assert trained_text(tokenizer, sft(tokenizer, {"input": rows})) == ["b<eos>c<eos>", "\n(assistant) \n"]


def test_sft_under_a_template_that_rewrites(tokenizer, tmp_path):
    """As those that cut the thinking out of earlier turns: what is trained is what the model would see of them."""
    rewriting = write_char_tokenizer(str(tmp_path))
    rewriting.chat_template = ("{% for m in messages %}({{ m.role }}) {% if loop.last %}{{ m.content }}{% else %}"
                               "{{ m.content.split('=')[-1] }}{% endif %}<eos>\n{% endfor %}"
                               "{% if add_generation_prompt %}(assistant) {% endif %}")
    s = sft(rewriting, {"input": turns("a", "thought=bb", "c", "thought=d")})
    assert trained_text(rewriting, s)[0] == "bb<eos>thought=d<eos>"
    rewriting.chat_template = rewriting.chat_template.replace("split('=')[-1]", "upper()[:0]")
    with pytest.raises(ValueError, match="row 0: message 1: the chat template leaves out this assistant turn.*step_loss_mask=0"):
        sft(rewriting, {"input": turns("a", "bb", "c", "d")})


def test_sft_too_long_is_counted(tokenizer):
    rows = [{"input": "1+1=", "label": "2" * n} for n in (1, 5, 6)]         # 4 + n + 1 tokens
    data = source(tokenizer, rows, loss_type="sft", rollout_max_context_len=10)
    assert len(data) == 2 and data.skipped == {"prompt_too_long": 1}


# ---- Packing ---------------------------------------------------------------------------------------------------------
def random_samples(n_groups=5, seed=0, n=None) -> list[Sample]:
    """Groups of 1 to 4 samples (or n), prompts of 1 to 6, responses of 0 to 12 tokens with holes in the mask."""
    rnd, out = random.Random(seed), []
    for g in range(n_groups):
        for _ in range(n or rnd.randint(1, 4)):
            s = Sample(group_index=g, index=len(out), tokens=[rnd.randint(0, 99) for _ in range(rnd.randint(1, 6))],
                       reward=rnd.random(), status=Status.COMPLETED)
            for part in range(rnd.randint(0, 3)):
                k = rnd.randint(1, 4)
                s.append([rnd.randint(0, 99) for _ in range(k)], [-rnd.random() for _ in range(k)], trainable=rnd.random() < 0.7)
            out.append(s)
    return out


def train_data(cfg, samples):
    return buffer.to_train_data(cfg, samples, [s.reward for s in samples])


def test_flat_and_back():
    data = train_data(make_cfg(), random_samples(3, seed=5))
    back = buffer.from_flat(pickle.loads(pickle.dumps(buffer.to_flat(data))))
    assert back.keys() == data.keys()
    for key, values in data.items():
        for a, b in zip(values, back[key], strict=True):
            assert torch.equal(a, b) and a.dtype == b.dtype if torch.is_tensor(a) else a == b


def test_to_train_data():
    a, b = Sample(index=0, tokens=[1, 2]), Sample(index=1, tokens=[3])
    a.append([4, 5], [-1.0, -2.0])
    b.append([6, 7, 8], [-1.0, -2.0, -3.0])
    b.remove_sample, b.status, b.reward, b.rollout_log_probs = True, Status.TRUNCATED, {"x": 3.0}, []
    a.reward = {"x": 1.0}
    data = buffer.to_train_data(make_cfg(reward_key="x"), [a, b], [-1, 1])
    assert data["rewards"] == [-1.0, 1.0] and data["raw_reward"] == [1.0, 3.0] and data["truncated"] == [False, True]
    assert data["tokens"][0].tolist() == a.tokens and data["loss_masks"][0].tolist() == a.loss_mask
    assert data["loss_masks"][1].tolist() == [0, 0, 0] == data["rollout_log_probs"][1].tolist()
    assert data["sample_indices"] == data["rollout_ids"] == [0, 1] and data["response_lengths"] == [2, 3]
    assert {len(v) for v in data.values()} == {2}
    a.loss_mask = a.loss_mask[1:]
    with pytest.raises(ValueError, match="sample 0: loss_mask"):
        buffer.to_train_data(make_cfg(reward_key="x"), [a, b], [-1, 1])


def test_overlong_filtering_trains_no_truncated_sample():
    samples = [Sample(index=i, tokens=[1], status=status, reward=0.0) for i, status in enumerate((Status.COMPLETED, Status.TRUNCATED))]
    for s in samples:
        s.append([4, 5], [-1.0, -2.0])
    for on in (False, True):
        data = train_data(make_cfg(overlong_filtering=on), samples)
        assert [m.tolist() for m in data["loss_masks"]] == [[1, 1], [0, 0] if on else [1, 1]]


def test_a_servers_log_probs_travel():
    s = Sample(index=0, tokens=[1], reward=0.0, teacher_log_probs=[-0.5, -0.25])
    s.append([4, 5], [-1.0, -2.0])
    assert "teacher_log_probs" not in train_data(make_cfg(), [s])
    assert train_data(make_cfg(opd_teacher_url="x"), [s])["teacher_log_probs"][0].tolist() == [-0.5, -0.25]
    s.teacher_log_probs = [-0.5]
    with pytest.raises(ValueError, match="teacher_log_probs has 1 entries for 2 response tokens"):
        train_data(make_cfg(), [s])


def test_examples_beside_samples(tokenizer):
    """Rows of sft_data: an order and a place of their own; no policy loss, no reward; their own denominator in each step."""
    rows = [{"input": f"{i}+", "label": "x" * (i + 1)} for i in range(5)]
    data = source(tokenizer, questions(6), sft_data=lambda: rows, sft_batch_size=3, n_samples_per_prompt=2)
    first = data.get_examples()
    assert [s.response for s in first] == ["x", "xx", "xxx"] and data.get_samples(1)[0][0].group_index == 0
    other = source(tokenizer, questions(6), sft_data=lambda: rows, sft_batch_size=3, n_samples_per_prompt=2)
    other.load_state_dict(json.loads(json.dumps(data.state_dict())))
    examples = other.get_examples()
    assert [s.response for s in examples] == ["xxxx", "xxxxx", "x"] and source(tokenizer, questions(2)).get_examples() == []

    strict = source(tokenizer, questions(6), sft_data=lambda: rows, sft_batch_size=3, rollout_max_prompt_len=2)
    assert len(strict.examples) == 5         # that limit is for prompts that ask for an answer
    held_out = dict(x=dict(prompt_data=lambda: questions(1), input_key="q"))
    assert not eval_config(dataclasses.replace(data.cfg, eval_prompt_data=held_out), "x").sft_data             # nor does every held-out set read them again

    samples, cfg = random_samples(4, seed=3, n=2), make_cfg(num_steps_per_rollout=2, max_tokens_per_gpu=30)
    alone, mixed = (buffer.to_train_data(cfg, samples, [1.0] * 8, rows) for rows in ([], examples))
    steps, mixed_steps = buffer.plan(cfg, alone, 1), buffer.plan(cfg, mixed, 2)
    assert mixed["loss_weights"][:8] == alone["loss_weights"] and mixed["rewards"] == [1.0] * 8 + [0.0] * 3
    seen = []
    for step in mixed_steps:
        batches = [buffer.pack(mixed, one, 1) for rank in step for one in rank]
        assert sum(float(b.per_token["sft_weight"].sum()) for b in batches) == pytest.approx(1)      # mean over their tokens
        assert sum(float(b.weight.sum()) for b in batches) == pytest.approx(1)
        assert all(float((b.weight * b.per_token["sft_weight"]).abs().max()) == 0 for b in batches if len(b.weight))
        own = sorted(i for rank in step for one in rank for i in one)
        assert [i for i in own if i < 8] == sorted(i for one in steps[len(seen)][0] for i in one)
        seen.append([i for i in own if i >= 8])
    assert seen == [[8], [9, 10]]            # each step has its part of them


@pytest.mark.parametrize("pad_to", [1, 8, 64])
@pytest.mark.parametrize("seed", range(5))
def test_pack_equals_a_loop(seed, pad_to):
    samples = random_samples(seed=seed)
    data = train_data(make_cfg(), samples)
    data["loss_weights"] = [0.5 + i for i in range(len(samples))]
    data["advantages"] = [torch.full((s.response_length,), float(i)) for i, s in enumerate(samples)]
    chosen = list(range(len(samples)))[::-1][:7]
    batch = buffer.pack(data, chosen, pad_to)

    row, position, bounds, logit_index, targets, weight, logp, adv = [], [], [0], [], [], [], [], []
    for i in chosen:
        s = samples[i]
        first = len(s.tokens) - s.response_length
        for j, token in enumerate(s.tokens):
            if j >= first:                   # token j is predicted from where token j - 1 stands
                logit_index.append(len(row) - 1)
                targets.append(token)
                weight.append(s.loss_mask[j - first] * (0.5 + i))
                logp.append(s.rollout_log_probs[j - first])
                adv.append(float(i))
            row.append(token)
            position.append(j)
        bounds.append(len(row))
    pad = -len(row) % pad_to
    if pad:
        bounds.append(len(row) + pad)
    assert batch.tokens.tolist() == [row + [0] * pad] and batch.position_ids.tolist() == [position + list(range(pad))]
    assert batch.cu_seqlens.tolist() == bounds and batch.cu_seqlens.dtype == torch.int32
    assert batch.max_seqlen == max(b - a for a, b in zip(bounds, bounds[1:])) and batch.tokens.shape[1] % pad_to == 0
    assert batch.logit_index.tolist() == logit_index and batch.targets.tolist() == targets
    assert batch.weight.tolist() == pytest.approx(weight) and batch.weight.dtype == torch.float32
    assert batch.per_token["rollout_logp"].tolist() == pytest.approx(logp) and batch.per_token["advantages"].tolist() == adv
    assert set(batch.per_token) == {"rollout_logp", "advantages"}           # what the data has, no more
    assert batch.sample.tolist() == [k for k, i in enumerate(chosen) for _ in range(samples[i].response_length)]
    assert batch.samples == chosen and sum(batch.lengths) == len(targets)


@pytest.mark.parametrize("pad_to", [1, 8])
def test_an_empty_micro_batch_is_padding_only(pad_to):
    data = train_data(make_cfg(), random_samples())
    data["loss_weights"] = [1.0] * len(data["tokens"])
    batch = buffer.pack(data, [], pad_to)
    assert batch.tokens.shape == (1, pad_to) and batch.cu_seqlens.tolist() == [0, pad_to]
    assert len(batch.targets) == len(batch.logit_index) == len(batch.weight) == len(batch.per_token["rollout_logp"]) == 0
    assert batch.targets.dtype == batch.logit_index.dtype == torch.int64


# ---- Bins and ranks --------------------------------------------------------------------------------------------------
@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 120), min_size=1, max_size=40), st.integers(20, 150), st.integers(1, 5))
def test_bins_hold_every_sample_once_and_fit(lengths, capacity, dp_size):
    bins = buffer.pack_bins(lengths, capacity, dp_size)
    assert sorted(i for one in bins for i in one) == list(range(len(lengths)))
    assert len(bins) % dp_size == 0
    for one in bins:
        assert sum(lengths[i] for i in one) <= capacity or len(one) == 1    # one sample above the limit gets its own
    needed = max(-(-sum(lengths) // capacity), 1)
    assert len(bins) < 2 * needed + 1 + dp_size                             # first fit: all but one bin over half full

    loads = [sum(lengths[i] for i in one) for one in bins]
    ranks = buffer.distribute(bins, loads, dp_size)
    assert sorted(map(tuple, (b for rank in ranks for b in rank))) == sorted(map(tuple, bins))
    assert len(ranks) == dp_size and len({len(rank) for rank in ranks}) == 1   # every rank runs the same number
    totals = [sum(lengths[i] for one in rank for i in one) for rank in ranks]
    assert max(totals) - min(totals) <= max(loads)                          # no rank is ahead by more than one bin


def test_distribute_balances():
    bins = [[i] for i in range(8)]
    ranks = buffer.distribute(bins, [8, 7, 6, 5, 4, 3, 2, 1], 2)
    assert sorted(sum(8 - i for b in rank for i in b) for rank in ranks) == [18, 18]


# ---- Loss weights ----------------------------------------------------------------------------------------------------
def weighted(masks, cfg, rollout_ids=None, groups=None):
    n = len(masks)
    data = {"loss_masks": [torch.tensor(m) for m in masks], "tokens": [torch.zeros(len(m) + 1) for m in masks],
            "rollout_ids": rollout_ids or list(range(n)), "group_indices": groups or [0] * n}
    buffer.plan(cfg, data, 1)
    return data["loss_weights"]


MASKS = [[1, 1, 0], [1], [1, 1, 1, 1]]       # 2, 1 and 4 trainable tokens


@pytest.mark.parametrize("changes, want", [
    (dict(), [1 / 6, 1 / 3, 1 / 12]),                                       # mean of the samples' means
    (dict(calculate_per_token_loss=True), [1 / 7] * 3),
    (dict(fixed_loss_length=10), [1 / 30] * 3)])
def test_loss_weights_by_hand(changes, want):
    cfg = make_cfg(**changes)
    assert weighted(MASKS, cfg) == pytest.approx(want)
    # a sample with nothing to train changes nothing, and counts nowhere
    assert weighted([[0, 0], *MASKS], cfg) == pytest.approx([0, *want])
    assert weighted([[0], [0, 0]], cfg) == [0, 0]


@pytest.mark.parametrize("changes, want", [
    (dict(), [1 / 6, 1 / 6, 1 / 8]),                                        # the first two share one of two rollouts
    (dict(calculate_per_token_loss=True), [1 / 7] * 3),
    (dict(fixed_loss_length=10), [1 / 20] * 3)])
def test_siblings_of_a_rollout_share_a_weight(changes, want):
    assert weighted(MASKS, make_cfg(**changes), rollout_ids=[5, 5, 6]) == pytest.approx(want)
    assert weighted([[0], *MASKS], make_cfg(**changes), rollout_ids=[6, 5, 5, 6]) == pytest.approx([0, *want])


def test_each_optimizer_step_has_its_own_denominator():
    cfg = make_cfg(num_steps_per_rollout=2)
    assert weighted(MASKS, cfg, groups=[0, 1, 1]) == pytest.approx([1 / 2, 1 / 2, 1 / 8])
    with pytest.raises(ValueError, match="1 groups cannot fill 2 optimizer steps; set num_steps_per_rollout lower"):
        weighted(MASKS, cfg)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(5, 200), st.integers(1, 3),
       st.sampled_from([dict(), dict(calculate_per_token_loss=True), dict(fixed_loss_length=7)]))
def test_total_loss_does_not_depend_on_the_packing(seed, dp_size, max_tokens, steps, changes):
    """The sum over ranks and micro-batches of weight * value, for values that depend on the token, against no packing."""
    samples = random_samples(6, seed)
    cfg = make_cfg(num_steps_per_rollout=steps, max_tokens_per_gpu=max_tokens, **changes)
    data = train_data(cfg, samples)
    plan = buffer.plan(cfg, data, dp_size)
    seen = []
    for k, step in enumerate(plan):
        assert len(step) == dp_size and len({len(rank) for rank in step}) == 1
        members = sorted(i for rank in step for one in rank for i in one)
        seen += members
        packed = [buffer.pack(data, one, 8) for rank in step for one in rank]
        got = sum(float((b.weight.double() * b.targets.double().sin()).sum()) for b in packed)

        means, total, count = [], 0.0, 0     # the definitions of set_loss_weights, written as means
        for i in members:
            s = samples[i]
            values = [torch.tensor(float(t), dtype=torch.float64).sin().item()
                      for t, m in zip(s.tokens[len(s.tokens) - s.response_length:], s.loss_mask) if m]
            if values:
                means.append(sum(values) / (cfg.fixed_loss_length or len(values)))
                total, count = total + sum(values), count + len(values)
        want = total / max(count, 1) if cfg.calculate_per_token_loss else sum(means) / max(len(means), 1)
        assert got == pytest.approx(want, abs=1e-5)
        groups = {samples[i].group_index for i in members}
        assert groups == set(range(6 * k // steps, 6 * (k + 1) // steps))   # whole groups, in order
    assert seen == list(range(len(samples)))


def test_plan_reads_lengths_only_once_packed():
    """Rows of very different length: no micro-batch above the limit unless a single sample is."""
    samples = random_samples(20, seed=1, n=4)
    cfg = make_cfg(max_tokens_per_gpu=15)
    data = train_data(cfg, samples)
    for rank in buffer.plan(cfg, data, 4)[0]:
        for one in rank:
            assert len(one) <= 1 or sum(len(samples[i].tokens) for i in one) <= 15


def test_namespace_configs_are_enough():
    """plan and pack read a handful of fields: a notebook may call them with any object that has those."""
    cfg = SimpleNamespace(num_steps_per_rollout=1, max_tokens_per_gpu=50, calculate_per_token_loss=False, fixed_loss_length=None,
                          reward_key=None, overlong_filtering=False, opd_teacher_url=None, context_parallel_size=1,
                          virtual_pipeline_model_parallel_size=None, use_rollout_routing_replay=False)
    assert len(buffer.plan(cfg, train_data(cfg, random_samples()), 2)[0]) == 2
