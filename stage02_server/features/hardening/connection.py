"""How uvicorn treats connections: TLS, timeouts, its log, and the class that handles each of them."""

from __future__ import annotations

from asyncio import BaseProtocol
from collections.abc import Callable
from typing import Any

from stage02_server.features.hardening.manifest import HardeningFlags
from stage02_server.features.hardening.slow_clients import timed_protocol


def uvicorn_settings(args: HardeningFlags) -> dict[str, Any]:
    """Arguments of uvicorn.Config."""
    timed = timed_protocol(args)
    http: Callable[..., BaseProtocol] = timed
    if args.ssl_certfile is not None:
        from stage02_server.features.hardening.handshakes import with_tls  # late: most servers have no certificate

        http = with_tls(timed, args)
    return {
        "http": http,
        "log_level": args.uvicorn_log_level,
        "proxy_headers": bool((args.forwarded_allow_ips or "").strip()),
        "forwarded_allow_ips": args.forwarded_allow_ips or "",
        "access_log": not args.disable_uvicorn_access_log,
        "timeout_keep_alive": args.timeout_keep_alive,
    }
