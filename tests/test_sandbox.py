"""
test_sandbox.py: programs that want more than they may have. Each is a real process, really confined.

Run:   pytest -q tests/test_sandbox.py       (about a minute on two busy cores)
"""
import ctypes
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

import pytest

import confine
import sandbox
from sandbox import run_python, run_tests

LANDLOCK = ctypes.CDLL(None).syscall(444, None, 0, 1) > 0
TRY = "def attempt(f, *args):\n    try: print('done', f(*args))\n    except OSError as e: print(type(e).__name__)\nimport ctypes, os, signal, socket, sys\n"


def test_a_program_runs():
    result = run_python("import numpy, sys\nprint(int(input()) + 1, numpy.arange(3).sum())\nprint('no', file=sys.stderr)\nsys.exit(3)", "41\n")
    assert (result.stdout, result.stderr, result.exit_code) == ("42 3\n", "no\n", 3)
    assert not (result.timed_out or result.out_of_memory or result.passed)
    assert run_python("print(open('f', 'w').write('abc'), open('f').read())").stdout == "3 abc\n"
    assert run_python("import asyncio, threading\nt = threading.Thread(target=print, args=(1,)); t.start(); t.join()\n"
                      "asyncio.run(asyncio.sleep(0)); print(2)").stdout == "1\n2\n"


@pytest.mark.parametrize("act", [
    "socket.socket", "socket.socket, socket.AF_UNIX", "socket.create_connection, ('127.0.0.1', 80)", "os.fork", "os.posix_spawn, '/bin/true', ['true'], {}",
    "os.kill, os.getppid(), 0", "os.kill, -1, 9", "os.killpg, os.getpgid(os.getppid()), 0", "os.pidfd_open, os.getppid()",
    "os.setpriority, 0, os.getppid(), 19", "os.sched_setaffinity, os.getppid(), [0]", "os.setuid, 1",
    "__import__('resource').prlimit, os.getppid(), 0"])
def test_what_is_refused(act):
    result = run_python(TRY + f"attempt({act})")
    assert result.stdout == "PermissionError\n", result
    free = TRY + f"attempt({act})"           # the same goes through where nobody is confined, so the test is of the confinement
    if act in ("socket.socket", "os.kill, os.getppid(), 0", "os.fork"):
        assert "done" in subprocess.run([sys.executable, "-c", free], capture_output=True, text=True, timeout=60).stdout


@pytest.mark.parametrize("call", ["ptrace(16, os.getppid(), 0, 0)", "prctl(1, 0, 0, 0, 0)", "syscall(425, 1, 0)", "unshare(0x10000000)", "shmget(0, 10, 0o1600)"])
def test_what_is_refused_to_c(call):
    code = f"import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nprint(libc.{call}, ctypes.get_errno())"
    assert run_python(code).stdout == "-1 1\n"


def test_a_test_program_is_confined_too():
    for act in ("socket.socket", "os.fork", "os.kill, os.getppid(), 0"):
        assert run_tests(TRY, [f"try: {act.split(',')[0]}({act.partition(',')[2]})\nexcept PermissionError: pass\nelse: raise ValueError"]).passed


def test_nothing_of_ours_is_inherited(monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET_KEY", "sesame")
    assert "sesame" not in run_python("import os; print(os.environ, os.listdir('.'))").stdout
    secret = tmp_path / "secret"
    secret.write_text("sesame")
    with open(secret) as file:
        os.set_inheritable(file.fileno(), True)
        fds = run_python("import os\nprint([fd for fd in range(3, 60) if not os.system('') and os.path.exists(f'/dev/fd/{fd}')])").stdout
        assert fds.strip() in ("[]", "[3]")
    if LANDLOCK:
        for path in (secret, "/etc/passwd", f"/proc/{os.getpid()}/environ"):
            assert "PermissionError" in run_python(f"open({str(path)!r})").stderr
        assert "PermissionError" in run_python(f"open({str(tmp_path / 'new')!r}, 'w')").stderr and not (tmp_path / "new").exists()


GREEDY = {  # program -> what shows that it was ended, of its Result
    "sleep": ("import time; time.sleep(1000)", lambda r: r.timed_out), "busy": ("while True: pass", lambda r: r.timed_out),
    "stubborn": ("import signal, time\nfor s in range(1, 30):\n    try: signal.signal(s, signal.SIG_IGN)\n    except OSError: pass\ntime.sleep(1000)",
                 lambda r: r.timed_out),
    "threads": ("import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(1000,)).start()", lambda r: r.exit_code),
    "forks": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", lambda r: r.timed_out),
    "shell": ("import os\nwhile True: os.system('sleep 1000 &')", lambda r: r.timed_out),
    "setsid": ("import os, time\nos.setsid() if os.getsid(0) != os.getpid() else 0\ntime.sleep(1000)", lambda r: r.timed_out),
    "memory": ("x = bytearray(8 << 30)", lambda r: r.out_of_memory), "lists": ("x = []\nwhile True: x.append(bytes(10**6))", lambda r: r.out_of_memory),
    "output": ("while True: print('x' * 10**6)", lambda r: r.exit_code and len(r.stdout) == confine.FILE_BYTES),
    "errors": ("import sys\nwhile True:\n    try: sys.stderr.write('x' * 10**6)\n    except OSError: pass", lambda r: len(r.stderr) <= confine.FILE_BYTES),
    "one file": ("f = open('f', 'wb')\nfor _ in range(1000): f.write(bytes(10**7))", lambda r: "File too large" in r.stderr),
    "files": ("n = 0\nwhile True:\n    n += 1\n    open(f'f{n}', 'wb').write(bytes(10**7))", lambda r: r.exit_code == -9),
    "folders": ("import os\nfor _ in range(3000):\n    os.mkdir('d'); os.chdir('d')\nos.chmod('.', 0)\nwhile True: pass", lambda r: r.exit_code == -9),
    "recursion": ("import sys\nsys.setrecursionlimit(10**9)\nf = lambda: f()\nf()", lambda r: r.exit_code), "nul": ("x = '\0'", lambda r: r.exit_code),
    "surrogate": ("x = '\udfff'", lambda r: True), "braces": ("(" * 10**6, lambda r: r.exit_code), "crash": ("import ctypes; ctypes.string_at(0)", lambda r: r.exit_code == -11)}


@pytest.mark.parametrize("name", GREEDY)
@pytest.mark.parametrize("as_tests", [False, True])
def test_each_ends_within_its_limit(name, as_tests, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sandbox.check()
    program, shows = GREEDY[name]
    start_s = time.monotonic()
    result = run_tests(program, ["assert False"], 2.0, 1 << 28) if as_tests else run_python(program, "", 2.0, 1 << 28)
    assert time.monotonic() - start_s < 2 + 20, "slack for a slow machine"
    assert shows(result) and not result.passed, result
    assert not list(tmp_path.iterdir()), "its folder is left"


def test_it_dies_with_the_process_that_waits(tmp_path):
    code = ("import os, signal, subprocess, threading, time, sandbox\nsandbox.check()\n"
            "threading.Thread(target=sandbox.run_python, args=('import time; time.sleep(1000)', '', 1000.0), daemon=True).start()\n"
            "time.sleep(1.5)\nprint(open(f'/proc/self/task/{threading.enumerate()[1].native_id}/children').read(), flush=True)\nos.kill(os.getpid(), 9)")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=pathlib.Path(sandbox.__file__).parent,
                         env=os.environ | {"TMPDIR": str(tmp_path)})
    pid, end_s = int(out.stdout), time.monotonic() + 20
    while pathlib.Path(f"/proc/{pid}").exists() and time.monotonic() < end_s:
        time.sleep(0.05)
    assert out.returncode == -signal.SIGKILL and not pathlib.Path(f"/proc/{pid}").exists()


def test_a_machine_that_cannot_confine_is_refused(monkeypatch):
    """Where the filter is not installed, no program runs: the error says what to do."""
    sandbox.check.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "LAUNCHER", os.devnull)
        with pytest.raises(ValueError, match="cannot confine a program.*rm_url"):
            run_python("print(1)")
        with pytest.raises(ValueError, match="cannot confine"):
            run_tests("x = 1", ["assert x"])
    sandbox.check()


@pytest.mark.parametrize("machine, header", [("x86_64", "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), ("aarch64", "/usr/include/asm-generic/unistd.h")])
def test_the_numbers_are_the_kernels(machine, header):
    if not os.path.exists(header):
        pytest.skip("no kernel headers here")
    text = pathlib.Path(header).read_text()
    known = {name: int(number) for name, number in re.findall(r"#define __NR_(\w+) (\d+)", text)}
    column = confine.ARCH[machine][0]
    for name, numbers in (confine.REFUSED | confine.SOME).items():
        assert numbers[column] == known.get(name), name
