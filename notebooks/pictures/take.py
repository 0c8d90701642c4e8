"""Take the two pictures of the README from the real thing: the server's page while it answers, and the player on a recorded run.

`python notebooks/pictures/take.py` writes page.png and player.png beside this file. It needs a Chromium on the machine and
the packages of `make test`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
from playwright.sync_api import sync_playwright

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from browser import ARGS, find_chromium  # noqa: E402

SIZE = {"width": 1280, "height": 800}
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


def take_player(browser: Any) -> None:
    """The player in the middle of a run with several requests."""
    with tempfile.TemporaryDirectory() as folder:
        player = Path(folder) / "player.html"
        command = ["-m", "stagetrace", "export", "trace/recorded/mixed", "--html", str(player)]
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        page = browser.new_page(viewport=SIZE)
        page.goto(player.as_uri())
        page.wait_for_function("player !== null")  # it unpacks its recording first
        for _ in range(12):
            page.keyboard.press("Shift+ArrowRight")  # a step of the engine each
        page.screenshot(path=FOLDER / "player.png")


def main() -> None:
    """Both pictures."""
    server, url = start_server()
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=find_chromium(), args=ARGS)
            take_page(browser, url)
            take_player(browser)
            browser.close()
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
