"""
test_agent.py: is a conversation's every token where it belongs, whoever said it and however often it was put back?

    a made-up conversation, cut anywhere --agent.py--> Sample: trained == what the engine sent, all else masked
    the real engine and tools --rollout.py--> Samples --buffer.py--> packed batch: no tool's word has weight

Test:  pytest tests/test_agent.py        (90 s, a third of it one SGLang start)
Engine stands in for SGLang where it must abort within a word; the last tests have the real one, on a model whose weights are set by
hand. What is said is decided beforehand in both, so that the right tokens can be written down without agent.py's help.
"""
import asyncio
import copy
import dataclasses
import functools
import itertools
import json
import pathlib
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import agent
import chat
from buffer import DataSource, pack, plan, to_train_data
from configs import base, calculator
from configs.calculator_model import make_model
from configs.calculator_sft import teachers_rows
from helpers import make_cfg, prompts, run_config, running_engines
from rollout import Rollout
from sample import Sample, Status
from test_chat import TEMPLATES, backend, make               # noqa: F401: fixtures
from workers import Workers

ENDS = {name: "<end_of_turn>" if name == "gemma" else eos for name, (_, eos) in TEMPLATES.items()}
RESERVE = 7                                  # buffer.ENGINE_RESERVE


# ---- Tools that need no process --------------------------------------------------------------------------------------
async def add(a: int, b: int) -> int:
    """
    Adds.

    Args:
        a: a number
        b: another one
    """
    return a + b


async def repeat(word: str, times: int) -> str:
    """
    Says a word again and again.

    Args:
        word: which
        times: how often
    """
    return word * times


async def fail(why: str) -> dict:
    """
    Raises.

    Args:
        why: what it says
    """
    raise KeyError(why)


async def hang() -> None:
    """Never ends."""
    await asyncio.sleep(1000)


TOOLS = [add, repeat, fail, hang]


def written(*calls) -> str:
    """As Qwen writes them, each on lines of its own."""
    return "".join("\n<tool_call>\n" + (one if isinstance(one, str) else json.dumps(one)) + "\n</tool_call>" for one in calls)


def named(name, **arguments) -> dict:
    return {"name": name, "arguments": arguments}


# A call -> what the model reads then; None: SGLang leaves it out; ...: it raises, and no call of the turn is read.
CALLS = [
    (named("add", a=2, b=3), "5"), (named("repeat", word="hello ", times=2), "hello hello "),
    (named("repeat", word="世界\n", times=1), "世界\n"), (named("repeat", word="<|im_end|></s><eos>", times=1), "<|im_end|></s><eos>"),
    (named("repeat", word="the answer is ", times=60), "the answer is " * 60), (named("repeat", word="", times=1), ""),
    (named("fail", why="no"), "Error: KeyError: 'no'"), (named("hang"), "Error: TimeoutError: no result in 0.02 s"),
    (named("add", a=2), "Error: TypeError: missing a required argument: 'b'"),
    (named("add", a=2, b=3, c=4), "Error: TypeError: got an unexpected keyword argument 'c'"),
    ({"name": "add", "arguments": [2, 3]}, "Error: TypeError: the arguments must be an object with a name for each value"),
    ({"name": "add", "arguments": "2"}, "Error: TypeError: the arguments must be an object with a name for each value"),
    (named("subtract", a=2, b=3), None), ('{"name": "add"', None), ("", None),
    ({"name": ["add"], "arguments": {}}, ...), ("42", ...), ("[" * 2000, ...)]
UNREADABLE = "Error: ValueError: this call cannot be read; call one of add, repeat, fail, hang in the format shown"


# ---- The engine that does what it is told ------------------------------------------------------------------------------
class Engine:
    """Sends the turns, token by token, as client.Client.generate appends them; stops short where `cuts` says."""

    def __init__(self, tokenizer, end: str, turns: list[tuple[str, bool]], cuts=(), context_len: int = 10**6):
        """turns: text, and whether an end token follows (else a stop string stood there). cuts: how many tokens are sent before
        each abort; each happens once."""
        self.end, self.context_len, self.cuts = tokenizer.convert_tokens_to_ids(end), context_len, sorted(cuts)
        self.turns = [tokenizer(text, add_special_tokens=False)["input_ids"] + [self.end] * ended for text, ended in turns]
        self.sent = []                       # (turn, token, log-prob, version), in the order they were sent
        self.turn, self.at = 0, 0            # which comes next

    async def generate(self, sample, params):
        assert sample.status == Status.PENDING, "a step that has its groups would take it for finished"
        left = self.context_len - len(sample.tokens)
        room = min(params["max_new_tokens"] - sample.response_length, left)
        if room <= 0 or left < RESERVE:
            sample.status = Status.TRUNCATED
            return sample
        say = self.turns[self.turn][self.at:][:room]
        cut = self.cuts and self.cuts[0] - len(self.sent) <= len(say)
        if cut:
            say = say[:max(self.cuts.pop(0) - len(self.sent), 0)]
        first = len(self.sent)
        new = [(self.turn, token, -1.0 - i, i // 5) for i, token in enumerate(say, first)]   # weights change every five tokens
        for version, run in itertools.groupby(new, key=lambda row: row[3]):
            sample.append(*zip(*((token, log_prob) for _, token, log_prob, _ in run)), version=version)
        self.sent += new
        self.at += len(say)
        if say[-1:] == [self.end] or self.at == len(self.turns[self.turn]) and not cut:
            sample.status = Status.COMPLETED
            self.turn, self.at = self.turn + 1, 0
        else:
            sample.status = Status.ABORTED if cut else Status.TRUNCATED
        return sample

    def start_over(self):
        self.sent, self.turn, self.at = [], 0, 0

    def words(self, tokenizer, turn: int) -> str:
        ids = [token for t, token, *_ in self.sent if t == turn]
        return tokenizer.decode(ids[:-1] if ids[-1:] == [self.end] else ids)


def args_for(tokenizer, engine, **changes):
    workers = Workers(1)                     # starts no process for an async tool
    defaults = dict(tokenizer=tokenizer, generate=engine.generate, end_ids={engine.end}, context_len=engine.context_len, tools=TOOLS,
                    tool_call_parser="qwen25", max_turns=8, tool_timeout_s=0.02, workers=workers, apply_chat_template_kwargs={})
    return types.SimpleNamespace(**defaults | changes)


def first_sample(tokenizer, messages=({"role": "user", "content": "a question"},), tools=None) -> Sample:
    prompt = chat.render(tokenizer, list(messages), tools, add_generation_prompt=True)
    metadata = {"messages": list(messages)} | ({"tools": tools} if tools else {})
    return Sample(index=0, prompt=prompt, tokens=tokenizer(prompt, add_special_tokens=False)["input_ids"], metadata=metadata)


async def dialogue(args, sample, params):
    """A custom_generate_function without tools: a user who says args.user's words one after the other."""
    talk = agent.Conversation(args, sample, params)
    while True:
        if talk.waiting() == "assistant":
            await talk.say()
            if sample.status != Status.COMPLETED:
                return sample
        done = talk.turns_done()
        if done > len(args.user):
            return sample
        if not talk.hear({"role": "user", "content": args.user[done - 1]}):
            return sample


def until_done(args, engine, sample, hook, limit, partial: bool, cancel_at=()) -> Sample:
    """As rollout.py does it: what comes back aborted, or was cancelled while a tool ran, is put back and asked again."""
    put_back = functools.partial(Rollout.put_back, types.SimpleNamespace(
        continues=partial, data=types.SimpleNamespace(add_samples=lambda groups: None)))
    cancel_at, calls = set(cancel_at), 0

    async def call(*job):
        nonlocal calls
        calls += 1
        if calls in cancel_at:
            cancel_at.remove(calls)
            task.cancel()
            await asyncio.sleep(1)
        return await Workers.call(args.workers, *job)

    async def run():
        nonlocal task, sample
        args = types.SimpleNamespace(**vars(given) | {"workers": types.SimpleNamespace(call=call)})
        for _ in range(50):
            task = asyncio.create_task(hook(args, sample, {"max_new_tokens": limit}))
            try:
                assert await task is sample
            except asyncio.CancelledError:
                assert sample.status == Status.PENDING
            sample.check()
            if sample.status in (Status.COMPLETED, Status.TRUNCATED):
                return sample
            assert [(i, p, v) for i, p, v, m in rows(sample) if m] == [row[1:] for row in engine.sent]
            sample = Sample.from_dict(json.loads(json.dumps(sample.to_dict())))      # through a checkpoint
            put_back([[sample]])
            if not partial:
                assert sample.turns == [] and sample.response_length == 0
                engine.start_over()
        raise AssertionError("it never ends")
    given, task = args, None
    return asyncio.run(run())


def rows(sample) -> list[tuple]:
    """Of each response token: id, log-prob, version, mask."""
    return list(zip(sample.response_ids(), sample.rollout_log_probs, sample.weight_versions, sample.loss_mask, strict=True))


# ---- Bookkeeping under made-up conversations ----------------------------------------------------------------------------
WORDS = st.sampled_from(["", "hello", "the answer is 42", "世界 🤗", "a \n b", "<think>\nis\n</think>\n\nhello", "<tool_call>{", "{"])
LOOSE = st.tuples(st.sampled_from(["", " ", "\n"]), WORDS, st.sampled_from(["", " ", "\n"])).map("".join)


@st.composite
def conversations(draw):
    name, with_tools = draw(st.sampled_from(sorted(TEMPLATES))), draw(st.booleans())
    ended, turns, replies = st.sampled_from([True, True, False]), [], []
    for _ in range(draw(st.integers(0, 4))):
        if with_tools:
            calls = draw(st.lists(st.sampled_from(CALLS), min_size=1, max_size=1 if name == "mistral" else 2))
            turns.append((draw(WORDS) + written(*(call for call, _ in calls)), draw(ended)))
            said = [said for _, said in calls if said is not None]
            replies.append([UNREADABLE] if ... in said or not said else said)
        else:
            turns.append((draw(LOOSE), draw(ended)))
            replies.append([draw(LOOSE)])
    turns.append((draw(LOOSE), draw(ended)))
    return dict(name=name, with_tools=with_tools, turns=turns, replies=replies, max_turns=draw(st.sampled_from([1, 2, 8, 8, 8])),
                limit=draw(st.sampled_from([3, 30, 150, 10**4, 10**4, 10**4])), context=draw(st.sampled_from([60, 10**5, 10**5])),
                cuts=draw(st.lists(st.integers(0, 60), max_size=4)), cancel_at=draw(st.lists(st.integers(1, 4), max_size=2)))


def play(make, c, cuts, cancel_at, partial=True):
    template, eos = TEMPLATES[c["name"]]
    tokenizer = make(template, eos)
    engine = Engine(tokenizer, ENDS[c["name"]], c["turns"], cuts, c["context"])
    args = args_for(tokenizer, engine, max_turns=c["max_turns"], user=[said for said, in c["replies"]] if not c["with_tools"] else None)
    sample = first_sample(tokenizer)
    hook = agent.converse if c["with_tools"] else dialogue
    return tokenizer, engine, until_done(args, engine, sample, hook, c["limit"], partial, cancel_at)


@settings(max_examples=250, deadline=None)
@given(c=conversations(), partial=st.booleans())
def test_bookkeeping(make, c, partial):                          # noqa: F811
    tokenizer, engine, sample = play(make, c, c["cuts"], c["cancel_at"], partial)
    prompt = first_sample(tokenizer).tokens
    assert sample.tokens[:-sample.response_length or None] == prompt and len(sample.tokens) == len(prompt) + sample.response_length
    # Trained is what the engine sent, token for token, with its log-probs and versions; nothing else is.
    assert [(i, p, v) for i, p, v, m in rows(sample) if m] == [row[1:] for row in engine.sent]
    assert all((p, v) == (0.0, -1) for _, p, v, m in rows(sample) if not m)

    # Turn by turn: its place, its words, what came between.
    spoken = [turn for turn in sample.turns if turn["role"] == "assistant"]
    at, ids = 0, sample.response_ids()
    for k, turn in enumerate(spoken):
        begin, end = turn["begin"], turn["end"]
        sent = [token for t, token, *_ in engine.sent if t == k]
        assert sample.loss_mask[at:begin] == [0] * (begin - at) and sample.loss_mask[begin:end] == [1] * (end - begin)
        assert ids[begin:end] == sent and turn["ended"] == (sent[-1:] == [engine.end])
        assert tokenizer.decode(sent[:-1] if turn["ended"] else sent) == engine.words(tokenizer, k)
        if "tool_calls" not in turn:
            assert turn["content"] == engine.words(tokenizer, k)
        if k:
            between = tokenizer.decode(ids[at:begin])
            heard = [m["content"] for m in sample.turns[sample.turns.index(spoken[k - 1]) + 1:sample.turns.index(turn)]]
            assert heard == c["replies"][k - 1]
            assert spoken[k - 1]["ended"] != between.lstrip().startswith(ENDS[c["name"]]), "one end token, the model's or the template's"
            trims = c["name"] in ("llama3", "gemma")
            for text in heard:               # each, in this order
                _, found, between = between.partition(text.strip() if trims else text) if text.strip() else ("", True, between)
                assert found
        at = end
    assert at == len(ids) or sample.turns[-1]["role"] != "assistant"

    complete = len(spoken) == len(c["turns"]) and engine.turn == len(c["turns"])
    assert sample.status == (Status.COMPLETED if complete else Status.TRUNCATED)
    assert sample.response_length <= c["limit"] and len(sample.tokens) <= c["context"]
    if c["with_tools"]:
        assert len(spoken) <= c["max_turns"]
    roomy = c["limit"] == 10**4 and c["context"] == 10**5
    assert complete or not roomy or (c["with_tools"] and len(spoken) == c["max_turns"])


@settings(max_examples=120, deadline=None)
@given(c=conversations())
def test_aborts_change_nothing(make, c):                         # noqa: F811
    """Cut, put back, cancelled within a tool and through a checkpoint: the same sample as in one piece."""
    c |= {"context": 10**5}                  # near its end SGLang gives the rest of an answer no room (ENGINE_RESERVE)
    whole, cut = play(make, c, [], [])[2], play(make, c, c["cuts"], c["cancel_at"])[2]
    assert dataclasses.asdict(whole) == dataclasses.asdict(cut)


STABLE = ("qwen2", "llama3", "gemma")                            # what they write of a turn does not depend on later ones


@settings(max_examples=100, deadline=None)
@given(c=conversations(), name=st.sampled_from(STABLE))
def test_equals_the_templates_own_text(make, c, name):           # noqa: F811
    """Where every turn ends by the end token: the whole conversation as the template writes it at one go."""
    texts = [text.strip() for text, _ in c["turns"]]
    c |= dict(name=name, turns=[(text.replace("</think>", "</t>"), True) for text in texts], limit=10**5, context=10**5, max_turns=8)
    tokenizer, engine, sample = play(make, c, c["cuts"], c["cancel_at"])
    messages = [{"role": "user", "content": "a question"}]
    role = "tool" if c["with_tools"] else "user"
    for (text, _), said in zip(c["turns"], [*c["replies"], []]):
        messages += [{"role": "assistant", "content": text}, *({"role": role, "content": one} for one in said)]
    text, whole = tokenizer.decode(sample.tokens), chat.render(tokenizer, messages)
    assert whole.startswith(text) and not whole[len(text):].strip()


# ---- What stands between two turns, in each template ---------------------------------------------------------------------
HELLO, CALL = {"role": "assistant", "content": "hello"}, {"role": "assistant", "content": "", "tool_calls": [
    {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}, "id": "call00000"}]}
RESULT, USER = {"role": "tool", "name": "add", "content": "5"}, {"role": "user", "content": "hi"}
REPLIES = {                                  # after a turn that has ended itself -> to one result; to two; to a user
    "qwen2": ("\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
              "\n<|im_start|>user\n<tool_response>\n5\n</tool_response>\n<tool_response>\n5\n</tool_response><|im_end|>\n"
              "<|im_start|>assistant\n",
              "\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
    "llama3": ("<|start_header_id|>tool<|end_header_id|>\n\n5<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
               "<|start_header_id|>tool<|end_header_id|>\n\n5<|eot_id|>" * 2 + "<|start_header_id|>assistant<|end_header_id|>\n\n",
               "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"),
    "mistral": ("[RESULT] 5 [/RESULT]", None, "[INST] hi [/INST]"),
    "gemma": ("\n<start_of_turn>tool\n5<end_of_turn>\n<start_of_turn>model\n",
              "\n" + "<start_of_turn>tool\n5<end_of_turn>\n" * 2 + "<start_of_turn>model\n",
              "\n<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n"),
    "r1": ("<|User|>5<|Assistant|><think>\n", "<|User|>5<|User|>5<|Assistant|><think>\n", "<|User|>hi<|Assistant|><think>\n")}
REPLIES["qwen3"] = REPLIES["qwen2"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_replies(make, name):                                    # noqa: F811
    tokenizer, end = make(*TEMPLATES[name]), ENDS[name]
    one, two, user = REPLIES[name]

    def reply(turn, *heard, ended=True):
        return chat.reply(tokenizer, [USER], turn, list(heard), ended)
    for turn in (HELLO, CALL, CALL | {"content": "hello"}):
        if turn is not HELLO or name != "mistral":               # which wants a call before each result
            assert reply(turn, RESULT) == one and reply(turn, RESULT, ended=False) == end + one
        if two is not None:
            assert reply(turn, RESULT, RESULT) == two
        assert reply(turn, USER) == user and reply(turn, USER, ended=False) == end + user
    looks_like_the_end = RESULT | {"content": end + "hello" + end}           # only the template's own is left out
    assert end + "hello" + end in reply(CALL, looks_like_the_end)
    before = [USER, CALL, RESULT, HELLO, USER]                   # further on, and with an earlier turn that is the same
    assert chat.reply(tokenizer, before, CALL, [RESULT], True) == one
    assert chat.reply(tokenizer, before, HELLO, [USER | {"content": "zq0qz xk0kx"}], True) == user.replace("hi", "zq0qz xk0kx", 1)


def test_replies_that_a_template_cannot_write(make):             # noqa: F811
    for name, turn, heard in (("mistral", HELLO, RESULT), ("mistral", CALL, USER | {"role": "system"})):
        with pytest.raises(ValueError, match="does not write .* after an assistant's turn; .*answer with role 'user'"):
            chat.reply(make(*TEMPLATES[name]), [USER], turn, [heard], True)
    silent = TEMPLATES["gemma"][0].replace("{% else %}", "{% elif m.role != 'tool' %}")
    with pytest.raises(ValueError, match=r"does not write \['tool'\]"):
        chat.reply(make(silent, "<eos>"), [USER], CALL, [RESULT], True)


# ---- The calculator --------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("calculator_model"))
    make_model(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(model):
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(model)


def test_calculator():
    for text in ("37*45", " 12 - 50", "-(3+4)*2", "10-20-30", "99*99"):
        assert calculator.calculator(text) == str(eval(text))
    for text in ("", "2**9", "1/2", "1.5+2", "abs(1)", "a", "'a'*9", "True+1", "__import__('os')", "1;2", "[1][0]", "1 if 1 else 2"):
        with pytest.raises((ValueError, SyntaxError)):
            calculator.calculator(text)
    held, trained = ({row["input"] for row in calculator.questions(flag)} for flag in (True, False))
    assert len(held) == 243 and len(held | trained) == 3 * 90 * 90 and not held & trained


def test_sft_trains_what_rl_samples(tokenizer):
    """Rows of all teachers: the same ids, the same mask, whether read, or generated with the tool's real results."""
    rows = teachers_rows()[:300]
    taught = prompts("calculator_sft.py", rows, tokenizer)
    asked = prompts("calculator_cpu.py", [{"input": row["input"][0]["content"], "label": "?"} for row in rows], tokenizer)
    tools = run_config("calculator_cpu.py").tools

    async def job(function, arguments, limit_s):                 # the real tool, but in this process
        return function(**arguments)
    calls = 0
    for row, sft, rl in zip(rows, taught, asked, strict=True):
        texts = [chat_text(m) for m in row["input"] if m["role"] == "assistant"]
        engine = Engine(tokenizer, "<|im_end|>", [(text, True) for text in texts])
        args = args_for(tokenizer, engine, tools=tools, workers=types.SimpleNamespace(call=job))
        asyncio.run(agent.converse(args, rl, {"max_new_tokens": 64}))
        newline = tokenizer("\n")["input_ids"]                   # that the template writes behind the last end token
        assert (rl.tokens + newline, rl.loss_mask + [0]) == (sft.tokens, sft.loss_mask), row
        assert [{k: v for k, v in agent.plain(turn).items() if k != "tool_call_id"} for turn in rl.turns] == [
            m | ({"tool_calls": [m["tool_calls"][0] | {"id": "call00000"}]} if "tool_calls" in m else {}) for m in row["input"][1:]]
        calls += len(texts) - 1
        assert tokenizer.pad_token_id not in rl.tokens           # which unknown words would become
        for rm, want in ((calculator.right, rl.turns[-1]["content"] == rl.label), (calculator.called, len(texts) > 1)):
            assert asyncio.run(rm(None, rl)) == float(want)
    assert 100 < calls < 250


def chat_text(message: dict) -> str:
    """What a model writes that says this."""
    return message["content"] + "".join(written(call["function"])[1:] for call in message.get("tool_calls", ()))


def test_a_template_that_knows_no_tools_is_refused_when_the_data_is_read(tokenizer):
    cfg = dataclasses.replace(run_config("calculator_cpu.py"), prompt_data=lambda: [{"input": "1+1", "label": "2"}])
    silent = copy.deepcopy(tokenizer)
    silent.chat_template = "{% for m in messages if m.role != 'tool' %}{{ m.role + m.content + '<|im_end|>' }}{% endfor %}"
    with pytest.raises(ValueError, match=r"does not write \['tool'\] after an assistant's turn; is it made for tools\?"):
        DataSource(cfg, silent, 256)


def test_what_is_outside_the_turns_is_never_trained():
    sample = Sample(index=3, tokens=[1, 2])
    sample.turns = [{"role": "assistant", "content": "a", "begin": 0, "end": 2}, RESULT,
                    {"role": "assistant", "content": "b", "begin": 4}]        # put back in the middle: no end yet
    for part, trainable in (([5, 6], True), ([7, 8], False), ([9, 9, 9], True)):
        sample.append(part, [-1.0] * len(part), trainable=trainable)
    sample.check()
    sample.loss_mask[2] = 1
    with pytest.raises(ValueError, match="sample 3: 1 tokens would be trained that the model did not say .*trainable=False"):
        sample.check()


def test_hear_out_of_turn():
    sample = Sample(index=3, tokens=[1], metadata={"messages": [{"role": "user", "content": "hi"}]})
    talk = agent.Conversation(types.SimpleNamespace(), sample, {})
    with pytest.raises(ValueError, match="sample 3: hear.. where the assistant's turn is next; say.. first"):
        talk.hear({"role": "user", "content": "hello?"})
    sample.turns, sample.status = [{"role": "assistant", "content": "h", "begin": 0}], Status.ABORTED        # in the middle of say()
    assert talk.hear({"role": "user", "content": "go on"}) is False and len(sample.turns) == 1


# ---- The real engine, the real tools ---------------------------------------------------------------------------------
OPEN, CLOSE = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "', '"}}\n</tool_call>'
START, END = "\n<|im_start|>assistant\n", "<|im_end|>"


def set_bigrams(folder: str, tokenizer, pairs: list[tuple[str, str]]) -> None:
    """Layers that add nothing, and a head that answers each token with one of those that follow it in the pairs, all as likely."""
    from transformers import Qwen3ForCausalLM
    model = Qwen3ForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding = torch.randn(len(tokenizer), model.config.hidden_size)
        head = torch.zeros_like(embedding)
        for now, after in pairs:
            (now,), (after,) = (tokenizer(word)["input_ids"] for word in (now, after))
            head[after] += 0.12 * embedding[now]                 # a logit of about 15, the others below 5
        model.model.embed_tokens.weight.copy_(embedding)
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(head)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def engines(tokenizer, tmp_path_factory):
    """A model that calls the tool with 37*65, 1, 2 or 4, again and again, or says 9 and ends."""
    folder = tmp_path_factory.mktemp("bigrams")
    make_model(str(folder))
    path = [START, OPEN, "3", "7", "*", "6", "5", CLOSE, END]
    set_bigrams(str(folder), tokenizer, [*itertools.pairwise(path), (START, "9"), ("9", END), *((OPEN, d) for d in "124"),
                                         *((d, CLOSE) for d in "124")])
    with running_engines(folder, str(folder), rollout_num_gpus=1) as engines:
        engines.post("/update_weight_version", {"new_version": "0", "abort_all_requests": False})
        yield engines


def one_step(engines, tokenizer, folder, monkeypatch, **changes):
    """A rollout step -> its result, its config, and for each prompt's tokens what the engine was asked and sent."""
    cfg = dataclasses.replace(run_config("calculator_cpu.py"), **dict(rollout_batch_size=4, over_sampling_batch_size=4, global_batch_size=32,
                                                                  num_rollout=1, max_logprob_diff=1e-4) | changes)
    rollout, sent = Rollout(cfg, engines, DataSource(cfg, tokenizer, 256), {}, folder), []
    ask = rollout.client.request_when_served

    async def request_when_served(payload, who):
        out = await ask(payload, who)
        sent.append((who, list(payload["input_ids"]), [pair[1] for pair in out["meta_info"]["output_token_logprobs"]]))
        return out
    monkeypatch.setattr(rollout.client, "request_when_served", request_when_served)
    try:
        return rollout.generate(0), cfg, sent
    finally:
        rollout.close()


def test_no_tool_token_has_weight_in_the_training_batch(engines, tokenizer, tmp_path, monkeypatch):
    """Every tool output is looked for in the packed batch by its text; every token the engine sent by what it answered."""
    result, cfg, sent = one_step(engines, tokenizer, tmp_path, monkeypatch)
    data = to_train_data(cfg, result.samples, result.rewards)
    batches = [pack(data, one, 8) for step in plan(cfg, data, 1) for rank in step for one in rank]
    outputs = {text: f"\n<|im_start|>user\n<tool_response>\n{text}\n</tool_response><|im_end|>{START}" for text in ("2405", "1", "2", "4")}
    outputs = {text: tokenizer(whole)["input_ids"] for text, whole in outputs.items()}
    found, weighty = dict.fromkeys(outputs, 0), 0
    for batch in batches:
        row, weight = batch.tokens[0].tolist(), torch.zeros(batch.tokens.shape[1])
        weight[batch.logit_index + 1] = batch.weight             # [T]: of each token as a target
        told = torch.zeros(len(row), dtype=torch.bool)
        for text, ids in outputs.items():
            for at in range(len(row) - len(ids) + 1):
                if row[at:at + len(ids)] == ids:
                    found[text] += 1
                    told[at:at + len(ids)] = True
        assert told.any() and (weight[told] == 0).all()
        starts = dict(zip(batch.samples, batch.cu_seqlens.tolist()))
        for who, asked, answer in sent:
            i = next(i for i, s in enumerate(result.samples) if s.index == who)
            if i in starts:
                span = slice(starts[i] + len(asked), starts[i] + len(asked) + len(answer))
                assert row[span] == answer and (weight[span] > 0).all()
                weighty += len(answer)
        assert int((weight > 0).sum()) == sum(len(answer) for who, _, answer in sent
                                              if any(result.samples[i].index == who for i in batch.samples))
    results = [turn["content"] for s in result.samples for turn in s.turns if turn["role"] == "tool"]
    assert found == {text: results.count(text) for text in outputs} and min(found.values()) > 0
    assert weighty == sum(len(answer) for *_, answer in sent) == sum(sum(s.loss_mask) for s in result.samples)

    metrics, kinds = result.metrics, [[turn["role"] for turn in s.turns] for s in result.samples]
    assert metrics["rollout/tool_errors"] == 0 and metrics["rollout/tool_calls"] == sum(k.count("tool") for k in kinds) / len(kinds)
    assert metrics["rollout/turns"] == sum(k.count("assistant") for k in kinds) / len(kinds)
    for s in result.samples:                 # 9 is an answer; a third call is one too many, and is not run
        last = s.turns[-1]
        assert last["role"] == "assistant" and (s.status == Status.COMPLETED) == ("tool_calls" not in last)
        assert s.status == Status.COMPLETED or [turn["role"] for turn in s.turns].count("assistant") == cfg.max_turns == 3
        assert all(-8 < p < 0 if m else p == 0.0 for p, m in zip(s.rollout_log_probs, s.loss_mask))
    assert {s.status for s in result.samples} == {Status.COMPLETED, Status.TRUNCATED}


def test_tools_that_raise_hang_and_kill_themselves(engines, tokenizer, tmp_path, monkeypatch):
    def calculator(expression: str) -> str:                      # noqa: F811: the name that the model calls
        """
        Does harm.

        Args:
            expression: which
        """
        import os
        import signal
        import time
        if expression == "1":
            raise OSError("no paper")
        if expression == "2":
            time.sleep(1000)
        if expression == "4":
            os.kill(os.getpid(), signal.SIGKILL)
        return expression
    result, cfg, _ = one_step(engines, tokenizer, tmp_path, monkeypatch, tools=[calculator], tool_timeout_s=1.0, max_turns=2,
                              rollout_max_response_len=200, reward_workers=8, n_samples_per_prompt=4, global_batch_size=16)
    begins = {"37*65": "37*65", "1": "Error: OSError: no paper", "2": "Error: timed out", "4": "Error: its process died with exit code -9"}
    seen = set()
    for sample in result.samples:
        for turn, answer in zip(sample.turns, sample.turns[1:]):
            if "tool_calls" in turn and answer["role"] == "tool":
                typed = turn["tool_calls"][0]["function"]["arguments"]["expression"]
                seen.add(typed)
                assert answer["content"].startswith(begins[typed]) and answer.get("error", False) == (typed != "37*65")
                assert answer["content"] in sample.response      # the model can read it
    assert seen == set(begins), "the engine drew too few kinds of calls"
    errors = sum("error" in turn for s in result.samples for turn in s.turns)
    assert result.metrics["rollout/tool_errors"] == errors / len(result.samples) > 0
    assert result.metrics["rollout/reward_restarts"] > 0         # processes that were killed are counted


def test_put_back_while_tools_run(engines, tokenizer, tmp_path):
    """Three steps in which groups wait in a tool, or in the engine, when the batch is full: they go on, none of their tokens lost."""
    async def calculator(expression: str) -> str:                # noqa: F811
        """
        Takes its time.

        Args:
            expression: which
        """
        await asyncio.sleep(0.05 * len(expression))
        return expression
    cfg = dataclasses.replace(run_config("calculator_cpu.py"), tools=[calculator], rollout_batch_size=2, over_sampling_batch_size=8,
                              n_samples_per_prompt=4, global_batch_size=8, partial_rollout=True, max_staleness=8)
    rollout, sent, done = Rollout(cfg, engines, DataSource(cfg, tokenizer, 256), {}, tmp_path), [], []
    take = rollout.client.take

    def recorded(sample, meta, *rest):
        sent.append((sample.index, step, [(pair[1], pair[0], step) for pair in meta["output_token_logprobs"]]))
        return take(sample, meta, *rest)
    rollout.client.take = recorded
    try:
        for step in range(3):
            engines.post("/update_weight_version", {"new_version": str(step), "abort_all_requests": False})
            rollout.client.weight_version = step
            done += rollout.generate(step).samples
    finally:
        rollout.close()
        engines.post("/update_weight_version", {"new_version": "0", "abort_all_requests": False})
    for s in done:
        s.check()
        assert [(i, p, v) for i, p, v, m in rows(s) if m] == [token for who, _, answer in sent if who == s.index for token in answer]
        assert all((p, v) == (0.0, -1) for _, p, v, m in rows(s) if not m)
        text = s.prompt                      # and the conversation as it must read
        for turn in s.turns:
            text += (turn["content"] if turn["role"] == "tool" else
                     tokenizer.decode(s.response_ids()[turn["begin"]:turn["end"]]) + "\n<|im_start|>user\n<tool_response>\n")
            text += "\n</tool_response><|im_end|>" + START if turn["role"] == "tool" else ""
        assert tokenizer.decode(s.tokens) == text.removesuffix("\n<|im_start|>user\n<tool_response>\n")
    assert any(len({step for who, step, answer in sent if who == s.index and answer}) > 1 for s in done), "nobody was put back"
