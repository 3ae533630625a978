"""
test_endpoint.py: does an agent written with the `openai` package become the right samples? One real SGLang server, a model
that learns here to call a tool, real clients; transformers says which log-probs are right.

    agent --openai--> endpoint --> engine          [Sample], compared with what the agent was answered

Test:  pytest tests/test_endpoint.py      (about 90 s on two cores)
"""
import asyncio
import contextlib
import itertools
import json
import time
import types

import openai
import pytest
import torch

from buffer import DataSource, Status
from configs.base import eval_config
from endpoint import session
from helpers import assert_log_probs, make_cfg, running_engines
from rollout import Rollout

CONTEXT = 1024                               # tokens: the model's max_position_embeddings
COLD = 0.2                                   # a temperature at which the model says what it has learned
ROLES = {"system": "<s>", "user": "<u>", "assistant": "<a>", "tool": "<t>"}
TEMPLATE = (r"{% set role = {'system': '<s>', 'user': '<u>', 'assistant': '<a>', 'tool': '<t>'} %}"
            r"{% if tools %}{{ '<s>' + (tools | tojson) + '<eos>\n' }}{% endif %}"
            r"{% for m in messages %}{{ role[m.role] + m.content }}{% for c in m.tool_calls or [] %}"
            r"{{ '<tool_call>\n{\"name\": \"' + c.function.name + '\", \"arguments\": ' + (c.function.arguments | tojson)"
            r" + '}\n</tool_call>' }}{% endfor %}{{ '<eos>\n' }}{% endfor %}"
            r"{% if add_generation_prompt %}{{ '<a>' }}{% endif %}")
ADD = {"type": "function", "function": {"name": "add", "description": "sum", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}
ASK = {"role": "user", "content": "add 1 and 2"}
CALL = {"role": "assistant", "content": "", "tool_calls": [
    {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]}


# ---- What is shared ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory) -> str:
    """A tiny Qwen3 with a chat template, which answers ASK with CALL, and what the tool says with "it is 3"."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    folder = str(tmp_path_factory.mktemp("caller"))
    words = ["<pad>", "<eos>", *ROLES.values(), *map(chr, range(32, 127)), "\n"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in words[:6]])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>",
                                        chat_template=TEMPLATE, clean_up_tokenization_spaces=False)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=CONTEXT, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=1, pad_token_id=0))
    said = [ASK, CALL, {"role": "tool", "content": "3"}, {"role": "assistant", "content": "it is 3"}]
    ids = torch.tensor([tokenizer(tokenizer.apply_chat_template(said, tools=[ADD], tokenize=False))["input_ids"]])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(1500):
        loss = model(ids, labels=ids).loss
        if loss < 0.005:
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.02, loss
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engines(tiny_model, tmp_path_factory):
    with running_engines(tmp_path_factory.mktemp("run"), tiny_model, rollout_num_gpus=1) as engines:
        engines.post("/update_weight_version", {"new_version": "0", "abort_all_requests": False})
        yield engines


@pytest.fixture
def make(engines, tokenizer, tmp_path):
    """make(hook, **changes of the config) -> Rollout; closed after the test."""
    with contextlib.ExitStack() as stack:
        def build(hook, **changes) -> Rollout:
            cfg = make_cfg(**dict(
                prompt_data=lambda: [dict(input=f"add {a}", label=str(a)) for a in range(9)], label_key="label",
                custom_generate_function=hook, tool_call_parser="qwen25", rollout_num_gpus=1, rollout_batch_size=1,
                n_samples_per_prompt=1, over_sampling_batch_size=changes.get("rollout_batch_size", 1),
                rollout_max_response_len=200,
                request_timeout_s=300.0, generate_timeout_s=200.0) | changes)
            held_out = {name: DataSource(eval_config(cfg, name), tokenizer, CONTEXT) for name in cfg.eval_prompt_data}
            rollout = Rollout(cfg, engines, DataSource(cfg, tokenizer, CONTEXT), held_out, tmp_path)
            stack.callback(rollout.close)
            return rollout
        yield build


@pytest.fixture
def play(make):
    """play(agent, **changes) -> samples of one rollout. agent: async (client, talk), returns the reward."""
    def run(agent, **changes):
        async def hook(args, sample, params):
            async with session(args, sample, params) as talk:
                async with openai.AsyncOpenAI(base_url=talk.base_url, api_key="none") as client:
                    talk.reward = await agent(client, talk)
            return talk.samples()
        return make(hook, **changes).generate(0).samples
    return run


async def ask(client, messages, **kw):
    """-> the answer's message, and its choice."""
    answer = await client.chat.completions.create(model="policy", messages=messages, **kw)
    return answer.choices[0].message, answer


def user(content):
    return {"role": "user", "content": content}


def pieces(sample) -> list[tuple[int, list[int]]]:
    """Runs of equal loss_mask in the response, with their tokens."""
    pairs = zip(sample.loss_mask, sample.response_ids())
    return [(mask, [t for _, t in run]) for mask, run in itertools.groupby(pairs, key=lambda pair: pair[0])]


# ---- Conversations -----------------------------------------------------------------------------------------------------
async def two_questions(base_url, question):
    """An agent that knows nothing of us."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as client:
        messages, usages = [{"role": "system", "content": "be brief"}, user(question)], []
        for words in ("again", None):
            answer = await client.chat.completions.create(model="any", messages=messages, max_tokens=40)
            usages.append(answer.usage)
            messages += [answer.choices[0].message, user(words)]
        return [m if isinstance(m, dict) else m.content for m in messages], usages


def test_a_conversation_is_a_sample(make, tokenizer, reference):
    seen = {}

    async def hook(args, sample, params):
        async with session(args, sample, params) as talk:
            seen[sample.index] = await two_questions(talk.base_url, sample.prompt)
            talk.reward = float(sample.index % 2)
        return talk.samples()
    rollout = make(hook, rollout_batch_size=2, n_samples_per_prompt=2, eval_prompt_data=dict(
        held=dict(prompt_data=lambda: [dict(input=f"add {a}", label="") for a in range(3)], eval_temperature=0.0)))
    for step in range(2):
        result = rollout.generate(step)
        assert [s.index for s in result.samples] == [4 * step + i for i in range(4)]
        assert result.rewards == pytest.approx([-0.7071, 0.7071] * 2, abs=1e-3)
        assert result.metrics["rollout/turns"] == 2 and result.metrics["rollout/groups_trained"] == 2
        for s in result.samples:
            (_, question, first, again, second, _), usages = seen[s.index]
            head = f"<s>be brief<eos>\n<u>{question['content']}<eos>\n<a>"
            assert s.prompt == head and s.tokens[:-s.response_length] == tokenizer(head)["input_ids"]
            (_, one), (_, between), (_, two) = pieces(s)
            assert [m for m, _ in pieces(s)] == [1, 0, 1] and s.rollout_id == s.index and s.weight_versions[0] == 0
            for ids, said in ((one, first), (two, second)):
                assert tokenizer.decode(ids).removesuffix("<eos>") == said and len(ids) <= 40
            ended = one[-1] == tokenizer.eos_token_id
            assert tokenizer.decode(between) == ("" if ended else "<eos>") + "\n<u>again<eos>\n<a>"
            assert [(u.prompt_tokens, u.completion_tokens) for u in usages] == [
                (len(tokenizer(head)["input_ids"]), len(one)), (len(s.tokens) - len(two), len(two))]
            assert s.status == (Status.COMPLETED if two[-1] == tokenizer.eos_token_id else Status.TRUNCATED)
            assert_log_probs(reference, s, mask=s.loss_mask)
    metrics = rollout.evaluate(2)
    assert metrics["eval/held"] == pytest.approx(1 / 3) and metrics["eval/held-turns"] == 2


def test_tools(make, play, tokenizer, reference):
    async def agent(client, talk):
        for way in (lambda m: m, lambda m: m.model_dump(), lambda m: m.to_dict()):     # as agents give it back
            messages = [ASK]
            while True:
                message, answer = await ask(client, messages, tools=[ADD])
                messages.append(way(message))
                if answer.choices[0].finish_reason != "tool_calls":
                    assert (message.content, answer.choices[0].finish_reason) == ("it is 3", "stop")
                    break
                (call,) = message.tool_calls
                assert (message.content, call.function.name) == (None, "add")
                total = sum(json.loads(call.function.arguments).values())
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})
        return 1.0
    samples = play(agent, rollout_temperature=COLD)
    assert len(samples) == 3                 # the same question three times is three roots
    said = [ASK, CALL, {"role": "tool", "content": "3"}, {"role": "assistant", "content": "it is 3"}]
    text = tokenizer.apply_chat_template(said, tools=[ADD], tokenize=False).removesuffix("\n")
    for s in samples:
        assert tokenizer.decode(s.tokens) == text and [m for m, _ in pieces(s)] == [1, 0, 1]
        assert [t["role"] for t in s.turns] == ["assistant", "tool", "assistant"]
        assert_log_probs(reference, s, COLD, s.loss_mask)


def test_branches_share_what_is_trained_once(play, tokenizer, reference):
    async def agent(client, talk):
        hi = [user("hi")]
        first, _ = await ask(client, hi, max_tokens=20)
        more = [*hi, first.model_dump(), user("more")]
        three = await asyncio.gather(*(ask(client, more, max_tokens=10 + i) for i in range(3)))
        await ask(client, [*more, three[1][0].model_dump(), user("go on")], max_tokens=9)
        await ask(client, [user("hi"), {"role": "assistant", "content": "edited"}, user("more")], max_tokens=8)
        talk.lengths = [answer.usage.completion_tokens for _, answer in three]
        return [float(i) for i in range(4)]
    samples = play(agent)
    assert [s.reward for s in samples] == [0.0, 1.0, 2.0, 3.0]
    assert {(s.group_index, s.index, s.rollout_id) for s in samples} == {(0, 0, 0)}
    for s in samples:
        assert_log_probs(reference, s, mask=s.loss_mask)
    first = next(len(ids) for mask, ids in pieces(samples[0]) if mask)
    shared = [s for s in samples if s.prompt == "<u>hi<eos>\n<a>"]
    assert len(shared) == 3 and len({tuple(s.response_ids()[:first]) for s in shared}) == 1, "the same tokens in each"
    assert [sum(s.loss_mask[:first]) for s in shared] == [first, 0, 0], "trained in the first"
    assert [len([m for m, _ in pieces(s) if m]) for s in shared].count(2) >= 1
    edited = samples[-1]
    assert edited.prompt == "<u>hi<eos>\n<a>edited<eos>\n<u>more<eos>\n<a>"
    assert edited.loss_mask == [1] * edited.response_length
    assert 1 <= edited.response_length <= 8
    deepest = max(shared, key=lambda s: len(s.turns))
    assert [t["content"] for t in deepest.turns if t["role"] == "user"] == ["more", "go on"]


def test_what_the_engine_is_asked(make):
    """max_tokens is of a call, the run's limit of a branch. In a deterministic run candidates have seeds of their own."""
    asked = []

    async def hook(args, sample, params):
        async def generate(sample, params):
            asked.append((sample.response_length, params["max_new_tokens"], params["sampling_seed"], params.get("stop")))
            return await args.generate(sample, params)
        own = types.SimpleNamespace(**vars(args) | dict(generate=generate))
        async with session(own, sample, params | {"sampling_seed": 5, "stop": "~~~"}) as talk:
            async with openai.AsyncOpenAI(base_url=talk.base_url, api_key="none") as client:
                message, _ = await ask(client, [user("hi")], max_tokens=10)
                await ask(client, [user("hi")], max_tokens=10, stop=["q", "z"])
                await ask(client, [user("hi"), message, user("go on")])
        return talk.samples()

    def of_length(args, sample):
        return float(sample.response_length)
    samples = make(hook, rollout_max_response_len=90, custom_rm=of_length).generate(0).samples
    (one, two, three), begin = asked, asked[2][0]
    assert one == (0, 10, 5, "~~~") and two == (0, 10, 5 + 1_000_003, ["~~~", "q", "z"]) and three[1:3] == (90, 5)
    assert 0 < begin and [s.reward for s in samples] == [s.response_length for s in samples]


def test_weights_that_change_meanwhile(make, engines, reference):
    """A sync stops the answer for a moment; the agent does not notice, and each token knows its version."""
    async def hook(args, sample, params):
        async with session(args, sample, params | {"ignore_eos": True}) as talk:
            async with openai.AsyncOpenAI(base_url=talk.base_url, api_key="none") as client:
                message, answer = await ask(client, [user("hi")], max_tokens=600)
                assert answer.usage.completion_tokens == 600
                await ask(client, [user("hi"), message, user("go on")], max_tokens=20)
            talk.reward = 1.0
        return talk.samples()

    def push():
        engines.pause()
        engines.flush_cache()
        engines.post("/update_weight_version", {"new_version": "1", "abort_all_requests": False})
        engines.resume()
        return {}
    rollout = make(hook, rollout_max_response_len=800)
    under_way = rollout.start(0)
    end = time.monotonic() + 60
    while not rollout.client.in_flight and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.3)                          # of the second or so that 600 tokens take
    try:
        rollout.sync(push, 1)
        (sample,) = under_way.result(100).samples
    finally:
        engines.post("/update_weight_version", {"new_version": "0", "abort_all_requests": False})
    first = sample.weight_versions[:600]
    assert set(first) == {0, 1} and first == sorted(first) and sample.loss_mask[:600] == [1] * 600
    assert set(sample.weight_versions[-20:]) == {1}
    assert_log_probs(reference, sample, mask=sample.loss_mask)


# ---- Other clients, streams ----------------------------------------------------------------------------------------------
def test_a_blocking_agent_and_streams(make, tokenizer):
    def agent(base_url):
        client = openai.OpenAI(base_url=base_url, api_key="none")
        assert [m.id for m in client.models.list()] == ["policy"]
        chunks = list(client.chat.completions.create(model="m", messages=[ASK], tools=[ADD], stream=True,
                                                     stream_options={"include_usage": True}))
        (call,) = chunks[0].choices[0].delta.tool_calls
        assert call.index == 0 and chunks[1].choices[0].finish_reason == "tool_calls" and chunks[2].usage.completion_tokens > 9
        plain = client.chat.completions.create(model="m", messages=[user("hi")], max_tokens=5, logprobs=True, temperature=COLD)
        return call.function.arguments, plain.choices[0].logprobs.content

    async def hook(args, sample, params):
        async with session(args, sample, params) as talk:
            begin = time.monotonic()
            both = await asyncio.gather(*(talk.in_thread(agent, talk.base_url) for _ in range(40)))
            assert time.monotonic() - begin < 100
            sample.metadata["said"] = both
            talk.reward = 1.0
        return talk.samples()
    samples = make(hook, rollout_temperature=COLD).generate(0).samples
    assert len(samples) == 80
    (arguments, _), *_ = samples[0].metadata["said"]
    assert json.loads(arguments) == {"a": 1, "b": 2}
    told = sorted([(t.token, round(t.logprob, 5)) for t in tokens] for _, tokens in samples[0].metadata["said"])
    kept = sorted([(tokenizer.decode([t]), round(logp, 5)) for t, logp in zip(s.response_ids(), s.rollout_log_probs)]
                  for s in samples if s.prompt.startswith("<u>hi"))
    assert told == kept


# ---- Refusals and ends ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("given, words", [
    (dict(temperature=0.3), "leave it out, or set rollout_temperature"), (dict(top_p=0.5), "set rollout_top_p"),
    (dict(n=2), "ask several times at once"), (dict(logit_bias={"5": 3}), "logit_bias.*leave it out"),
    (dict(response_format={"type": "json_object"}), "response_format.*leave it out"), (dict(seed=4), "seed=4.*leave it out"),
    (dict(stop=[7]), "must be strings"), (dict(max_tokens=0), "max_tokens=0 must be a positive number"),
    (dict(extra_body={"top_k": 3}), "top_k=3.*leave it out"),
    (dict(messages=[]), "send a list"), (dict(messages=[{"content": "hi"}]), "send role and content"),
    (dict(messages=[user([{"type": "image_url", "image_url": {"url": "x"}}])]), "text only"),
    (dict(messages=[user(["hi"])]), "cannot be read .*AttributeError.*write it as OpenAI"),
    (dict(messages=[{"role": "assistant", "tool_calls": [{"id": "1"}]}]), "cannot be read .*KeyError: 'function'"),
    (dict(tools=[ADD]), "set tool_call_parser in the run file")])
def test_what_training_would_not_know_of(play, given, words):
    async def agent(client, talk):
        with pytest.raises(openai.BadRequestError, match=words):
            await client.chat.completions.create(model="m", **{"messages": [user("hi")]} | given)
        parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
        await ask(client, [user(parts)], temperature=1.0, top_p=1.0, n=1, user="me", max_completion_tokens=4)
        return 0.0
    (sample,) = play(agent, tool_call_parser=None)
    assert sample.prompt == "<u>hi<eos>\n<a>" and sample.response_length <= 4


def test_no_room(play):
    """Answers end with "length" while there is room for a token, then calls are refused as OpenAI does."""
    async def agent(client, talk):
        talk.reward = 0.25
        with pytest.raises(openai.BadRequestError, match="make it shorter, or set rollout_max_context_len") as caught:
            await ask(client, [user("x" * 10**6)])
        assert caught.value.code == "context_length_exceeded"
        messages, reasons = [user("hi")], []
        while True:                          # until it raises, out of the session
            message, answer = await ask(client, messages, max_tokens=50)
            reasons.append(answer.choices[0].finish_reason)
            messages += [message, user("more " * 3)]
    (sample,) = play(agent, rollout_max_response_len=90)
    assert sample.status == Status.TRUNCATED and sample.response_length <= 90 and sample.reward == 0.25


def test_errors_of_an_agent_are_the_runs(play):
    asked = []

    async def no_call(client, talk):
        return 1.0

    async def broken(client, talk):
        await ask(client, [user("hi")], max_tokens=3)
        raise KeyError("mine")

    async def wrong_path(client, talk):
        with pytest.raises(openai.NotFoundError, match="v1/embeddings is not served; use chat.completions"):
            await client.embeddings.create(model="m", input="hi")
        raise KeyError("after all")

    async def refused_by_the_engine(client, talk):
        talk.params["temperature"] = -1.0
        with pytest.raises(openai.InternalServerError, match="the engine refused the request"):
            await ask(client, [user("hi")])
        asked.append(talk.asked.total())
        return 1.0

    async def too_many_rewards(client, talk):
        await ask(client, [user("hi")], max_tokens=3)
        return [1.0, 2.0]
    for agent, kind, words in ((no_call, ValueError, "no call of the agent was answered; does"), (broken, KeyError, "mine"),
                               (wrong_path, KeyError, "after all"), (too_many_rewards, ValueError, "2 rewards for 1 bran"),
                               (refused_by_the_engine, ValueError, "the engine refused the request")):
        with pytest.raises(kind, match=words):
            play(agent)
    assert asked == [1], "the client shall not try again what cannot help"


def test_calls_after_the_end_and_calls_nobody_waits_for(make):
    left = []

    async def hook(args, sample, params):
        async with session(args, sample, params | {"ignore_eos": True}) as talk:      # or it might end too soon
            client = openai.AsyncOpenAI(base_url=talk.base_url, api_key="none", max_retries=0)
            with pytest.raises(openai.APITimeoutError):          # it hangs up: nothing is recorded
                await client.with_options(timeout=0.3).chat.completions.create(
                    model="m", messages=[user("hi")], extra_body={"stop": "never"})
            await ask(client, [user("hi")], max_tokens=3)
            late = asyncio.create_task(ask(client, [user("late")]))
            while len(talk.calls) < 1:
                await asyncio.sleep(0.01)
            talk.reward = 1.0
        with pytest.raises(openai.APIConnectionError):
            await late
        with pytest.raises(openai.NotFoundError, match="this session has ended; make all calls inside its block"):
            await ask(client, [user("hi")])
        while args.rollout.client.in_flight:
            await asyncio.sleep(0.01)
        left.append(len(talk.turns))
        return talk.samples()
    (sample,) = make(hook, rollout_max_response_len=800).generate(0).samples
    assert left == [1] and sample.response_length <= 3


def test_a_group_that_is_not_wanted_any_more(make, capfd):
    """The agents of surplus groups end at once, also those that would try again for ever; their prompts are asked again."""
    ends, tries = [], []

    async def patient(base_url, calls, group):
        client = openai.AsyncOpenAI(base_url=base_url, api_key="none")
        for i in range(calls):
            try:
                await ask(client, [user("hi" + " " * i)], max_tokens=100 if i else 1)
            except asyncio.CancelledError:
                ends.append(group)
                raise
            except openai.APIError:
                await asyncio.sleep(1000)

    def blocking(base_url):
        client = openai.OpenAI(base_url=base_url, api_key="none")
        while True:
            try:
                client.chat.completions.create(model="m", messages=[user("hi")])
            except openai.InternalServerError as error:
                tries.append(str(error))
                time.sleep(0.05)
            except openai.NotFoundError:
                ends.append("thread")
                return

    async def hook(args, sample, params):
        async with session(args, sample, params) as talk:
            if sample.group_index == 2:
                await talk.in_thread(blocking, talk.base_url)
            else:
                await patient(talk.base_url, 1 + 99 * sample.group_index, sample.group_index)
            talk.reward = 0.0
        return talk.samples()
    rollout = make(hook, over_sampling_batch_size=3, n_samples_per_prompt=2)
    begin = time.monotonic()
    result = rollout.generate(0)
    assert time.monotonic() - begin < 60
    assert {s.group_index for s in result.samples} == {0} and result.metrics["rollout/groups_put_back"] == 2
    assert sorted(group[0].group_index for group in rollout.data.buffer) == [1, 2]
    assert all(s.status == Status.PENDING and not s.response_length for group in rollout.data.buffer for s in group)
    while ends.count("thread") < 2:
        assert time.monotonic() - begin < 60
        time.sleep(0.05)
    assert ends.count(1) == 2 and all("not wanted any more; end the agent" in words for words in tries)
    assert "ended with an error" not in capfd.readouterr().out


def test_a_rollout_that_takes_too_long(make):
    """generate_timeout_s cancels the hook too, which must not be taken for an unwanted group."""
    async def hook(args, sample, params):
        async with session(args, sample, params) as talk:
            async with openai.AsyncOpenAI(base_url=talk.base_url, api_key="none") as client:
                await ask(client, [user("hi")], max_tokens=1)
                await asyncio.sleep(1000)
        return talk.samples()
    with pytest.raises(TimeoutError, match="was not done in 3 s"):
        make(hook, generate_timeout_s=3.0).generate(0)
