"""Shut this process in before it runs code of a stranger: limits of time, memory and output, no network, no new process, no signal
to another, no file written outside one folder. Linux only (resource limits, Landlock, seccomp); needs no rights.

`python -m stage01_cli.tools.course.sandbox FOLDER SECONDS MEMORY PYTEST-ARGUMENTS...` shuts itself in and runs pytest.
Sources: landlock(7), seccomp(2).
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import sys
from pathlib import Path

LARGEST_FILE = 16 << 20
OPEN_FILES = 256
RESERVED = 2 << 30  # bytes of addresses that libraries reserve and do not use

LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446  # the same on all machines
WRITE_FILE = 1 << 1
CHANGES = WRITE_FILE | sum(1 << bit for bit in range(4, 13))  # remove_* and make_*; reading and running stay allowed
REFER, TRUNCATE = 1 << 13, 1 << 14  # Landlock 2 and 3
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2

ALLOW, REFUSE, MISSING, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000  # EPERM and ENOSYS in the lower bits
CLONE_THREAD = 0x00010000
MACHINES = {
    "x86_64": (0xC000003E, {"clone": 56, "clone3": 435, "refused": [
        41, 57, 58, 62, 90, 91, 92, 93, 94, 101, 132, 165, 166, 188, 189, 190, 200, 234, 235, 260, 261, 268, 272, 280, 308,
        310, 311, 321, 424, 425, 434, 438, 452, 463,
    ]}),
    "aarch64": (0xC00000B7, {"clone": 220, "clone3": 435, "refused": [
        5, 6, 7, 39, 40, 52, 53, 54, 55, 88, 97, 117, 129, 130, 131, 198, 268, 270, 271, 280, 424, 425, 434, 438, 452, 463,
    ]}),
}  # fmt: skip
"""Machine -> its audit number and its numbers of system calls. Refused: socket; fork and vfork; kill, tkill, tgkill, ptrace,
process_vm_readv and _writev, the pidfd family; chmod, chown, utime and setxattr in all forms (Landlock lets them pass); mount, umount, unshare, setns,
bpf, io_uring_setup."""


def problem() -> str | None:
    """Why nothing can be shut in on this machine, or None."""
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        return f"the sandbox needs Linux on {' or '.join(MACHINES)}; this is {sys.platform} on {platform.machine()}"
    if _landlock_version() < 1:
        return "the sandbox needs Landlock, which this kernel does not have, or which is switched off"
    return None


def shut_in(folder: Path, seconds: int, memory: int) -> None:
    """From now on this process and its threads write below `folder` only, use at most `seconds` of CPU and `memory` bytes.
    Raises OSError when the kernel refuses."""
    limits = {
        resource.RLIMIT_CPU: seconds, resource.RLIMIT_DATA: memory, resource.RLIMIT_AS: 2 * memory + RESERVED,
        resource.RLIMIT_FSIZE: LARGEST_FILE, resource.RLIMIT_NOFILE: OPEN_FILES, resource.RLIMIT_CORE: 0,
    }  # fmt: skip
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _write_below([folder, Path("/dev/null")])
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


def _write_below(places: list[Path]) -> None:
    """Landlock: every way of changing files is handled, so it is refused but where a rule allows it."""
    version = _landlock_version()
    handled = CHANGES | (REFER if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0)
    attributes = struct.pack("<Q", handled)
    rules = _call("syscall", LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    for place in places:
        handle = os.open(place, os.O_PATH | os.O_CLOEXEC)
        allowed = handled if place.is_dir() else handled & (WRITE_FILE | TRUNCATE)
        rule = struct.pack("<Qi", allowed, handle)
        _call("syscall", LANDLOCK_ADD_RULE, rules, 1, rule, 0)
        os.close(handle)
    _call("syscall", LANDLOCK_RESTRICT_SELF, rules, 0)
    os.close(rules)


def _refuse_calls() -> None:
    """seccomp: threads, but no process; pairs of sockets, but none that reaches anybody; no signal to others."""
    code = b"".join(_program())
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    _call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0)


def _program() -> list[bytes]:
    """The filter, in classic BPF. seccomp_data: number of the call at 0, machine at 4, low half of its first argument at 16."""
    audit, calls = MACHINES[platform.machine()]
    load, equal, set_bits, give = 0x20, 0x15, 0x45, 0x06
    refused = calls["refused"]
    assert isinstance(refused, list)
    program = [
        _statement(load, 4), _jump(equal, audit, 1, 0), _statement(give, KILL), _statement(load, 0),
        _jump(equal, calls["clone3"], 0, 1), _statement(give, MISSING),  # libc then calls clone, whose flags can be read
        _jump(equal, calls["clone"], 0, 4),
        _statement(load, 16), _jump(set_bits, CLONE_THREAD, 0, 1), _statement(give, ALLOW), _statement(give, REFUSE),
    ]  # fmt: skip
    for number in refused:
        program += [_jump(equal, number, 0, 1), _statement(give, REFUSE)]
    return [*program, _statement(give, ALLOW)]


def _statement(code: int, value: int) -> bytes:
    return struct.pack("HBBI", code, 0, 0, value)


def _jump(code: int, value: object, if_true: int, if_false: int) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def main() -> int:
    """Shut in, then judge."""
    folder, seconds, memory, *arguments = sys.argv[1:]
    shut_in(Path(folder), int(seconds), int(memory))
    import pytest

    return int(pytest.main(arguments))


if __name__ == "__main__":
    sys.exit(main())
