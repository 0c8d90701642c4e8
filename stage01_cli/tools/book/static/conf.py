"""How Sphinx makes the book out of the folder that build.py has written. It executes nothing and asks no other host."""

from pathlib import Path
from typing import Any

from stage01_cli.tools.book.links import page_of, relative
from stage01_cli.tools.book.listing import CODE_STYLES

project = "vLLM in stages"
author = "The vLLM in stages authors"
copyright = ""
html_show_copyright = html_show_sphinx = False
extensions = ["myst_nb"]
root_doc = "index"
nb_execution_mode = "off"
nb_mime_priority_overrides = [("html", "text/html", 0)]
myst_heading_anchors = 6
myst_url_schemes = ["http", "https", "mailto", "source", "page"]
suppress_warnings = ["myst.header", "misc.highlighting_failure"]
html_theme = "furo"
html_title = "vLLM in stages"
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_favicon = "_static/favicon.svg"
html_extra_path = ["_extra"]
html_copy_source = False
html_permalinks = True
pygments_style, pygments_dark_style = CODE_STYLES


def lead_to_source(app: Any, doctree: Any, docname: str) -> None:
    """`source:PATH#L52` and `page:PATH` become links from this page."""
    from docutils import nodes

    page = f"{docname}.html"
    for node in doctree.findall(nodes.reference):
        scheme, _, rest = node.get("refuri", "").partition(":")
        if scheme in ("source", "page"):
            target, _, place = rest.partition("#")
            to = target if scheme == "page" else page_of(target, (app.config.book_root / target).is_dir())
            node["refuri"] = relative(to, page) + (f"#{place}" if place else "")
            node["internal"] = True


WITHOUT_SCRIPTS = """\
A search needs JavaScript, which is switched off here. <a href="index.html">The first page</a> lists every chapter. With it, a search looks like this:
  <picture><source srcset="_static/search-dark.webp" media="(prefers-color-scheme: dark)"><img src="_static/search.webp" width="1280" height="800" alt="A \
search for preemption: the chapters in which the word stands, each with a few lines around it"></picture>"""
MENDED = {
    "Please activate JavaScript to enable the search functionality.": WITHOUT_SCRIPTS,
    '<p class="caption" role="heading">': '<p class="caption" role="heading" aria-level="2">',
    "<pre>": '<pre tabindex="0">',
    '<div class="table-wrapper ': '<div tabindex="0" class="table-wrapper ',
}


def mend(app: Any, exception: Exception | None) -> None:
    """Without scripts the search shows what it looks like with them. A caption says which level of heading it is; code and tables that are wider than their box can be scrolled with the keys. What Sphinx has only copied stays as it is: a page
    with a script of its own carries the script's hash."""
    for page in Path(app.outdir).rglob("*.html"):
        if not Path(app.srcdir, "_extra", page.relative_to(app.outdir)).exists():
            text = page.read_text(encoding="utf-8")
            for tag, mended in MENDED.items():
                text = text.replace(tag, mended)
            page.write_text(text, encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    """Sphinx calls it."""
    app.add_config_value("book_root", Path("@ROOT@"), "env")
    app.connect("doctree-resolved", lead_to_source)
    app.connect("build-finished", mend)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
