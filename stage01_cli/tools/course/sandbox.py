"""Shut this process in before it runs code of a stranger: limits of time, memory and output, no network, no new process, no signal
to another, no file written outside one folder, none read but Python, the system and the project. Linux only (resource limits,
Landlock, seccomp); needs no rights, and gives up those that it has.

`python -m stage01_cli.tools.course.sandbox FOLDER SECONDS MEMORY PARENT PYTEST-ARGUMENTS...` shuts itself in and runs pytest; it ends when the
process PARENT does.
Sources: landlock(7), seccomp(2), capabilities(7).
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct
import sys
from pathlib import Path

from stage01_cli.tools.course.exercises import ROOT

LARGEST_FILE = 16 << 20
OPEN_FILES = 256
RESERVED = 2 << 30  # bytes of addresses that libraries reserve and do not use

LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446  # the same on all machines
WRITE_FILE, READ_FILE, READ_DIR, MAKE_DIR, MAKE_REG = (1 << bit for bit in (1, 2, 3, 7, 8))
CHANGES = WRITE_FILE | sum(1 << bit for bit in range(4, 13))  # remove_* and make_*; running stays allowed
# in its folder: files and folders, but no link, pipe, socket or device
OWN = WRITE_FILE | 1 << 4 | 1 << 5 | MAKE_DIR | MAKE_REG
READS = READ_FILE | READ_DIR
REFER, TRUNCATE = 1 << 13, 1 << 14  # Landlock 2 and 3
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 1, 4, 38, 22, 2
CAPABILITIES_3 = 0x20080522
SYSTEM = ["/usr", "/lib", "/lib64", "/bin", "/etc", "/opt", "/proc", "/sys", "/dev/null", "/dev/zero", "/dev/urandom"]
PROJECT = [
    "stage01_cli",
    "stage02_server",
    "stage03_engine",
    "stage04_kernels",
    "trace",
    "tests",
    "notebooks",
    "pyproject.toml",
]
"""What may be read, beside Python's own path: not the other submissions, not the grader's home."""

ALLOW, REFUSE, MISSING, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000  # EPERM and ENOSYS in the lower bits
CLONE_THREAD, SOCK_STREAM, SCHED_OTHER, O_ACCMODE, O_TRUNC = 0x00010000, 1, 0, 3, 0o1000  # Linux's, on whatever machine
NEWEST = 450  # what has a higher number is missing: calls that nobody here knows, and on x86_64 the x32 table
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Machine -> its audit number, and its column in the numbers of system calls below."""

REFUSED: dict[str, tuple[int | None, int | None]] = {
    # the network
    "socket": (41, 198), "bind": (49, 200), "connect": (42, 203), "listen": (50, 201), "accept": (43, 202),
    "accept4": (288, 242),
    # processes, and what reaches another one
    "fork": (57, None), "vfork": (58, None), "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "setpriority": (141, 140), "ioprio_set": (251, 30),
    # changes of files that Landlock lets pass
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, None), "fchown": (93, 55),
    "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None), "futimesat": (261, None),
    "utimensat": (280, 88), "truncate": (76, 45), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    # memory that no limit counts, or that stays when the process is gone
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semctl": (66, 191),
    "semop": (65, 193), "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188),
    "msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    # the kernel itself
    "mount": (165, 40), "umount2": (166, 39), "unshare": (272, 97), "setns": (308, 268), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "fanotify_init": (300, 262),
}  # fmt: skip
"""Name -> its number on x86_64 and on aarch64."""

MISSES = {
    "clone3": (435, 435), "openat2": (437, 437), "sched_setaffinity": (203, 122), "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
}  # fmt: skip
"""libc then calls clone and openat, whose arguments can be read."""

ONLY = [
    ((56, 220), 0, CLONE_THREAD, [CLONE_THREAD]),  # clone: threads
    ((53, 199), 1, 0xF, [SOCK_STREAM]),  # socketpair: a datagram can be sent to anybody
    ((144, 119), 1, 0xFFFFFFFF, [SCHED_OTHER]),  # sched_setscheduler: what libzmq asks for, and what all have
    ((302, 261), 0, 0xFFFFFFFF, [0]),  # prlimit64: of its own
    ((72, 25), 1, 0xFFFFFFFF, [*range(8), 36, 37, 38, 1030, 1031, 1032]),  # fcntl: without F_SETOWN and F_SETSIG
    (
        (16, 29),
        1,
        0xFFFFFFFF,
        [0x5401, 0x540F, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451],
    ),  # ioctl: is it a terminal, FIO*
]
"""(numbers of a call, argument, mask, allowed values of its masked low half)"""

NEVER = [
    ((157, 167), 0, 0xFFFFFFFF, [PR_SET_PDEATHSIG, PR_SET_DUMPABLE]),  # prctl
    (
        (2, None),
        1,
        O_TRUNC | O_ACCMODE,
        [O_TRUNC, O_TRUNC | O_ACCMODE],
    ),  # open: truncates without writing
    ((257, 56), 2, O_TRUNC | O_ACCMODE, [O_TRUNC, O_TRUNC | O_ACCMODE]),  # openat
]
"""The same with values that are refused."""


def problem() -> str | None:
    """Why nothing can be shut in on this machine, or None."""
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        return f"the sandbox needs Linux on {' or '.join(MACHINES)}; this is {sys.platform} on {platform.machine()}"
    if _landlock_version() < 1:
        return "the sandbox needs Landlock, which this kernel does not have, or which is switched off"
    return None


def shut_in(folder: Path, seconds: int, memory: int) -> None:
    """From now on this process and its threads write below `folder` only, use at most `seconds` of CPU and `memory` bytes, and
    end with the thread that started the process. Raises OSError when the kernel refuses."""
    limits = {
        resource.RLIMIT_CPU: seconds, resource.RLIMIT_DATA: memory, resource.RLIMIT_AS: 2 * memory + RESERVED,
        resource.RLIMIT_FSIZE: LARGEST_FILE, resource.RLIMIT_NOFILE: OPEN_FILES, resource.RLIMIT_CORE: 0,
    }  # fmt: skip
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("capset", struct.pack("Ii", CAPABILITIES_3, 0), bytes(24))  # of root's rights, too
    _restrict_files(folder)
    _refuse_calls()


def _call(name: str, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = getattr(libc, name)(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}{arguments[:1]}: {os.strerror(ctypes.get_errno())}")
    return result


def _landlock_version() -> int:
    try:
        return _call("syscall", LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    except OSError:
        return 0


def _restrict_files(folder: Path) -> None:
    """Landlock: every way of reading and changing files is handled, so it is refused but where a rule allows it."""
    version = _landlock_version()
    truncate = TRUNCATE if version >= 3 else 0
    handled = CHANGES | READS | truncate | (REFER if version >= 2 else 0)
    attributes = struct.pack("<Q", handled)
    rules = _call("syscall", LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    python = {sys.prefix, sys.base_prefix, *(place for place in sys.path if place and not ROOT.is_relative_to(place))}
    for place in {*SYSTEM, *python, *(str(ROOT / name) for name in PROJECT)}:
        _allow(rules, Path(place), READS)
    _allow(rules, ROOT, READ_DIR)
    _allow(rules, Path("/dev/null"), READ_FILE | WRITE_FILE | truncate)
    _allow(rules, folder, OWN | READS | (handled & (REFER | truncate)))
    _call("syscall", LANDLOCK_RESTRICT_SELF, rules, 0)
    os.close(rules)


def _allow(rules: int, place: Path, rights: int) -> None:
    """Allow it below a folder, or for a file; what does not exist needs no rule."""
    if not place.exists():
        return
    handle = os.open(place, os.O_PATH | os.O_CLOEXEC)
    rule = struct.pack("<Qi", rights if place.is_dir() else rights & (READ_FILE | WRITE_FILE | TRUNCATE), handle)
    _call("syscall", LANDLOCK_ADD_RULE, rules, 1, rule, 0)
    os.close(handle)


def _refuse_calls() -> None:
    """seccomp: threads, but no processes; pairs of sockets, but none that reaches outside; no signals to others."""
    code = b"".join(_program())
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    _call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0)


def _program() -> list[bytes]:
    """The filter, in classic BPF. seccomp_data: number of the call at 0, machine at 4, the low half of argument n at 16 + 8 n."""
    audit, column = MACHINES[platform.machine()]
    load, equal, greater, give = 0x20, 0x15, 0x25, 0x06
    program = [
        _statement(load, 4), _jump(equal, audit, 1, 0), _statement(give, KILL), _statement(load, 0),
        _jump(greater, NEWEST, 0, 1), _statement(give, MISSING),
    ]  # fmt: skip
    for calls, answer in ((REFUSED, REFUSE), (MISSES, MISSING)):
        for numbers in calls.values():
            if (number := numbers[column]) is not None:
                program += [_jump(equal, number, 0, 1), _statement(give, answer)]
    for rules, if_found, otherwise in ((ONLY, ALLOW, REFUSE), (NEVER, REFUSE, ALLOW)):
        for numbers, argument, mask, values in rules:
            if (number := numbers[column]) is not None:
                program += _argument(number, argument, mask, values, if_found, otherwise)
    return [*program, _statement(give, ALLOW)]


def _argument(number: int, argument: int, mask: int, values: list[int], if_found: int, otherwise: int) -> list[bytes]:
    """The part of the filter that answers one call by the value of an argument; for other calls it jumps to its end."""
    load, mask_with, equal, give = 0x20, 0x54, 0x15, 0x06
    body = [_statement(load, 16 + 8 * argument), _statement(mask_with, mask)]
    for value in values:
        body += [_jump(equal, value, 0, 1), _statement(give, if_found)]
    body.append(_statement(give, otherwise))
    return [_jump(equal, number, 0, len(body)), *body]


def _statement(code: int, value: int) -> bytes:
    return struct.pack("HBBI", code, 0, 0, value)


def _jump(code: int, value: int, if_true: int, if_false: int) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def main() -> int:
    """Shut in, then judge."""
    folder, seconds, memory, parent, *arguments = sys.argv[1:]
    shut_in(Path(folder), int(seconds), int(memory))
    if os.getppid() != int(parent):  # it ended before the kernel was asked to watch it
        return 1
    import pytest

    return int(pytest.main(arguments))


if __name__ == "__main__":
    sys.exit(main())
