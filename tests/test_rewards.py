"""
test_rewards.py: every grader against values worked out by hand, and what happens when a reward raises, hangs or lies.

Run:   pytest -q tests/test_rewards.py        (real processes, a real HTTP server; about 15 s on two cores)
"""
import asyncio
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import rewards
import workers
from buffer import Sample
from graders import last_boxed
from rewards import RewardError, Rewarder, check_rm_type
from workers import WorkerError


def Config(**changes):
    """The fields of configs/base.py that rewards.py reads."""
    # Not a class of this module: unpickling that would import this module, so torch, in every fresh worker process.
    return SimpleNamespace(**{**dict(rm_type=None, custom_rm=None, group_rm=False, rm_url=None, reward_key=None, extra={},
                                     reward_timeout_s=10.0, code_timeout_s=5.0, code_memory_mb=1024), **changes})


def make(response, label=None, index=0, **metadata):
    return Sample(index=index, prompt="p", response=response, label=label, metadata=metadata)


def light(index=0):
    return SimpleNamespace(prompt="p", response="7", label="7", metadata={}, index=index)


@pytest.fixture(scope="module")
def rewarder():
    rewarder = Rewarder(2)
    yield rewarder
    rewarder.close()


def score(rewarder, sample, reward_key=None, kw=None, **cfg):
    return asyncio.run(rewarder.score(Config(**cfg), sample, reward_key, **(kw or {})))


# ---- Graders against hand-worked values ------------------------------------------------------------------------------
@pytest.mark.parametrize("text, inside", [
    (r"so \boxed{\frac{1}{2}} done", r"\frac{1}{2}"), (r"\boxed{1} no, \boxed{ 2 }", "2"), ("7", None), ("", None),
    (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."), (r"\boxed{1} and \boxed{\frac{1}{", None), (r"\boxed{}", ""),
    (r"{{ \boxed{a_{b_{c}}} }", "a_{b_{c}}"), (r"\boxed{\{1, 2\}}", r"\{1, 2\}"), (r"\boxed{\\{3}}", r"\\{3}")])
def test_last_boxed(text, inside):
    assert last_boxed(text) == inside


@pytest.mark.parametrize("rm_type, response, label, metadata, reward", [
    ("exact", " 12\n", "12", {}, 1.0), ("exact", "12.", 12, {}, 0.0), ("boxed_exact", r"is \boxed{12}", 12, {}, 1.0),
    ("boxed_exact", "12", "12", {}, 0.0), ("boxed_f1", r"blah \boxed{the cat}", "cat", {}, 1.0),
    ("math", r"thus $x = \frac{1}{2}$, so \boxed{0.5}", r"\frac{1}{2}", {}, 1.0), ("math", "It is 7.", "7", {}, 1.0),
    ("math", r"\boxed{(x+1)^2}", "x^2+2x+1", {}, 1.0), ("math", r"\boxed{8}", "7", {}, 0.0), ("math", "", "7", {}, 0.0),
    ("math", r"\boxed{2\sqrt{3}}", r"\boxed{\sqrt{12}}", {}, 1.0), ("math", r"\boxed{@#{}$}", "7", {}, 0.0),
    ("math", r"\boxed{1,000}", "1000", {}, 1.0), ("math", r"7 then \boxed{8}", "7", {}, 0.0),
    ("boxed_math", "7", "7", {}, 0.0), ("boxed_math", r"\boxed{\frac{14}{2}}", "7", {}, 1.0),
    ("deepscaler", r"<think>\boxed{7}</think> 7", "7", {}, 0.0), ("deepscaler", r"\boxed{7}", 7, {}, 1.0),
    ("deepscaler", r"<think>\boxed{8}</think> \boxed{\frac{14}{2}}", "7", {}, 1.0),
    ("deepscaler", r"<think>hm</think> \boxed{7}", "8", {}, 0.0),
    # want: {cat, sat, on, mat}, got: {cat, was, on, mat, today}; 3 common -> 2 * 3 / (4 + 5)
    ("f1", "A cat was on the mat, today!", "The cat sat on the mat.", {}, 6 / 9), ("f1", "the", "a", {}, 1.0),
    ("f1", "no no", "no", {}, 2 / 3), ("f1", "", "dog", {}, 0.0), ("f1", "dog", "cat", {}, 0.0),
    ("gpqa", "So the answer is (C).", "C", {}, 1.0), ("gpqa", r"Answer: A or \boxed{\text{B}}", "b", {}, 1.0),
    ("gpqa", "<think>Answer: A</think>\n**B**", "A", {}, 0.0),
    ("gpqa", "Answer: **D**", "x", {"correct_letter": "D"}, 1.0),
    ("gpqa", "The answer is B", "iron", {"choices": ["lead", "iron", "tin"]}, 1.0), ("gpqa", "A cat", "A", {}, 0.0),
    ("gpqa", "Answer: A. No.\nAnswer: C", "C", {}, 1.0), ("gpqa", "the answer is a mystery", "A", {}, 0.0)])
def test_grader(rewarder, rm_type, response, label, metadata, reward):
    result = score(rewarder, make(response, label, **metadata), rm_type=rm_type)
    assert type(result) is float and result == pytest.approx(reward)


@pytest.mark.parametrize("response, acc, pred", [
    ("Answer: 3\nAnswer: 0.5", True, "0.5"), (r"**Answer:** $\frac{1}{2}$", True, r"\frac{1}{2}"),
    ("0.5", False, "[INVALID]"),
    (r"answer : \boxed{1/2}", True, r"\boxed{1/2}"), ("Answer: 2\nbecause 0.5", False, "2"),
    ("Answer: **", False, "[INVALID]"),
    ("Answer: $0.5$.", True, "0.5"), (r"\boxed{0.5} Answer: **", False, "[INVALID]")])
def test_dapo(rewarder, response, acc, pred):
    result = score(rewarder, make(response, r"\frac{1}{2}"), rm_type="dapo", reward_key="score")
    assert result == {"score": 1.0 if acc else -1.0, "acc": acc, "pred": pred}


def test_reasoning_gym_agrees_with_its_own_scorer(rewarder):
    import reasoning_gym
    for name in ("chain_sum", "countdown", "leg_counting"):
        entry = reasoning_gym.create_dataset(name, size=1, seed=1)[0]
        own = reasoning_gym.get_score_answer_fn(name)
        for text, answer in ((f"<think><answer>9</answer></think> <answer> {entry['answer']}\n</answer>.",
                              entry["answer"]),
                             (f" {entry['answer']} ", entry["answer"]), ("<answer>zz</answer>", "zz"), ("", "")):
            sample = make(text, rm_type="reasoning_gym", source_dataset=name, entry=entry)
            assert score(rewarder, sample) == own(answer, entry)


def test_random_is_a_fair_coin_that_repeats(rewarder):
    tosses = [score(rewarder, make("x", index=i), rm_type="random") for i in range(60)]
    assert set(tosses) == {0.0, 1.0} and 15 < sum(tosses) < 45
    assert tosses[:9] == [score(rewarder, make("x", index=i), rm_type="random") for i in range(9)]


def test_metadata_chooses_before_config_and_hook_before_both(rewarder):
    sample = make("the cat", "cat", rm_type="f1")
    assert score(rewarder, sample, rm_type="exact") == 1.0
    assert score(rewarder, sample, rm_type="exact", custom_rm=lambda args, sample: 5) == 5.0


def test_unknown_rm_type_names_the_nearest(rewarder):
    assert check_rm_type("boxed_math") == "math" and check_rm_type("dapo") == "dapo"
    with pytest.raises(ValueError, match="'boxed_mth'; did you mean 'math'"):
        check_rm_type("boxed_mth")
    with pytest.raises(RewardError, match="sample 3 from deepscalr.*did you mean 'deepscaler'"):
        score(rewarder, make("", "", index=3), rm_type="deepscalr")
    with pytest.raises(ValueError, match="custom_rm"):
        check_rm_type(None)


@pytest.mark.parametrize("rm_type", ["exact", "math", "dapo", "f1", "gpqa", "deepscaler"])
@pytest.mark.parametrize("label", [None, " "])
def test_a_missing_label_is_an_error_not_a_wrong_answer(rewarder, rm_type, label):
    with pytest.raises(RewardError, match="label"):
        score(rewarder, make(r"Answer: \boxed{7}", label), rm_type=rm_type, reward_key="score")


# ---- Hooks -----------------------------------------------------------------------------------------------------------
def test_hooks_plain_async_and_callable_get_cfg_sample_and_kw(rewarder):
    bonus = {"x": 2.0}  # a closure: not picklable by reference

    def plain(args, sample, **kw):
        return bonus["x"] + sample.index + args.extra["y"] + kw["z"]

    async def awaited(args, sample, **kw):
        await asyncio.sleep(0.01)
        return plain(args, sample, **kw)

    class Judge:
        async def __call__(self, args, sample, **kw):
            return plain(args, sample, **kw)

    for hook in (plain, awaited, Judge()):
        assert score(rewarder, make("", index=4), kw={"z": 0.5}, custom_rm=hook, extra={"y": 10}) == 16.5


def test_the_sample_is_not_changed(rewarder):
    sample = make(r"\boxed{7}", "7")
    before = pickle.dumps(sample)
    score(rewarder, sample, rm_type="boxed_math")
    score(rewarder, sample, custom_rm=lambda args, sample: sample.metadata.update(a=1) or 1.0)
    assert pickle.dumps(sample) == before


def test_group_hook(rewarder):
    def by_rank(args, samples, **kw):
        return [sorted(s.response for s in samples).index(s.response) for s in samples]

    async def short(args, samples, **kw):
        return [1.0]

    samples = [make(text, index=i) for i, text in enumerate("cab")]
    assert score(rewarder, samples, custom_rm=by_rank, group_rm=True) == [2.0, 0.0, 1.0]
    assert score(rewarder, samples[0], custom_rm=by_rank, group_rm=True) == 0.0  # evaluation: a group of one
    with pytest.raises(RewardError, match=r"samples? \[0, 1, 2\].*list of 3"):
        score(rewarder, samples, custom_rm=short, group_rm=True)


@pytest.mark.parametrize("value, reward", [(True, 1.0), (np.float32(0.5), 0.5), (np.int64(3), 3.0),
                                           (np.array(2.0), 2.0), (np.bool_(False), 0.0)])
def test_scalars_become_floats(rewarder, value, reward):
    import torch
    for v in (value, torch.tensor(float(value))):
        result = score(rewarder, make(""), custom_rm=lambda args, sample: v)
        assert type(result) is float and result == reward


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("value, said", [(None, "None"), (float("nan"), "nan"), (float("inf"), "inf"), ("1.0", "'1.0'"),
                                         ([1.0], r"\[1.0\]"), ({"a": 1.0}, r"set it to one of \['a'\]"),
                                         ({"score": None}, "None"), (np.zeros(2), "size 1|Python scalar")])
def test_a_reward_that_is_no_number_is_refused(rewarder, asynchronous, value, said):
    async def awaited(args, sample):
        return value
    hook = awaited if asynchronous else lambda args, sample: value
    with pytest.raises(RewardError, match=said):
        score(rewarder, make(""), custom_rm=hook, reward_key="score")


def test_dict_rewards_and_keys(rewarder):
    hook = lambda args, sample: {"score": np.float32(1), "other": 2, "note": "n"}  # noqa: E731
    assert score(rewarder, make(""), custom_rm=hook, reward_key="score") == {"score": 1.0, "other": 2, "note": "n"}
    with pytest.raises(RewardError, match="reward_key None"):
        score(rewarder, make(""), custom_rm=hook)
    assert score(rewarder, make(""), "other", custom_rm=hook)["other"] == 2.0


# ---- Failures --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_hook_that_raises_names_everything(rewarder, asynchronous):
    def divide(args, sample):
        return 1 / 0

    async def awaited(args, sample):
        return divide(args, sample)

    with pytest.raises(RewardError) as error:
        score(rewarder, make("", index=17), custom_rm=awaited if asynchronous else divide)
    for part in ("sample 17", "awaited" if asynchronous else "divide", "ZeroDivisionError", "test_rewards.py:", "skip"):
        assert part in str(error.value)
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)  # it crosses Ray


def test_exit_and_crash_are_errors_and_the_next_score_works(rewarder):
    for hook, said in ((lambda args, sample: sys.exit("bye"), "SystemExit: bye"),
                       (lambda args, sample: os.kill(os.getpid(), signal.SIGSEGV), "exit code -11"),
                       (lambda args, sample: os._exit(3), "exit code 3")):
        with pytest.raises(RewardError, match=said):
            score(rewarder, make(""), custom_rm=hook)
        assert score(rewarder, make("7", "7"), rm_type="exact") == 1.0


def test_a_hook_that_cannot_be_pickled_is_an_error(rewarder):
    import threading
    lock = threading.Lock()
    with pytest.raises(RewardError, match="pickle"):
        score(rewarder, make(""), custom_rm=lambda args, sample: lock.locked())


def hanging_hooks():  # defined inside a function, so that they travel by value
    def busy(args, sample):
        while True:
            pass

    def sleepy(args, sample):
        time.sleep(1000)

    def regex(args, sample):  # in C, and never gives the GIL back: no Python thread could end it
        re.match(r"(a+)+$", "a" * 50 + "b")

    def stubborn(args, sample):  # swallows exceptions and signals that Python handles
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            try:
                time.sleep(1000)
            except BaseException:
                pass

    async def late(args, sample):
        await asyncio.sleep(1000)

    def parent(args, sample):
        child = subprocess.Popen(["sleep", "1000"])
        Path(args.extra["file"]).write_text(str(child.pid))
        child.wait()

    return {hook.__name__: hook for hook in (busy, sleepy, regex, stubborn, late, parent)}


def alive(pid):
    try:  # a zombie has ended, even if nobody here is its parent
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):      # gone before, or while it was read
        return False


def wait_until(condition, limit_s=60):
    end_s = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.02)
    return condition()


@pytest.mark.parametrize("name", ["busy", "sleepy", "regex", "stubborn", "late"])
def test_a_hanging_hook_is_ended_and_the_loop_stays_free(name):
    hook = hanging_hooks()[name]

    async def main(rewarder):
        assert await rewarder.score(Config(rm_type="math"), light()) == 1.0  # warm
        pid, ticks, start_s = rewarder.workers.idle[-1].process.pid, 0, time.monotonic()
        task = asyncio.create_task(rewarder.score(Config(custom_rm=hook, reward_timeout_s=0.5), light(5)))
        while not task.done():
            await asyncio.sleep(0.01)
            ticks += 1
        wall_s = time.monotonic() - start_s
        with pytest.raises(RewardError, match=f"sample 5 from {hook.__qualname__} .*(timed out|TimeoutError)"):
            await task
        assert 0.45 < wall_s < 60 and ticks > 2, (wall_s, ticks)  # the loop ran while the hook hung
        assert alive(pid) == (name == "late")
        assert await rewarder.score(Config(rm_type="exact"), light()) == 1.0

    rewarder = Rewarder(1)
    asyncio.run(main(rewarder))
    rewarder.close()


def test_an_answer_that_hangs_math_verify_is_an_error_not_a_zero():
    rewarder = Rewarder(1)
    with pytest.raises(RewardError, match="from math .*timed out"):
        score(rewarder, make(r"\boxed{9^{9^{9^{9}}}}", "7"), rm_type="math", reward_timeout_s=1.5)
    assert score(rewarder, make(r"\boxed{7}", "7"), rm_type="math") == 1.0
    rewarder.close()


def test_a_hang_takes_its_own_children_along(tmp_path):
    rewarder, file = Rewarder(1), tmp_path / "pid"
    cfg = Config(custom_rm=hanging_hooks()["parent"], reward_timeout_s=3.0, extra={"file": str(file)})
    with pytest.raises(RewardError, match="timed out"):
        asyncio.run(rewarder.score(cfg, light()))
    assert wait_until(lambda: not alive(int(file.read_text())))
    rewarder.close()


def test_a_stopped_process_is_replaced():
    worker = workers.Worker()
    job = pickle.dumps((pickle.dumps(str.upper), False, {}, 10.0))           # a TypeError, and that is an answer too
    with pytest.raises(WorkerError, match="TypeError"):
        worker.call(job, 10.0)
    os.kill(worker.process.pid, signal.SIGSTOP)  # not even its own clock runs
    start_s = time.monotonic()
    with pytest.raises(WorkerError, match="timed out"):
        worker.call(job, 0.2, load_s=0.2)
    assert time.monotonic() - start_s < 60   # 0.4 s where nothing else runs
    with pytest.raises(WorkerError, match="TypeError"):
        worker.call(job, 10.0)
    worker.kill()


def test_a_stopped_process_and_a_long_answer():
    """More than the socket holds: the send itself must end."""
    worker = workers.Worker()
    job = pickle.dumps((pickle.dumps(dict), False, {"text": "7" * 10**7}, 10.0))
    assert len(worker.call(job, 10.0)["text"]) == 10**7
    os.kill(worker.process.pid, signal.SIGSTOP)
    with pytest.raises(WorkerError, match="timed out"):
        worker.call(job, 0.2, load_s=0.2)
    assert worker.process is None and len(worker.call(job, 10.0)["text"]) == 10**7
    worker.kill()


def test_a_process_killed_from_outside_is_replaced(tmp_path):
    """kill -9 while it works: the job is done by a new process, and counted. While it waits: the same."""
    def slow(args, sample):
        with open(args.extra["file"], "a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(1.0)
        return 5

    async def main(rewarder, kills):
        file = tmp_path / f"pids{kills}"
        cfg = Config(custom_rm=slow, extra={"file": str(file)}, reward_timeout_s=20.0)
        task = asyncio.create_task(rewarder.score(cfg, light(8)))
        for nth in range(kills):
            while len(file.read_text().split() if file.exists() else ()) <= nth:
                await asyncio.sleep(0.01)
            pid = int(file.read_text().split()[nth])
            assert rewarder.workers.pids() == [pid]
            os.kill(pid, signal.SIGKILL)
        return await task

    rewarder = Rewarder(1)
    assert rewarder.workers.pids() == [] and asyncio.run(main(rewarder, 0)) == 5.0 and rewarder.workers.restarts == 0
    assert asyncio.run(main(rewarder, 1)) == 5.0 and rewarder.workers.restarts == 1
    with pytest.raises(RewardError, match="sample 8 from .*slow.*exit code -9 .SIGKILL., and so did the new one") as error:
        asyncio.run(main(rewarder, 2))
    assert rewarder.workers.restarts == 3 and type(error.value) is RewardError
    assert asyncio.run(main(rewarder, 0)) == 5.0
    os.kill(rewarder.workers.pids()[0], signal.SIGKILL)  # idle
    assert wait_until(lambda: not rewarder.workers.pids())
    assert asyncio.run(main(rewarder, 0)) == 5.0 and rewarder.workers.restarts == 4
    rewarder.close()
    assert rewarder.workers.pids() == []


def test_a_time_out_is_not_repeated():
    rewarder = Rewarder(1)
    start_s = time.monotonic()
    with pytest.raises(RewardError, match="timed out"):
        asyncio.run(rewarder.score(Config(custom_rm=hanging_hooks()["busy"], reward_timeout_s=2.0), light()))
    assert rewarder.workers.restarts == 0 and time.monotonic() - start_s < 60
    rewarder.close()


def test_no_process_outlives_close_or_a_killed_trainer(tmp_path):
    rewarder = Rewarder(2)
    asyncio.run(rewarder.score(Config(rm_type="math"), make("7", "7")))
    pids = [worker.process.pid for worker in rewarder.workers.idle if worker.process]
    rewarder.close()
    rewarder.close()
    assert pids and not any(map(alive, pids))
    with pytest.raises(RewardError, match="shutdown"):
        score(rewarder, make("7", "7"), rm_type="math")
    code = ("import asyncio, os, signal\nfrom types import SimpleNamespace as N\nfrom rewards import Rewarder\n"
            "r = Rewarder(1)\n"
            "c = N(custom_rm=None, rm_type='math', reward_key=None, reward_timeout_s=60, group_rm=False)\n"
            "asyncio.run(r.score(c, N(prompt='', response='7', label='7', metadata={}, index=0)))\n"
            "print(r.workers.idle[-1].process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180,
                         cwd=Path(rewards.__file__).parent)
    assert out.returncode == -9 and wait_until(lambda: not alive(int(out.stdout)))


@pytest.mark.parametrize("rm_type", ["exact", "math"])           # here, and in the worker processes
def test_200_at_once_in_order(rewarder, rm_type):
    async def main():
        cfg = Config(rm_type=rm_type)
        return await asyncio.gather(*(rewarder.score(cfg, make(str(i % 3), "1", index=i)) for i in range(200)))
    assert asyncio.run(main()) == [float(i % 3 == 1) for i in range(200)]


# ---- remote_rm -------------------------------------------------------------------------------------------------------
def with_server(answers, **cfg):
    """Score one sample against a server that gives these answers in turn: (reward or None, error, requests)."""
    from aiohttp import web
    seen = []

    async def handle(request):
        seen.append(await request.json())
        status, body = answers[min(len(seen), len(answers)) - 1]
        await asyncio.sleep(1000 if status is None else 0)
        return web.json_response(body, status=status)

    async def main():
        app = web.Application()
        app.router.add_post("/rm", handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/rm"
        rewarder = Rewarder(1)
        try:
            config = Config(**{"rm_url": url, "rm_type": "remote_rm", **cfg})
            return await rewarder.score(config, make(r"\boxed{r}", "l")), ""
        except RewardError as error:
            return None, str(error)
        finally:
            rewarder.close()
            await runner.cleanup()

    return *asyncio.run(main()), seen


def test_remote_rm_retries_and_gives_up():
    bad, good = (503, {}), (200, 0.25)
    reward, _, seen = with_server([bad, bad, good], reward_timeout_s=10)
    assert reward == 0.25 and seen == [{"prompt": "p", "response": r"\boxed{r}", "label": "l"}] * 3
    assert with_server([good], rm_type="boxed_remote_rm")[2][0]["response"] == "r"
    assert with_server([(200, {"score": 1})], reward_key="score")[0] == {"score": 1.0}
    reward, error, seen = with_server([bad], reward_timeout_s=12)
    assert reward is None and "503" in error and "remote_rm" in error and len(seen) > 2
    reward, error, _ = with_server([(None, {})], reward_timeout_s=0.3)
    assert reward is None and "limit 0.3 s" in error and "TimeoutError" in error
    assert "finite number" in with_server([(200, None)])[1]


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_remote_rm_does_not_repeat_a_refusal(status):
    reward, error, seen = with_server([(status, {}), (200, 0.25)], reward_timeout_s=10)
    assert reward is None and str(status) in error and len(seen) == 1


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_remote_rm_repeats_what_may_pass(status):
    reward, _, seen = with_server([(status, {}), (200, 0.25)], reward_timeout_s=10)
    assert reward == 0.25 and len(seen) == 2


def test_remote_rm_says_when_nobody_is_there(rewarder):
    for url, said in ((None, "rm_url"), ("http://127.0.0.1:9/rm", "127.0.0.1:9")):
        with pytest.raises(RewardError, match=said):
            score(rewarder, make(""), rm_type="remote_rm", rm_url=url, reward_timeout_s=12)
