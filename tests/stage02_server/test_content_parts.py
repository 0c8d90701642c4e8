"""The parts of a message's content: the walk knows text, features declare the other kinds."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from server_under_test import InProcessServer

from stage02_server.chat_template import text_of
from stage02_server.protocol import CONTENT_KINDS, ChatMessageParam
from stage03_engine.errors import InvalidRequestError
from stage03_engine.plugins import keys

ROOT = Path(__file__).parents[2]


def part_of(kind: str) -> dict[str, Any]:
    """A part whose every field holds a text of its own."""
    fields = CONTENT_KINDS[kind].model_fields.keys() - {"type"}
    return {"type": kind} | {name: f"the {name} of {kind}" for name in fields}


TEXTS = CONTENT_KINDS.keys() - {"image_url"}  # a picture is text only where a model sees: test_images_api


def shown(*parts: dict[str, Any] | str) -> str:
    return text_of(ChatMessageParam.model_validate({"role": "user", "content": parts}))


def test_every_kind_is_text_of_the_walk_or_declared() -> None:
    assert CONTENT_KINDS.keys() == {"text"} | keys("content").keys()
    assert len(keys("content")) >= 4


@pytest.mark.parametrize("first, second", permutations(sorted(TEXTS), 2))
def test_any_two_kinds_in_one_message(first: str, second: str) -> None:
    one, other = part_of(first), part_of(second)
    assert shown(one) in one.values() and shown(one) != shown(other)
    assert shown(one, "between", other) == f"{shown(one)}\nbetween\n{shown(other)}"


@pytest.mark.parametrize("kind", CONTENT_KINDS)
def test_a_part_without_what_its_kind_needs_is_refused(kind: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"type '{kind}' lacks its field '[a-z_]+'") as caught:
        shown({"type": kind})
    assert caught.value.param == "messages"


def test_an_unknown_kind_is_told_which_there_are(make_server: Any) -> None:
    server: InProcessServer = make_server()
    message = {"role": "user", "content": [*map(part_of, TEXTS), {"type": "video_url", "video_url": {}}]}
    response = server.post("/v1/chat/completions", {"messages": [message]})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages")
    assert "'video_url'" in error["message"] and all(kind in error["message"] for kind in CONTENT_KINDS)
    message["content"].pop()
    prompt = server.post("/tokenize", {"messages": [message]}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": prompt}).json()["prompt"] == shown(*map(part_of, TEXTS))


OWN_KIND = """
from pydantic import Field
from stage02_server.protocol_types import ContentKind

class Sound(ContentKind):
    seconds: int | None = Field(default=None)

    def as_text(self):
        return None if self.seconds is None else f"<sound of {self.seconds} s>"
"""
ASKED = """
import json, sys
from stage03_engine import plugins
without, own, *types = sys.argv[1:]
index = [room for room in plugins.INDEX if not without or not room.endswith(without)]
plugins.INDEX = (*index, plugins.Feature("own", "", "", parts=tuple(plugins.Part("content", "own:Sound", key=key) for key in own.split())))

from stage02_server.chat_template import text_of
from stage02_server.protocol import ChatMessageParam

def shown(kind):
    part = {"type": kind, "text": "t", "refusal": "r", "thinking": "h", "seconds": 3}
    try:
        return text_of(ChatMessageParam.model_validate({"role": "user", "content": [part]}))
    except ValueError as error:
        return str(error)

print(json.dumps({kind: shown(kind) for kind in types}))
"""


def ask(folder: Path, without: str, own: str, *types: str) -> dict[str, str]:
    """What a house without a room and with kinds of one's own shows of parts of these types, or how it refuses them."""
    (folder / "own.py").write_text(OWN_KIND)
    code = f"import sys; sys.path += {[str(ROOT), str(ROOT / 'trace'), str(folder)]}{ASKED}"
    done = subprocess.run([sys.executable, "-c", code, without, own, *types], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_kind_of_ones_own(tmp_path: Path) -> None:
    found = ask(tmp_path, "", "input_audio noise", "text", "input_audio", "noise", "thinking", "video_url")
    assert found["text"] == "t" and found["thinking"] == "h"
    assert found["input_audio"] == found["noise"] == "<sound of 3 s>"
    assert "there are image_url, input_audio, input_text, noise," in found["video_url"]


@pytest.mark.slow(keep="images")
@pytest.mark.parametrize("room", sorted({part.feature for part in keys("content").values()}))
def test_the_kinds_of_a_deleted_room_are_refused_like_unknown_ones(tmp_path: Path, room: str) -> None:
    """Whoever needs the room is not there either."""
    gone = {kind for kind, part in keys("content").items() if part.feature == room}
    found = ask(tmp_path, f".{room}", "", *CONTENT_KINDS)
    assert {kind for kind, said in found.items() if "cannot be served; there are" in said} >= gone
    assert all(f" {kind}," not in found[min(gone)] for kind in gone) and found["text"] == "t"
