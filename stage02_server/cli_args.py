"""The settings of the HTTP server (vllm/entrypoints/openai/cli_args.py, FrontendArgs). Imports no web framework."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stage03_engine.config import option


@dataclass(frozen=True)
class FrontendArgs:
    """Flags of `serve` beside those of the engine."""

    host: str | None = option(None, "address to listen on; all interfaces if not given")
    port: int = option(8000, "port to listen on; 0 takes a free one")
    uds: str | None = option(None, "path of a Unix socket to listen on, instead of host and port")
    served_model_name: tuple[str, ...] | None = option(
        None, "names that requests may use for the model; its own if not given"
    )
    chat_template: str | None = option(None, "Jinja chat template, as a file or as text; replaces the model's own")
    chat_template_content_format: str = option(
        "auto",
        "how templates see a message's content: as one text, or as OpenAI's list of parts; auto looks at the template",
        ("auto", "string", "openai"),
    )
    trust_request_chat_template: bool = option(False, "take a chat template that comes with a request")
    default_chat_template_kwargs: dict[str, Any] | None = option(
        None, "variables for the chat template, where a request does not set them itself"
    )
    enable_auto_tool_choice: bool = option(
        False, "let the model decide whether to call a tool; needs --tool-call-parser"
    )
    exclude_tools_when_tool_choice_none: bool = option(
        False, "do not show the tools to the chat template when the request has tool_choice none"
    )
    tool_call_parser: str | None = option(
        None, "how the model writes tool calls: hermes, or the name of a plugin's parser"
    )
    tool_parser_plugin: str = option(
        "", "Python file that adds parsers to stage02_server.features.tools.tool_parsers.TOOL_PARSERS"
    )
    reasoning_parser: str = option(
        "", "how the model marks its reasoning: deepseek_r1 (<think> tags), or the name of a plugin's parser"
    )
    reasoning_parser_plugin: str = option(
        "", "Python file that adds parsers to stage02_server.features.tools.reasoning_parsers.REASONING_PARSERS"
    )
    response_role: str = option("assistant", "role of the answering message in chats")
    return_tokens_as_token_ids: bool = option(
        False, 'in logprobs call tokens "token_id:5" instead of by their text, unless a request says otherwise'
    )
    enable_force_include_usage: bool = option(False, "end every stream with the usage, asked for or not")
    enable_per_request_metrics: bool = option(
        False, "tell in `metrics` of each answer how long it waited and took; in a stream with the usage"
    )
    max_stored_responses: int = option(
        1000, "responses of /v1/responses that stay in memory, for previous_response_id, GET and cancel; 0 stores none"
    )
    engine: str = option(
        "core", "core = the real engine; echo = answers with the prompt itself, without torch", ("core", "echo")
    )
    in_process: bool = option(
        False, "run the engine inside the API process, for print and breakpoint(); slower, and without ZMQ"
    )
    shutdown_timeout: int = option(30, "seconds that running requests get to finish after SIGTERM")
    enable_server_load_tracking: bool = option(False, "count the requests in progress for GET /load")
    server_dev_mode: bool = option(
        False, "answer GET /server_info and POST /abort_requests, which show and change what is not the caller's"
    )
    max_queue_len: int | None = option(
        None, "requests that may wait; one more is refused with 429 and Retry-After; no limit if not given"
    )
    timeout_keep_alive: int = option(5, "seconds that an idle HTTP connection stays open")
    sse_keep_alive_interval: float = option(
        0.0,
        "seconds of silence after which a stream of text (completions, chats, responses, sound) sends a comment; 0 = never",
    )
    request_header_timeout: float = option(
        30, "seconds that a client has to send the header of a request (408 beyond); 0 = no limit"
    )
    request_body_timeout: float = option(
        60, "seconds that a client has to send the body, and one more per 8 KiB of it (408 beyond); 0 = no limit"
    )
    response_stall_timeout: float = option(
        120, "seconds after which a client that reads nothing of an answer that waits for it is cut off; 0 = no limit"
    )
    # repr=False marks a secret: its value is in no message, no table and no trace
    api_key: tuple[str, ...] | None = field(
        default=None,
        repr=False,
        metadata={
            "help": "keys, of which a client must send one as `Authorization: Bearer KEY`; other users of this machine can "
            "read command lines, so better the variable STAGES_API_KEY"
        },
    )
    ssl_certfile: str | None = option(None, "certificate file (PEM); the server then speaks HTTPS")
    ssl_keyfile: str | None = option(None, "file with the certificate's private key, if it is not in the same file")
    ssl_ca_certs: str | None = option(None, "file with the authorities that may sign certificates of clients")
    ssl_cert_reqs: int = option(0, "certificate of clients: 0 = not asked for, 1 = optional, 2 = required")
    ssl_ciphers: str | None = option(None, "ciphers for TLS 1.2 and below, in OpenSSL's notation")
    allowed_origins: tuple[str, ...] = option(
        (), "web sites whose pages may call this server (CORS), such as https://example.org, or '*'; none if not given"
    )
    allowed_methods: tuple[str, ...] = option(("*",), "HTTP methods that pages of allowed origins may use")
    allowed_headers: tuple[str, ...] = option(("*",), "headers that pages of allowed origins may send")
    allow_credentials: bool = option(False, "pages of allowed origins may send cookies and logins")
    root_path: str | None = option(None, "path under which a reverse proxy shows this server, such as /llm")
    middleware: tuple[str, ...] = option(
        (), "module.name of ASGI middleware of your own, a class or a coroutine function; may be given several times"
    )
    enable_request_id_headers: bool = option(False, "answer with the header X-Request-Id")
    disable_fastapi_docs: bool = option(False, "no /docs, /redoc and /openapi.json")
    h11_max_incomplete_event_size: int = option(4194304, "most bytes of a request's header (431 beyond)")
    h11_max_header_count: int = option(256, "most fields of a request's header (431 beyond)")
    max_request_bytes: int = option(
        8388608, "most bytes of a request's body (413 beyond); of uploaded files 32 MiB, or this if it is more"
    )
    enable_log_requests: bool = option(False, "a log line per prompt, with its text and its sampling parameters")
    max_log_len: int | None = option(None, "most characters and token ids of a prompt in the log; all if not given")
    log_config_file: str | None = option(
        None, "JSON file that sets up logging, in the form of Python's logging.config.dictConfig"
    )
    uvicorn_log_level: str = option(
        "info", "log level of the HTTP server", ("trace", "debug", "info", "warning", "error", "critical")
    )
    disable_uvicorn_access_log: bool = option(False, "no log line per HTTP request")
    disable_access_log_for_endpoints: str | None = option(
        None, "paths, with commas between them, whose requests get no such line, such as /health,/metrics"
    )
