"""Checks of the HTTP server's flags that need no web framework, before anything is started."""

from __future__ import annotations

import json
import logging.config
import ssl
from typing import Any

from stage02_server.cli_args import FrontendArgs
from stage03_engine.errors import ConfigError

AT_LEAST = {
    "h11_max_incomplete_event_size": 1024, "h11_max_header_count": 16, "max_request_bytes": 1024, "max_log_len": 0,
}  # fmt: skip


def check_http_flags(args: FrontendArgs) -> None:
    """Raises ConfigError that names the flag; never with a key in its message."""
    for name, least in AT_LEAST.items():
        value = getattr(args, name)
        if value is not None and value < least:
            raise ConfigError(f"{name} must be at least {least}, not {value}")
    for key in args.api_key or ():
        if not key.isascii() or not key.isprintable() or key != key.strip():
            raise ConfigError("api_key must be printable ASCII without spaces around it, to fit into a header")
    if args.root_path is not None and not args.root_path.startswith("/"):
        raise ConfigError(f"root_path must begin with a slash, not {args.root_path!r}")
    if args.allow_credentials and "*" in (args.allowed_origins or ()):
        raise ConfigError("allow_credentials needs allowed_origins by name: with '*' every site could use the login")
    if not 0 <= args.ssl_cert_reqs <= 2:
        raise ConfigError(f"ssl_cert_reqs must be 0 (none), 1 (optional) or 2 (required), not {args.ssl_cert_reqs}")
    if args.ssl_cert_reqs and args.ssl_ca_certs is None:
        raise ConfigError("ssl_cert_reqs needs ssl_ca_certs: who signs the certificates of clients")
    _check_tls(args)


def _check_tls(args: FrontendArgs) -> None:
    if args.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_ciphers"):
            if getattr(args, name) is not None:
                raise ConfigError(f"{name} needs ssl_certfile, without which the server speaks plain HTTP")
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # A password would be asked for at the terminal; an empty one is refused instead.
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile, password="")
        if args.ssl_ca_certs is not None:
            context.load_verify_locations(args.ssl_ca_certs)
        if args.ssl_ciphers is not None:
            context.set_ciphers(args.ssl_ciphers)
    except OSError as error:  # ssl.SSLError is one
        files = ", ".join(name for name in (args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs) if name)
        reason = error.strerror if not isinstance(error, ssl.SSLError) else error.reason or error
        raise ConfigError(f"cannot use {files} for TLS: {reason}; see --ssl-certfile") from error


def load_log_config(path: str) -> None:
    """Set logging up as the JSON file says, in the form of Python's logging.config.dictConfig. Raises ConfigError.

    Loggers that exist already stay, unless the file says otherwise: Python's default would silence the server's own.
    """
    try:
        with open(path, encoding="utf-8") as file:
            config: Any = json.load(file)
        if not isinstance(config, dict):
            raise ValueError("it must hold a JSON object")
        logging.config.dictConfig({"disable_existing_loggers": False} | config)
    except OSError as error:
        raise ConfigError(f"cannot read log_config_file {path}: {error.strerror or error}") from error
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        raise ConfigError(f"log_config_file {path} cannot be used: {error}") from error
