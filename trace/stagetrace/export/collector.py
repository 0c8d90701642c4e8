"""Where an OpenTelemetry collector takes spans. Imports nothing of OpenTelemetry."""

from __future__ import annotations

from urllib.parse import urlsplit

from stagetrace.errors import TraceError


def traces_address(url: str) -> tuple[str, int, str]:
    """(host, port, whole address of the traces) from http://host:4318, or from the whole address. Raises TraceError."""
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 4318)
    except ValueError as error:
        raise TraceError(f"{url}: not a collector's address ({error})") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isprintable() or " " in url:
        raise TraceError(f"{url}: not a collector's address; it looks like http://localhost:4318")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    path = parts.path if parts.path.strip("/") else "/v1/traces"
    return parts.hostname, port, f"{parts.scheme}://{host}:{port}{path}"
