"""Your own text in the browser: the tokenizer and the model in JavaScript are the engine's, under the same scheduler and block pool.

`make test-all` opens the page with Pyodide; PYODIDE_DIR holds what `stages book --pyodide` wants (stage01_cli/tools/book/README.md).
"""

from __future__ import annotations

import functools
import http.server
import json
import shutil
import sys
import threading
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from parts import pyodide_folder
from patience import PATIENCE
from tokenizers import Tokenizer

from stage01_cli.tools.book.own_text import Engine, Refused
from stage01_cli.tools.book.own_text_page import FILES, MODEL, STATIC, build_page, write_page
from stage01_cli.tools.lab.static_site import write_site
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams

pytest_plugins = ["browser"]
BEGINNING = "To be, or not to be, that is the question: whether 'tis nobler in the mind"
PROMPTS = [
    BEGINNING,
    BEGINNING + " to suffer",
    "O Romeo, Romeo, wherefore art thou Romeo? " * 2,
    "What light",
    "My lord,",
]
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
TOKENS = 20
KNOWN = st.characters(exclude_categories=["Cs", "Cn"])  # a browser may know newer ones than the tokenizers package
ODD = ["a", "The", " ", "  ", "\n", "\r", "é", "e\u0301", "'s", "'S", "1", "٣", "²", "!", "…", "日", "😀", "ß", "\x00", "\x1c", "\x85", "\u2028", "\ufeff", "_", "<|endoftext|>"]  # fmt: skip


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class Script:
    """gpt2.js, as Python in the page's worker sees it."""

    def __init__(self, page: Any) -> None:
        self._page = page

    def __getattr__(self, name: str) -> Any:
        if name not in ("encode", "decode", "begin", "forward"):
            raise AttributeError(name)
        return lambda *args: self._page.evaluate("([name, args]) => gpt2[name](...args)", [name, args])

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = self._page.evaluate("(texts) => texts.map((text) => gpt2.encode(text))", texts)
        return ids


@pytest.fixture(scope="module")
def script(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("own_text")
    for name, there in FILES.items():
        shutil.copyfile(MODEL / name, folder / there)
    shutil.copyfile(STATIC / "gpt2.js", folder / "gpt2.js")
    (folder / "index.html").write_text("<!doctype html>")
    with served(folder) as site:
        page = browser.new_page()
        page.goto(site)
        page.evaluate(
            "async () => { window.gpt2 = await import('./gpt2.js'); await gpt2.prepare(async (name) => (await fetch(name)).arrayBuffer()); }"
        )
        yield Script(page)
        page.close()


@pytest.mark.slow
@given(st.lists(st.sampled_from(ODD), max_size=20).map("".join) | st.text(KNOWN, max_size=20))
def test_the_tokens_of_a_text_are_those_of_the_tokenizer(script: Any, text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert script.encode(text) == ids
    assert "<|endoftext|>" in text or script.decode(ids) == text


@pytest.mark.parametrize("every", [50, pytest.param(1, marks=pytest.mark.slow)])
def test_every_character_is_of_the_class_that_the_tokenizer_sees(script: Any, every: int) -> None:
    """Letter, number, space or none of them: \\s of JavaScript, for instance, is another set than that of the package."""
    known = [c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(c) not in ("Cn", "Co", "Cs")]
    texts = ["".join(f"{c}'s a{c} {c}" for c in known[at : at + 64]) for at in range(0, len(known), 64 * every)]
    encoded = TOKENIZER.encode_batch(texts, add_special_tokens=False)
    found = script.encode_all(texts)
    assert not [text for text, one, ids in zip(texts, encoded, found, strict=True) if one.ids != ids]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What the engine makes of PROMPTS."""
    outputs = LLM("gpt2-tiny").generate(PROMPTS, SamplingParams(temperature=0, max_tokens=TOKENS))
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.slow(keep="7-7")
@pytest.mark.parametrize(
    ("num_blocks", "budget", "meets"),
    [(33, 64, {"found"}), (33, 5, {"chunks"}), (9, 64, {"preempted"}), (7, 7, {"preempted", "chunks"})],
)
def test_the_tokens_are_those_of_the_engine(
    script: Any, expected: list[list[int]], num_blocks: int, budget: int, meets: set[str]
) -> None:
    """With chunks, preemption and blocks that two requests share."""
    engine = Engine(script, num_blocks, 16, budget)
    engine.send(PROMPTS[:1], TOKENS)
    steps = [engine.step("r0", 1, 2)]
    engine.send(PROMPTS[1:], TOKENS)
    while not steps[-1]["idle"]:
        steps.append(engine.step("r0", 1, 2))
        assert len(steps) < 1000
    assert [row["ids"] for row in steps[-1]["requests"]] == expected
    assert len(steps[-1]["free"]) == num_blocks - 1
    met = {"preempted"} if any(step["preempted"] for step in steps) else set()
    met |= {"found"} if any(any(step["found"].values()) for step in steps) else set()
    met |= {"chunks"} if steps[0]["given"]["r0"] < len(script.encode(PROMPTS[0])) else set()
    assert meets <= met
    for step in steps:
        assert bool(step["attention"]) is ("r0" in step["given"])
        assert not step["attention"] or sum(share for _, share in step["attention"]) == pytest.approx(1, abs=1e-5)


def test_what_cannot_be_sent_is_refused_in_a_sentence(script: Any) -> None:
    engine = Engine(script, 9, 16, 64)
    for prompts, count, said in (
        ([""], 1, "empty"),
        (["a b c d e f " * 20], 16, "do not fit"),
        (["a"] * 17, 1, "At most 16"),
    ):
        with pytest.raises(Refused, match=said):
            engine.send(["a", *prompts] if len(prompts) == 1 else prompts, count)
    assert engine.state()["idle"] and engine.state()["requests"] == []


@pytest.mark.slow
def test_the_page(browser: Any, tmp_path: Path, expected: list[list[int]]) -> None:
    given_folder = pyodide_folder()
    if given_folder is None:
        pytest.skip("PYODIDE_DIR does not say where Pyodide is (stage01_cli/tools/book/README.md)")
    folder = tmp_path / "lab"
    list(write_site(folder, given_folder))
    write_page(folder)
    with served(folder) as site:
        page = browser.new_page()
        page.set_default_timeout(PATIENCE * 10_000)
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda each: None if each.url.startswith((site, "data:")) else problems.append(each.url))
        page.goto(f"{site}own_text.html")
        page.wait_for_function("() => document.body.dataset.step === '0'")
        page.fill("#prompt", PROMPTS[0])
        page.fill("#tokens", str(TOKENS))
        page.click("#send-8")
        page.wait_for_function("() => Number(document.body.dataset.step) > 0 && document.body.dataset.idle === 'true'")
        last = int(page.inner_text("#number"))
        assert (
            page.evaluate("story.at(-1).requests[0].ids") == expected[0] and page.locator("#requests li").count() == 8
        )
        page.click("#back")
        assert int(page.inner_text("#number")) == last - 1 and page.evaluate("document.body.dataset.idle") == "false"
        page.click("#next")
        assert int(page.inner_text("#number")) == last
        page.fill("#prompt", "")
        page.click("#send")
        page.wait_for_function("() => document.getElementById('problem').textContent.includes('empty')")
        page.close()
        assert not problems


def test_the_page_asks_nobody_else() -> None:
    page = build_page({"megabytes": 1})
    assert json.loads(page.partition('id="data">')[2].partition("</script>")[0])["layers"] == 6
    assert "http" not in page.replace("http-equiv", "").replace("python -m http.server", "")
