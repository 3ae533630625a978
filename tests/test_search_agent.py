"""
test_search_agent.py: does a search find the line, and does RL see token for token what SFT has taught?

    configs/search_sft.py's rows --buffer.DataSource--> ids, mask --+
                                                                    +-- the same?
    a question --configs/search_turns.generate--> ids, mask --------+

Test:  pytest tests/test_search_agent.py     (40 s, most of it one SGLang start)
`Script` stands in for the engine where only the hook's own steps matter: it says given turns, stops and aborts where it is told. The
last test has the real engine, on a model whose weights are set by hand so that it says one conversation.
"""
import asyncio
import copy
import dataclasses
import itertools
import pathlib
import types

import pytest
import torch

from buffer import DataSource, Sample, Status
from configs import base, countries, search_turns
from configs.search_sft import make_model, teachers_rows
from helpers import prompts, run_config, running_engines
from rollout import Rollout

CONFIGS = pathlib.Path(base.__file__).parent
QUESTION = {"input": countries.questions(False)[0]["input"][:1] + [{"role": "user", "content": "What is the capital of Peru?"}],
            "label": "Lima"}
SEARCH, ANSWER = "<search> capital Peru </search>", "<answer> Lima </answer> <eos>"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("search_model"))
    make_model(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(model):
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(model)


class Script:
    """Says the turns, one a call, as Rollout.generate_sample would sample them; is aborted once, after `abort_after` tokens in all."""

    def __init__(self, tokenizer, turns: list[str], abort_after: int | None = None):
        self.tokenizer, self.abort_after = tokenizer, abort_after
        self.turns = [tokenizer(turn, add_special_tokens=False)["input_ids"] for turn in turns]
        self.said = 0                        # tokens, over all calls

    async def generate(self, sample, params):
        assert params["stop"] == ["</search>"] and sample.status == Status.PENDING
        bounds = [0, *itertools.accumulate(map(len, self.turns))]
        turn = next(i for i in range(len(self.turns)) if bounds[i] <= self.said < bounds[i + 1])
        left, room = self.turns[turn][self.said - bounds[turn]:], params["max_new_tokens"] - sample.response_length
        allowed = len(left) if self.abort_after is None else min(len(left), self.abort_after - self.said)
        ids = left[:min(room, allowed)]
        sample.append(ids, [-0.5] * len(ids), version=0)
        self.said += len(ids)
        if allowed <= room and self.said == self.abort_after:    # SGLang says so also where the last token was a stop
            self.abort_after, sample.status = None, Status.ABORTED
        else:
            sample.status = Status.COMPLETED if len(ids) == len(left) else Status.TRUNCATED
        answer = sample.tokens[len(sample.tokens) - sample.response_length:]
        sample.response = self.tokenizer.decode(answer[:-1] if answer[-1:] == [self.tokenizer.eos_token_id] else answer)
        return sample

    def run(self, sample: Sample, max_new_tokens: int = 200) -> Sample:
        args = types.SimpleNamespace(tokenizer=self.tokenizer, generate=self.generate)
        sample = asyncio.run(search_turns.generate(args, sample, {"max_new_tokens": max_new_tokens}))
        sample.check()
        return sample


def say(tokenizer, *turns, **script) -> Sample:
    return Script(tokenizer, turns, **script).run(prompts("search_agent.py", [QUESTION], tokenizer)[0])


# ---- The corpus and the search ---------------------------------------------------------------------------------------
def test_every_good_query_finds_its_line_first():
    for row in countries.table():
        for kind in countries.KINDS:
            found = countries.search(f"{kind} {row['country']}")
            assert found[0] == f"The {kind} of {row['country']} is {row[kind]}.", (row, kind, found)
            assert len(found) == 2


def test_poor_queries():
    assert [line.split(" of ")[0] for line in countries.search("currency")] == ["The currency"] * 2
    assert all("Peru" in line for line in countries.search("Peru"))
    for query in ("", "zzz ?", " \n"):
        assert countries.search(query) == [] and "nothing found" in countries.information(query)
    assert countries.search("zzz Peru") == countries.search("Peru")     # an unknown word is no obstacle
    assert countries.search("zloty") == ["The currency of Poland is zloty."]         # no line without any word is added


def test_corpus_is_small_plain_and_complete(tokenizer):
    path = CONFIGS.parent / "data" / "countries.jsonl"
    assert path.stat().st_size < 60_000 and path.read_text().isascii()
    rows = countries.table()
    assert len({row["country"] for row in rows}) == len(rows) == 186
    assert all(row.keys() == {"country", *countries.KINDS} and all(row.values()) for row in rows)
    texts = [*countries.index(0)[1], *(q["input"][1]["content"] for held in (True, False) for q in countries.questions(held)),
             countries.information("?")]
    assert tokenizer("zzz")["input_ids"] == [0]                  # an unknown word
    assert not [text for text in texts if 0 in tokenizer(text)["input_ids"]]


def test_held_out_countries_are_in_no_training_question():
    held, trained = ({q["input"][1]["content"] for q in countries.questions(flag)} for flag in (True, False))
    assert len(held) == 38 * 4 and len(trained) == 148 * 4 and not held & trained
    # SFT answers with a true fact about as often as chance has it: 1 in 186 capitals.
    truth = {countries.KINDS["capital"].format(row["country"]): f"<answer> {row['capital']} </answer>" for row in countries.table()}
    rows = [row["input"] for row in teachers_rows() if row["input"][0]["content"] in truth]
    assert sum(turns[-1]["content"] == truth[turns[0]["content"]] for turns in rows) < len(rows) * 3 / 186


# ---- SFT and RL --------------------------------------------------------------------------------------------------------
def test_sft_trains_what_rl_samples(tokenizer):
    """Every row in the real world: the same ids, the same mask, the same text, whether read or generated."""
    rows = teachers_rows([0])
    taught = prompts("search_sft.py", rows, tokenizer)
    asked = prompts("search_agent.py", [{"input": [QUESTION["input"][0], row["input"][0]], "label": "?"} for row in rows], tokenizer)
    searched = 0
    for row, sft, rl in zip(rows, taught, asked, strict=True):
        turns = [m["content"] for m in row["input"] if m["role"] == "assistant"]
        rl = Script(tokenizer, [*turns[:-1], turns[-1] + " <eos>"]).run(rl)
        assert (rl.tokens, rl.loss_mask, rl.response_length) == (sft.tokens, sft.loss_mask, sft.response_length), row
        assert rl.status == Status.COMPLETED and rl.metadata["searches"] == len(turns) - 1
        assert f"{rl.response} <eos>" == sft.response
        searched += rl.metadata["searches"]
    assert 300 < searched < len(rows)


def test_information_is_not_trained(tokenizer):
    sample = say(tokenizer, SEARCH, ANSWER)
    ids = sample.tokens[-sample.response_length:]
    told = tokenizer(countries.information("capital Peru"))["input_ids"]
    assert tokenizer.decode([i for i, m in zip(ids, sample.loss_mask) if not m]) == tokenizer.decode(told)
    assert sample.loss_mask == [1] * 4 + [0] * len(told) + [1] * 4
    assert all((log_prob == 0.0) == (mask == 0) for log_prob, mask in zip(sample.rollout_log_probs, sample.loss_mask))
    assert search_turns.right(None, sample) == search_turns.searched(None, sample) == 1.0


def test_the_last_answer_counts(tokenizer):
    rewards = {"<answer> Lima </answer>": 1.0, "<answer> Oslo </answer>": 0.0, "<answer> Oslo </answer> <answer> Lima </answer>": 1.0,
               "<answer> Lima Lima </answer>": 0.0, "<answer> </answer>": 0.0, "Lima": 0.0}
    for text, reward in rewards.items():
        sample = say(tokenizer, text + " <eos>")
        assert (search_turns.right(None, sample), search_turns.searched(None, sample)) == (reward, 0.0), text


# ---- Ends --------------------------------------------------------------------------------------------------------------
def test_turn_limit(tokenizer):
    sample = say(tokenizer, SEARCH, SEARCH, SEARCH, ANSWER)      # the last is never asked for
    assert sample.status == Status.COMPLETED and sample.metadata["searches"] == search_turns.MAX_SEARCHES == 2
    assert sample.response.endswith("</search>") and sample.response.count("<search>") == 3
    assert search_turns.right(None, sample) == 0.0
    assert search_turns.right(None, say(tokenizer, SEARCH, SEARCH, ANSWER)) == 1.0


@pytest.mark.parametrize("limit", range(1, 32))
def test_token_limit(tokenizer, limit):
    whole = say(tokenizer, SEARCH, ANSWER)
    sample = Script(tokenizer, [SEARCH, ANSWER]).run(prompts("search_agent.py", [QUESTION], tokenizer)[0], max_new_tokens=limit)
    n = sample.response_length
    assert n <= limit and sample.tokens == whole.tokens[:len(sample.tokens)] and sample.loss_mask == whole.loss_mask[:n]
    assert sample.status == (Status.COMPLETED if limit >= whole.response_length else Status.TRUNCATED)
    assert sample.loss_mask[-1] == 1         # information with no room behind it is left out


def test_words_behind_the_stop_and_broken_tags(tokenizer):
    sample = say(tokenizer, SEARCH + " is", ANSWER)              # a token of a large tokenizer can be ">\n"
    assert sample.metadata["searches"] == 1 and search_turns.right(None, sample)
    sample = say(tokenizer, "capital </search>", "<search> </search>", "<answer> Lima <eos>")
    assert "of Afghanistan" in sample.response and "nothing found" in sample.response      # no opening tag; no query
    assert sample.status == Status.COMPLETED and search_turns.right(None, sample) == 0.0


def test_an_aborted_sample_goes_on_where_it_was(tokenizer):
    turns = [SEARCH, "<search> Peru </search>", ANSWER]
    whole = say(tokenizer, *turns)
    assert whole.metadata["searches"] == 2
    for cut in range(12):                    # 4 + 3 + 4 tokens are said; 4 and 7: right behind a </search>; 11: the end itself
        script = Script(tokenizer, turns, abort_after=cut)
        sample = script.run(prompts("search_agent.py", [QUESTION], tokenizer)[0])
        assert sample.status == Status.ABORTED and script.said == cut and sum(sample.loss_mask) == cut
        sample = Sample.from_dict(copy.deepcopy(sample.to_dict()))           # through a checkpoint
        sample.status = Status.PENDING       # as Rollout.put_back does
        if cut < 11:
            sample = script.run(sample)
            assert dataclasses.asdict(sample) == dataclasses.asdict(whole), cut


# ---- The real engine -----------------------------------------------------------------------------------------------------
def set_bigrams(folder: str, tokenizer, turns: list[str]) -> None:
    """Layers that add nothing, and a head that answers each token with the one that follows it in these turns."""
    from transformers import Qwen3ForCausalLM
    model = Qwen3ForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding = torch.randn(len(tokenizer), model.config.hidden_size)
        head = torch.zeros_like(embedding)
        for turn in turns:
            ids = tokenizer(turn)["input_ids"]
            for now, after in zip(ids, ids[1:]):
                head[after] += 0.08 * embedding[now]             # a logit of about 10, the others below 4
        model.model.embed_tokens.weight.copy_(embedding)
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(head)
    model.save_pretrained(folder)


def test_real_engine(tmp_path, tokenizer):
    """Stop strings, log-probs and text by SGLang, through rollout.py: one question, the tokens that SFT teaches for it."""
    make_model(str(tmp_path / "model"))
    set_bigrams(str(tmp_path / "model"), tokenizer, [f"? {SEARCH}", f"</information> {ANSWER}"])
    turns = [{"role": "assistant", "content": SEARCH}, {"role": "tool", "content": countries.information("capital Peru")},
             {"role": "assistant", "content": "<answer> Lima </answer>"}]
    taught = prompts("search_sft.py", [{"input": [*QUESTION["input"], *turns]}], tokenizer)[0]
    held = dict(prompt_data=lambda: [QUESTION])
    cfg = dataclasses.replace(run_config("search_agent.py"), prompt_data=lambda: [QUESTION],
                              eval_prompt_data=dict(right=held, searched=held | dict(custom_rm=search_turns.searched)))
    with running_engines(tmp_path, str(tmp_path / "model"), rollout_num_gpus=1) as engines:
        engines.post("/update_weight_version", {"new_version": "0", "abort_all_requests": False})     # as a first sync would
        data = {name: DataSource(base.eval_config(cfg, name), tokenizer, 256) for name in cfg.eval_prompt_data}
        rollout = Rollout(cfg, engines, DataSource(cfg, tokenizer, 256), data, tmp_path)
        try:
            metrics = rollout.evaluate(0)
            group = rollout.client.run(rollout.generate_group(data["right"].cfg, data["right"].get_samples(1)[0], evaluation=True))
            rollout.client.context_len = len(taught.tokens)             # no room for SGLang to answer in
            short = rollout.client.run(rollout.generate_group(data["right"].cfg, data["right"].get_samples(1)[0], evaluation=True))[0]
        finally:
            rollout.close()
    assert (metrics["eval/right"], metrics["eval/searched"]) == (1.0, 1.0)
    assert short.status == Status.TRUNCATED and short.metadata["searches"] == 1 and "is Lima" in short.response
    for sample in group:
        assert (sample.tokens, sample.loss_mask) == (taught.tokens, taught.loss_mask)
        assert f"{sample.response} <eos>" == taught.response and sample.status == Status.COMPLETED and sample.reward == 1.0
        assert all(-1 < p < 0 if mask else p == 0.0 for p, mask in zip(sample.rollout_log_probs, sample.loss_mask))
