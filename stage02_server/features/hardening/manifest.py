"""The flags that bound what a client can do, and say how the server listens and logs."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass, field
from string import ascii_letters, digits

from stage03_engine.args.fields import option
from stage03_engine.errors import ConfigError
from stage03_engine.plugins import Feature, Part

_IN_A_PATH = {*ascii_letters, *digits, *"/._~!$&()*+,;=:@%-"}  # RFC 3986, but for the quote


@dataclass(frozen=True)
class HardeningFlags:
    """Limits, keys, TLS, CORS, proxies and logs."""

    uds: str | None = option(None, "path of a Unix socket to listen on, instead of host and port", protects=True)
    timeout_keep_alive: int = option(5, "seconds that an idle HTTP connection stays open", at_least=0)
    sse_keep_alive_interval: float = option(
        0.0,
        "seconds of silence after which a stream of text (completions, chats, responses, sound) sends a comment; 0 = never",
        at_least=0,
    )
    request_header_timeout: float = option(
        30, "seconds that a client has to send the header of a request (408 beyond); 0 = no limit", at_least=0
    )
    request_body_timeout: float = option(
        60,
        "seconds that a client has to send the body, and one more per 8 KiB of it (408 beyond); 0 = no limit",
        at_least=0,
    )
    response_stall_timeout: float = option(
        120,
        "seconds after which a client that has stopped reading its answer is disconnected; 0 = no limit",
        at_least=0,
    )
    max_unread_bytes: int = option(
        268435456,
        "most bytes of answers that wait for the clients of an API key, or of an address without one, to read them; beyond, the connection "
        "that has read nothing for the longest time is closed",
        at_least=1048576,
    )
    h11_max_incomplete_event_size: int = option(4194304, "most bytes of a request's header (431 beyond)", at_least=1024)
    h11_max_header_count: int = option(256, "most fields of a request's header (431 beyond)", at_least=16)
    max_request_bytes: int = option(
        8388608,
        "most bytes of a request's body (413 beyond); of uploaded files 32 MiB, or this if it is more",
        at_least=1024,
    )
    max_tokenize_characters: int = option(
        524288, "most characters of a text for /tokenize and /v1/messages/count_tokens (400 beyond)", at_least=1
    )
    max_pipelined_requests: int = option(
        64,
        "most requests of a connection that wait behind the one that is answered; no more of it is read meanwhile",
        at_least=1,
    )
    max_connections: int | None = option(
        None,
        "most connections at once; one more takes the place of the one that has been idle longest, or gets a 503 if none is idle; three "
        "quarters of the files that the process may open if not given",
        at_least=1,
    )
    max_requests_per_address: int = option(
        1024,
        "most requests of one address that are in flight; more wait, on connections of which no more is read; /health and what else needs "
        "no key never waits; 0 = no limit",
        at_least=0,
    )
    max_answers_per_key: int = option(
        65536,
        "most answers of an API key, or of all clients without one, that are in the making (429 beyond): prompts times n, over all requests",
        at_least=1,
    )
    max_settings_bytes: int = option(
        16777216,
        "most bytes that the settings of a request (grammar, bad words, biases, ...) take for all its prompts and answers (400 beyond)",
        at_least=1024,
    )
    max_request_items: int = option(
        327680,  # more than the 300,000 tokens that OpenAI takes in one request for embeddings
        "most items of a request's body: token ids, and all else in lists and objects, where keys count too (413 beyond)",
        at_least=1024,
    )
    event_loop_held_seconds: float = option(
        0.25,
        "seconds for which one piece of work may keep the event loop, and so all clients, before the log, /metrics and /health tell of it; "
        "0 = no watch",
        at_least=0,
    )
    # repr=False marks a secret: no message, table or trace shows its value
    api_key: tuple[str, ...] | None = field(
        default=None,
        repr=False,
        metadata={
            "help": "keys, of which a client must send one as `Authorization: Bearer KEY` or `x-api-key: KEY`; other users of this machine can "
            "read command lines, so better the variable STAGES_API_KEY (or VLLM_API_KEY)",
            "protects": True,
        },
    )
    shared_prefix_cache: bool = option(
        False,
        "with more than one API key: share cached prefixes and compiled grammars between the keys, each of which can then find out, by the time "
        "that an answer takes, what the others ask",
    )
    ssl_certfile: str | None = option(None, "certificate file (PEM); the server then speaks HTTPS", protects=True)
    ssl_keyfile: str | None = option(
        None, "file with the certificate's private key, if it is not in the same file", protects=True
    )
    ssl_ca_certs: str | None = option(
        None, "file with the authorities that may sign certificates of clients", protects=True
    )
    ssl_cert_reqs: int = option(0, "certificate of clients: 0 = not asked for, 1 = optional, 2 = required")
    ssl_ciphers: str | None = option(None, "ciphers for TLS 1.2 and below, in OpenSSL's notation")
    allowed_origins: tuple[str, ...] = option(
        (), "web sites whose pages may call this server (CORS), such as https://example.org, or '*'; none if not given"
    )
    allowed_methods: tuple[str, ...] = option(("*",), "HTTP methods that pages of allowed origins may use")
    allowed_headers: tuple[str, ...] = option(("*",), "headers that pages of allowed origins may send")
    allow_credentials: bool = option(False, "pages of allowed origins may send cookies and logins")
    forwarded_allow_ips: str | None = option(
        None,
        "proxies, with commas between them, whose X-Forwarded-For and X-Forwarded-Proto are believed: addresses, networks, or '*' for "
        "all; none if not given. The variable FORWARDED_ALLOW_IPS is the same",
    )
    root_path: str | None = option(None, "path under which a reverse proxy shows this server, such as /llm")
    middleware: tuple[str, ...] = option(
        (), "module.name of ASGI middleware of your own, a class or a coroutine function; may be given several times"
    )
    enable_request_id_headers: bool = option(False, "answer with the header X-Request-Id")
    uvicorn_log_level: str = option(
        "info", "log level of the HTTP server", ("trace", "debug", "info", "warning", "error", "critical")
    )
    max_log_lines: int = option(
        1000,
        "most lines of the log a second of each kind (access, HTTP, ...), below errors; one line says how many were left out; 0 = no limit",
        at_least=0,
    )
    disable_uvicorn_access_log: bool = option(False, "no log line per HTTP request")
    disable_access_log_for_endpoints: str | None = option(
        None, "paths, with commas between them, whose requests get no such line, such as /health,/metrics"
    )

    def check(self) -> None:
        """Raises ConfigError that names the flag; never with a key in its message."""
        for key in self.api_key or ():
            if not key.isascii() or not key.isprintable() or key != key.strip():
                raise ConfigError("api_key must be printable ASCII without spaces around it, to fit into a header")
        if self.root_path is not None and not self.root_path.startswith("/"):
            raise ConfigError(f"root_path must begin with a slash, not {self.root_path!r}")
        if self.root_path is not None and not set(self.root_path) <= _IN_A_PATH:
            raise ConfigError(
                f"root_path must be a path as it stands in an address, not {self.root_path!r}: pages show it"
            )
        if self.allow_credentials and "*" in (self.allowed_origins or ()):
            raise ConfigError(
                "allow_credentials needs allowed_origins by name: with '*' every site could use the login"
            )
        if not 0 <= self.ssl_cert_reqs <= 2:
            raise ConfigError(f"ssl_cert_reqs must be 0 (none), 1 (optional) or 2 (required), not {self.ssl_cert_reqs}")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError("ssl_cert_reqs needs ssl_ca_certs: who signs the certificates of clients")
        _check_proxies(self.forwarded_allow_ips or "")
        _check_tls(self)

    def warnings(self) -> tuple[str, ...]:
        """What is to be said at the start: that everybody who reaches this machine may use the server, if nothing keeps them out."""
        host = getattr(self, "host", None) or "0.0.0.0"
        asks = self.api_key or self.ssl_cert_reqs == ssl.CERT_REQUIRED
        if self.uds is not None or asks or host not in ("0.0.0.0", "::"):
            return ()
        return (
            "Everybody who reaches this machine can use the server: it listens on all interfaces (--host) and asks for no key "
            "(--api-key). With --host 127.0.0.1 it is for this machine alone.",
        )


def _check_proxies(text: str) -> None:
    for word in text.split(",") if text.strip() not in ("", "*") else ():
        try:
            ipaddress.ip_network(word.strip())
        except ValueError as error:
            raise ConfigError(
                f"forwarded_allow_ips takes addresses and networks such as 10.0.0.0/8, or '*' alone, not {word.strip()!r}: {error}"
            ) from error


def _check_tls(args: HardeningFlags) -> None:
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


FEATURE = Feature(
    name="hardening",
    help="API keys, TLS, CORS, proxies, and a limit on everything that a client can make long",
    room=__package__,
    settings={"FrontendArgs": HardeningFlags},
    parts=(
        Part("process", ".process:prepare"),
        Part("socket", ".unix_socket:create_server_unix_socket", flags=("uds",)),
        Part("connection", ".connection:uvicorn_settings"),
        Part("middleware", ".unread:UnreadMiddleware", key="connection"),
        Part("middleware", ".middleware:RootPathMiddleware", key="address", flags=("root_path",)),
        Part(
            "middleware", ".middleware:RequestIdHeaderMiddleware", key="address", flags=("enable_request_id_headers",)
        ),
        Part("middleware", ".middleware:OwnMiddleware", key="own", flags=("middleware",)),
        Part("middleware", ".middleware:AllowedOriginsMiddleware", key="browser", flags=("allowed_origins",)),
        Part("middleware", ".authentication:AuthenticationMiddleware", key="key", flags=("api_key",)),
        Part("middleware", ".body_limits:BodyLimitMiddleware", key="body"),
        Part("middleware", ".answers_in_flight:AnswersMiddleware", key="body"),
        Part("middleware", ".keep_alive:KeepAliveMiddleware", key="stream", flags=("sse_keep_alive_interval",)),
        Part("request", ".body_limits:BoundedBody", key="RequestModel"),
        Part("server", ".fair_threads:threads_for", key="threads"),
        Part("server", ".long_answers:LongAnswers", key="long_answers"),
        Part("server", ".long_answers:json_pieces", key="json_pieces"),
        Part("server", ".text_limit:check_length", key="text_limit"),
        Part("server", ".turns:TurnsByKey", key="turns"),
        Part("server", ".turns:asker", key="asker"),
        Part("routes", ".tenants:install", flags=("api_key",)),
        Part("answers", ".body_limits:install"),
        Part("answers", ".answers_in_flight:install"),
        Part("answers", ".loop_watch:install", flags=("event_loop_held_seconds",)),
    ),
    events=("connection.ended", "loop.held"),
)
