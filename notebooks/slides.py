"""Slides from the notebooks: one HTML file each, which needs no network, no Jupyter and no other file.

`python notebooks/build.py --slides 08` makes `notebooks/slides/08_execution.html` from the built .ipynb; `make slides` makes all. A slide begins
at each heading, and where a reader predicts or has an exercise. What a notebook hides until a guess is hidden here, too, and long code is folded.
Arrow keys, space and Home lead through them; printing gives one page for each slide. (`jupyter nbconvert --to slides` loads reveal.js
from a CDN, so its slides stay white in a room without a network.)
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import nbformat
from markdown_it import MarkdownIt
from nbformat import NotebookNode
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

FOLDER = Path(__file__).resolve().parent
TARGET = FOLDER / "slides"
MOST_LINES = 14  # of code that stands open on a slide
COVER = "(hidden: guess first)\n"
_MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable("table")
_CODE = HtmlFormatter(nowrap=True, style="default")
_HEADING = re.compile(r"^(?=#{1,2} )", re.M)

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title><style>
{colours}
* {{ box-sizing: border-box }}
body {{ margin: 0; font: 22px/1.4 system-ui, sans-serif; color: #1a1a1a; background: #fff }}
section {{ padding: 1.6rem 4vw 3rem; min-height: 100vh }}
.js section {{ display: none }} .js section.now {{ display: block }}
h1 {{ font-size: 2.2rem; margin: 18vh 0 1rem }} h2 {{ font-size: 1.6rem; margin: 0 0 .8rem; color: #0072b2 }}
h1:not(:first-child), .first h1 {{ margin-top: 1rem }}
pre {{ font: 15px/1.35 ui-monospace, monospace; background: #f6f6f6; padding: .6rem .8rem; overflow-x: auto; border-left: 4px solid #ccc }}
pre.out {{ background: #fff; border-color: #009e73 }}
code {{ font-family: ui-monospace, monospace; font-size: .88em }}
table {{ border-collapse: collapse; font-size: .8em }} td, th {{ border: 1px solid #ccc; padding: .2rem .5rem; text-align: left; vertical-align: top }}
img, iframe {{ max-width: 100%; max-height: 66vh; border: 0 }} iframe {{ width: 100%; height: 66vh }}
blockquote {{ margin: 0; padding: .4rem 1rem; border-left: 6px solid #e69f00; background: #fff8e8 }}
details {{ margin: .5rem 0 }} summary {{ cursor: pointer; color: #0072b2 }}
#at {{ position: fixed; right: 1rem; bottom: .5rem; font-size: 14px; color: #555 }}
@media print {{ section, .js section {{ display: block; break-after: page; min-height: 0 }} #at {{ display: none }} body {{ font-size: 14px }} }}
</style></head><body>
{slides}
<div id="at"></div>
<script>
const all = [...document.querySelectorAll("section")]; let at = Math.min(all.length, parseInt(location.hash.slice(1)) || 1) - 1;
function show(to) {{ at = Math.max(0, Math.min(all.length - 1, to)); all.forEach((s, i) => s.classList.toggle("now", i === at));
  document.getElementById("at").textContent = (at + 1) + " / " + all.length; history.replaceState(null, "", "#" + (at + 1)); scrollTo(0, 0) }}
document.documentElement.classList.add("js"); show(at);
addEventListener("hashchange", () => show((parseInt(location.hash.slice(1)) || 1) - 1));
addEventListener("keydown", event => {{ const by = {{ArrowRight: 1, PageDown: 1, " ": 1, ArrowLeft: -1, PageUp: -1}}[event.key];
  if (event.target.tagName === "SUMMARY" && event.key === " ") return;
  if (by) {{ event.preventDefault(); show(at + by) }} else if (event.key === "Home") show(0); else if (event.key === "End") show(all.length - 1) }});
</script></body></html>
"""


def slides(notebook: NotebookNode) -> list[str]:
    """The body of each slide, in order. Reads a built notebook."""
    made: list[list[str]] = []
    asked = False  # what follows a question is the answer
    for cell in notebook.cells[:1] + notebook.cells[2:]:  # the set-up cell shows nothing
        tags = cell.metadata.get("tags", [])
        if cell.cell_type == "markdown":
            for piece in _HEADING.split(cell.source):
                if piece.strip():
                    if not made or asked or piece.startswith("#") or {"predict", "exercise"} & set(tags):
                        made.append([])
                    asked = "predict" in tags
                    made[-1].append(_links(_MARKDOWN.render(piece)))
        elif "predict" not in tags:
            made += [[]] if asked else []
            asked = False
            made[-1] += _code(cell)
    return ["\n".join(parts) for parts in made]


def _code(cell: NotebookNode) -> Iterator[str]:
    lines = cell.source.count("\n") + 1
    code = f"<pre>{highlight(cell.source, PythonLexer(), _CODE)}</pre>"
    yield code if lines <= MOST_LINES else f"<details><summary>{lines} lines of code</summary>{code}</details>"
    shown = "\n".join(_outputs(cell.outputs))
    if shown and cell.metadata.get("jupyter", {}).get("outputs_hidden"):
        shown = f"<details><summary>What it is</summary>{shown}</details>"
    yield shown


def _outputs(outputs: Iterable[NotebookNode]) -> Iterator[str]:
    """Text, pictures with their alternative text, pages in a frame of their own."""
    for output in outputs:
        data = output.get("data", {})
        if output.output_type == "stream":
            if text := output.text.removeprefix(COVER).rstrip():
                yield f'<pre class="out">{html.escape(text)}</pre>'
        elif "image/png" in data:
            alt = output.metadata.get("image/png", {}).get("alt", "")
            picture = data["image/png"].replace("\n", "")
            yield f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{picture}">'
        elif "text/html" in data:
            yield f'<iframe sandbox="allow-scripts" title="a page" srcdoc="{html.escape(data["text/html"])}"></iframe>'
        elif "text/markdown" in data:
            yield _links(_MARKDOWN.render(data["text/markdown"]))
        elif "text/plain" in data:
            yield f'<pre class="out">{html.escape(data["text/plain"])}</pre>'


def _links(text: str) -> str:
    """Links lead from the folder of the slides; one to another notebook leads to its slides."""
    text = re.sub(r'href="(\d\d_\w+)\.ipynb"', r'href="\1.html"', text)
    return re.sub(r'(href|src)="(?!https?:|data:|#|\d\d_\w+\.html)([^"]+)"', r'\1="../\2"', text)


def page(notebook: NotebookNode) -> str:
    """The HTML of all slides of a built notebook."""
    title = re.sub(r"^# ", "", notebook.cells[0].source.splitlines()[0])
    bodies = [
        f'<section class="{"first" if n == 0 else ""}">{body}</section>' for n, body in enumerate(slides(notebook))
    ]
    return _PAGE.format(title=html.escape(title), colours=_CODE.get_style_defs(), slides="\n".join(bodies))


def write(source: Path, folder: Path = TARGET) -> Path:
    """Make the slides of one notebook, given its source; returns the file. Raises FileNotFoundError if it has not been built."""
    folder.mkdir(exist_ok=True)
    made = folder / f"{source.stem}.html"
    made.write_text(page(nbformat.read(source.with_suffix(".ipynb"), as_version=4)), encoding="utf-8")
    return made
