"""Room for many connections at once (vllm/utils/system_utils.py, set_ulimit)."""

from __future__ import annotations

import resource

WANTED = 65535


def set_ulimit() -> None:
    """Let this process, and those that it starts, open as many files as the system allows, up to WANTED: each connection
    is one, and the usual limit of 1,024 is soon reached."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
