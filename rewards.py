"""
rewards.py: how is an answer scored? A finished sample goes in, a finite float comes out, or a dict that holds one.

    Sample --score()--+-- async hook, remote_rm: awaited on the event loop, at most reward_timeout_s --+--> float | dict
                      +-- thread i --job--> process i: plain hook or grader, same limit ---------------+--> RewardError
Use:   rewarder = Rewarder(cfg.reward_workers); await rewarder.score(cfg, sample)    Test:  pytest tests/test_rewards.py
Knows nothing about: Ray, SGLang, tensors; of a Sample only prompt, response, label, metadata, index, and only to read.
Left out on purpose: turning an exception into 0.0, because a broken grader would look like a bad policy (rollout.py
decides by on_reward_error); a guard for an `async def` that blocks or ignores its cancellation (use a `def`).
What is right, say the graders of graders.py.
"""
import asyncio
import faulthandler
import functools
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from types import SimpleNamespace

import cloudpickle

from graders import GRADERS, INLINE, NEEDS_LABEL, SETTINGS, SLOW_IMPORTS, check_rm_type, grader_view


class RewardError(RuntimeError):
    """A score that could not be made; the message names sample, reward function, cause and remedy."""


class Killed(RewardError):
    """The process was ended by a signal that was not ours: the OOM killer, a user, a crash in C."""


# ---- What rollout.py uses --------------------------------------------------------------------------------------------
class Rewarder:
    """Scores with cfg.custom_rm, else with the grader that sample.metadata["rm_type"] or else cfg.rm_type names.
    A plain `def` hook runs in another process on copies of cfg and sample: what it writes to them is lost, and what it
    keeps (a cache, a counter) is per process. An `async def` hook runs here, on the originals.
    """

    def __init__(self, workers: int):
        # A thread only waits for a process, with a limit, so it cannot hang. The process runs the code that can.
        self.threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        self.workers = [Worker() for _ in range(workers)]
        self.idle = deque(self.workers)      # last in, first out: warm processes first
        self.restarts = 0                    # processes that somebody killed; written on the event loop only
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
            if name in NEEDS_LABEL and not sample.gold:
                raise ValueError("the label is empty; check label_key and this line of the data")
            if asyncio.iscoroutinefunction(fn) or asyncio.iscoroutinefunction(getattr(fn, "__call__", None)):
                return to_reward(await asyncio.wait_for(fn(cfg, sample, **kw), limit_s), n, key)
            if name in INLINE and len(sample.response) < 100_000:
                return to_reward(fn(cfg, sample), n, key)
            if hook and id(cfg) not in self.pickled:
                self.pickled[id(cfg)] = cfg, cloudpickle.dumps((cfg, hook))  # by value: closures and lambdas too
            settings = SimpleNamespace(**{field: getattr(cfg, field) for field in SETTINGS.get(name, ())})
            job = cloudpickle.dumps((name or self.pickled[id(cfg)][1], settings, sample, kw, n, key, limit_s))
            for last in (False, True):
                try:
                    return await asyncio.get_running_loop().run_in_executor(self.threads, self._ask, job, limit_s)
                except Killed as error:      # once more, in a new process; a time-out is not repeated
                    self.restarts += 1
                    if last:
                        raise RewardError(f"{error}, and so did the new one that was given the job again") from error
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

    def pids(self) -> list[int]:
        """Of the worker processes that live now."""
        return [process.pid for worker in self.workers if (process := worker.process) and process.poll() is None]

    def close(self):
        """End the processes. Scores that run are waited for (at most their limit), queued ones are cancelled."""
        self.threads.shutdown(cancel_futures=True)
        for worker in self.workers:
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
        start_s, wait_s = time.monotonic(), limit_s + load_s  # serve() ends itself at limit_s: this is for a stopped one
        with socket.socket(fileno=os.dup(self.conn.fileno())) as pipe:
            for side in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):      # for each piece of a long message
                pipe.setsockopt(socket.SOL_SOCKET, side, struct.pack("ll", int(wait_s), int(wait_s % 1 * 1e6)))
        try:
            self.conn.send_bytes(job)
            if not self.conn.poll(wait_s):
                raise BlockingIOError
            value, failure = cloudpickle.loads(self.conn.recv_bytes())
        except BlockingIOError:
            self.kill()
            failure = f"timed out: its process was silent for {wait_s:g} s"
        except (EOFError, OSError) as error:
            late, code = time.monotonic() - start_s >= limit_s, self.kill()
            if code < 0:
                raise Killed(f"its process died with exit code {code} ({signal.Signals(-code).name})") from error
            # faulthandler's clock exits with 1
            failure = "timed out, its stack is on stderr" if late and code == 1 else f"died with exit code {code}"
        if failure:
            raise RewardError(failure)
        return value

    def kill(self):
        process, self.process = self.process, None
        if process:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # the group: what the hook started goes too
            except ProcessLookupError:       # nobody is left of it
                pass
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
            what, settings, sample, kw, n, key, limit_s = cloudpickle.loads(job)
            cfg, fn = load(what) if isinstance(what, bytes) else (settings, GRADERS[what])
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
