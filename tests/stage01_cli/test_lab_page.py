"""The laboratory's page in a real browser: what it draws is what was simulated, everything on it can be reached by keys, a scenario is a
link, and it talks to nobody but its server."""

from __future__ import annotations

import functools
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from parts import pyodide_folder
from patience import PATIENCE

from stage01_cli.tools.lab.bench import KINDS
from stage01_cli.tools.lab.own_scheduler import OwnScheduler
from stage01_cli.tools.lab.page import read_static
from stage01_cli.tools.lab.scenario import FIELDS, REQUEST_FIELDS
from stage01_cli.tools.lab.simulate import MAX_PRINTED, simulate
from stage01_cli.tools.lab.static_site import write_site

pytest_plugins = ["browser"]  # the fixture of tests/support/browser.py

POOL_IN_LAB = Path(__file__).parent.parent.parent / "stage01_cli/tools/book/static/pool_in_lab.txt"
NAMED = json.loads(read_static("scenarios.json"))
PICTURE = """id => Object.fromEntries([...document.querySelectorAll(`#${id} tbody tr`)].map(row => [
  row.querySelector("th").textContent,
  Object.fromEntries([...row.querySelectorAll("td")].flatMap((cell, place) => {
    const kind = [...cell.classList].find(name => name.startsWith("k-"));
    return kind ? [[place + 1, kind.slice(2)]] : [];
  })),
]))"""
BLOCKS = """() => [...document.querySelectorAll("#blocks li")].map(block => block.title.replace(/^block \\d+: /, ""))"""


def in_a_picture(answer: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Of what `simulate` says: name of a request -> step -> what it did."""
    return {
        name: {str(step): KINDS[cell[0]] for step, cell in cells.items()} for name, cells in answer["cells"].items()
    }


@pytest.fixture(scope="module")
def own_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mine") / "mine.py"
    path.write_text(read_static("own_scheduler.txt"))
    return path


@pytest.fixture(scope="module")
def url(own_file: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "stage01_cli", "lab", "--scheduler-cls", f"{own_file}:ShortestFirst"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[4]
        process.terminate()


@pytest.fixture(scope="module")
def printed_link() -> Iterator[str]:
    """What `stages lab` prints, which has an editor."""
    with subprocess.Popen([sys.executable, "-m", "stage01_cli", "lab"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[4]
        process.terminate()


class Lab:
    """The page, open. Nothing may go wrong in it, and it may ask nobody but its server."""

    def __init__(self, browser: Any, url: str, fragment: str = "", width: int = 1280) -> None:
        self.url = url
        self.context = browser.new_context(viewport={"width": width, "height": 900})
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE * 1000)
        self.problems: list[str] = []
        self.asked: set[str] = set()
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda message: self.problems.append(message.text) if message.type == "error" else None)
        self.page.on("request", lambda request: self.asked.add(request.url))
        self.page.goto(url + fragment)
        self.settled()

    def settled(self) -> None:
        """Until what was changed last is drawn."""
        self.page.wait_for_selector("body[data-run]:not([data-busy])")

    def click(self, name: str) -> None:
        self.page.get_by_role("button", name=name, exact=True).click()
        self.settled()

    def use(self, whose: str) -> None:
        self.page.check(f"[name=whose][value={whose}]")
        self.settled()

    def text(self, selector: str) -> str:
        found: str = self.page.text_content(selector)
        return found

    @property
    def scenario(self) -> dict[str, Any]:
        found: dict[str, Any] = self.page.evaluate("() => editor.scenario")
        return found

    def check_picture(self, own: OwnScheduler | None = None) -> dict[str, Any]:
        """The grid is what Python says of the scenario that the page has."""
        answer = simulate(self.scenario, own)
        assert self.page.evaluate(PICTURE, "grid") == in_a_picture(answer)
        beside = {} if own is None else in_a_picture(simulate(self.scenario))
        assert self.page.evaluate(PICTURE, "beside-grid") == beside and self.page.is_visible("#beside") == bool(beside)
        return answer

    def close(self) -> None:
        self.context.close()
        self.check()

    def check(self) -> None:
        assert self.problems == []
        origin = re.match(r"https?://[^/]+", self.url)
        assert origin and all(each.startswith(origin[0]) for each in self.asked), self.asked


@pytest.fixture(scope="module")
def opened(browser: Any, url: str) -> Iterator[Lab]:
    lab = Lab(browser, url)
    yield lab
    lab.close()


@pytest.fixture
def lab(opened: Lab) -> Iterator[Lab]:
    """The page, loaded anew, with the reference scheduler."""
    opened.page.goto("about:blank")
    opened.page.goto(opened.url)
    opened.settled()
    opened.use("reference")
    yield opened
    opened.check()


@pytest.mark.slow
@pytest.mark.parametrize("each", NAMED, ids=lambda each: each["name"])
def test_the_five_scenarios_are_drawn(lab: Lab, each: dict[str, Any]) -> None:
    lab.click(each["name"])
    assert lab.text("#look") == each["look"]
    answer = lab.check_picture()
    assert lab.text("#facts div:first-child dd") == str(sum(not step["idle"] for step in answer["steps"]))
    pressed = lab.page.evaluate(
        "() => [...document.querySelectorAll('#scenarios [aria-pressed=true]')].map(e => e.textContent)"
    )
    assert pressed == [each["name"]]


@pytest.mark.slow
def test_a_reason_and_the_blocks_of_every_cell(lab: Lab) -> None:
    """By keys, from cell to cell: the sentences of `why`, and who holds which block."""
    lab.click("Preemption")
    answer = lab.check_picture()
    lab.page.click('#grid [data-at="2,1"]')
    for step in range(1, len(answer["steps"]) + 1):
        said = [answer["texts"][place][1] for place in answer["why"]["c"].get(step, [])]
        shown = lab.page.evaluate("() => [...document.querySelectorAll('#why li')].map(e => e.firstChild.textContent)")
        assert shown == said, step
        assert lab.text("#now") == f"{step} of {len(answer['steps'])}"
        holders = {block: name for name, table in answer["steps"][step - 1]["tables"].items() for block in table}
        blocks = lab.page.evaluate(BLOCKS)
        assert [words.startswith("held by") for words in blocks] == [block in holders for block in range(len(blocks))]
        assert ["found" in words for words in blocks] == [
            block in answer["steps"][step - 1]["cached"] for block in range(len(blocks))
        ]
        lab.page.keyboard.press("ArrowRight")
    lab.page.keyboard.press("Home")
    lab.page.keyboard.press("ArrowUp")
    assert lab.text("#why h3").startswith("b in step 1: ")
    assert lab.page.evaluate("() => document.activeElement.getAttribute('aria-label')").startswith(
        "b, step 1: prefill of "
    )


@pytest.mark.slow
def test_the_pointer_looks_and_a_click_pins(lab: Lab) -> None:
    lab.page.click('#grid [data-at="1,4"]')
    lab.page.hover('#grid [data-at="3,9"]')
    assert lab.text("#why h3").startswith("d in step 9")
    lab.page.hover("h1")
    assert lab.text("#why h3").startswith("b in step 4")


def test_settings_by_slider_number_and_switch(lab: Lab) -> None:
    lab.page.focus("#max_num_batched_tokens-range")
    lab.page.keyboard.press("ArrowRight")
    lab.settled()
    assert (
        lab.scenario["settings"]["max_num_batched_tokens"] == 17 == int(lab.page.input_value("#max_num_batched_tokens"))
    )
    lab.page.fill("#num_gpu_blocks_override", "300")
    lab.page.select_option("#scheduling_policy", "priority")
    lab.page.uncheck("#enable_chunked_prefill")
    lab.settled()
    settings = lab.scenario["settings"]
    assert (settings["num_gpu_blocks_override"], settings["scheduling_policy"], settings["enable_chunked_prefill"]) == (
        300,
        "priority",
        False,
    )
    lab.page.fill("#block_size", "0")
    assert (
        lab.page.get_attribute("#block_size", "aria-invalid") == "true" and lab.scenario["settings"]["block_size"] == 8
    )
    flags = lab.text("#flags")
    assert "--num-gpu-blocks-override 300" in flags and "--no-enable-chunked-prefill" in flags
    lab.settled()
    assert "cannot go on" in lab.text("#problem"), "a prompt of 90 tokens in a budget of 17, and no chunks"
    lab.check_picture()


@pytest.mark.slow
def test_requests_are_edited(lab: Lab) -> None:
    lab.click("Add a request")
    assert lab.page.evaluate("() => document.activeElement.value") == "f"
    lab.page.keyboard.type("oo")
    lab.page.get_by_label("prompt of f").fill("30")
    lab.page.get_by_label("shared prefix of f").select_option("B")
    lab.settled()
    added = lab.scenario["requests"][-1]
    assert (added["id"], added["prompt"], added["prefix"], added["shared"]) == ("foo", 30, "B", 15)
    lab.page.get_by_label("prompt of f").fill("10")
    lab.settled()
    assert lab.scenario["requests"][-1]["shared"] == 10, "no more than there is"
    name = lab.page.get_by_label("name of request 6")
    for wrong in ("a", "", "<b>"):
        name.fill(wrong)
        assert name.get_attribute("aria-invalid") == "true" and lab.scenario["requests"][-1]["id"] == "foo"
    lab.page.get_by_label("remove a", exact=True).click()
    lab.settled()
    assert [each["id"] for each in lab.scenario["requests"]] == ["b", "c", "d", "e", "foo"]
    lab.check_picture()


@pytest.mark.slow
def test_an_arrival_is_moved_on_the_time_line(lab: Lab) -> None:
    def arrival() -> int:
        return int(lab.scenario["requests"][3]["arrival"])

    handle = lab.page.get_by_role("slider", name="arrival of d", exact=True)
    handle.focus()
    for _ in range(3):
        lab.page.keyboard.press("ArrowRight")
        lab.settled()
    assert arrival() == 9
    assert lab.page.evaluate("() => document.activeElement.getAttribute('aria-valuenow')") == "9"
    box = handle.bounding_box()
    width = lab.page.locator('#grid thead [data-at="0,2"]').first.bounding_box()["width"]
    lab.page.mouse.move(box["x"] + 5, box["y"] + 5)
    lab.page.mouse.down()
    for moved in range(1, 6):
        lab.page.mouse.move(box["x"] + 5 - moved * width, box["y"] + 5)
        lab.settled()
    lab.page.mouse.up()
    lab.page.mouse.move(box["x"] + 90, box["y"] + 5)
    lab.settled()
    assert arrival() == 4
    lab.check_picture()
    lab.page.wait_for_url("**d.4.90.10**")


@pytest.mark.slow
def test_a_scenario_is_a_link(lab: Lab, browser: Any, url: str) -> None:
    lab.click("Shared prefix")
    lab.page.get_by_label("priority of c").fill("-3")
    lab.page.wait_for_url("**c.5.52.12.A48.-3**")
    link = lab.page.url
    assert len(link) < 200
    other = Lab(browser, link)
    assert other.scenario == lab.scenario
    other.use("reference")
    other.check_picture()
    lab.page.go_back()
    lab.page.wait_for_selector("#scenarios [aria-pressed=true]")
    other.close()


def test_every_scenario_survives_its_link(lab: Lab) -> None:
    """At the ends of every bound."""
    least, most = ({name: bounds[side] for name, bounds in FIELDS.items()} for side in (0, 1))
    low, high = ({name: bounds[side] for name, bounds in REQUEST_FIELDS.items()} for side in (0, 1))
    for settings, fields, prefix in ((least, low, ""), (most, high, "D")):
        scenario = {
            "settings": settings
            | {"scheduling_policy": "fair", "enable_chunked_prefill": False, "enable_prefix_caching": True},
            "requests": [{"id": f"cmpl-{i}_x", "prefix": prefix} | fields for i in range(64)],
        }
        link = lab.page.evaluate("scenario => writeLink(scenario)", scenario)
        assert len(link) < 2500
        assert lab.page.evaluate("link => readLink(link)", link) == scenario


BROKEN = [
    ("x", "it does not begin with v=1"),
    ("v=2&r=a.1.1.1", 'it is of version "2", and this page reads version 1'),
    ("v=1", "it has no requests (r=...)"),
    ("v=1&r=a.1.1", 'request a must look like name.arrival.prompt.output, not "a.1.1"'),
    ("v=1&r=a.1.1.1,a.2.2.2", "two requests are called a"),
    ("v=1&r=a.0.1.1", 'arrival of request a must be a whole number from 1 to 400, not "0"'),
    ("v=1&r=a.1.9999.1", 'prompt of request a must be a whole number from 1 to 4096, not "9999"'),
    ("v=1&r=a.1.4.1.A5", "request a shares 5 tokens, but its prompt has only 4"),
    ("v=1&r=a.1.4.1.Z5", 'the prefix of request a must be one of A, B, C, D, not "Z5"'),
    ("v=1&t=1e3&r=a.1.1.1", 'max_num_batched_tokens must be a whole number from 1 to 4096, not "1e3"'),
    ("v=1&p=lifo&r=a.1.1.1", 'scheduling_policy must be one of fcfs, priority, fair, not "lifo"'),
    ("v=1&c=yes&r=a.1.1.1", 'enable_chunked_prefill must be 0 or 1, not "yes"'),
    ("v=1&__proto__=1&r=a.1.1.1", '"__proto__" is no setting'),
    ("v=1&v=1&r=a.1.1.1", '"v" stands in it twice'),
    ("v=1&r=<img src=x onerror=alert(1)>.1.1.1", "request number 1: a name must be 1 to 12 letters, digits, - or _"),
    ("v=1&r=" + ",".join(f"r{i}.1.1.1" for i in range(65)), "it has 65 requests, and at most 64 are possible"),
    ("v=1&r=" + "a" * 9000, "and at most 8000 are read"),
    ("%E0%A4%A", "it is damaged"),
]  # fmt: skip


SAYS = """link => { try { readLink(link) } catch (error) { return error.message } }"""


def test_a_broken_link_says_what_is_wrong(lab: Lab) -> None:
    for fragment, sentence in BROKEN[:-1]:
        assert sentence in lab.page.evaluate(SAYS, fragment)
    for fragment, sentence in (BROKEN[0], BROKEN[-1]):  # the last cannot even be decoded
        lab.click("Priority")
        assert lab.text("#status") == ""
        lab.page.goto(lab.url + "#" + fragment)
        lab.page.wait_for_selector("#status:not(:empty)")
        lab.settled()
        assert sentence in lab.text("#status") and lab.text("#status").endswith("The first scenario is shown instead.")
        assert [each["id"] for each in lab.scenario["requests"]] == [each["id"] for each in NAMED[0]["requests"]]
    lab.check_picture()


@pytest.mark.slow
def test_two_runs_are_compared(lab: Lab) -> None:
    lab.click("Preemption")
    lab.click("Keep to compare")
    before = lab.text("#facts div:first-child dd")
    lab.page.fill("#num_gpu_blocks_override", "40")
    lab.settled()
    assert f"was {before}" in lab.text("#facts div:first-child dd")


def test_a_late_answer_to_an_older_change_is_not_drawn(lab: Lab) -> None:
    held: list[Any] = []
    lab.page.route("**/simulate", lambda route: held.append(route))
    for count, name in enumerate(("Preemption", "Priority"), start=1):
        lab.page.get_by_role("button", name=name, exact=True).click()
        while len(held) < count:
            lab.page.evaluate("() => 0")  # what the browser has told meanwhile is heard
    held[1].continue_()
    lab.settled()
    with lab.page.expect_response("**/simulate") as late:
        held[0].continue_()
    late.value.finished()
    lab.page.unroute("**/simulate")
    lab.page.evaluate("() => new Promise(resolve => setTimeout(resolve))")
    lab.check_picture()


@pytest.mark.slow
def test_play_goes_to_the_end(lab: Lab) -> None:
    lab.click("Shared prefix")
    last = lab.page.evaluate("() => picture.lastStep")
    lab.page.evaluate("() => picture.select(0, picture.lastStep - 2)")
    lab.page.click("#play")
    assert lab.text("#play") == "Stop"
    lab.page.wait_for_selector("#play:text-is('Play')")
    assert lab.text("#now") == f"{last} of {last}"


@pytest.mark.slow
def test_ones_own_scheduler_beside_the_reference(browser: Any, url: str, own_file: Path) -> None:
    """It is chosen at first, since it was asked for; its file is read again for each run, and its mistakes are shown."""
    lab = Lab(browser, url)
    assert str(own_file) in lab.text("#own-name")
    lab.click("Head-of-line blocking")
    lab.check_picture(OwnScheduler(f"{own_file}:ShortestFirst"))
    text = own_file.read_text()
    own_file.write_text(
        text
        + "\n    def schedule(self):\n        print('<b>hello</b>')\n        return 1 / (self.step - 3) and super().schedule()\n"
    )
    lab.click("Read it again and run")
    assert (
        lab.text("#problem")
        == f"Step 4: ZeroDivisionError: division by zero [{own_file}, line 16: return 1 / (self.step - 3) and super().schedule()]"
    )
    assert lab.text("#printed-text").startswith("<b>hello</b>\n")
    assert lab.page.locator("#grid thead tr").first.locator("td").count() == 3, "what it did before stays in sight"
    lab.use("reference")
    assert lab.text("#problem") == "" and not lab.page.is_visible("#printed")
    lab.check_picture()
    own_file.write_text(text)
    assert not lab.page.is_visible("#code"), "no code is written into the server's page"
    lab.close()


LOOPS = "class Mine:\n    def __init__(self, *args):\n        while True: print('x' * 9999)"


@pytest.mark.parametrize("loops", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_scheduler_is_written_into_the_servers_page(browser: Any, printed_link: str, loops: bool) -> None:
    """The reference's run above, one's own below; whatever is written, the page goes on."""
    lab = Lab(browser, printed_link)
    assert "key=" in printed_link and "key=" not in lab.page.url, "a link that is copied has no key"
    lab.page.reload()
    lab.settled()
    lab.click("Head-of-line blocking")
    lab.use("own")
    starter = read_static("own_scheduler.txt")
    assert lab.page.input_value("#code") == starter and "on this machine" in lab.text("#own-text label")
    lab.check_picture(OwnScheduler(text=starter))
    assert "the project's own" in lab.text("#facts"), "the numbers of both"
    mistakes = {
        "class Mine(": "SyntaxError: '(' was never closed [your scheduler, line 1: class Mine(]",
        "": "the text defines no class; begin with: class MyScheduler(Scheduler):",
        "class Mine:\n    def __init__(self, *args):\n        raise ValueError('no')": "ValueError: no [your scheduler, line 3: raise ValueError('no')]",
    }
    if loops:
        mistakes[LOOPS] = "it was still at work after 5 seconds of CPU time [your scheduler, line 3:"
    for code, sentence in mistakes.items():
        lab.page.fill("#code", code)
        lab.click("Run")
        assert lab.text("#problem").startswith(sentence)
    assert len(lab.text("#printed-text")) <= MAX_PRINTED
    pool = "from stage03_engine.core.block_pool import BlockPool\n" + POOL_IN_LAB.read_text(encoding="utf-8")
    lab.page.fill("#code", pool)
    lab.click("Run")
    assert lab.text("#problem") == ""
    lab.check_picture(OwnScheduler(text=pool))
    lab.use("reference")
    lab.check_picture()
    lab.close()


@pytest.mark.slow
def test_without_the_key_the_page_has_no_editor(browser: Any, printed_link: str) -> None:
    lab = Lab(browser, printed_link.partition("?")[0])
    assert lab.page.is_disabled("[name=whose][value=own]") and "open the link that was printed" in lab.text("#own-name")
    lab.check_picture()
    lab.close()


@pytest.mark.slow
def test_it_fits_a_telephone(browser: Any, url: str) -> None:
    lab = Lab(browser, url, width=400)
    assert lab.page.evaluate("() => document.documentElement.scrollWidth") <= 400
    lab.close()


def test_everything_has_a_name(lab: Lab) -> None:
    """For those who listen to the page: each control and each cell says what it is."""
    nameless = lab.page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea, [tabindex]")].filter(e => e.offsetParent)
          .filter(e => !(e.getAttribute("aria-label") || e.labels?.length || e.textContent.trim() || e.matches("td:empty, pre"))).map(e => e.outerHTML)"""
    )
    assert nameless == []
    drawn = "#grid td[class*='k-']"
    assert lab.page.locator(drawn).count() == lab.page.locator(f"{drawn}[aria-label]").count() > 50


@pytest.mark.slow
def test_without_the_server_it_says_so(browser: Any, url: str) -> None:
    lab = Lab(browser, url)
    lab.context.set_offline(True)
    lab.click("Priority")
    assert lab.text("#problem").startswith("The server of this page does not answer: ")
    lab.problems.clear()  # the browser reports the failed request
    lab.close()


# The static page


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The folder of `stages lab --static`, behind Python's own web server. PYODIDE_DIR holds what `--pyodide` wants."""
    folder = pyodide_folder()
    if folder is None:
        pytest.skip(
            "PYODIDE_DIR does not say where Pyodide and msgspec's wheel for it are (stage01_cli/tools/lab/README.md)"
        )
    site = tmp_path_factory.mktemp("site")
    list(write_site(site, folder))
    handler = functools.partial(QuietHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *message: Any) -> None:
        pass


@pytest.mark.slow
def test_the_static_page_runs_the_same_python_in_the_browser(browser: Any, site: str) -> None:
    lab = Lab(browser, site)
    for each in NAMED:
        lab.click(each["name"])
        right = json.loads(json.dumps(simulate(lab.scenario)))
        found = lab.page.evaluate("async () => await simulator.run(editor.scenario, null)")
        assert found == right
        lab.check_picture()
    lab.use("own")
    lab.check_picture(OwnScheduler(text=read_static("own_scheduler.txt")))
    lab.page.fill("#code", "class Mine:\n    def __init__(self, *args):\n        raise ValueError('no')")
    lab.click("Run")
    assert lab.text("#problem") == "ValueError: no [your scheduler, line 3: raise ValueError('no')]"
    lab.close()


@pytest.mark.slow
def test_a_scheduler_that_loops_in_the_browser_is_ended(browser: Any, site: str) -> None:
    lab = Lab(browser, site)
    lab.use("own")
    lab.page.fill("#code", "class Mine:\n    def __init__(self, *args):\n        while True: pass")
    lab.click("Run")
    assert lab.text("#problem") == "The scheduler was still at work after 10 seconds, and was ended."
    lab.use("reference")
    lab.check_picture()
    lab.close()


def check_sources(archive: Path, tmp_path: Path) -> None:
    """What is in the archive is enough: with it, the standard library and msgspec alone every scenario runs."""
    unpacked = tmp_path / "unpacked"
    shutil.unpack_archive(archive, unpacked)
    (unpacked / "msgspec").symlink_to(Path(msgspec.__file__).parent)
    code = f"""
import json, sys
sys.path = [{str(unpacked)!r}, {str(unpacked / "trace")!r}, *(path for path in sys.path if "site-packages" not in path)]
from stage01_cli.tools.lab.own_scheduler import OwnScheduler
from stage01_cli.tools.lab.simulate import MAX_PRINTED, simulate
print(json.dumps([simulate({{key: each[key] for key in ("settings", "requests")}}) for each in {NAMED!r}]))
own = simulate({{"requests": [{{"id": "a"}}], "settings": {{"scheduling_policy": "fair"}}}}, OwnScheduler(text={read_static("own_scheduler.txt")!r}))
assert own["problem"] is None, own
"""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    right = [simulate({key: each[key] for key in ("settings", "requests")}) for each in NAMED]
    assert json.loads(done.stdout) == json.loads(json.dumps(right))


def test_from_a_file_it_says_what_to_do(browser: Any, tmp_path: Path) -> None:
    """Needs no Pyodide: a browser starts no worker from a file."""
    for name in (
        "pyodide.mjs",
        "pyodide.asm.mjs",
        "pyodide.asm.wasm",
        "python_stdlib.zip",
        "pyodide-lock.json",
        "msgspec-0-wasm32.whl",
    ):
        (tmp_path / name).write_text("")
    lines = list(write_site(tmp_path / "site", tmp_path))
    check_sources(tmp_path / "site/stages.zip", tmp_path)
    assert lines[0].startswith(f"wrote {tmp_path / 'site'} (")
    context = browser.new_context()
    page = context.new_page()
    page.goto((tmp_path / "site/index.html").as_uri())
    page.wait_for_selector("body[data-run]")
    assert "python -m http.server" in page.text_content("#problem")
    context.close()
