"""A file of the project as a page with numbered lines, each with an anchor: `#L52`."""

from __future__ import annotations

import html
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename
from pygments.lexers.special import TextLexer
from pygments.util import ClassNotFound

CODE_STYLES = ("a11y-high-contrast-light", "a11y-high-contrast-dark")
"""Of accessible-pygments, which the theme brings: comments and strings can be read, too."""
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><link rel="icon" href="{up}_static/favicon.svg"><link rel="stylesheet" href="{up}_static/listing.css"></head>
<body><header><a href="{up}index.html">vLLM in stages</a> <h1>{title}</h1></header><main>{body}</main></body></html>
"""


def css() -> str:
    """The style of the pages, light and dark."""
    light, dark = (HtmlFormatter(style=style).get_style_defs(".highlight") for style in CODE_STYLES)
    own = (
        ":root{color-scheme:light dark}body{margin:0;font:14px/1.5 ui-monospace,monospace}header{padding:.6rem 1rem;font-family:system-ui}"
        "h1{display:inline;font-size:1rem;margin-left:1rem;overflow-wrap:anywhere}main{overflow-x:auto;padding:0 1rem 3rem}pre{margin:0}.highlight{background:none}"
        ".highlight a{color:inherit;text-decoration:none}.linenos a{opacity:.75}:target{background:#fc08;outline:2px solid #fa0}"
        "li{font-family:system-ui}"
    )
    return f"{own}\n{light}\n@media (prefers-color-scheme: dark) {{ body{{background:#131416;color:#ddd}} header a{{color:#8cf}} {dark} }}\n"


def file_page(path: Path, name: str, up: str) -> str:
    """`up` leads from the page to the root of the book."""
    try:
        lexer = get_lexer_for_filename(path.name)
    except ClassNotFound:
        lexer = TextLexer()
    formatter: HtmlFormatter[str] = HtmlFormatter(linenos="inline", lineanchors="L", anchorlinenos=True, wrapcode=True)
    body = (
        highlight(path.read_text(encoding="utf-8"), lexer, formatter)
        .replace('id="L-', 'id="L')
        .replace('name="L-', 'name="L')
        .replace('href="#L-', 'href="#L')
    )
    return PAGE.format(title=html.escape(name), up=up, body=body)


def folder_page(path: Path, name: str, up: str, pages: dict[str, str]) -> str:
    """What is in a folder; `pages` are those of its files that have one, name -> link."""
    names = sorted(each.name for each in path.iterdir() if not each.name.startswith(("_", ".")))
    items = (
        f'<a href="{html.escape(pages[each])}">{html.escape(each)}</a>' if each in pages else html.escape(each)
        for each in names
    )
    return PAGE.format(
        title=html.escape(name), up=up, body="<ul>" + "".join(f"<li>{item}</li>" for item in items) + "</ul>"
    )
