"""Take the pictures of the README, the notebooks, and the pages, which show them where scripts are off: from the real thing, while it runs.

`python notebooks/pictures/take.py` takes all, `take.py player napkin` takes some. It needs a Chromium on the machine and the packages of `make test`, and of `make book` for the pages
of the book, which is made for it, with Pyodide; `--book DIR` takes one that is made already.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
from PIL import Image
from playwright.sync_api import sync_playwright

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
sys.path.insert(0, str(ROOT / "tests/support"))

from browser import ARGS, find_chromium  # noqa: E402

SIZE = {"width": 1280, "height": 800}
FREQUENT, FAR = (
    48,
    16,
)  # colours of a still picture: of plain areas and words, and those far from all others, such as a request's thin stripe
SMALL = (960, 600)  # of the picture that moves
STEPS, FRAME_MS, COLOURS_MOVING = 20, 700, 96
PROMPTS = ("ROMEO:", "To be, or not", "KING HENRY:", "What is", "My lord,")
TOOLS = ROOT / "stage01_cli" / "tools"
PLAYER = ROOT / "trace" / "stagetrace" / "player" / "player.webp"
PAGE = ROOT / "stage02_server" / "features" / "page" / "static" / "page.webp"


def keep(page: Any, file: Path, schemes: tuple[str, ...] = ("light",)) -> None:
    """What the window shows, as a file; the dark one is called NAME-dark."""
    for scheme in schemes:
        page.emulate_media(color_scheme=scheme)
        where = file if scheme == "light" else file.with_stem(f"{file.stem}-{scheme}")
        shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        counted = sorted(shot.getcolors(shot.width * shot.height), reverse=True)
        frequent = [part for _, colour in counted[:FREQUENT] for part in colour]
        palette = Image.new("P", (1, 1))
        palette.putpalette(frequent + shot.quantize(FAR, Image.Quantize.MAXCOVERAGE).getpalette()[: 3 * FAR])
        flat = shot.quantize(palette=palette, dither=Image.Dither.NONE).convert("RGB")
        flat.save(where, lossless=True, quality=80)
        print(f"{where.relative_to(ROOT)}: {where.stat().st_size / 1000:.0f} kB", flush=True)


# The server's page


def start_server() -> tuple[subprocess.Popen[str], str]:
    """A server on a free port, and its address."""
    command = [sys.executable, "-m", "stage02_server", "serve", "gpt2-tiny", "--host", "127.0.0.1", "--port", "0"]
    flags = ["--num-gpu-blocks-override", "64", "--max-num-batched-tokens", "64", "--max-num-seqs", "8"]
    server = subprocess.Popen([*command, *flags], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    for line in server.stderr:
        if found := re.search(r"Serving \S+ on (http://\S+)$", line):
            Thread(target=server.stderr.read, daemon=True).start()  # so that its log never blocks it
            return server, found[1]
    raise SystemExit("the server did not start")


def ask(url: str, prompt: str) -> None:
    """A request of a neighbour, so that the engine has more than one."""
    body = {"prompt": prompt * 4, "max_tokens": 300, "temperature": 0.8, "ignore_eos": True}
    httpx.post(f"{url}/v1/completions", json=body, timeout=120)


def take_page(browser: Any) -> None:
    """The page in the middle of an answer, with neighbours in the engine."""
    server, url = start_server()
    try:
        page = browser.new_page(viewport=SIZE)
        page.goto(url)
        page.fill("[name=prompt]", "ROMEO:")
        page.fill("[name=max_tokens]", "200")
        neighbours = [Thread(target=ask, args=(url, prompt)) for prompt in PROMPTS]
        for neighbour in neighbours:
            neighbour.start()
        page.click("#send")
        page.locator("#output", has_text=re.compile(".{150}", re.DOTALL)).wait_for()
        keep(page, PAGE)
        for neighbour in neighbours:
            neighbour.join()
    finally:
        server.terminate()
        server.wait()


# The player


@contextmanager
def player(browser: Any, run: str, height: int = SIZE["height"]) -> Iterator[Any]:
    """A tab with the player of a recorded run."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "player.html"
        command = ["-m", "stagetrace", "export", f"trace/recorded/{run}", "--html", str(file)]
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        page = browser.new_page(viewport={**SIZE, "height": height}, reduced_motion="reduce")
        page.goto(file.as_uri())
        page.locator(".run").wait_for()  # it unpacks its recording first
        yield page
        page.close()


def take_player(browser: Any) -> None:
    """The player in the middle of a run with several requests."""
    with player(browser, "mixed") as page:
        for _ in range(12):
            page.keyboard.press("Shift+ArrowRight")  # a step of the engine each
        keep(page, PLAYER)


def take_chances(browser: Any) -> None:
    """A token's candidates, where a random draw did not take the likeliest."""
    with player(browser, "chances", height=1600) as page:  # so that the controls cover nothing
        page.evaluate("player.goToStep(7)")
        page.locator(".chances").screenshot(path=FOLDER / "chances.png")


def take_preempted(browser: Any) -> None:
    """The moment after a preemption, when the step's decision is complete."""
    with player(browser, "preemption") as page:
        page.evaluate("player.goTo(player.findEvent(1, ({ name }) => name === 'sched.preempt'))")
        page.keyboard.press("Shift+ArrowRight")
        keep(page, FOLDER / "preempted.webp")


def take_moving(browser: Any) -> None:
    """The same run as in player.webp, step by step: a GIF that plays three times and then rests. Its last frame stays longest."""
    with player(browser, "mixed") as page:
        frames = []
        for _ in range(STEPS):
            page.keyboard.press("Shift+ArrowRight")
            frames.append(
                Image.open(io.BytesIO(page.screenshot())).convert("RGB").resize(SMALL, Image.Resampling.LANCZOS)
            )
    palette = frames[STEPS // 2].quantize(COLOURS_MOVING)
    flat = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    durations = [FRAME_MS] * (STEPS - 1) + [4 * FRAME_MS]
    flat[0].save(FOLDER / "player.gif", save_all=True, append_images=flat[1:], duration=durations, loop=2)


# The pages of the book


def look_up(page: Any) -> None:
    """A search that has found something."""
    page.locator("#search-results li a").first.wait_for()


def preempt(page: Any) -> None:
    """The laboratory, where a request has just lost its blocks."""
    page.get_by_role("button", name="Preemption").click()
    for _ in range(9):
        page.click("#forward")
    for _ in range(2):
        page.locator('#grid [tabindex="0"]').press("ArrowDown")


def write(page: Any) -> None:
    """Eight answers, after five steps."""
    page.click("#send-8")
    for step in range(1, 6):
        page.click("#next")
        page.locator("#number", has_text=re.compile(f"^{step}$")).wait_for()


def judge(page: Any) -> None:
    """What the judge says of a starter, which is still to be written."""
    page.click("#check")
    page.locator("#end").wait_for()  # while it judges
    page.locator("#end").wait_for(state="hidden")


Do = Callable[[Any], None]
OF_THE_BOOK: dict[str, tuple[str, Path, int, Do | None]] = {
    "search": ("search.html?q=preemption", TOOLS / "book/static/search.webp", SIZE["height"], look_up),
    "walk": ("source/notebooks/pictures/walk.html#fn=EngineCore.step", TOOLS / "walk/walk.webp", SIZE["height"], None),
    "napkin": ("napkin.html", TOOLS / "napkin/static/napkin.webp", SIZE["height"], None),
    "lab": ("lab/index.html", TOOLS / "lab/static/lab.webp", SIZE["height"], preempt),
    "own_text": ("lab/own_text.html", TOOLS / "book/static/own_text.webp", SIZE["height"], write),
    "exercises": ("lab/exercises.html", TOOLS / "book/static/exercises.webp", 1080, judge),
}  # fmt: skip
"""Name -> where it is in the book, the file of its picture, how much of the page that shows, and what is done first."""
LIGHT_ALONE = {"walk"}  # one such page is a file of the project


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """A page of the book asks for many files."""


@contextmanager
def served(book: Path | None) -> Iterator[str]:
    """The address of a book."""
    with tempfile.TemporaryDirectory() as folder:
        if book is None:
            book = Path(folder) / "book"
            command = ["-m", "stage01_cli", "book", "--pyodide", "--out", str(book)]
            subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
        with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(book))) as server:
            Thread(target=server.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{server.server_address[1]}/"
            server.shutdown()


def take_of_the_book(browser: Any, address: str, name: str) -> None:
    """One of the book's pages, light and mostly dark, too."""
    path, file, height, do = OF_THE_BOOK[name]
    page = browser.new_page(viewport={**SIZE, "height": height}, reduced_motion="reduce")
    page.goto(address + path)
    if path.startswith("lab/"):
        page.locator("#status:empty").wait_for(state="attached")  # until Python is there
    if do is not None:
        do(page)
    keep(page, file, ("light",) if name in LIGHT_ALONE else ("light", "dark"))
    page.close()


def main() -> None:
    """All pictures, or some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*TAKES, *OF_THE_BOOK]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; all if none is given")
    parser.add_argument("--book", metavar="DIR", type=Path, help="what `make book ARGS=--pyodide` has written")
    given = parser.parse_args()
    names = given.names or known
    if strange := sorted(set(names) - set(known)):
        parser.error(f"there is no picture {', '.join(strange)}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=ARGS)
        for name in names:
            if name in TAKES:
                TAKES[name](browser)
        if of_the_book := [name for name in names if name in OF_THE_BOOK]:
            with served(given.book) as address:
                for name in of_the_book:
                    take_of_the_book(browser, address, name)
        browser.close()


TAKES: dict[str, Do] = {
    "player": take_player, "chances": take_chances, "preempted": take_preempted, "moving": take_moving, "page": take_page,
}  # fmt: skip

if __name__ == "__main__":
    main()
