"""Take the pictures of the README and the notebooks from the real thing: the server's page while it answers, and the player on recorded runs.

`python notebooks/pictures/take.py` writes page.png, player.png, chances.png, preempted.png and player.gif, which moves, beside this file;
`take.py player chances moving` writes those of the player alone. It needs a Chromium on the machine and the packages of `make test`.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
from PIL import Image
from playwright.sync_api import sync_playwright

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from browser import ARGS, find_chromium  # noqa: E402

SIZE = {"width": 1280, "height": 800}
SMALL = (960, 600)  # of the picture that moves
STEPS, FRAME_MS, COLOURS = 20, 700, 96
PROMPTS = ("ROMEO:", "To be, or not", "KING HENRY:", "What is", "My lord,")


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


def take_page(browser: Any, url: str) -> None:
    """The page in the middle of an answer, with neighbours in the engine."""
    page = browser.new_page(viewport=SIZE)
    page.goto(url)
    page.fill("[name=prompt]", "ROMEO:")
    page.fill("[name=max_tokens]", "200")
    neighbours = [Thread(target=ask, args=(url, prompt)) for prompt in PROMPTS]
    for neighbour in neighbours:
        neighbour.start()
    page.click("#send")
    page.locator("#output", has_text=re.compile(".{150}", re.DOTALL)).wait_for()
    page.screenshot(path=FOLDER / "page.png")
    for neighbour in neighbours:
        neighbour.join()


@contextmanager
def player(browser: Any, run: str, height: int = SIZE["height"]) -> Iterator[Any]:
    """A tab with the player of a recorded run."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "player.html"
        command = ["-m", "stagetrace", "export", f"trace/recorded/{run}", "--html", str(file)]
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        page = browser.new_page(viewport={**SIZE, "height": height}, reduced_motion="reduce")
        page.goto(file.as_uri())
        page.wait_for_function("player !== null")  # it unpacks its recording first
        yield page
        page.close()


def take_player(browser: Any) -> None:
    """The player in the middle of a run with several requests."""
    with player(browser, "mixed") as page:
        for _ in range(12):
            page.keyboard.press("Shift+ArrowRight")  # a step of the engine each
        page.screenshot(path=FOLDER / "player.png")


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
        page.screenshot(path=FOLDER / "preempted.png")


def take_moving(browser: Any) -> None:
    """The same run as in player.png, step by step: a GIF that plays three times and then rests. Its last frame stays longest."""
    with player(browser, "mixed") as page:
        frames = []
        for _ in range(STEPS):
            page.keyboard.press("Shift+ArrowRight")
            frames.append(
                Image.open(io.BytesIO(page.screenshot())).convert("RGB").resize(SMALL, Image.Resampling.LANCZOS)
            )
    palette = frames[STEPS // 2].quantize(COLOURS)
    flat = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    durations = [FRAME_MS] * (STEPS - 1) + [4 * FRAME_MS]
    flat[0].save(FOLDER / "player.gif", save_all=True, append_images=flat[1:], duration=durations, loop=2)


def main() -> None:
    """All pictures, or those of the player."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TAKES)}, page; all if none is given")
    names = parser.parse_args().names or [*TAKES, "page"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=ARGS)
        for name in names:
            if name != "page":
                TAKES[name](browser)
                continue
            server, url = start_server()
            try:
                take_page(browser, url)
            finally:
                server.terminate()
                server.wait()
        browser.close()


TAKES = {"player": take_player, "chances": take_chances, "preempted": take_preempted, "moving": take_moving}

if __name__ == "__main__":
    main()
