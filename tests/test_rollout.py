"""
test_rollout.py: do prompts become the right samples, and is none lost? Two real SGLang servers, the router, real reward
processes; transformers says which log-probs are right.

Test:  pytest tests/test_rollout.py      (about 90 s on two cores: three SGLang starts)
Left out on purpose: graders (tests/test_rewards.py), trainers: a "new weight version" here is only a number, except where an
engine dies.
"""
import asyncio
import collections
import contextlib
import copy
import dataclasses
import functools
import itertools
import json
import pathlib
import threading
import time

import aiohttp
import psutil
import pytest
import torch

from buffer import DataSource, Status
from configs.base import eval_config
from engines import EngineError, call
from helpers import assert_log_probs, make_cfg, running_engines, share_of_digits, sums
from rewards import RewardError
from hooks import DynamicFilterOutput, check_reward_nonzero_std
from rollout import Rollout
from rollout_metrics import pass_at_k

CONTEXT = 2048                               # tokens: the tiny model's max_position_embeddings
LONG = 1600                                  # tokens of an answer: some seconds, in which there is time to abort it


# ---- What is shared ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def engines(tiny_model, tmp_path_factory):
    with running_engines(tmp_path_factory.mktemp("run"), tiny_model, rollout_num_gpus=2, max_engine_restarts=10) as engines:
        engines.post("/update_weight_version", {"new_version": "0", "abort_all_requests": False})
        yield engines


@pytest.fixture
def make(engines, tokenizer, tmp_path):
    """make(**changes of the config) -> Rollout; closed after the test."""
    with contextlib.ExitStack() as stack:
        def build(**changes) -> Rollout:
            cfg = dict(prompt_data=sums, label_key="label", custom_rm=share_of_digits, rollout_num_gpus=2, rollout_batch_size=4,
                       n_samples_per_prompt=3, rollout_max_response_len=12, request_timeout_s=400.0, health_check_interval_s=5.0,
                       reward_timeout_s=20.0)
            cfg = make_cfg(**cfg | {"over_sampling_batch_size": changes.get("rollout_batch_size", 4)} | changes)
            engines.post("/update_weight_version", {"new_version": "0", "abort_all_requests": False})
            held_out = {name: DataSource(eval_config(cfg, name), tokenizer, CONTEXT) for name in cfg.eval_prompt_data}
            rollout = Rollout(cfg, engines, DataSource(cfg, tokenizer, CONTEXT), held_out, tmp_path)
            stack.callback(rollout.close)
            return rollout
        yield build


async def long_answers(args, sample, params):
    """A custom_generate_function: 300 tokens each, in which there is time to abort or to kill."""
    return await args.generate(sample, params | {"max_new_tokens": 300, "ignore_eos": True})


def groups_of(samples) -> dict[int, list]:
    groups = collections.defaultdict(list)
    for sample in samples:
        groups[sample.group_index].append(sample)
    return groups


def outcomes(metrics) -> dict[str, int]:
    return {k: metrics[f"rollout/groups_{k}"] for k in ("trained", "filtered", "put_back", "failed")}


# ---- A step ------------------------------------------------------------------------------------------------------------
def test_generate(make, tokenizer, reference, tmp_path):
    rollout = make()
    result = rollout.generate(0)
    assert [(s.group_index, s.index) for s in result.samples] == [(i // 3, i) for i in range(12)]
    for s in result.samples:
        s.check()
        prompt = tokenizer(s.prompt)["input_ids"]
        assert s.tokens[:-s.response_length] == prompt and 1 <= s.response_length <= 12
        ended = s.tokens[-1] == tokenizer.eos_token_id
        assert s.response_length == 12 or ended
        assert s.status == (Status.COMPLETED if ended else Status.TRUNCATED)
        assert s.response == tokenizer.decode(s.tokens[len(prompt):len(s.tokens) - ended])
        assert s.loss_mask == [1] * s.response_length and s.weight_versions == [0] * s.response_length
        assert s.reward == asyncio.run(share_of_digits(None, s))
        assert_log_probs(reference, s)
    assert len({tuple(s.tokens) for s in result.samples}) > 4, "siblings must not be copies"
    assert outcomes(result.metrics) == dict(trained=4, filtered=0, put_back=0, failed=0)
    assert result.metrics["rollout/response_len/mean"] == pytest.approx(sum(s.response_length for s in result.samples) / 12)
    assert result.metrics["rollout/stale_tokens"] == 0
    for i in range(0, 12, 3):                # normalised within the group: mean 0, std 1 (or all 0)
        own, raw = torch.tensor(result.rewards[i:i + 3]), torch.tensor([s.reward for s in result.samples[i:i + 3]])
        torch.testing.assert_close(own, (raw - raw.mean()) / (raw.std() + 1e-6), atol=1e-4, rtol=0)
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(r["step"], r["set"], r["index"], r["response"]) for r in lines] == [
        (0, "train", s.index, s.response) for s in result.samples]


def test_an_end_token_at_the_limit_ends_the_answer(make, tokenizer):
    async def one_token_until_it_is_the_end(args, sample, params):
        tries = await asyncio.gather(*(args.generate(copy.deepcopy(sample), params | {"max_new_tokens": 1})
                                       for _ in range(50)))      # after "y8" each is the end with probability 0.4
        return next(one for one in tries if one.tokens[-1] == tokenizer.eos_token_id)
    rollout = make(custom_generate_function=one_token_until_it_is_the_end, rollout_batch_size=1, n_samples_per_prompt=2,
                   prompt_data=lambda: [dict(input="y8", label="")])
    assert [(s.status, s.response, s.response_length) for s in rollout.generate(0).samples] == [(Status.COMPLETED, "", 1)] * 2


def test_context_bounds_the_response(make, tokenizer):
    """Tokens of prompt and response together; a prompt that leaves no room is left out when the data is read."""
    prompts = ["1" * 12, "2" * 18, "3" * 17]
    rollout = make(prompt_data=lambda: [dict(input=p, label="") for p in prompts], rollout_max_context_len=24,
                   custom_generate_function=long_answers, rollout_batch_size=2)
    assert rollout.data.skipped == {"prompt_too_long": 1}
    samples = rollout.generate(0).samples
    assert {s.prompt for s in samples} == {prompts[0], prompts[2]}
    assert all(s.status == Status.TRUNCATED and len(s.tokens) <= 24 for s in samples)
    assert {len(s.tokens) for s in samples if s.prompt == prompts[0]} == {24}


@pytest.mark.parametrize("length", [CONTEXT - 6, CONTEXT - 7, CONTEXT - 20])
def test_prompts_at_the_engines_own_limit(make, length):
    """SGLang refuses inputs some tokens before its context is full: such prompts are left out, and a conversation that
    has grown so long is a truncated sample, not a dead run."""
    async def a_tool_has_filled_it(args, sample, params):
        room = CONTEXT - 6 - len(sample.tokens)
        if room > 0 and sample.index % 2:
            sample.append([7] * room, trainable=False)
        return await long_answers(args, sample, params)
    ask = functools.partial(make, prompt_data=lambda: [dict(input="1" * length, label="")], rollout_batch_size=1,
                            custom_generate_function=a_tool_has_filled_it)
    if length > CONTEXT - 7:
        with pytest.raises(ValueError, match=f"prompt_too_long.: 1.*the limit is {CONTEXT - 7} tokens"):
            ask()
        return
    samples = ask().generate(0).samples
    assert all(s.status == Status.TRUNCATED and len(s.tokens) <= CONTEXT for s in samples)
    assert all(bool(s.trained_versions()) != bool(s.index % 2) for s in samples), "the full ones got no token more"


# ---- Filters and over-sampling -------------------------------------------------------------------------------------------
def keep_even(args, samples):
    assert args.sglang_router_port and len(samples) == args.n_samples_per_prompt
    return samples[0].group_index % 2 == 0


def keep_even_with_reason(args, samples):
    keep = samples[0].group_index % 2 == 0
    return DynamicFilterOutput(keep, None if keep else "odd")


@pytest.mark.parametrize("keep, reason", [(keep_even, "filter"), (keep_even_with_reason, "odd")])
def test_a_filtered_group_is_replaced(make, keep, reason):
    rollout = make(dynamic_sampling_filter=keep)
    result = rollout.generate(0)
    trained = sorted(groups_of(result.samples))
    assert len(trained) == 4 and all(g % 2 == 0 for g in trained)
    got = outcomes(result.metrics)
    assert got["filtered"] == result.metrics[f"rollout/dynamic_filter/drop_{reason}"] >= 1
    assert sum(got.values()) == rollout.data.next_group and got["put_back"] == len(rollout.data.buffer)


def test_nonzero_std_filter(make):
    async def by_group(args, sample):        # all 1.0, all 0.5, then two rewards; one group at a time, so in this order
        return {0: 1.0, 1: 0.5}.get(sample.group_index, float(sample.index % 2))
    rollout = make(dynamic_sampling_filter=check_reward_nonzero_std, custom_rm=by_group, rollout_batch_size=1)
    result = rollout.generate(0)
    assert list(groups_of(result.samples)) == [2]
    drops = {k.removeprefix("rollout/dynamic_filter/drop_"): v for k, v in result.metrics.items() if "/drop_" in k}
    assert drops == {"zero_std_1.0": 1, "zero_std_0.5": 1} and result.metrics["rollout/groups_filtered"] == 2


def test_dict_rewards_reach_the_filter(make):
    async def scores(args, sample):
        return {"score": float(sample.index), "other": 1.0}
    result = make(custom_rm=scores, reward_key="score", dynamic_sampling_filter=check_reward_nonzero_std).generate(0)
    assert result.metrics["rollout/groups_filtered"] == 0 and result.metrics["rollout/raw_reward"] == sum(range(12)) / 12
    result = make(custom_rm=scores, reward_key="other").generate(0)
    assert result.rewards == [0.0] * 12 and result.metrics["rollout/zero_std/count_1.0"] == 4


def test_a_filter_that_drops_everything_ends_the_run(make):
    rollout = make(dynamic_sampling_filter=lambda args, samples: False, rollout_batch_size=1, n_samples_per_prompt=2)
    with pytest.raises(RuntimeError, match=r"20 groups were asked .* dropped \{'filter': 20\}.*change the prompts or the dynamic"):
        rollout.generate(0)


def test_surplus_groups_wait_and_none_is_lost(make):
    rollout = make(over_sampling_batch_size=7, rollout_batch_size=4)
    trained = []
    for step in range(4):
        waiting = [group[0].group_index for group in rollout.data.buffer]
        result = rollout.generate(step)
        trained += sorted(groups_of(result.samples))
        assert all(len(group) == 3 for group in groups_of(result.samples).values())
        assert outcomes(result.metrics) == dict(trained=4, filtered=0, put_back=3, failed=0)
        asked_now = set(groups_of(result.samples)) | {group[0].group_index for group in rollout.data.buffer}
        assert set(waiting) <= asked_now, "what waited is asked first"
        for group in rollout.data.buffer:    # as if they had not been asked
            assert all(s.status == Status.PENDING and s.response_length == 0 and s.reward is None for s in group)
            assert all(s.tokens == rollout.client.tokenizer(s.prompt)["input_ids"] for s in group)
    everything = sorted(trained + [group[0].group_index for group in rollout.data.buffer])
    assert everything == list(range(rollout.data.next_group)), "each once: trained, or waiting"


# ---- Partial rollout -----------------------------------------------------------------------------------------------------
def mostly_long():
    """Of groups 2 and 3 the first sample is soon done and its siblings take long; groups 0 and 1 end just after those two, and
    later groups after the siblings."""
    ended, change = collections.Counter(), asyncio.Condition()

    async def generate(args, sample, params):
        kind = ("short" if sample.group_index < 2 else "late" if sample.group_index > 3
                else "long" if sample.index % args.n_samples_per_prompt else "first")
        need = {"short": ("first", 2), "late": ("long", 4)}.get(kind)
        if need:
            async with change:
                await asyncio.wait_for(change.wait_for(lambda: ended[need[0]] >= need[1]), 400)
        length = LONG if kind in ("long", "late") else 8
        sample = await args.generate(sample, params | {"max_new_tokens": length, "ignore_eos": True})
        async with change:
            ended[kind] += sample.status == Status.TRUNCATED
            change.notify_all()
        return sample
    return generate


@pytest.mark.parametrize("mask", [False, True])
def test_partial_rollout_goes_on(make, engines, reference, mask):
    rollout = make(rollout_batch_size=2, over_sampling_batch_size=4, custom_generate_function=mostly_long(),
                   partial_rollout=True, mask_offpolicy_in_partial_rollout=mask)
    first = rollout.generate(0)
    assert sorted(groups_of(first.samples)) == [0, 1] and outcomes(first.metrics)["put_back"] == 2
    before = {}
    for group in rollout.data.buffer:
        assert group[0].status == Status.TRUNCATED and group[0].response_length == 8
        assert all(s.status == (Status.PENDING if s.response_length < LONG else Status.TRUNCATED) for s in group[1:])
        before |= {s.index: list(s.tokens) for s in group}
    assert any(0 < s.response_length < LONG for group in rollout.data.buffer for s in group[1:]), "some were under way"

    engines.post("/update_weight_version", {"new_version": "1", "abort_all_requests": False})
    rollout.client.weight_version = 1
    second = rollout.generate(1)
    done = [s for s in second.samples if s.index in before]
    assert sorted(groups_of(done)) == [2, 3] and len(done) == 6
    for s in done:
        old = len(before[s.index]) - (len(s.tokens) - s.response_length)
        assert s.tokens[:len(before[s.index])] == before[s.index]
        assert s.response_length == (8 if s.index % 3 == 0 else LONG)
        assert s.weight_versions == [0] * old + [1] * (s.response_length - old)
        assert s.loss_mask == ([0] * old if mask else [1] * old) + [1] * (s.response_length - old)
        assert_log_probs(reference, s)       # the numbers are the same weights'
        assert s.reward is not None
    trained = [v for s in second.samples for v, m in zip(s.weight_versions, s.loss_mask) if m]
    stale = trained.count(0) / len(trained)
    assert second.metrics["rollout/stale_tokens"] == pytest.approx(stale) and (stale == 0) == mask


def test_without_partial_rollout_aborted_groups_start_again(make):
    rollout = make(rollout_batch_size=2, over_sampling_batch_size=4, custom_generate_function=mostly_long())
    rollout.generate(0)
    assert [group[0].group_index for group in rollout.data.buffer] == [2, 3]
    for s in (s for group in rollout.data.buffer for s in group):
        assert s.status == Status.PENDING and s.response_length == 0
        assert s.loss_mask == s.weight_versions == s.rollout_log_probs == []
        assert s.tokens == rollout.client.tokenizer(s.prompt)["input_ids"]


# ---- Custom generation -----------------------------------------------------------------------------------------------------
def test_custom_generate_with_its_own_request(make, reference):
    """Upstream's way: the router's address from args, one's own HTTP, one's own sample."""
    seen = []

    async def own_request(args, sample, sampling_params, evaluation=False):
        seen.append(evaluation)
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
        payload = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
        async with aiohttp.ClientSession() as session, session.post(url, json=payload) as answer:
            meta = (await answer.json())["meta_info"]
        pairs = meta["output_token_logprobs"]
        sample.append([token for _, token, _ in pairs], [logp for logp, _, _ in pairs])
        sample.append([7, 8], trainable=False)                   # a tool's words
        sample.response, sample.status = "x", Status.COMPLETED
        return sample
    rollout = make(custom_generate_function=own_request, eval_prompt_data={"held_out": sums})
    samples = rollout.generate(0).samples
    assert seen == [False] * 12 and len(samples) == 12
    for s in samples:
        assert s.tokens[-2:] == [7, 8] and s.loss_mask == [1] * (s.response_length - 2) + [0, 0]
        n = s.response_length - 2
        assert_log_probs(reference, dataclasses.replace(s, tokens=s.tokens[:-2], response_length=n,
                                                        rollout_log_probs=s.rollout_log_probs[:n]))
    rollout.evaluate(0)
    assert seen[12:] == [True] * 40


def test_custom_generate_may_return_siblings(make):
    """Each third sample has four branches, with reward 1; the others have one, with reward 0. A rollout counts once."""
    async def branches(args, sample, sampling_params):
        out = []
        for i in range(1 if sample.index % 3 else 4):
            branch = sample.copy(rollout_id=sample.index, metadata={"branch": i}, reward=float(sample.index % 3 == 0))
            out.append(await args.generate(branch, sampling_params))
        return out
    held_out = dict(sums=dict(prompt_data=lambda: sums()[:2], n_samples_per_eval_prompt=3))
    rollout = make(custom_generate_function=branches, rollout_batch_size=2, eval_prompt_data=held_out, log_passrate=True)
    result = rollout.generate(0)
    assert [(s.group_index, s.index, s.rollout_id, s.metadata["branch"]) for s in result.samples] == [
        (i // 3, i, i, branch) for i in range(6) for branch in range(1 if i % 3 else 4)]
    assert result.metrics["rollout/raw_reward"] == pytest.approx(1 / 3)
    a, b = (2 / 3) / (3 ** -0.5 + 1e-6), (-1 / 3) / (3 ** -0.5 + 1e-6)       # of 1, 0, 0: mean 1/3, std 1/sqrt(3)
    assert result.rewards == pytest.approx(2 * [a, a, a, a, b, b])
    metrics = rollout.evaluate(0)
    assert metrics["eval/sums"] == pytest.approx(1 / 3) and metrics["eval/sums-pass@1"] == pytest.approx(1 / 3)


def test_branches_that_were_done_when_their_group_was_put_back(make):
    """Sample 2 has its two branches when group 0 ends and group 1 is aborted, under sample 3. Nobody keeps branches: next time
    sample 2 begins anew and has two again, while sample 3 goes on."""
    begun = []                               # (sample, tokens that it had)

    async def branches(args, sample, sampling_params):
        begun.append((sample.index, sample.response_length))
        if sample.index > 3:                 # of a group that may not be faster than group 1
            await asyncio.sleep(1000)
        n = {0: 40, 1: 40, 2: 4, 3: 600}[sample.index]
        one = await args.generate(sample, sampling_params | {"max_new_tokens": n, "ignore_eos": True})
        return one if sample.index == 3 else [one, one.copy(metadata={"branch": 1})]
    rollout = make(custom_generate_function=branches, rollout_batch_size=1, over_sampling_batch_size=2, n_samples_per_prompt=2,
                   partial_rollout=True, rollout_max_response_len=600)
    assert [s.index for s in rollout.generate(0).samples] == [0, 0, 1, 1]
    samples = rollout.generate(1).samples
    assert [(s.index, s.response_length) for s in samples] == [(2, 4), (2, 4), (3, 600)]
    assert begun[:5] == [(0, 0), (1, 0), (2, 0), (3, 0), (2, 0)] and begun[5][0] == 3 and begun[5][1] > 0


def test_a_hook_that_ends_cancelled_is_an_error(make):
    async def awaits_what_it_has_cancelled(args, sample, params):
        task = asyncio.create_task(asyncio.sleep(10))
        task.cancel()
        await task
    with pytest.raises(RuntimeError, match=r"group \d: a hook, tool or reward ended with CancelledError; catch it"):
        make(custom_generate_function=awaits_what_it_has_cancelled, rollout_batch_size=1).generate(0)


def test_an_error_is_not_hidden_behind_a_reward_that_failed(make):
    async def two_ways_to_fail(args, sample, params):
        if sample.index == 0:
            sample.status, sample.response_length = Status.FAILED, 0
            return sample
        raise ZeroDivisionError("mine")
    with pytest.raises(ZeroDivisionError, match="mine"):
        make(custom_generate_function=two_ways_to_fail, rollout_batch_size=1, on_reward_error="skip").generate(0)


def test_a_malformed_sample_of_a_hook_is_refused(make):
    async def forgets_the_mask(args, sample, sampling_params):
        sample.tokens, sample.response_length = sample.tokens + [5, 6], 2
        return sample
    with pytest.raises(ValueError, match="set no rollout_log_probs for its trained tokens; ask with return_logprob=True"):
        make(custom_generate_function=forgets_the_mask).generate(0)

    async def masks_one_too_many(args, sample, sampling_params):
        sample = await args.generate(sample, sampling_params)
        sample.loss_mask = [0] + sample.loss_mask
        return sample
    with pytest.raises(ValueError, match=r"loss_mask has \d+ entries for \d+ response tokens; extend responses with sample.append"):
        make(custom_generate_function=masks_one_too_many).generate(0)


def test_a_hook_that_hangs_or_gives_up(make):
    async def hangs(args, sample, sampling_params):
        await asyncio.sleep(1000)
    with pytest.raises(TimeoutError, match=r"sample \d+: .*hangs was not done in 1 s; .*generate_timeout_s"):
        make(custom_generate_function=hangs, generate_timeout_s=1.0).generate(0)

    async def gives_up(args, sample, sampling_params):
        sample.status = Status.ABORTED
        return sample
    rollout = make(custom_generate_function=gives_up, eval_prompt_data={"held_out": sums})
    with pytest.raises(RuntimeError, match="evaluation held_out: custom_generate_function aborted a sample"):
        rollout.evaluate(0)


def test_a_group_that_a_hook_aborts_is_asked_again(make):
    tried = collections.Counter()

    async def not_at_first(args, sample, sampling_params):
        tried[sample.index] += 1
        if tried[sample.index] == 1 and sample.group_index == 1:
            sample.status = Status.ABORTED
            return sample
        return await args.generate(sample, sampling_params)
    rollout = make(custom_generate_function=not_at_first)
    result = rollout.generate(0)
    left = [group[0].group_index for group in rollout.data.buffer]
    assert len(groups_of(result.samples)) == 4 and all(s.reward is not None for s in result.samples)
    assert sorted([*groups_of(result.samples), *left]) == list(range(rollout.data.next_group)), "no group is lost"


# ---- Rewards ---------------------------------------------------------------------------------------------------------------
def plain_length(args, sample):
    return float(len(sample.response))


async def group_ranks(args, samples):
    return [float(i) for i, _ in enumerate(samples)]


def test_a_teacher_behind_a_server(make, engines, reference):
    """It reads each answer, tools' tokens included, and says how likely each was; without a reward it is the only judge."""
    async def with_a_tool(args, sample, params):
        sample = await args.generate(sample, params | {"max_new_tokens": 4, "ignore_eos": True})
        sample.append(sample.tokens[:2], trainable=False)
        return await args.generate(sample, params | {"max_new_tokens": 9, "ignore_eos": True})

    rollout = make(use_opd=True, opd_teacher_url=engines.router_url, custom_rm=None, custom_generate_function=with_a_tool)
    result = rollout.generate(0)
    for s in result.samples:
        assert s.response_length == 9 and s.loss_mask[4:6] == [0, 0] and s.reward == 0.0
        s.rollout_log_probs = s.teacher_log_probs            # the teacher is the tiny model
        assert_log_probs(reference, s)
    assert result.rewards == [0.0] * 12
    nobody = make(use_opd=True, opd_teacher_url="http://127.0.0.1:9", request_retries=0)
    with pytest.raises(EngineError, match="the teacher gave no log-probs.*http://127.0.0.1:9/generate: no answer in 1 tries"):
        nobody.generate(0)


def test_long_answers_cost_reward(make):
    """DAPO's soft punishment comes off before groups are compared; what is logged as raw_reward does not know it."""
    async def lengths(args, sample, params):
        return await args.generate(sample, params | {"max_new_tokens": 4 + 4 * (sample.index % 3), "ignore_eos": True})
    rollout = make(custom_generate_function=lengths, custom_rm=one_point, advantage_estimator="rloo", overlong_buffer_len=8,
                   overlong_penalty_factor=0.5)
    result = rollout.generate(0)
    assert [s.response_length for s in result.samples] == [4, 8, 12] * 4
    assert result.metrics["rollout/raw_reward"] == 1.0 and result.metrics["rollout/length_penalty"] == pytest.approx(-0.25)
    penalties = [0.0, -0.25, -0.5]           # of 12 tokens at most, the last 8 cost
    want = [p - (sum(penalties) - p) / 2 for p in penalties]             # minus the mean of the others
    assert result.rewards == pytest.approx(want * 4)


async def one_point(args, sample):
    return 1.0


def test_plain_and_group_rewards(make):
    samples = make(custom_rm=plain_length).generate(0).samples
    assert [s.reward for s in samples] == [len(s.response) for s in samples]
    samples = make(custom_rm=group_ranks, group_rm=True).generate(0).samples
    assert [s.reward for s in samples] == [0.0, 1.0, 2.0] * 4


def raises(args, sample):
    if sample.index == 4:
        raise KeyError("no such answer")
    return 1.0


def hangs(args, sample):
    while sample.index == 4:
        time.sleep(0.1)
    return 1.0


async def hangs_async(args, sample):
    while sample.index == 4:
        await asyncio.sleep(0.1)
    return 1.0


@pytest.mark.parametrize("reward, cause", [
    (raises, "KeyError.*no such answer"), (hangs, "timed out"), (hangs_async, "TimeoutError")])
def test_a_failing_reward(make, reward, cause):
    with pytest.raises(RewardError, match=rf"no reward for sample 4 from {reward.__name__} .*{cause}.*on_reward_error='skip'"):
        make(custom_rm=reward, reward_timeout_s=3.0).generate(0)
    result = make(custom_rm=reward, reward_timeout_s=3.0, on_reward_error="skip").generate(0)
    assert outcomes(result.metrics) == dict(trained=4, filtered=0, put_back=3, failed=1)
    assert 1 not in groups_of(result.samples), "group 1 has sample 4"


def test_a_failing_group_reward(make):
    async def second_group(args, samples):
        if samples[0].group_index == 1:
            raise KeyError("no such group")
        return [1.0] * len(samples)
    with pytest.raises(RewardError, match=r"sample \[3, 4, 5\].*no such group"):
        make(custom_rm=second_group, group_rm=True).generate(0)
    result = make(custom_rm=second_group, group_rm=True, on_reward_error="skip").generate(0)
    assert result.metrics["rollout/groups_failed"] == 1 and 1 not in groups_of(result.samples)


# ---- Evaluation ------------------------------------------------------------------------------------------------------------
def test_pass_at_k():
    """n = 4 with c = 1 right: pass@2 = 1 - C(3,2)/C(4,2) = 1/2; c = 2: 1 - C(2,2)/C(4,2) = 5/6; c = 0 and 4: 0 and 1."""
    assert pass_at_k([[1, 0, 0, 0]]) == pytest.approx({1: 1 / 4, 2: 1 / 2, 4: 1})
    assert pass_at_k([[1, 0, 1, 0]]) == pytest.approx({1: 1 / 2, 2: 5 / 6, 4: 1})
    assert pass_at_k([[1, 0, 0, 0], [1, 0, 1, 0], [0] * 4, [1] * 4]) == pytest.approx({1: 7 / 16, 2: 7 / 12, 4: 3 / 4})
    assert pass_at_k([[1, 0, 1]]) == pytest.approx({1: 2 / 3, 2: 1})     # 1 - C(1,2)/C(3,2): C(1,2) = 0
    assert pass_at_k([[1]]) == {1: 1.0}


async def even_index(args, sample):
    return {"score": float(sample.index % 2 == 0), "long": float(sample.response_length)}


def test_evaluation_with_settings_of_each_set(make, reference, tmp_path):
    greedy = dict(prompt_data=lambda: sums()[:3], eval_temperature=0.0, eval_max_response_len=5, n_samples_per_eval_prompt=2,
                  eval_reward_key="long", custom_rm=even_index)
    sampled = dict(prompt_data=lambda: sums()[3:5], n_samples_per_eval_prompt=4)
    rollout = make(eval_prompt_data={"greedy": greedy, "sampled": sampled}, custom_rm=even_index, reward_key="score",
                   eval_reward_key="score", log_passrate=True)
    position = rollout.data.state_dict()
    metrics = rollout.evaluate(7)
    assert rollout.data.state_dict() == position, "an evaluation takes no training prompts"
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    by_set = {name: [r for r in lines if r["set"] == name] for name in ("greedy", "sampled")}
    assert [len(rows) for rows in by_set.values()] == [6, 8] and all(r["step"] == 7 for r in lines)
    for row in by_set["greedy"]:             # temperature 0: the most likely token, each time
        ids = rollout.client.tokenizer(row["prompt"], return_tensors="pt").input_ids
        want = reference.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1]:]
        want = want[:-1] if want[-1] == rollout.client.tokenizer.eos_token_id else want
        assert row["response"] == rollout.client.tokenizer.decode(want)
    assert len({r["response"] for r in by_set["sampled"]}) > 2
    assert metrics["eval/greedy"] == metrics["eval/greedy-response_len"] <= 5    # its reward is the length
    assert metrics["eval/sampled"] == 0.5 and metrics["eval/sampled-pass@1"] == 0.5
    assert metrics["eval/sampled-pass@2"] == pytest.approx(5 / 6) and metrics["eval/sampled-pass@4"] == 1
    truncated = sum(r["status"] == "truncated" for r in by_set["sampled"]) / 8
    assert metrics["eval/sampled-truncated_ratio"] == truncated and metrics["eval/sampled-failed"] == 0


# ---- An engine dies --------------------------------------------------------------------------------------------------------
def supervisor_of(engines, rank: int) -> psutil.Process:
    import ray
    return psutil.Process(ray.get(engines.actors[rank][0].pid.remote()))


def kill_engine(engines, rank: int) -> None:
    """Returns when it answers no more."""
    url, end = engines.urls[rank], time.monotonic() + 60
    supervisor_of(engines, rank).kill()
    with contextlib.suppress(EngineError):
        while time.monotonic() < end:
            call("GET", url + "/health", None, 30.0)
            time.sleep(0.05)
        raise AssertionError(f"{url} lives on")


def test_an_engine_that_dies_just_before_the_abort(make, engines):
    """An idle one, so nobody has noticed; the surplus groups, busy with a tool, are called off, and it cannot hear it."""
    short_ones = itertools.count(1)

    async def the_last_short_one_kills(args, sample, params):
        long = sample.group_index > 1
        while long and rollout.client.replacing is None:
            await asyncio.sleep(0.05)
        sample = await args.generate(sample, params | {"max_new_tokens": LONG if long else 8, "ignore_eos": True})
        if not long and next(short_ones) == 6:
            kill_engine(engines, 1)
        return sample
    rollout = make(custom_generate_function=the_last_short_one_kills, rollout_batch_size=2, over_sampling_batch_size=4,
                   health_check_interval_s=100.0)                # so that the abort finds it, not the monitor
    before, resynced = engines.restarts, []

    def resync(ranks):
        resynced.append(ranks)
        engines.post("/update_weight_version", {"new_version": "0", "abort_all_requests": False}, only=ranks)
    rollout.client.resync = resync
    result = rollout.generate(0)
    assert sorted(groups_of(result.samples)) == [0, 1] and outcomes(result.metrics)["put_back"] == 2
    assert resynced == [[1]] and engines.restarts == before + 1 and engines.check() == []
    assert [group[0].group_index for group in rollout.data.buffer] == [2, 3]


def test_a_restart_under_way_ends_before_the_step_does(make, engines):
    """An idle engine dies, and the last answer is there before its successor."""
    async def ends_in_the_middle_of_it(args, sample, params):
        sample = await args.generate(sample, params)
        kill_engine(engines, 1)
        while rollout.client.replacing is None:
            await asyncio.sleep(0.05)
        return sample
    rollout = make(custom_generate_function=ends_in_the_middle_of_it, rollout_batch_size=1, n_samples_per_prompt=1,
                   health_check_interval_s=1.0)
    resynced = []
    rollout.client.resync = resynced.append
    rollout.generate(0)
    assert resynced == [[1]] and engines.check() == [] and rollout.client.serving.is_set()


def test_a_restart_whose_caller_is_gone_is_not_begun_twice(make, engines, monkeypatch):
    """Who began it is cancelled, a hook with a time limit, say; the next who looks waits for the same restart."""
    rollout, dead, restarted = make(), [1], []

    def restart(rank):
        restarted.append(rank)
        time.sleep(0.5)
        dead.clear()
    monkeypatch.setattr(engines, "check", lambda: [*dead])
    monkeypatch.setattr(engines, "restart", restart)
    monkeypatch.setattr(engines, "admit", lambda rank: None)

    async def two_callers():
        first = asyncio.create_task(rollout.client.recover())
        while not restarted:
            await asyncio.sleep(0.01)
        first.cancel()
        await rollout.client.recover()
        return rollout.client.replacing.done()
    assert rollout.client.run(two_callers()) and restarted == [1]


def test_a_restart_that_fails_when_the_step_is_done_ends_the_run(make, engines, monkeypatch):
    async def ends_in_the_middle_of_it(args, sample, params):
        sample = await args.generate(sample, params)
        while rollout.client.replacing is None:
            await asyncio.sleep(0.05)
        return sample

    async def used_up(rank):
        await asyncio.sleep(2.0)
        raise EngineError(f"engine {rank} is down and all restarts are used up")
    rollout = make(custom_generate_function=ends_in_the_middle_of_it, rollout_batch_size=1, n_samples_per_prompt=1,
                   health_check_interval_s=0.2)
    monkeypatch.setattr(rollout.client, "replace", used_up)
    monkeypatch.setattr(engines, "check", lambda: [1])
    with pytest.raises(EngineError, match="engine 1 is down and all restarts are used up"):
        rollout.generate(0)


def test_an_engine_killed_under_requests(make, engines, tiny_model, tmp_path, capfd):
    """The last test: the engines get other weights. What was under way is repeated, on the weights of now and no others."""
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for parameter in model.parameters():     # not the ones an engine starts with
        parameter.data.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    current = tmp_path / "current"
    model.save_pretrained(current)

    def push(ranks):
        engines.post("/update_weights_from_disk", {"model_path": str(current), "flush_cache": True}, only=ranks)
        engines.post("/update_weight_version", {"new_version": "5", "abort_all_requests": False}, only=ranks)
    push(None)
    new_engine_is_up, asked = threading.Event(), []

    async def some_come_late(args, sample, params):
        """The last two groups are asked for just when a new engine is there that has not got the weights yet."""
        asked.append(sample.index)
        while sample.group_index >= 6 and not new_engine_is_up.is_set():
            await asyncio.sleep(0.05)
        return await args.generate(sample, params | {"max_new_tokens": 480, "ignore_eos": True})
    rollout = make(custom_generate_function=some_come_late, rollout_batch_size=8, n_samples_per_prompt=4)
    push(None)                               # make() set the version back
    rollout.client.weight_version, resynced, before = 5, [], engines.restarts

    def resync(ranks):
        new_engine_is_up.set()
        time.sleep(2.0)                      # a big model's push takes its time
        push(ranks)
        resynced.append(ranks)
    rollout.client.resync = resync
    for process in supervisor_of(engines, 1).children(recursive=True):
        process.suspend()                    # what it is asked now is not done before it is killed

    def kill():
        end = time.monotonic() + 60
        while len(asked) < 6 * 4 and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(1.0)                      # they are on their way
        kill_engine(engines, 1)
    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    result = rollout.generate(0)
    killer.join()

    assert resynced == [[1]] and engines.restarts == before + 1 == result.metrics["rollout/engine_restarts"]
    assert result.metrics["rollout/request_retries"] >= 1
    assert outcomes(result.metrics) == dict(trained=8, filtered=0, put_back=0, failed=0)
    assert [s.index for s in result.samples] == list(range(32))
    for s in result.samples:
        assert s.response_length == 480 and s.weight_versions == [5] * 480
        assert_log_probs(model, s)
    printed = capfd.readouterr().out
    assert f"engine 1 is down; restart {before + 1} of 3" in printed and "engine 1 is back, with the trainers' weights" in printed
    both = [pathlib.Path(engines.log_dir / f"engine_{rank}.log").read_text().count("Prefill batch") for rank in range(2)]
    assert min(both) > 0
