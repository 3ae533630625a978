"""
test_fully_async.py: is generation that never stops still exact? Two real SGLang servers whose weight version changes under answers
(the weights stay, so transformers can say which log-probs are right); no trainers: training is a pause, a sync a new number.

Test:  pytest tests/test_fully_async.py      (about 60 s on two cores)
"""
import asyncio
import collections
import contextlib
import json
import time

import pytest

import hooks
from buffer import DataSource
from configs.base import eval_config
from helpers import assert_log_probs, make_cfg, running_engines, share_of_digits, sums
from engines import EngineError, call
from fully_async import FullyAsyncRollout
from rollout import Rollout
from sample import Sample, Status

CONTEXT = 2048
P, N = 3, 2


@pytest.fixture(scope="module")
def engines(tiny_model, tmp_path_factory):
    with running_engines(tmp_path_factory.mktemp("run"), tiny_model, rollout_num_gpus=2) as engines:
        yield engines


@pytest.fixture
def make(engines, tokenizer, tmp_path):
    with contextlib.ExitStack() as stack:
        def build(**changes) -> FullyAsyncRollout:
            cfg = dict(prompt_data=sums, label_key="label", custom_rm=share_of_digits, rollout_num_gpus=2, rollout_batch_size=P,
                       n_samples_per_prompt=N, rollout_max_response_len=60, request_timeout_s=200.0, fully_async=True,
                       max_staleness=2)
            cfg = make_cfg(**cfg | changes)
            held_out = {name: DataSource(eval_config(cfg, name), tokenizer, CONTEXT) for name in cfg.eval_prompt_data}
            rollout = FullyAsyncRollout(cfg, engines, DataSource(cfg, tokenizer, CONTEXT), held_out, tmp_path)
            stack.callback(rollout.close)
            sync(rollout, 0)
            return rollout
        yield build


def sync(rollout, version: int) -> None:
    """As Trainers.push_weights does it, without weights."""
    def push():
        rollout.engines.pause()
        rollout.engines.flush_cache()
        rollout.engines.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        rollout.engines.resume()
        return {}
    rollout.sync(push, version)


def run(rollout, steps, train_s=0.15) -> dict[int, list[Sample]]:
    """step -> its samples, each checked for what must always hold."""
    out = {}
    for step in steps:
        result = rollout.generate(step)
        time.sleep(train_s)
        out[step] = result.samples
        for s in result.samples:
            s.check()
            assert s.reward is not None and len(s.weight_versions) == s.response_length
            assert s.weight_versions == sorted(s.weight_versions) and max(s.weight_versions) <= step
            trained = s.trained_versions()
            assert not trained or step - min(trained) <= rollout.cfg.max_staleness, (step, sorted(set(trained)))
        sync(rollout, step + 1)
    return out


async def of_many_lengths(args, sample, params):
    """Some answers are shorter than a step, some longer than two."""
    length = [20, 900, 200, 500][sample.group_index % 4] + sample.index % 7
    return await args.generate(sample, params | {"max_new_tokens": length, "ignore_eos": True})


def test_answers_go_on_over_weight_updates(make, reference):
    rollout = make(custom_generate_function=of_many_lengths, eval_prompt_data={"held_out": lambda: sums()[:2]})
    batches = run(rollout, range(5))
    samples = [s for batch in batches.values() for s in batch]
    assert all(len(batch) == P * N for batch in batches.values())
    indices = [s.index for s in samples]
    assert len(set(indices)) == len(indices), "no sample is trained twice"
    mixed = [s for s in samples if len(set(s.weight_versions)) > 1]
    assert mixed, "some answers were interrupted"
    for s in samples:
        assert s.response_length == [20, 900, 200, 500][s.group_index % 4] + s.index % 7
        assert_log_probs(reference, s)       # also where a new request went on with an old one's tokens
    assert rollout.evaluate(4)["eval/held_out-failed"] == 0, "while others are being generated"
    everywhere = sorted({s.group_index for s in samples} | set(rollout.ready) | set(rollout.under_way))
    assert everywhere == list(range(rollout.data.next_group)), "each group is trained, ready or under way"


def test_an_end_token_ends_the_answer_also_when_the_abort_came_first(make, tokenizer):
    """SGLang calls an answer aborted whose last token was the end. Going on behind it made nonsense."""
    rollout = make(rollout_batch_size=8, rollout_max_response_len=200)
    samples = [s for batch in run(rollout, range(8), train_s=0.02).values() for s in batch]
    ended = [s for s in samples if tokenizer.eos_token_id in s.response_ids()]
    assert len(ended) > 60
    for s in ended:
        assert s.response_ids().index(tokenizer.eos_token_id) == s.response_length - 1 and s.status == Status.COMPLETED


@pytest.mark.parametrize("pieces, reason, params, kept, status", [
    (["12", "3<eos>"], "abort", {}, "123<eos>", Status.COMPLETED),
    (["12<eos>45"], "abort", {}, "12<eos>", Status.COMPLETED),
    (["12<eos>"], "abort", {"ignore_eos": True}, "12<eos>", Status.ABORTED),
    (["1a", "bc"], "abort", {"stop": ["ab"]}, "1ab", Status.COMPLETED),
    (["1a", "bc"], "length", {"stop": "ab"}, "1ab", Status.COMPLETED),
    (["1a", "c"], "abort", {"stop": ["ab"]}, "1ac", Status.ABORTED),
    (["12", "7x"], "abort", {"stop_token_ids": [10]}, "127", Status.COMPLETED)])
def test_where_an_answer_in_pieces_ends(make, tokenizer, pieces, reason, params, kept, status):
    """Token 10 is "7"."""
    client, sample = make().client, Sample(tokens=[3, 4, 5])
    for piece in pieces:
        ids = tokenizer(piece, add_special_tokens=False)["input_ids"]
        client.take(sample, {"output_token_logprobs": [(-1.0, i, None) for i in ids], "finish_reason": {"type": reason}}, params, 3)
    assert tokenizer.decode(sample.response_ids()) == kept and sample.status == status
    assert sample.response == kept.removesuffix("<eos>" if status == Status.COMPLETED else "?").removesuffix(
        "7" if params.get("stop_token_ids") else "?")
    sample.check()


def test_what_would_be_too_old_is_waited_for(make):
    """Group 0 takes very long: batch h is the last that may train it, and waits. Nobody else is held up before."""
    took = collections.defaultdict(float)

    async def one_slow(args, sample, params):
        if sample.group_index == 0:
            sample = await args.generate(sample, params | {"max_new_tokens": 5, "ignore_eos": True})
            await asyncio.sleep(4.0)
        return await args.generate(sample, params | {"max_new_tokens": 10, "ignore_eos": True})
    rollout = make(custom_generate_function=one_slow)
    where = {}
    for step in range(4):
        begin = time.monotonic()
        where |= {s.group_index: step for s in rollout.generate(step).samples}
        took[step] = time.monotonic() - begin
        sync(rollout, step + 1)
    assert where[0] == 2 == rollout.cfg.max_staleness and took[0] + took[1] < 3.5 < took[0] + took[1] + took[2] + 0.5


def test_old_tokens_are_masked_instead(make):
    async def slow(args, sample, params):
        sample = await args.generate(sample, params | {"max_new_tokens": 5, "ignore_eos": True})
        await asyncio.sleep(2.0 * (sample.group_index % 3 == 0))
        return await args.generate(sample, params | {"max_new_tokens": 10, "ignore_eos": True})
    rollout = make(custom_generate_function=slow, mask_offpolicy_in_partial_rollout=True, max_staleness=1)
    batches = run(rollout, range(6), train_s=0.02)
    masked = [(step, s) for step, batch in batches.items() for s in batch if 0 in s.loss_mask]
    assert masked
    for step, s in masked:
        assert s.loss_mask == [int(v >= step - 1) for v in s.weight_versions]


@pytest.mark.parametrize("partial", [False, True])
def test_resume_loses_and_doubles_nothing(make, partial, reference):
    """The state is taken between two steps and goes through JSON; another Rollout goes on with it."""
    rollout = make(custom_generate_function=of_many_lengths, partial_rollout=partial, max_staleness=2)
    before = [s for batch in run(rollout, range(3)).values() for s in batch]
    time.sleep(0.1)
    sync(rollout, 3)                         # so that some samples have pieces
    state = json.loads(json.dumps(rollout.state_dict()))
    pieces = [s for group in state["under_way"] for s in group if s["response_length"] and s["status"] == "aborted"]
    rollout.close()
    again = make(custom_generate_function=of_many_lengths, partial_rollout=partial, max_staleness=2)
    again.load_state_dict(state)
    sync(again, 3)
    after = [s for batch in run(again, range(3, 6)).values() for s in batch]
    indices = [s.index for s in before + after]
    assert len(set(indices)) == len(indices) == 6 * P * N
    groups = {s.group_index for s in before + after} | set(again.ready) | set(again.under_way) | {
        group[0].group_index for group in again.data.buffer}
    assert groups == set(range(again.data.next_group))
    for s in after:
        assert_log_probs(reference, s)
    kept = {s["index"]: s["tokens"] for s in pieces}
    for s in after:
        if s.index in kept and partial:
            assert s.tokens[:len(kept[s.index])] == kept[s.index], "it went on with what it had"


def test_fully_async_may_be_set_or_removed_where_a_run_resumes(make, engines, tokenizer, tmp_path):
    rollout = make()
    trained = run(rollout, range(1))[0]
    state = json.loads(json.dumps(rollout.state_dict()))
    rollout.close()
    plain = Rollout(make_cfg(prompt_data=sums, label_key="label"), engines, DataSource(rollout.cfg, tokenizer, CONTEXT), {}, tmp_path)
    plain.load_state_dict(state)
    waiting = {group[0].group_index for group in plain.data.buffer}
    assert waiting and waiting == set(range(plain.data.next_group)) - {s.group_index for s in trained}
    again = make()
    again.load_state_dict(plain.state_dict())
    plain.close()
    sync(again, 1)
    assert {s.group_index for s in run(again, range(1, 2))[1]} <= waiting


def test_a_hooks_own_request_is_whole(make, reference):
    async def own(args, sample, params):
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
        out = await hooks.post(url, {"input_ids": sample.tokens, "return_logprob": True,
                                     "sampling_params": params | {"max_new_tokens": 400, "ignore_eos": True}})
        pairs = out["meta_info"]["output_token_logprobs"]
        assert [pair[1] for pair in pairs] == out["output_ids"] and out["meta_info"]["completion_tokens"] == 400
        # The tiny model has ids that its tokenizer does not know: SGLang writes <pad> for them, decode() nothing.
        assert out["text"].replace("<pad>", "") == args.tokenizer.decode(out["output_ids"]).replace("<pad>", "")
        sample.append_response_tokens(args, tokens=out["output_ids"], log_probs=[pair[0] for pair in pairs],
                                      meta_info=out["meta_info"], text=out["text"])
        return sample
    rollout = make(custom_generate_function=own)
    samples = [s for batch in run(rollout, range(4), train_s=0.1).values() for s in batch]
    assert rollout.client.holds >= 4
    for s in samples:
        assert s.response_length == 400
        assert_log_probs(reference, s)


def test_an_evaluation_does_not_take_a_conversation_for_finished(make):
    """Held-out samples are numbered from 0 like those that train: what ends there says nothing about these."""
    async def two_turns(args, sample, params, evaluation=False):
        sample = await args.generate(sample, params | {"max_new_tokens": 5, "ignore_eos": True})
        await asyncio.sleep(0.0 if evaluation else 60.0)
        return sample
    rollout = make(custom_generate_function=two_turns, partial_rollout=True, eval_prompt_data={"held_out": lambda: sums()[:P * N]})
    pending = rollout.start(0)
    while len(rollout.under_way) < P or any(s.response_length < 5 for group in rollout.under_way.values() for s in group):
        time.sleep(0.05)
    rollout.evaluate(0)
    under_way = [s for group in rollout.state_dict()["under_way"] for s in group]
    assert {s["index"] for s in under_way} >= set(range(P * N)) and {s["status"] for s in under_way} == {"aborted"}
    pending.cancel()


def test_a_cut_answer_keeps_its_log_probs_beside_its_tokens(make, monkeypatch):
    """The stop string "ab" in two pieces, and more behind it: tokens, log-probs and text end at the same place."""
    rollout = make()
    ids = {piece: rollout.client.tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in ("1a", "bcdefg")}
    pieces = list(ids.values())

    async def request(payload):
        rollout.client.holds += 1            # a sync after each
        own = pieces.pop(0)
        return {"text": "?", "output_ids": own, "meta_info": {"finish_reason": {"type": "abort"}, "weight_version": "0",
                                                              "output_token_logprobs": [(-float(i), i, None) for i in own]}}
    monkeypatch.setattr(rollout.client, "request", request)
    url = rollout.engines.router_url + "/generate"
    out = rollout.client.run(rollout.client.post(url, {"text": "x", "sampling_params": {"stop": "ab", "max_new_tokens": 50}}))
    assert out["text"] == "1ab" and out["meta_info"]["finish_reason"]["type"] == "stop"
    assert [pair[1] for pair in out["meta_info"]["output_token_logprobs"]] == out["output_ids"] == ids["1a"] + ids["bcdefg"][:1]


def test_filters_failures_and_an_end_of_the_data(make):
    async def fails(args, sample):
        if sample.group_index % 5 == 4:
            raise KeyError("no answer")
        return float(sample.index % 2)
    rollout = make(custom_rm=fails, on_reward_error="skip", dynamic_sampling_filter=lambda args, group: group[0].group_index % 3 != 1)
    total = collections.Counter()
    for step in range(4):
        metrics = rollout.generate(step).metrics
        total.update({k: metrics[f"rollout/groups_{k}"] for k in ("trained", "filtered", "failed", "put_back")})
        sync(rollout, step + 1)
    assert total["trained"] == 4 * P and total["filtered"] > 0 and total["failed"] > 0 and total["put_back"] == 0
    nobody = make(dynamic_sampling_filter=lambda args, group: False, max_batches_asked=3)
    with pytest.raises(RuntimeError, match="step 0 has 0 of 3 groups.*dropped.*change the prompts or the"):
        nobody.generate(0)


def test_an_error_ends_the_step(make):
    async def raises(args, sample, params):
        raise ZeroDivisionError("in a hook")
    with pytest.raises(ZeroDivisionError, match="in a hook"):
        make(custom_generate_function=raises).generate(0)


def test_an_engine_that_dies_in_a_sync_is_replaced(make, engines):
    """The last test: answers are in flight, the sync has begun, one engine is gone. All is sent again, and answers go on."""
    rollout = make(custom_generate_function=of_many_lengths)
    tries, resynced = [], []

    def resync(ranks):
        resynced.append(ranks)
        engines.post("/update_weight_version", {"new_version": "1", "abort_all_requests": False}, only=ranks)
    rollout.client.resync = resync

    def push():
        tries.append(len(tries))
        engines.pause()
        if len(tries) == 1:
            engines.fault(1, "kill")
            with contextlib.suppress(EngineError):               # until it is gone: else the push may still come through
                for _ in range(1000):
                    call("GET", engines.urls[1] + "/health", None, 30.0)
                    time.sleep(0.02)
        engines.flush_cache()
        engines.post("/update_weight_version", {"new_version": "1", "abort_all_requests": False})
        engines.resume()
        return {"bytes": 7}
    before = rollout.generate(0).samples
    assert rollout.sync(push, 1) == {"bytes": 7} and tries == [0, 1] and resynced == [[1]] and engines.restarts == 1
    assert engines.check() == [] and set(engines.router.workers()) == set(engines.urls) and rollout.client.weight_version == 1
    samples = before + rollout.generate(1).samples
    assert len({s.index for s in samples}) == 2 * P * N
    for s in samples:
        assert s.response_length == [20, 900, 200, 500][s.group_index % 4] + s.index % 7
    metrics = rollout.client.metrics()
    assert metrics["rollout/engine_restarts"] == 1
