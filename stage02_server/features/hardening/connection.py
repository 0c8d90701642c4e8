"""How uvicorn treats connections: TLS, timeouts, its log, and the class that handles each of them."""

from __future__ import annotations

from typing import Any

from stage02_server.features.hardening.manifest import HardeningFlags
from stage02_server.features.hardening.slow_clients import timed_protocol


def uvicorn_settings(args: HardeningFlags) -> dict[str, Any]:
    """Arguments of uvicorn.Config."""
    return {
        "http": timed_protocol(args),
        "ssl_certfile": args.ssl_certfile,
        "ssl_keyfile": args.ssl_keyfile,
        "ssl_ca_certs": args.ssl_ca_certs,
        "ssl_cert_reqs": args.ssl_cert_reqs,
        "ssl_ciphers": args.ssl_ciphers or "TLSv1",  # uvicorn's default: OpenSSL's name for a set, not a version of TLS
        "log_level": args.uvicorn_log_level,
        "proxy_headers": bool((args.forwarded_allow_ips or "").strip()),
        "forwarded_allow_ips": args.forwarded_allow_ips or "",
        "access_log": not args.disable_uvicorn_access_log,
        "timeout_keep_alive": args.timeout_keep_alive,
    }
