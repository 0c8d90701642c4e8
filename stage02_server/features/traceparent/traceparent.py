"""The header `traceparent` (W3C Trace Context): our trace continues the client's. vLLM: extract_trace_headers."""

from __future__ import annotations

import re
from collections.abc import Sequence

_VERSION_00 = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_LATER = re.compile(_VERSION_00.pattern + r"(-.*)?")  # a later version may add fields after these


def parse_traceparent(values: Sequence[str]) -> tuple[str | None, str | None]:
    """(trace id, parent id) of the request's `traceparent` headers; (None, None) unless there is exactly one valid one.

    As the standard demands: lower-case hex, neither id all zero, no version ff, and nothing after the flags in version 00.
    """
    if len(values) != 1:
        return None, None
    match = _VERSION_00.fullmatch(values[0]) or _LATER.fullmatch(values[0])
    if match is None:
        return None, None
    version, trace_id, parent_id = match.group(1, 2, 3)
    longer = len(values[0]) > 55
    if version == "ff" or (version == "00" and longer) or not trace_id.strip("0") or not parent_id.strip("0"):
        return None, None
    return trace_id, parent_id
