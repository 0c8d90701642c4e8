"""A token's chances: what a recording holds of logprobs that clients asked for, and what the player and `why` tell of them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_under_test import InProcessServer, events

from stagetrace import Event, read_run, trace
from stagetrace.__main__ import main
from stagetrace.check.reason_words import MOST_LIKELY, token_chances
from stagetrace.player import page
from stagetrace.player.data import short_names

pytest_plugins = ["browser"]  # the fixture of tests/support/browser.py

RECORDED = Path(__file__).parents[2] / "trace" / "recorded"
PROMPT = "zebra okapi"


@pytest.fixture
def server() -> Iterator[InProcessServer]:
    server = InProcessServer()
    yield server
    server.close()


def told(folder: Path, server: InProcessServer, prompts: bool, *asked: tuple[str, dict[str, Any]]) -> list[Any]:
    """The answers; what is recorded lies in the folder."""
    trace.open(str(folder), prompts=prompts)
    try:
        return [server.post(path, body) for path, body in asked]
    finally:
        trace.close()


def joined(recorded: list[Event]) -> dict[str, list[Any]]:
    """Request -> the chances of each of its tokens, in order."""
    found: dict[str, list[Any]] = {}
    for event in recorded:
        chances = found.setdefault(str(event.req), [])
        assert event.args["first"] == len(chances) and len(event.args["chances"]) == event.args["num_tokens"]
        chances += event.args["chances"]
    return found


def near(pairs: list[Any], texts: list[tuple[str, float]]) -> bool:
    """Are the chances of one token these texts with these log-probabilities?"""
    return [text for text, _ in pairs] == [text for text, _ in texts] and all(
        math.isclose(share, math.exp(logprob), abs_tol=1e-5) for (_, share), (_, logprob) in zip(pairs, texts)
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_records_what_its_answer_says(tmp_path: Path, server: InProcessServer, stream: bool) -> None:
    body = {"prompt": [PROMPT, "abc"], "max_tokens": 4, "n": 2, "temperature": 0.5, "logprobs": 3, "stream": stream}
    [answer] = told(tmp_path, server, True, ("/v1/completions", body))
    pieces = [piece for piece in events(answer.text) if piece != "[DONE]"] if stream else [answer.json()]
    chances = joined(read_run(tmp_path).named("answer.logprobs"))
    ids = {request.rpartition("-")[0].partition("_")[2] for request in chances}
    assert ids == {pieces[0]["id"]} and len(chances) == 4, "each answer to each prompt has its own id"
    for index in range(4):
        parts = [c["logprobs"] for piece in pieces for c in piece["choices"] if c["index"] == index and c["logprobs"]]
        own = chances[f"{index % 2}_{pieces[0]['id']}-{index // 2}"]
        tokens = [one for part in parts for one in zip(part["tokens"], part["token_logprobs"], part["top_logprobs"])]
        assert len(own) == len(tokens) == 4
        for (chosen, *likely), (token, logprob, top) in zip(own, tokens):
            assert near([chosen], [(token, logprob)])
            assert {text for text, _ in [chosen, *likely]} == set(top), "the answer's dict has the chosen one too"


def test_a_chat_records_five_of_its_candidates(tmp_path: Path, server: InProcessServer) -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 3, "logprobs": True, "top_logprobs": 9}
    [answer] = told(tmp_path, server, True, ("/v1/chat/completions", body))
    content = answer.json()["choices"][0]["logprobs"]["content"]
    [chances] = joined(read_run(tmp_path).named("answer.logprobs")).values()
    assert len(chances) == len(content) == 3
    for (chosen, *likely), entry in zip(chances, content):
        assert near([chosen], [(entry["token"], entry["logprob"])])
        assert near(likely, [(top["token"], top["logprob"]) for top in entry["top_logprobs"][:5]])


def test_without_leave_only_how_many(tmp_path: Path, server: InProcessServer) -> None:
    """Probabilities are as good as the text for whoever has the model."""
    told(tmp_path, server, False, ("/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "logprobs": 2}))
    [event] = read_run(tmp_path).named("answer.logprobs")
    assert event.args == {"first": 0, "num_tokens": 4, "chances": []}


def test_nobody_asked_nothing_told(tmp_path: Path, server: InProcessServer) -> None:
    told(tmp_path, server, True, ("/v1/completions", {"prompt": PROMPT, "max_tokens": 4}))
    assert not read_run(tmp_path).named("answer.logprobs")


SHOWN = """places => places.map(place => {
  player.goTo(place);
  const panel = document.querySelector(".chances");
  return [panel.querySelector(".chosen").textContent,
    [...panel.querySelectorAll(".tokens-of button")].map(button => button.textContent),
    [...panel.querySelectorAll(".candidates li")].map(li => [li.querySelector(".text").textContent, li.querySelector(".share").textContent]),
    [...panel.querySelectorAll(".candidates .is-chosen .text")].map(text => text.textContent)];
})"""


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """A function that opens the player of a recording; nothing may go wrong on its page."""
    errors: list[str] = []

    def open_page(name: str) -> Any:
        file = tmp_path / "player.html"
        file.write_text(page(RECORDED / name), encoding="utf-8")
        tab = browser.new_page()
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.goto(file.as_uri())
        tab.wait_for_function("player !== null")
        return tab

    yield open_page
    assert errors == []


def seen(text: str) -> str:
    return text.replace("\n", "⏎").replace(" ", "␣") or "(part of a character)"


@pytest.mark.slow
def test_the_player_shows_who_else_could_have_been_chosen(opened: Any) -> None:
    run = read_run(RECORDED / "chances").events
    chances = joined([event for event in run if event.name == "answer.logprobs"])
    labels = dict(short_names(dict.fromkeys(event.req for event in run if event.req)))
    places = [at for at, event in enumerate(run) if event.name == "sched.token"]
    tab = opened("chances")
    for at, (words, row, candidates, marked) in zip(places, tab.evaluate(SHOWN, places)):
        request, number = str(run[at].req), run[at].args["num_output_tokens"]
        chosen, *likely = chances[request][number - 1]
        assert words.startswith(f"Token {number} of {labels[request]}, step {run[at].step}, read from block")
        assert row == [seen(token[0][0]) for token in chances[request][:number]], "the answer so far"
        expected = likely if chosen in likely else [*likely, chosen]
        assert [text for text, _ in candidates] == [seen(text) for text, _ in expected]
        shares = [float(share.partition(" ")[0]) / 100 for _, share in candidates]
        assert shares == pytest.approx([share for _, share in expected], abs=6e-4)
        assert marked == [seen(chosen[0])]
    blocks = [
        event.args["new_blocks"] for event in run if event.name == "sched.admit" and event.req == run[places[0]].req
    ]
    [[words, *_]] = tab.evaluate(SHOWN, places[:1])
    assert words.endswith(f"read from block {blocks[0][0]}.")


def test_a_click_on_a_token_leads_to_where_it_was_chosen(opened: Any) -> None:
    run = read_run(RECORDED / "chances").events
    last = max(at for at, event in enumerate(run) if event.name == "sched.token")
    own = [at for at, event in enumerate(run) if event.name == "sched.token" and event.req == run[last].req]
    tab = opened("chances")
    tab.evaluate("place => player.goTo(place)", last)
    tab.locator(".tokens-of button").nth(2).click()
    assert tab.locator(".run").get_attribute("data-at") == str(own[2])
    tab.evaluate("player.goTo(0)")
    assert tab.locator(".chosen").text_content() == "No token has been chosen yet."
    tab.evaluate("player.goTo(player.length - 1)")
    assert tab.locator(".chosen").text_content().endswith("its request has given its blocks back.")


@pytest.mark.slow
def test_a_recording_without_logprobs_has_no_such_panel(opened: Any) -> None:
    assert opened("one_request").locator(".chances").is_hidden()


# `why`


def told_by_why(capsys: pytest.CaptureFixture[str], run: str, request: str, step: int) -> list[str]:
    assert main(["why", str(RECORDED / run), "--req", request, "--step", str(step)]) == 0
    return [line for line in capsys.readouterr().out.splitlines() if "of its answer could have been" in line]


def test_why_tells_who_else_could_have_been_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    run = read_run(RECORDED / "chances").events
    chances = joined([event for event in run if event.name == "answer.logprobs"])
    tokens = [event for event in run if event.name == "sched.token"]
    assert len({event.req for event in tokens}) == 2
    for event in tokens:
        [line] = told_by_why(capsys, "chances", str(event.req), int(event.step or 0))
        number = event.args["num_output_tokens"]
        chosen, *likely = chances[str(event.req)][number - 1]
        assert line.startswith(f"- Token {number} of its answer could have been ")
        expected = likely if chosen in likely else [*likely, chosen]
        found = re.findall(r'("(?:[^"\\]|\\.)*") ([0-9.]+) %( .chosen.)?', line)
        assert [json.loads(text) for text, _, _ in found] == [text for text, _ in expected]
        assert [float(share) / 100 for _, share, _ in found] == pytest.approx(
            [share for _, share in expected], abs=6e-4
        )
        assert [json.loads(text) for text, _, is_chosen in found if is_chosen] == [chosen[0]]


def test_why_tells_no_chances_where_there_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    tokens = [event for event in read_run(RECORDED / "one_request").events if event.name == "sched.token"]
    assert tokens
    for event in tokens:
        assert told_by_why(capsys, "one_request", str(event.req), int(event.step or 0)) == []


def test_five_candidates_are_told_and_the_chosen_one() -> None:
    likely = [[f"t{k}", 0.2 / (k + 1)] for k in range(20)]
    for chosen in [*likely, ["rare", 0.0001]]:
        words = token_chances(3, chosen, *likely)
        assert [f'"t{k}" ' in words for k in range(20)] == [k < MOST_LIKELY or likely[k] == chosen for k in range(20)]
        assert words.count("(chosen)") == 1 and f'"{chosen[0]}" ' in words.partition("(chosen)")[0]
    assert token_chances(1, ["", 0.5]) == "Token 1 of its answer could have been (part of a character) 50.0 % (chosen)."
