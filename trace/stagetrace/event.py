"""One trace event, and its two renderings: the machine line (JSON) and the human line (console).

vLLM has no counterpart: it logs sentences. Here a sentence and a record are two views of one object, so they cannot
disagree.
"""

from __future__ import annotations

from typing import Any

import msgspec

FORMAT_VERSION = 1


class Event(msgspec.Struct, gc=False, omit_defaults=True):
    """What happened, where, when, and what caused it.

    `cause` is the `ref` of the event that made this one happen ("4211:88" = pid 4211, its 88th event), in another process
    or, from an HTTP request to its chunks, in this one; within a process the sequence number gives the order. Which `req` belong
    to one HTTP request is defined in `stagetrace.ids`.
    """

    v: int  # FORMAT_VERSION
    seq: int  # counts up within one process, from 1; 0 is run.start, at the head of each file
    ts: int  # time.monotonic_ns(): comparable between the processes of one host
    pid: int
    proc: str  # APIServer, EngineCore_DP0, LLM, CLI
    ph: str  # i = instant, B = span begins, E = span ends (the letters of the Chrome trace format)
    name: str  # a row of stagetrace.vocabulary
    phase: int  # 1-9; 0 for the run's own records
    src: str  # file:line of the call
    req: str | None = None  # request id
    step: int | None = None  # engine step
    cause: str | None = None
    args: dict[str, Any] = {}

    @property
    def ref(self) -> str:
        """The name by which another event can call this one its cause."""
        return f"{self.pid}:{self.seq}"

    def console_line(self) -> str:
        """`[TRACE] (scheduler.py) sched.admit req=r0 step=3 new_blocks=[4, 5]`"""
        parts = [f"[TRACE] ({self.src.partition(':')[0]}) {self.name}"]
        if self.ph != "i":
            parts.append("begin" if self.ph == "B" else "end")
        if self.req is not None:
            parts.append(f"req={self.req}")
        if self.step is not None:
            parts.append(f"step={self.step}")
        parts.extend(f"{key}={value}" for key, value in self.args.items())
        return " ".join(parts)


_encoder = msgspec.json.Encoder(enc_hook=str)
_decoder = msgspec.json.Decoder(Event)


encode = _encoder.encode
"""One JSON object, without a newline in it."""


def encode_line(event: Event) -> bytes:
    """One JSON object and a newline."""
    return encode(event) + b"\n"


def decode_line(line: bytes) -> Event:
    """The inverse of `encode_line`. Raises msgspec.DecodeError on a torn or foreign line."""
    return _decoder.decode(line)
