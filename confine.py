"""
confine.py: how does a process give up what a program must not have? sandbox.py starts this file; it becomes the program.

    this process --die with the parent, no capabilities, Landlock, limits, seccomp--> exec python main.py, or tests_of_stdin

Test:  pytest tests/test_sandbox.py
Knows nothing about: who waits, what is done with the result. A file of its own because it starts in 20 ms with few imports.
Source: the kernel's docs, userspace-api/seccomp_filter and /landlock; its headers asm/unistd.h, linux/audit.h, linux/prctl.h.
"""
import ctypes
import errno
import json
import os
import platform
import resource
import signal
import struct
import sys
import types

FILE_BYTES, OPEN_FILES = 16 << 20, 64        # of one file (stdout is one); open at a time
PROGRAM = "<program>"                        # the file name in its tracebacks


# ---- Giving up rights -------------------------------------------------------------------------------------------------
def main(folder, memory_bytes, limit_s, parent, channel):
    libc = ctypes.CDLL(None, use_errno=True)
    def call(name, *args):
        if (value := getattr(libc, name)(*args)) < 0:
            raise OSError(ctypes.get_errno(), f"{name}{args[:2]}: {os.strerror(ctypes.get_errno())}")
        return value

    machine = platform.machine()
    if machine not in ARCH:
        raise OSError(f"no system call table for {machine}")
    call("prctl", 1, signal.SIGKILL, 0, 0, 0)                            # PR_SET_PDEATHSIG: die with the thread that waits
    if os.getppid() != parent:
        sys.exit("the process that wanted this is gone")
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")                   # when the machine runs out of memory, this goes before any trainer
    call("prctl", 38, 1, 0, 0, 0)                                        # PR_SET_NO_NEW_PRIVS: no setuid program helps it
    call("capset", struct.pack("<Ii", 0x20080522, 0), bytes(24))    # root keeps no more than its name
    landlock(libc, folder)
    # NOTE: no RLIMIT_NPROC: it counts all threads of the user, trainers' too, and does not hold for root. Processes are
    # refused by the filter; threads are bounded by their stacks' share of memory_bytes.
    for what, most in ((resource.RLIMIT_CPU, int(limit_s) + 1), (resource.RLIMIT_FSIZE, FILE_BYTES), (resource.RLIMIT_CORE, 0),
                       (resource.RLIMIT_NOFILE, OPEN_FILES), (resource.RLIMIT_AS, memory_bytes)):
        resource.setrlimit(what, (most, most))
    code = b"".join(struct.pack("<HBBI", *line) for line in seccomp_filter(machine, os.getpid()))
    buffer = ctypes.create_string_buffer(code)
    call("prctl", 22, 2, struct.pack("<HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer)), 0, 0)      # PR_SET_SECCOMP
    if not channel:
        os.execve(sys.executable, [sys.executable, "-s", "-P", "main.py"], dict(os.environ))
    tests_of_stdin(channel)


def landlock(libc, folder):
    # Kernel docs, userspace-api/landlock. System calls 444 to 446 on every machine; a kernel without them goes on as it is.
    abi = libc.syscall(444, None, 0, 1)
    if abi < 1:
        return
    rights = (1 << 13 + min(abi - 1, 2)) - 1                             # 13 rights on files; refer and truncate came later
    ruleset = libc.syscall(444, struct.pack("<Q", rights), 8, 0)
    venv = os.path.dirname(os.path.dirname(sys.executable))              # started with -S, sys.prefix does not know it
    folders = {venv, sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64", "/bin"}
    grants = {path: 0b1101 for path in folders} | {"/etc/ld.so.cache": 0b100, "/etc/localtime": 0b100, "/dev/urandom": 0b100,
                                                   "/dev/null": 0b110, folder: rights}  # bits: execute, write, read, list
    for path, grant in grants.items():
        if os.path.exists(path):
            fd = os.open(path, os.O_PATH)
            if libc.syscall(445, ruleset, 1, struct.pack("<Qi", grant, fd), 0):
                raise OSError(ctypes.get_errno(), f"landlock rule for {path}")
            os.close(fd)
    if libc.syscall(446, ruleset, 0):
        raise OSError(ctypes.get_errno(), "landlock")
    os.close(ruleset)


ARCH = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}           # column below, AUDIT_ARCH_* of linux/audit.h
REFUSED = {  # system call -> its number on x86_64 and on aarch64 (asm/unistd.h); None: there is none
    "socket": (41, 198), "fork": (57, None), "vfork": (58, None), "ptrace": (101, 117), "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "process_madvise": (440, 440), "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "unshare": (272, 97), "setns": (308, 268), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "shmget": (29, 194), "semget": (64, 190),
    "msgget": (68, 186), "mq_open": (240, 180), "setpriority": (141, 140), "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274)}
SOME = {"kill": (62, 129), "tgkill": (234, 131), "prlimit64": (302, 261), "prctl": (157, 167), "clone": (56, 220),
        "clone3": (435, 435)}                                            # by their first argument


def seccomp_filter(machine, pid):
    """Classic BPF (kernel docs, userspace-api/seccomp_filter), lines of (code, jump if true, jump if false, constant)."""
    column, audit_arch = ARCH[machine]
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, die = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
    number, architecture, argument = 0, 4, 16                            # offsets in struct seccomp_data; both little endian
    own = [(equal, 2, 0, pid), (equal, 1, 0, 0), (give, 0, 0, refuse), (give, 0, 0, allow)]
    rules = {"kill": own, "tgkill": own, "prlimit64": own,               # itself only
             "prctl": [(equal, 0, 1, 1), (give, 0, 0, refuse), (give, 0, 0, allow)],             # PDEATHSIG stays
             "clone": [(any_bit, 1, 0, 0x10000), (give, 0, 0, refuse), (give, 0, 0, allow)],     # CLONE_THREAD
             "clone3": [(give, 0, 0, 0x00050000 | errno.ENOSYS)]}        # its flags are out of reach: libc falls back to clone
    lines = [(load, 0, 0, architecture), (equal, 1, 0, audit_arch), (give, 0, 0, die), (load, 0, 0, number),
             (at_least, 0, 1, 0x40000000), (give, 0, 0, die)]            # x32's numbers
    for columns in REFUSED.values():
        if columns[column] is not None:
            lines += [(equal, 0, 1, columns[column]), (give, 0, 0, refuse)]
    for name, rule in rules.items():
        lines += [(equal, 0, len(rule) + 1, SOME[name][column]), (load, 0, 0, argument), *rule]
    return lines + [(give, 0, 0, allow)]


# ---- The program and its tests in one process ------------------------------------------------------------------------
def tests_of_stdin(channel):
    program, tests = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)             # nor can the tests be read again
    codes = [compile(compare_by_equal(test), "<test>", "exec") for test in tests]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    execute, trace, read, write = exec, sys.settrace, os.read, os.write  # bound before the program can replace them
    execute(compile(program, PROGRAM, "exec"), module.__dict__)
    module.__dict__["__equal__"] = equal
    for code in codes:
        trace(None)
        execute(code, module.__dict__)
    write(channel, read(channel, 32))


def compare_by_equal(test):
    """The test's syntax tree, with __equal__(a, b) for each a == b."""
    import ast                               # 10 ms, and only tests need it

    class Equals(ast.NodeTransformer):
        def visit_Compare(self, node):
            self.generic_visit(node)
            if len(node.ops) > 1 or not isinstance(node.ops[0], ast.Eq):
                return node
            return ast.Call(ast.Name("__equal__", ast.Load()), [node.left, *node.comparators], [])

    return ast.fix_missing_locations(Equals().visit(ast.parse(test)))


def equal(a, b):
    # An object whose class the program wrote equals only objects of such a class: __eq__ may say True to everything.
    return has_own_eq(a) == has_own_eq(b) and a == b


def has_own_eq(value):
    code = getattr(type(value).__eq__, "__code__", None)
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set, frozenset)) else ()
    return (code is not None and code.co_filename == PROGRAM) or any(map(has_own_eq, inside))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
