"""Puts the laboratory's page together: template, style, scripts, scenarios and limits in one text."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from stage01_cli.tools.lab.bench import KINDS
from stage01_cli.tools.lab.scenario import FIELDS, MAX_REQUESTS, MAX_STEPS, POLICIES, PREFIXES, REQUEST_FIELDS, SWITCHES
from stagetrace.figures.style import KINDS as LOOKS, css_colours
from stagetrace.player.build import csp_hash, fill, harmless

SCRIPTS = ("link.js", "python.js", "simulator.js", "editor.js", "picture.js", "lab.js")
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
        f"default-src 'none'; {worker} 'sha256-{csp_hash(script)}'; style-src 'sha256-{csp_hash(style)}'; connect-src 'self'; worker-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    parts = {"STYLE": style, "DATA": harmless(json.dumps(data)), "SCRIPT": script, "POLICY": policy}
    return fill(read_static("lab.html"), parts), policy


def read_static(name: str) -> str:
    """One of the files in static/."""
    return files("stage01_cli.tools.lab").joinpath("static", name).read_text(encoding="utf-8")


def _colours() -> str:
    """The figures' colours, which are also the player's: what a request does looks the same everywhere."""
    colours = css_colours() | {"wait": LOOKS["wait"].face}
    return f":root {{ {' '.join(f'--{name}: {colour};' for name, colour in colours.items())} }}\n"
