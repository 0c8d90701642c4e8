"""The page "Your own text": its data, its archive of the project, gpt2-tiny's files. It lies beside the laboratory, whose Pyodide and worker it uses."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

from stage01_cli.tools.book.chapters import ROOT
from stage01_cli.tools.lab.page import read_static as of_lab
from stage01_cli.tools.lab.static_site import plain
from stagetrace.player.frame import framed

STATIC = Path(__file__).resolve().parent / "static"
MODEL = ROOT / "stage03_engine" / "bundled" / "gpt2-tiny"
FILES = {
    "tokenizer.json": "gpt2-tiny-tokenizer.json",
    "config.json": "gpt2-tiny-config.json",
    "model.safetensors": "gpt2-tiny.safetensors",
}
"""The model's files, and what gpt2.js calls them."""
SOURCES = "own_text.zip"
INSIDE = ("stage01_cli/tools/book/__init__.py", "stage01_cli/tools/book/own_text.py")


def write_page(lab: Path) -> None:
    """Write the page into the folder of a laboratory that `stages lab --static` has written."""
    for name, there in FILES.items():
        shutil.copyfile(MODEL / name, lab / there)
    shutil.copyfile(STATIC / "gpt2.js", lab / "gpt2.js")
    shutil.copyfile(lab / "stages.zip", lab / SOURCES)
    with zipfile.ZipFile(lab / SOURCES, "a", zipfile.ZIP_DEFLATED) as archive:
        for name in INSIDE:
            archive.writestr(plain(name), (ROOT / name).read_bytes())
    wheel = next(lab.glob("msgspec-*wasm32.whl")).name
    needed = [*lab.glob("pyodide/*"), lab / wheel, lab / SOURCES, *(lab / name for name in FILES.values())]
    start = {
        "wheels": [wheel], "sources": SOURCES, "module": "stage01_cli.tools.book.own_text", "modules": {"gpt2": "gpt2.js"},
        "megabytes": round(sum(path.stat().st_size for path in needed) / 1e6),
    }  # fmt: skip
    (lab / "own_text.html").write_text(build_page(start), encoding="utf-8")


def build_page(start: dict[str, object]) -> str:
    """The page. It runs its own script and asks its own server, and nothing else."""
    script = of_lab("python.js") + "\n" + (STATIC / "own_text.js").read_text(encoding="utf-8")
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    data = {"start": start, "layers": config["n_layer"], "heads": config["n_head"]}
    body, style = ((STATIC / f"own_text.{kind}").read_text(encoding="utf-8") for kind in ("html", "css"))
    return framed("Your own text, in the browser", body, style, script, data, STATIC, "python")[0]
