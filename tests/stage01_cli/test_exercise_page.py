"""The exercises in the browser: the judges' verdicts are those of `stages course check`, what never ends is ended, and what was done is kept.

`make test-all` runs Chromium with Pyodide. PYODIDE_DIR holds what `stages book --pyodide` wants (stage01_cli/tools/book/README.md).
"""

from __future__ import annotations

import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from parts import pyodide_folder
from patience import PATIENCE

from stage01_cli.tools.book.exercise_page import build_page, here, missing_wheels, write_page, write_sources
from stage01_cli.tools.course import table
from stage01_cli.tools.course.exercises import JUDGES, ROOT, exercises, find
from stage01_cli.tools.lab.static_site import write_site

pytest_plugins = ["browser"]  # the fixture of tests/support/browser.py
POOL = find(4)


def pasted(number: int) -> str:
    """An honest solution."""
    sys.path.insert(0, str(JUDGES))
    try:
        from pasted import pasted as text
    finally:
        sys.path.remove(str(JUDGES))
    return text(find(number))


def wrong_pool() -> str:
    """One in which a block without a hash joins the end of the queue, too."""
    right, place = pasted(4), "self._free.move_to_end(block.block_id, last=False)"
    assert right.count(place) == 1
    return right.replace(place, "pass")


def test_it_has_all_exercises_and_judges_those_without_tensors() -> None:
    page = build_page({"wheels": []})
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert [row["number"] for row in data["exercises"]] == sorted(exercises())
    judged = {row["number"] for row in data["exercises"] if "starter" in row}
    assert judged == {number for number, each in exercises().items() if here(each)} == {1, 2, 4, 5, 10, 12, 13, 18}
    assert all(row.get("why_not") or (len(row["hints"]) == 3 and row["contract"]) for row in data["exercises"])


CHECKS = """
import json, sys
sys.path[:0] = [{tree!r}, {tree!r} + "/trace"]
from stage01_cli.tools.book import in_browser
from pathlib import Path
assert in_browser.__file__.startswith({tree!r})
in_browser.WORK = Path({work!r})
told = []
found = [in_browser.check("block_pool", code, told.append) for code in json.loads(sys.stdin.read())]
print("\\n" + json.dumps([found, told]))
"""


@pytest.mark.slow
def test_what_is_in_the_archive_is_enough_to_judge(tmp_path: Path) -> None:
    """Without a browser: the archive alone, and the packages of which there are wheels, give the verdicts one after another."""
    write_sources(tmp_path / "judges.zip")
    shutil.unpack_archive(tmp_path / "judges.zip", tmp_path / "tree")
    code = CHECKS.format(tree=str(tmp_path / "tree"), work=str(tmp_path / "work"))
    vandal = pasted(4) + "\nimport stage03_engine.errors as theirs\ntheirs.ConfigError = object\n"
    codes = [POOL.starter.read_text(encoding="utf-8"), wrong_pool(), "def (", pasted(4), vandal]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], input=json.dumps(codes), capture_output=True, text=True, cwd=tmp_path, env=environment)  # fmt: skip
    assert done.returncode == 0, done.stderr
    (unwritten, wrong, broken, right, changed), told = json.loads(done.stdout.splitlines()[-1])
    assert unwritten["outcome"] == "unwritten" and unwritten["line"]
    assert wrong["outcome"] == "rejected" and POOL.contract[wrong["sentence"]] in wrong["text"]
    assert broken["outcome"] == "error" and broken["line"] == 1
    assert right["outcome"] == "passed" and right["tests"] == 3, right
    assert not any(each["spoiled"] for each in (unwritten, wrong, right))
    assert changed["outcome"] == "rejected" and changed["spoiled"] and "It may not change" in changed["text"]
    assert [json.loads(line).get("collected") for line in told].count(3) == 5


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    given = pyodide_folder()
    if given is None or missing_wheels(given):
        pytest.skip(
            "PYODIDE_DIR does not say where Pyodide and the judges' wheels are (stage01_cli/tools/book/README.md)"
        )
    folder = tmp_path_factory.mktemp("book") / "lab"
    list(write_site(folder, given))
    write_page(folder, given)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class Exercises:
    """The page, open. It may ask nobody but its server."""

    def __init__(self, browser: Any, site: str, name: str) -> None:
        self.context = browser.new_context(viewport={"width": 1280, "height": 900}, accept_downloads=True)
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE * 10_000)
        self.problems: list[str] = []
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda each: self.problems.append(each.url) if not each.url.startswith((site, "blob:", "data:")) else None)  # fmt: skip
        self.page.goto(f"{site}exercises.html#{name}")
        self.page.evaluate("async () => await python.ready")

    def check(self, code: str) -> str:
        before = self.page.evaluate("document.body.dataset.checked ?? '0'")
        self.page.fill("#code", code)
        self.page.click("#check")
        self.page.wait_for_function("before => (document.body.dataset.checked ?? '0') !== before", arg=before)
        return str(self.page.text_content("#verdict"))

    def close(self) -> None:
        self.context.close()
        assert not self.problems


@pytest.mark.slow
def test_the_verdicts_of_a_page(browser: Any, site: str, tmp_path: Path) -> None:
    opened = Exercises(browser, site, POOL.name)
    page = opened.page
    said = opened.check(POOL.starter.read_text(encoding="utf-8"))
    assert "not yet written: hash_block_tokens" in said and page.text_content("#numbers b")
    said = opened.check(wrong_pool())
    assert "not yet right" in said and page.text_content("#contract .broken") in said
    assert page.locator("#list .passed").count() == 0
    assert "passed (3 tests" in opened.check(pasted(4))
    assert page.locator("#list .passed").count() == 1
    page.click("#hint")
    assert page.text_content("#hints") == POOL.hints[0]
    with page.expect_download() as saved:
        page.click("#export")
    saved.value.save_as(tmp_path / "progress.json")
    done = table.read(tmp_path)[POOL.name]
    assert (done.checks, done.hints, bool(done.started), bool(done.passed)) == (3, 1, True, True)
    page.reload()
    assert page.input_value("#code") == pasted(4)
    page.click("#lab")
    page.wait_for_selector("body[data-run]")
    page.wait_for_function("!document.body.dataset.busy")
    assert "WithYourPool" in page.input_value("#code") and page.text_content("#problem") == ""
    opened.close()


@pytest.mark.slow
def test_a_loop_without_an_end_is_ended(browser: Any, site: str) -> None:
    opened = Exercises(browser, site, POOL.name)
    page = opened.page
    page.fill("#code", pasted(4) + "\nwhile True:\n    pass\n")
    assert page.evaluate("async () => await python.ask({ check: chosen.name, code: byId('code').value }, 3)") is None
    page.click("#check")
    page.wait_for_selector("#end:visible")
    page.click("#end")
    page.wait_for_selector("#verdict.not")
    assert "so it was ended: a loop that never ends?" in page.text_content("#verdict")
    assert "passed (3 tests" in opened.check(pasted(4)), "a new worker judges on"
    opened.close()


@pytest.mark.slow
@pytest.mark.parametrize("number", [number for number, each in sorted(exercises().items()) if here(each)])
def test_an_honest_solution_passes_in_the_browser(browser: Any, site: str, number: int) -> None:
    opened = Exercises(browser, site, find(number).name)
    answer = opened.page.evaluate("async (code) => await python.ask({ check: chosen.name, code }, 600)", pasted(number))
    assert answer["outcome"] == "passed", answer
    opened.close()


def test_no_path_of_this_machine_is_in_the_page() -> None:
    assert str(ROOT) not in build_page({"wheels": []})
