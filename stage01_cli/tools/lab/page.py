"""Puts the laboratory's page together: template, style, scripts, scenarios and limits in one text."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files
from typing import Any

from stage01_cli.tools.lab.bench import KINDS
from stage01_cli.tools.lab.scenario import FIELDS, MAX_REQUESTS, MAX_STEPS, POLICIES, PREFIXES, REQUEST_FIELDS, SWITCHES
from stagetrace.figures.style import KINDS as LOOKS, request_look

SCRIPTS = ("link.js", "simulator.js", "editor.js", "picture.js", "lab.js")
STARTER = "own_scheduler.txt"  # what the text box of the static page begins with


def build_page(how: dict[str, Any]) -> tuple[str, str]:
    """The page, and the Content-Security-Policy under which it runs its own script and asks its own server, and nothing else.

    `how`: `mode` is "server" or "static"; `own` names the learner's class, if the server has one.
    """
    script = "\n".join(read_static(name) for name in SCRIPTS)
    style = _colours() + read_static("lab.css")
    data = how | {
        "fields": FIELDS, "switches": SWITCHES, "policies": POLICIES, "prefixes": PREFIXES, "request_fields": REQUEST_FIELDS,
        "max_requests": MAX_REQUESTS, "max_steps": MAX_STEPS, "kinds": KINDS, "scenarios": json.loads(read_static("scenarios.json")),
        "starter": read_static(STARTER),
    }  # fmt: skip
    worker = "script-src 'self' 'wasm-unsafe-eval'" if how["mode"] == "static" else "script-src"
    policy = (
        f"default-src 'none'; {worker} '{_hash(script)}'; style-src '{_hash(style)}'; connect-src 'self'; worker-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    parts = {"STYLE": style, "DATA": _harmless(json.dumps(data)), "SCRIPT": script, "POLICY": policy}
    pieces = read_static("lab.html").split("@@")  # text, NAME, text, NAME, ...
    return "".join(parts[piece] if place % 2 else piece for place, piece in enumerate(pieces)), policy


def read_static(name: str) -> str:
    """One of the files in static/."""
    return files("stage01_cli.tools.lab").joinpath("static", name).read_text(encoding="utf-8")


def _colours() -> str:
    """The figures' colours, which are also the player's: what a request does looks the same everywhere."""
    colours = {kind: LOOKS[kind].face for kind in ("wait", "prefill", "decode", "preempted")}
    colours |= {f"hue-{place}": request_look(place).face for place in range(7)}
    return f":root {{ {' '.join(f'--{name}: {colour};' for name, colour in colours.items())} }}\n"


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _harmless(text: str) -> str:
    """The same JSON without a character that could end the element that holds it."""
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
