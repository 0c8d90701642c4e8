"""The sandbox of `stages course grade`: each way out of it that is known, tried from inside. One process tries them all."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from stage01_cli.tools.course import sandbox

pytestmark = pytest.mark.skipif(sandbox.problem() is not None, reason=str(sandbox.problem()))
ROOT = Path(__file__).resolve().parents[2]
TRIES = r"""
import ctypes, fcntl, json, mmap, os, resource, socket, struct, sys, threading
from pathlib import Path
from stage01_cli.tools.course.sandbox import REFUSED, shut_in
folder, outside, parent = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
os.chdir(folder)
shut_in(folder, 60, 1 << 30)
libc = ctypes.CDLL(None, use_errno=True)

def call(name, *arguments):
    which = 0 if os.uname().machine == "x86_64" else 1
    number = REFUSED[name][which] if isinstance(name, str) else name
    if number is None:
        raise OSError("this machine does not have it")
    if libc.syscall(ctypes.c_long(number), *arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

def queue_signal():
    information = struct.pack("iiii", 0, 0, -1, 0) + bytes(112)
    call("rt_sigqueueinfo", parent, 0, information)

def signal_by_descriptor():
    fcntl.fcntl(sys.stdin, fcntl.F_SETOWN, parent)

def signal_by_ioctl():
    fcntl.ioctl(socket.socketpair()[0], 0x8901, struct.pack("i", parent))

def datagram():
    one, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    one.sendto(b"out", outside + ".socket")

def datagram_raw():
    one, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_RAW)
    one.sendto(b"out", outside + ".socket")

def truncate_by_open():
    os.open("own", os.O_RDONLY | os.O_TRUNC)

def other_table():
    call(0x40000000 | 39)  # getpid of the x32 table
    raise SystemExit("x32")

def shared_memory():
    call("shmget", 0, ctypes.c_size_t(4096), 0o1600)

def large_file():
    with open("large", "wb") as file:
        file.truncate(1 << 40)

def queue():
    call("mq_open", b"stages", os.O_CREAT | os.O_RDWR, 0o600, None)

tries = {
    "fork": os.fork, "vfork": lambda: call("vfork"), "clone": lambda: os.posix_spawn("/bin/true", ["true"], {}),
    "kill": lambda: os.kill(parent, 0), "rt_sigqueueinfo": queue_signal, "F_SETOWN": signal_by_descriptor, "FIOSETOWN": signal_by_ioctl,
    "pidfd": lambda: os.pidfd_open(parent),
    "socket": lambda: socket.socket(), "datagram": datagram, "raw datagram": datagram_raw,
    "prlimit": lambda: resource.prlimit(parent, resource.RLIMIT_CORE),
    "priority": lambda: os.setpriority(os.PRIO_PROCESS, parent, 19),
    "affinity": lambda: os.sched_setaffinity(parent, os.sched_getaffinity(0)),
    "scheduler": lambda: os.sched_setscheduler(parent, os.SCHED_BATCH, os.sched_param(0)),
    "io priority": lambda: call("ioprio_set", 1, parent, 3 << 13),
    "memory of the parent": lambda: open(f"/proc/{parent}/mem", "rb"),
    "environment of the parent": lambda: open(f"/proc/{parent}/environ", "rb").read(),
    "write": lambda: open(outside, "w"), "by another name": lambda: open("/proc/self/root" + outside, "a"),
    "reopened": lambda: open(f"/proc/self/fd/{os.open(json.__file__, os.O_RDONLY)}", "r+"), "read": lambda: open(outside),
    "truncate": lambda: os.truncate(outside, 0), "O_TRUNC": truncate_by_open,
    "hard link": lambda: os.link(outside, "mine"), "link out": lambda: os.link("own", outside + "2"),
    "symbolic link": lambda: os.symlink(outside, "link"), "fifo": lambda: os.mkfifo("fifo"),
    "device": lambda: os.mknod("device", 0o600 | 0o020000, os.makedev(1, 3)),
    "chmod": lambda: os.chmod(outside, 0), "chown": lambda: os.chown(outside, os.getuid(), os.getgid()), "utime": lambda: os.utime(outside),
    "attribute": lambda: os.setxattr(outside, "user.a", b"1"), "no attribute": lambda: os.removexattr(outside, "user.b"),
    "flags of a file": lambda: fcntl.ioctl(os.open("own", os.O_RDONLY), 0x40086602, struct.pack("l", 0x80)),
    "its own folder": lambda: os.rename(folder, str(folder) + "2"),
    "shared memory": shared_memory, "message queue": queue, "memfd": lambda: os.memfd_create("a"),
    "semaphores": lambda: call("semget", 0, 1, 0o1600), "messages": lambda: call("msgget", 0, 0o1600),
    "key": lambda: call("add_key", b"user", b"stages", b"1", ctypes.c_size_t(1), -3),
    "io_uring": lambda: call("io_uring_setup", 1, bytes(120)), "x32": other_table,
    "stays when the grader dies": lambda: ctypes.CDLL(None).prctl(1, 0) and call(-1),
    "user namespace": lambda: call("unshare", 0x10000000), "owner": lambda: os.setuid(1) if os.getuid() == 0 else call(-1),
    "memory": lambda: bytearray(2 << 30), "large file": large_file,
    "terminal": lambda: [open(path, "rb") for path in ("/dev/tty", "/dev/ptmx")],
}
Path("own").write_text("a place of its own")
succeeded = []
for name, attempt in tries.items():
    try:
        attempt()
        succeeded.append(name)
    except (OSError, ValueError, MemoryError):
        pass
thread = threading.Thread(target=print)
thread.start()
thread.join()
socket.socketpair()
print(json.dumps(succeeded))
"""


def test_no_way_out(tmp_path: Path) -> None:
    """The one that it would find first says what is open: a system call that is missing in the lists, or a file that can be changed."""
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    folder.mkdir()
    outside.write_text("untouched")
    before = outside.stat()
    run = subprocess.run(
        [sys.executable, "-c", TRIES, str(folder), str(outside), str(os.getpid())],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == []
    after = outside.stat()
    assert outside.read_text() == "untouched" and after.st_mtime_ns == before.st_mtime_ns
    assert stat.filemode(after.st_mode) == stat.filemode(before.st_mode)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["folder", "outside"]
