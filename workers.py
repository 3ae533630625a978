"""
workers.py: how is code run that may hang or crash? In another process, with a time limit that nothing in there can prevent.

    call() --job--> thread i, which only waits --pickle--> process i: the function --> its value
                                                      time is up, crash, kill -9 --> WorkerError

Use:   workers = Workers(2); await workers.call(function, dict(text="..."), limit_s=5.0)
Test:  pytest tests/test_rewards.py
Knows nothing about: rewards, tools.
"""
import asyncio
import concurrent.futures
import contextvars
import faulthandler
import functools
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from typing import Any

import cloudpickle


class WorkerError(RuntimeError):
    """The function raised, hung or died; the message says which."""


class Killed(WorkerError):
    """The process was ended by a signal that was not ours: the OOM killer, a user, a crash in C."""


async def in_thread(function: Callable, *args, **kw) -> Any:
    """A user's function that blocks, in a thread of its own. NOTE: not asyncio.to_thread, which has few, and the engines need
    them; and Python does not end before they do."""
    result, context = concurrent.futures.Future(), contextvars.copy_context()
    result.set_running_or_notify_cancel()    # else the end of one that nobody waits for is an error

    def work():
        try:
            result.set_result(context.run(function, *args, **kw))
        except BaseException as error:
            result.set_exception(error)
    threading.Thread(target=work, name=getattr(function, "__name__", "hook"), daemon=True).start()
    return await asyncio.wrap_future(result)


class Workers:
    """`count` processes, started when they are needed, and again after one hung or died."""

    def __init__(self, count: int):
        # A thread only waits for a process, with a limit, so it cannot hang. The process runs the code that can.
        self.threads = ThreadPoolExecutor(count, thread_name_prefix="worker")
        self.all = [Worker() for _ in range(count)]
        self.idle = deque(self.all)          # last in, first out: warm processes first
        self.restarts = 0                    # processes that somebody killed; written on the event loop only
        self.pickled = {}                    # id(object) -> (object, its bytes): made once, they do not change

    async def call(self, function: Callable, arguments: dict, limit_s: float, make: bool = False) -> Any:
        """function(**arguments), of which a process gets copies; an `async def` runs here, on the originals. WorkerError.

        make: function() makes the function to call; once in each process, and not on the clock (imports, say).
        """
        if asyncio.iscoroutinefunction(function):
            return await asyncio.wait_for(function(**arguments), limit_s)
        if id(function) not in self.pickled:
            self.pickled[id(function)] = function, cloudpickle.dumps(function)   # by value: closures and lambdas too
        job = cloudpickle.dumps((self.pickled[id(function)][1], make, arguments, limit_s))
        for last in (False, True):
            try:
                return await asyncio.get_running_loop().run_in_executor(self.threads, self._ask, job, limit_s)
            except Killed as error:          # once more, in a new process; a time-out is not repeated
                self.restarts += 1
                if last:
                    raise WorkerError(f"{error}, and so did the new one that was given the job again") from error

    def _ask(self, job, limit_s):
        worker = self.idle.pop()             # never empty: there are as many workers as threads
        try:
            return worker.call(job, limit_s)
        finally:
            self.idle.append(worker)

    def pids(self) -> list[int]:
        """Of the processes that live now."""
        return [process.pid for worker in self.all if (process := worker.process) and process.poll() is None]

    def close(self):
        """End the processes. What runs is waited for (at most its limit), what is queued is cancelled."""
        self.threads.shutdown(cancel_futures=True)
        for worker in self.all:
            worker.kill()


# ---- One process -----------------------------------------------------------------------------------------------------
class Worker:
    """A process that does one job at a time; started by the first job, and again after it hung or died."""
    process = None

    def start(self):
        # Neither fork (this process is full of gRPC threads) nor multiprocessing (its child would run train.py again).
        self.conn, theirs = Pipe()           # a socket: its end reads EOF when this process is gone, however it went
        path = [os.path.dirname(os.path.abspath(__file__)), *sys.path]       # imports resolve as they do here
        code = f"import sys; sys.path[:] = {path!r}; import workers; workers.serve({theirs.fileno()})"
        self.process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()],
                                        stdin=subprocess.DEVNULL, start_new_session=True)      # its own group, for kill
        theirs.close()

    def call(self, job, limit_s, load_s=300):  # load_s: to import what the function needs (torch?) before its clock starts
        if not self.process:
            self.start()
        start_s, wait_s = time.monotonic(), limit_s + load_s     # serve() ends itself at limit_s: this is for a stopped one
        with socket.socket(fileno=os.dup(self.conn.fileno())) as pipe:
            for side in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):            # for each piece of a long message
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
            raise WorkerError(failure)
        return value

    def kill(self):
        process, self.process = self.process, None
        if process:
            try:
                os.killpg(process.pid, signal.SIGKILL)           # the group: what the function started goes too
            except ProcessLookupError:       # nobody is left of it
                pass
            return process.wait()


def serve(fd):
    """The life of a process: job after job, until the other end of the socket closes."""
    conn = Connection(fd)

    @functools.cache
    def load(pickled, make):
        function = cloudpickle.loads(pickled)
        return function() if make else function
    while True:
        try:
            job = conn.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            pickled, make, arguments, limit_s = cloudpickle.loads(job)
            function = load(pickled, make)
            # The clock: a C thread that prints the stack and exits. It needs neither GIL nor signal, so it also ends a
            # regex or a sympy call that never returns, even when the trainer is already gone.
            faulthandler.dump_traceback_later(limit_s, exit=True)
            answer = cloudpickle.dumps((function(**arguments), None))
        except BaseException as error:       # sys.exit() is no answer either
            answer = cloudpickle.dumps((None, describe(error)))
        faulthandler.cancel_dump_traceback_later()
        conn.send_bytes(answer)


def describe(error):
    where = [f"{os.path.basename(f.filename)}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)[-3:]]
    return f"{type(error).__name__}: {error} ({' > '.join(where)})"
