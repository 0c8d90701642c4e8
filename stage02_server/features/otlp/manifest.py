"""`--otlp-traces-endpoint` (vllm/tracing/__init__.py)."""

from __future__ import annotations

import os
from dataclasses import dataclass

from stage03_engine.args.fields import option
from stage03_engine.errors import ConfigError
from stage03_engine.mixins import is_there
from stage03_engine.plugins import Feature, Part

_NEEDS = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


@dataclass(frozen=True)
class OtlpFlags:
    """Where spans of requests are sent."""

    otlp_traces_endpoint: str | None = option(
        None,
        "address of an OpenTelemetry collector, which gets a span for each request that ends: http://localhost:4318, or the whole address of its traces",
    )

    @staticmethod
    def check(args: OtlpFlags) -> None:
        """Raises ConfigError for what is no address, for another protocol, and without OpenTelemetry."""
        if args.otlp_traces_endpoint is None:
            return
        from stagetrace.errors import TraceError
        from stagetrace.export.collector import traces_address

        try:
            traces_address(args.otlp_traces_endpoint)
        except TraceError as error:
            raise ConfigError(f"otlp_traces_endpoint {error}") from error
        for name in _PROTOCOLS:
            if os.environ.get(name) not in (None, "", "http/protobuf"):
                raise ConfigError(
                    f"otlp_traces_endpoint: environment variable {name} is {os.environ[name]!r}, and spans are sent by http/protobuf alone"
                )
        if lacking := [name for name in _NEEDS if not is_there(name)]:
            raise ConfigError(
                f"otlp_traces_endpoint needs {lacking[0]}, which is not installed: pip install --editable '.[trace]' adds it"
            )


FEATURE = Feature(
    name="otlp",
    help="a span for each request, sent to an OpenTelemetry collector while the server runs",
    room=__package__,
    settings={"FrontendArgs": OtlpFlags},
    parts=(
        Part("middleware", ".spans:ContextMiddleware", key="own", flags=("otlp_traces_endpoint",)),
        Part("answers", ".spans:install", flags=("otlp_traces_endpoint",)),
    ),
)
