"""The pages that compute in a browser have one head, one base of style and one table of colours, and run under one policy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from stagetrace.player.frame import RULES, Reach, framed, tokens

ROOT = Path(__file__).parent.parent.parent
PLAYER = ROOT / "trace/stagetrace/player"
HOUSE = [ROOT / name for name in ("stage01_cli", "stage02_server", "stage03_engine", "stage04_kernels", "trace")]
STYLES = sorted(path for house in HOUSE for path in house.rglob("*.css"))
TEMPLATES = sorted(path for house in HOUSE for path in house.rglob("*.html"))
WITH_A_HEAD = {
    "frame.html",
    "player.html",
    "walk.html",
    "page.html",
}  # what is embedded, written to a file, or a server's
OTHER_TABLE = {"page.css"}  # the server's own page: a stage's page takes nothing from the trace's


def variables(style: str) -> set[str]:
    return set(re.findall(r"(--[a-z-]+):", style))


@pytest.mark.parametrize("path", STYLES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_style_repeats_neither_a_rule_of_the_frame_nor_its_colours(path: Path) -> None:
    if path.parent == PLAYER or path.name in OTHER_TABLE:
        return
    rules = {line for line in (PLAYER / "frame.css").read_text(encoding="utf-8").splitlines() if line.endswith(" }")}
    style = path.read_text(encoding="utf-8")
    if "walk" not in path.parts:  # a page of its own kind, which takes the colours only
        assert not rules & set(style.splitlines())
    assert not variables(style) & variables(tokens())


def test_only_the_templates_have_a_head() -> None:
    assert len(TEMPLATES) > len(WITH_A_HEAD)
    assert {path.name for path in TEMPLATES if "<head>" in path.read_text(encoding="utf-8")} == WITH_A_HEAD


@pytest.mark.parametrize("reach", get_args(Reach))
def test_a_page_runs_its_own_script_and_reaches_no_other_host(reach: Reach) -> None:
    page, policy = framed("a < b", "<p>x</p>\n", "p {}", "1 < 2", {"x": "</script>"}, PLAYER, reach)
    assert policy in page and "<title>a &lt; b</title>" in page and page.count("</script>") == 2
    assert re.match(
        r"default-src 'none'; script-src ('self' 'wasm-unsafe-eval' )?'sha256-[^']+'; style-src 'sha256-[^']+';", policy
    )
    sources = {word for rule in policy.split("; ") for word in rule.split()[1:]}
    assert {word for word in sources if "sha256" not in word} <= {"'none'", "'self'", "'wasm-unsafe-eval'", "data:"}
    assert ("connect-src" in policy) == (reach != "nothing") and ("worker-src" in policy) == (reach == "python")
    assert set(RULES) == set(get_args(Reach))
