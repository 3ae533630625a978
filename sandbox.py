"""
sandbox.py: how is a program that nobody has read run? One process without network, with limits; what it wrote comes back.

    run_python(program, stdin) --Popen--> confine.py: limits, Landlock, seccomp --exec--> python main.py ----------+--> Result
    run_tests(program, tests)  --Popen--> the same, and then the program and its tests in that very process -------+
Use:   from sandbox import run_python; print(run_python("print(6 * 7)").stdout)      Test:  pytest tests/test_sandbox.py
Knows nothing about: rewards, samples, configs. Linux on x86_64 or aarch64, no privileges needed.
What the program cannot do: open a socket, start a process (threads it may; so nothing is left behind), signal, trace or limit
another one, gain rights; outlive its limit or us; take more memory or write larger files than allowed. Where the kernel has
Landlock (5.13 and later, switched on) it reads Python and /usr, and writes only its own folder, which is removed afterwards.
Not protected: without Landlock, all files of this user. A hole in the kernel. Side channels. Programs that may be hostile, not
only foolish, belong in a container or on another machine: rm_type="remote_rm" with rm_url.
"""
import functools
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from confine import FILE_BYTES

LAUNCHER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "confine.py")
FILES = 64                                   # in the program's folder


@dataclass
class Result:
    stdout: str                              # at most FILE_BYTES, as is stderr
    stderr: str
    exit_code: int                           # minus the signal that ended it: -9 is our own kill, or the kernel's
    timed_out: bool
    out_of_memory: bool                      # stderr speaks of a MemoryError
    passed: bool = False                     # run_tests: the program was loaded and every test held


def run_python(program: str, stdin: str = "", limit_s: float = 10.0, memory_bytes: int = 1 << 30) -> Result:
    """A whole program, as `python main.py < stdin` would run it. ValueError on a machine that cannot confine it."""
    check()
    return launch(program, stdin, limit_s, memory_bytes)


def run_tests(program: str, tests: list[str], limit_s: float = 10.0, memory_bytes: int = 1 << 30) -> Result:
    """The program, then test code that calls its functions, in one process; limit_s is for all of it.

    passed is said by an echo: the runner sends a secret back once the last test returned. So exiting early, printing, an
    exit code 0 or an object that equals everything does not pass. Not protected: a program that goes for the runner
    itself (its frames and open files hold the tests and the secret), or replaces builtins that a test uses.
    """
    check()
    secret, (ours, theirs) = secrets.token_bytes(32), socket.socketpair()
    with ours, theirs:
        ours.sendall(secret)                 # read only after the tests, so until then it is in no memory of the program's
        result = launch(None, json.dumps([program, tests]), limit_s, memory_bytes, theirs.fileno())
        theirs.close()
        ours.setblocking(False)
        try:
            echo = ours.recv(33)
        except OSError:                      # nothing was sent
            echo = b""
    result.passed = secrets.compare_digest(echo, secret) and not result.timed_out
    return result


@functools.cache
def check() -> None:
    """ValueError, with the remedy, where a program could not be confined. Asked once per process; takes 0.1 s."""
    probe = ("import os, socket\nfor forbidden in socket.socket, os.fork, lambda: os.kill(os.getppid(), 0):\n"
             "    try:\n        forbidden()\n    except PermissionError:\n        print('refused', end=' ')")
    result = launch(probe, "", 60.0, 1 << 30)
    if result.stdout != "refused " * 3:
        raise ValueError(f"this machine cannot confine a program ({(result.stderr or result.stdout)[-300:].strip()!r}); use "
                         "Linux with seccomp on x86_64 or aarch64, or run programs elsewhere: rm_type='remote_rm' with rm_url")


# ---- The side that waits -----------------------------------------------------------------------------------------------
def launch(program: str | None, stdin: str, limit_s: float, memory_bytes: int, channel: int | None = None) -> Result:
    folder = tempfile.mkdtemp(prefix="sandbox-")
    home = {"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}         # all of it: no key of ours is inherited
    try:
        # Files, not pipes: nobody has to read while the program writes, and FILE_BYTES holds for them too.
        with tempfile.TemporaryFile() as into, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            into.write(stdin.encode("utf-8", "replace"))
            into.seek(0)
            if program is not None:
                with open(os.path.join(folder, "main.py"), "wb") as file:
                    file.write(program.encode("utf-8", "replace"))       # a lone surrogate becomes "?"
            options = ["-s", "-P"] + ["-S"] * (program is not None)      # -S: the launcher needs no packages; 20 ms
            process = subprocess.Popen(
                [sys.executable, *options, LAUNCHER, folder, str(memory_bytes), str(limit_s), str(os.getpid()),
                 str(channel or 0)], stdin=into, stdout=out, stderr=err, cwd=folder, env=home, start_new_session=True,
                pass_fds=[channel] if channel else [])
            end_s, timed_out = time.monotonic() + limit_s, False
            try:
                while process.poll() is None:
                    timed_out = time.monotonic() > end_s
                    if timed_out or too_many_files(folder):
                        break
                    try:
                        process.wait(min(0.1, max(end_s - time.monotonic(), 0.001)))
                    except subprocess.TimeoutExpired:
                        pass
            finally:
                process.kill()               # it is one process: it could not start another
                process.wait(60)
            stdout, stderr = (file.seek(0) or file.read(FILE_BYTES).decode("utf-8", "replace") for file in (out, err))
    finally:
        for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):        # shutil.rmtree gives up 1,000 folders down
            subprocess.run([*command, folder], stderr=subprocess.DEVNULL, timeout=60)
    return Result(stdout, stderr, process.returncode, timed_out, "MemoryError" in stderr[-2000:])


def too_many_files(folder):
    # FILES of FILE_BYTES each is all that is ever on disk, and what 0.1 s can write more.
    seen, todo = 0, [folder]
    while todo and seen <= FILES:
        try:
            with os.scandir(todo.pop()) as entries:
                for entry in entries:
                    seen += 1
                    if seen > FILES:
                        break
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(entry.path)
        except OSError:                      # gone, closed to us, or too deep: it counts
            seen += 1
    return seen > FILES
