"""Once the workers have connected to each other, nobody else gets in.

gloo listens on TCP, on the loopback interface or on the network, for as long as the worker lives. It keeps each connection that a stranger
makes, even one that has been closed again, and aborts the process when there are no descriptors left. There is no way to tell it that all have
come. So the system gets a filter for its listening sockets that drops every packet. Connections that exist have sockets of their own,
and notice nothing. (Linux only. vLLM leaves these ports open.)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
import sys

SO_ATTACH_FILTER = 26  # of socket(7); Python has no name for it
DROP = struct.pack("HBBI", 0x06, 0, 0, 0)  # of struct sock_filter: BPF_RET | BPF_K, keep 0 bytes


def listening() -> set[int]:
    """The descriptors of this process that listen on TCP."""
    names = os.listdir("/proc/self/fd") if sys.platform == "linux" else ()
    return {descriptor for descriptor in map(int, names) if _listens(descriptor)}


def _listens(descriptor: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            return sock.family != socket.AF_UNIX and bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:  # another thread has closed it
        return False


def close_doors(descriptors: set[int]) -> None:
    """From now on the system drops whatever comes to these listening sockets."""
    instructions = ctypes.create_string_buffer(DROP, len(DROP))
    program = struct.pack("HP", 1, ctypes.addressof(instructions))  # struct sock_fprog
    for descriptor in descriptors:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as sock:
            sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
