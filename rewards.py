"""
rewards.py: how is an answer scored? A finished sample goes in, a finite float comes out, or a dict that holds one.

    Sample --score()--+-- async hook, remote_rm: awaited on the event loop, at most reward_timeout_s --+--> float | dict
                      +-- thread i --job--> process i: plain hook or grader below, same limit ---------+--> RewardError
Use:   rewarder = Rewarder(cfg.reward_workers); await rewarder.score(cfg, sample)    Test:  pytest tests/test_rewards.py
Knows nothing about: Ray, SGLang, tensors; of a Sample only prompt, response, label, metadata, index, and only to read.
Left out on purpose: turning an exception into 0.0, because a broken grader would look like a bad policy (rollout.py
decides by on_reward_error); a guard for an `async def` that blocks or ignores its cancellation (use a `def`); ifbench.
"""
import asyncio
import difflib
import faulthandler
import functools
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from types import SimpleNamespace

import cloudpickle


class RewardError(RuntimeError):
    """A score that could not be made; the message names sample, reward function, cause and remedy."""


# ---- What rollout.py uses --------------------------------------------------------------------------------------------
class Rewarder:
    """Scores with cfg.custom_rm, else with the grader that sample.metadata["rm_type"] or else cfg.rm_type names.
    A plain `def` hook runs in another process on copies of cfg and sample: what it writes to them is lost, and what it
    keeps (a cache, a counter) is per process. An `async def` hook runs here, on the originals.
    """

    def __init__(self, workers: int):
        # A thread only waits for a process, with a limit, so it cannot hang. The process runs the code that can.
        self.threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        self.idle = deque(Worker() for _ in range(workers))  # last in, first out: warm processes first
        self.pickled = {}  # id(cfg) -> (cfg, bytes of (cfg, hook)): made once, because cfg is read-only

    async def score(self, cfg, sample, reward_key=None, **kw) -> float | dict | list:
        """The reward of a sample; with group_rm also of a list of samples, in one call. RewardError if there is none.
        reward_key (default cfg.reward_key) names the entry of a dict that counts; kw goes to custom_rm."""
        hook, n = cfg.custom_rm, len(sample) if isinstance(sample, list) else None
        if hook and cfg.group_rm and n is None:  # evaluation scores one at a time
            return (await self.score(cfg, [sample], reward_key, **kw))[0]
        rm = getattr(hook, "__qualname__", repr(hook)) if hook else sample.metadata.get("rm_type") or cfg.rm_type
        index = sample.index if n is None else [one.index for one in sample]
        key, limit_s = reward_key or cfg.reward_key, cfg.reward_timeout_s * (n or 1)
        try:
            name = None if hook else check_rm_type(rm)
            fn, sample, kw = (hook, sample, kw) if hook else (GRADERS[name], grader_view(sample, boxed=rm != name), {})
            if name in ("exact", "math", "deepscaler", "dapo", "f1") and not sample.gold:
                raise ValueError("the label is empty; check label_key and this line of the data")
            if asyncio.iscoroutinefunction(fn) or asyncio.iscoroutinefunction(getattr(fn, "__call__", None)):
                return to_reward(await asyncio.wait_for(fn(cfg, sample, **kw), limit_s), n, key)
            if name in INLINE:
                return to_reward(fn(cfg, sample), n, key)
            if hook and id(cfg) not in self.pickled:
                self.pickled[id(cfg)] = cfg, cloudpickle.dumps((cfg, hook))  # by value: closures and lambdas too
            job = cloudpickle.dumps((name or self.pickled[id(cfg)][1], sample, kw, n, key, limit_s))
            return await asyncio.get_running_loop().run_in_executor(self.threads, self._ask, job, limit_s)
        except Exception as error:  # user code and HTTP, so any kind; our own cancellation is no Exception and passes
            cause = error if isinstance(error, RewardError) else describe(error)
            raise RewardError(f"no reward for sample {index} from {rm} (limit {limit_s:g} s): {cause}; fix function or "
                              "data, raise reward_timeout_s, or skip and count with on_reward_error='skip'") from error

    def _ask(self, job, limit_s):
        worker = self.idle.pop()  # never empty: there are as many workers as threads
        try:
            return worker.call(job, limit_s)
        finally:
            self.idle.append(worker)

    def close(self):
        """End the processes. Scores that run are waited for (at most their limit), queued ones are cancelled."""
        self.threads.shutdown(cancel_futures=True)
        for worker in self.idle:
            worker.kill()


# ---- Worker processes ------------------------------------------------------------------------------------------------
class Worker:
    """A process that scores one job at a time; started by the first job, and again after it hung or died."""
    process = None

    def start(self):
        # Neither fork (rollout.py is full of gRPC threads) nor multiprocessing (its child would run train.py again).
        self.conn, theirs = Pipe()  # a socket: its end reads EOF when this process is gone, however it went
        path = [os.path.dirname(os.path.abspath(__file__)), *sys.path]  # a hook's imports resolve as they do here
        code = f"import sys; sys.path[:] = {path!r}; import rewards; rewards.serve({theirs.fileno()})"
        self.process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()],
                                        stdin=subprocess.DEVNULL, start_new_session=True)  # its own group, for kill
        theirs.close()

    def call(self, job, limit_s, load_s=300):  # load_s: to import what a hook needs (torch?) before its clock starts
        if not self.process:
            self.start()
        start_s = time.monotonic()
        try:
            self.conn.send_bytes(job)
            if not self.conn.poll(limit_s + load_s):  # serve() ends itself at limit_s: this is for a stopped process
                raise EOFError
            value, failure = cloudpickle.loads(self.conn.recv_bytes())
        except (EOFError, OSError):
            late, code = time.monotonic() - start_s >= limit_s, self.kill()
            hung = late and code in (1, -signal.SIGKILL)  # faulthandler exits with 1; -9 is our own kill
            failure = "timed out, its stack is on stderr" if hung else f"died with exit code {code}"
        if failure:
            raise RewardError(failure)
        return value

    def kill(self):
        process, self.process = self.process, None
        if process:
            os.killpg(process.pid, signal.SIGKILL)  # the group: a sandbox that the hook started goes too
            return process.wait()


def serve(fd):
    """The life of a worker process: job after job, until the trainer's end of the socket closes."""
    conn, load = Connection(fd), functools.cache(cloudpickle.loads)  # cache: a run's (cfg, hook) is loaded once
    while True:
        try:
            job = conn.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            what, sample, kw, n, key, limit_s = cloudpickle.loads(job)
            cfg, fn = load(what) if isinstance(what, bytes) else (None, GRADERS[what])
            __import__(SLOW_IMPORTS.get(what, "math"))  # 0.4 s, 1.3 s; or nothing new
            # The clock: a C thread that prints the stack and exits. It needs neither GIL nor signal, so it also ends a
            # regex or a sympy call that never returns, even when the trainer is already gone.
            faulthandler.dump_traceback_later(limit_s, exit=True)
            answer = cloudpickle.dumps((to_reward(fn(cfg, sample, **kw), n, key), None))
        except BaseException as error:  # sys.exit() in a hook is no reward either
            answer = cloudpickle.dumps((None, describe(error)))
        faulthandler.cancel_dump_traceback_later()
        conn.send_bytes(answer)


def to_reward(value, n, key):
    """float, or dict with a float at key, or (n not None) a list of n of these; else ValueError."""
    if n is not None:
        if not isinstance(value, (list, tuple)) or len(value) != n:
            raise ValueError(f"group_rm must return a list of {n} rewards, not {value!r:.200}")
        return [to_reward(one, None, key) for one in value]
    if isinstance(value, dict):
        if key not in value:
            raise ValueError(f"reward_key {key!r} is not in the dict; set it to one of {list(value)}")
        return {**value, key: to_reward(value[key], None, None)}
    number = value.item() if hasattr(value, "item") else value  # numpy and torch scalars
    if not isinstance(number, (int, float)) or not math.isfinite(number):
        raise ValueError(f"a reward must be a finite number or a dict, not {number!r:.200}")
    return float(number)


def describe(error):
    where = [f"{os.path.basename(f.filename)}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)[-3:]]
    return f"{type(error).__name__}: {error} ({' > '.join(where)})"


# ---- Graders: (cfg, sample) -> number or dict, like a custom_rm ------------------------------------------------------
# FORK POINT: to add one, write the function and name it in GRADERS. It may hang or crash: it runs in a worker process.
def grader_view(sample, boxed):
    """What a grader sees: the sample without its tokens, taken apart. boxed: the box is the whole response."""
    view = {key: getattr(sample, key) for key in ("prompt", "response", "label", "metadata", "index")}
    view["answer"] = sample.response.rsplit("</think>", 1)[-1]  # all of it when there is no thinking
    view["box"] = last_boxed(view["answer"])
    view["gold"] = "" if sample.label is None else str(sample.label).strip()
    return SimpleNamespace(**view | (dict(response=view["box"] or "", answer=view["box"] or "") if boxed else {}))

def last_boxed(text):
    # What the last \boxed{} holds, nested braces included; None without one, and when the response ends inside it.
    start, depth = text.rfind(r"\boxed{") + len(r"\boxed"), 0
    for brace in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL) if r"\boxed{" in text else ():  # "\{" does not nest
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start + 1:start + brace.start()].strip()

def math_(cfg, sample, box=None):
    # An answer that math-verify cannot read is wrong; a label that it cannot read is a mistake in the data.
    from math_verify import parse, verify  # brings sympy: only worker processes pay
    box, never_s = box or sample.box, 10**6  # s; its own SIGALRM limit turns a hang into "wrong", ours into an error
    gold = sample.gold if "boxed{" in sample.gold or "$" in sample.gold else rf"\boxed{{{sample.gold}}}"
    if not (want := parse(gold, parsing_timeout=never_s)):
        raise ValueError(f"math-verify cannot read the label {sample.label!r:.200}")
    text = sample.answer[-2000:] if box is None else rf"\boxed{{{box}}}"  # no box: the last expression near the end
    return verify(want, parse(text, parsing_timeout=never_s), timeout_seconds=never_s)

def dapo(cfg, sample):
    # 2503.14476, eq. 7: +1 or -1. There normalised strings are compared, here values: 0.5 equals 1/2.
    pred = (re.findall(r"(?i)answer\s*:[ \t]*([^\n]+)", sample.response) or [""])[-1].strip(" *$\t").rstrip(" *$.")
    acc = pred != "" and math_(cfg, sample, pred)
    return {"score": 2.0 * acc - 1, "acc": acc, "pred": pred or "[INVALID]"}

def f1(cfg, sample):
    # SQuAD (1606.05250, sec. 6.1) on bags of words: 2PR / (P + R) = 2 common / (n_want + n_got)
    want, got = (Counter(re.sub(r"\b(a|an|the)\b", " ", re.sub(r"[!-/:-@\[-`{-~]", "", text.lower())).split())
                 for text in (sample.gold, sample.response))  # lower case, no ASCII punctuation, no articles
    return 2 * (want & got).total() / (want.total() + got.total()) if want and got else want == got

def gpqa(cfg, sample):
    texts, letters = list(sample.metadata.get("choices") or ()), "ABCDEFGHIJ"  # texts in the order of the letters
    right = letters[texts.index(sample.label)] if sample.label in texts else sample.gold
    right = str(sample.metadata.get("correct_letter") or right).strip("() .").upper()
    if len(right) != 1 or right not in letters:
        raise ValueError(f"{right!r:.200} is no letter; give metadata correct_letter, or choices that hold the label")
    said = (re.findall(r"\b([A-J])\b", sample.box or "") or re.findall(r"(?m)^\W*([A-J])\W*$", sample.answer)
            or re.findall(r"(?i:answer)(?i:\s+is)?[\s:*($]*([A-J])\b", sample.answer))  # most explicit form first
    return said[-1:] == [right]

def reasoning_gym(cfg, sample, scorers={}):  # scorers: kept per process, because making one takes up to 0.4 s
    import reasoning_gym as gym
    name, answers = sample.metadata["source_dataset"], re.findall(r"(?s)<answer>(.*?)</answer>", sample.answer)
    scorers[name] = scorers.get(name) or gym.get_score_answer_fn(name)
    return scorers[name]((answers or [sample.answer])[-1].strip(), sample.metadata["entry"])

async def remote_rm(cfg, sample):
    import aiohttp
    if not cfg.rm_url:
        raise ValueError("rm_url is not set")
    body = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    async with aiohttp.ClientSession(raise_for_status=True) as session:
        for share in (0.01, 0.02, 0.05, 0.1, 0.2, 0):  # of the limit, waited before the next try; 0: that was the last
            try:
                return await (await session.post(cfg.rm_url, json=body)).json(content_type=None)
            except aiohttp.ClientError:
                if not share:
                    raise
            await asyncio.sleep(share * cfg.reward_timeout_s)

GRADERS = {"math": math_, "dapo": dapo, "f1": f1, "gpqa": gpqa, "reasoning_gym": reasoning_gym, "remote_rm": remote_rm,
           "exact": lambda cfg, sample: sample.response.strip() == sample.gold,
           "deepscaler": lambda cfg, sample: sample.box is not None and math_(cfg, sample),  # the format is a must
           "random": lambda cfg, sample: random.Random(f"{sample.index} {sample.response}").randint(0, 1)}  # repeatable
INLINE = {"exact", "f1", "random"}  # linear in the response, so they cannot hang; a trip to a worker takes 10 times longer
SLOW_IMPORTS = dict(math="math_verify", deepscaler="math_verify", dapo="math_verify", reasoning_gym="reasoning_gym")

def check_rm_type(name):
    """The grader without "boxed_"; ValueError for an unknown one. configs/base.py asks before any GPU is touched."""
    if (grader := str(name).removeprefix("boxed_")) in GRADERS:
        return grader
    near = difflib.get_close_matches(grader, GRADERS, 1, 0.0)[0]
    raise ValueError(f"unknown rm_type {name!r}; did you mean {near!r}? There are {', '.join(GRADERS)}, each also as "
                     "boxed_<name>; a function of your own goes in custom_rm")
