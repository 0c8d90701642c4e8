"""Puts the laboratory's page together: template, style, scripts, scenarios and limits in one text."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from stage01_cli.tools.lab.bench import KINDS
from stage01_cli.tools.lab.scenario import FIELDS, MAX_REQUESTS, MAX_STEPS, POLICIES, PREFIXES, REQUEST_FIELDS, SWITCHES
from stagetrace.player.frame import Reach, framed

SCRIPTS = ("link.js", "python.js", "simulator.js", "editor.js", "picture.js", "lab.js")
STARTER = "own_scheduler.txt"  # what the text box of the static page begins with


def build_page(how: dict[str, Any]) -> tuple[str, str]:
    """The page, and the Content-Security-Policy under which it runs its own script and asks its own server, and nothing else.

    `how`: `mode` is "server" or "static"; `own` names the learner's class, if the server has one.
    """
    script = "\n".join(read_static(name) for name in SCRIPTS)
    data = how | {
        "fields": FIELDS, "switches": SWITCHES, "policies": POLICIES, "prefixes": PREFIXES, "request_fields": REQUEST_FIELDS,
        "max_requests": MAX_REQUESTS, "max_steps": MAX_STEPS, "kinds": KINDS, "scenarios": json.loads(read_static("scenarios.json")),
        "starter": read_static(STARTER),
    }  # fmt: skip
    reach: Reach = "python" if how["mode"] == "static" else "server"
    folder = files("stage01_cli.tools.lab").joinpath("static")
    return framed(
        "The scheduler's laboratory", read_static("lab.html"), read_static("lab.css"), script, data, folder, reach
    )


def read_static(name: str) -> str:
    """One of the files in static/."""
    return files("stage01_cli.tools.lab").joinpath("static", name).read_text(encoding="utf-8")
