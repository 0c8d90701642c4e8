"""The operator's flags."""

from __future__ import annotations

from dataclasses import dataclass

from stage03_engine.args.fields import option
from stage03_engine.errors import ConfigError
from stage03_engine.plugins import Feature, Part


@dataclass(frozen=True)
class AdminFlags:
    """What operators can see and do."""

    enable_server_load_tracking: bool = option(False, "count the requests in progress for GET /load")
    server_dev_mode: bool = option(
        False,
        "answer GET /server_info, POST /abort_requests, POST /reset_prefix_cache and, with several engines, POST /scale_engines, "
        "which show and change what is not the caller's (vLLM: VLLM_SERVER_DEV_MODE=1)",
    )
    max_num_queued_reqs: int | None = option(
        None,
        "most requests that wait or run, each counted as often as it has answers; one more is refused with 503 and "
        "Retry-After; no limit if not given. Each of several API servers counts its own",
    )
    max_num_queued_tokens: int | None = option(
        None,
        "prompt tokens of requests without a first output, from which on a request is refused with 503 and Retry-After; no "
        "limit if not given. Each of several API servers counts its own",
    )
    engine_stall_seconds: float | None = option(
        None,
        "how long the engine may owe an answer, without a step in between, before /health is 503 with the state `stalled`, 300 if "
        "not given; 0 = no limit. One of several engines is killed then, and started again as a dead one is, after 60 if not "
        "given: leave more if the first step compiles kernels on a slow machine, which takes a minute or two. So is one of several API "
        "servers that stands still as long",
        at_least=0,
    )
    enable_log_requests: bool = option(False, "log each prompt, with its text and its sampling parameters")
    max_log_len: int | None = option(
        None, "most characters and token ids of a prompt in the log; all if not given", at_least=0
    )

    def check(self) -> None:
        """Raises ConfigError for a limit below its least value."""
        for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}; leave it out for no limit")


FEATURE = Feature(
    name="admin",
    help="for whoever runs the server: /metrics, /load, states, a bound on the queue, a log of requests, developer's routes",
    room=__package__,
    settings={"FrontendArgs": AdminFlags},
    parts=(
        Part("middleware", ".server_load:ServerLoadMiddleware", key="count", flags=("enable_server_load_tracking",)),
        Part(  # behind the key and the limits: what they refuse takes no place
            "middleware",
            ".admission:AdmissionMiddleware",
            key="queue",
            flags=("max_num_queued_reqs", "max_num_queued_tokens"),
        ),
        Part("routes", ".routes:install"),
        Part("routes", ".dev_routes:install", flags=("server_dev_mode",)),
        Part("routes", ".states:install"),
        Part("answers", ".admission:install"),
        Part("answers", ".request_logger:install", flags=("enable_log_requests",)),
    ),
    events=("request.aborted",),
)
