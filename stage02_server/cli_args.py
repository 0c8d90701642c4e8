"""The settings of the HTTP server (vllm/entrypoints/openai/cli_args.py, FrontendArgs). Imports no web framework."""

from __future__ import annotations

from dataclasses import dataclass

from stage03_engine.config import option


@dataclass(frozen=True)
class FrontendArgs:
    """Flags of `serve` beside those of the engine."""

    host: str | None = option(None, "address to listen on; all interfaces if not given")
    port: int = option(8000, "port to listen on; 0 takes a free one")
    served_model_name: tuple[str, ...] | None = option(
        None, "names that requests may use for the model; its own if not given"
    )
    chat_template: str | None = option(None, "Jinja chat template, as a file or as text; replaces the model's own")
    response_role: str = option("assistant", "role of the answering message in chats")
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
    uvicorn_log_level: str = option(
        "info", "log level of the HTTP server", ("debug", "info", "warning", "error", "critical")
    )
    disable_uvicorn_access_log: bool = option(False, "no log line per HTTP request")
