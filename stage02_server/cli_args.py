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
    return_tokens_as_token_ids: bool = option(
        False, 'in logprobs call tokens "token_id:5" instead of by their text, unless a request says otherwise'
    )
    enable_force_include_usage: bool = option(False, "end every stream with the usage, asked for or not")
    engine: str = option(
        "core", "core = the real engine; echo = answers with the prompt itself, without torch", ("core", "echo")
    )
    in_process: bool = option(
        False, "run the engine inside the API process, for print and breakpoint(); slower, and without ZMQ"
    )
    shutdown_timeout: int = option(30, "seconds that running requests get to finish after SIGTERM")
    timeout_keep_alive: int = option(5, "seconds that an idle HTTP connection stays open")
    uvicorn_log_level: str = option(
        "info", "log level of the HTTP server", ("debug", "info", "warning", "error", "critical")
    )
    disable_uvicorn_access_log: bool = option(False, "no log line per HTTP request")
