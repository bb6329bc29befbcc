"""`flashgen gallery`: a picture of every mask, and pages that show them all."""

from __future__ import annotations

import argparse
import html
import re
from pathlib import Path

from . import catalogue, target
from .drawing import draw
from .loading import write

_LENGTHS, _BLOCK = (64, 64), (8, 8)
_INTRO = (
    "Each picture is a mask's matrix at 64 positions under tiles of 8 x 8: blue pairs lie in full "
    "tiles, which need no mask; orange ones in partial tiles, masked pair by pair (pale: computed, "
    "and masked); grey tiles are empty and skipped."
)
_MADE_BY = "Made by `python -m flashgen gallery docs/gallery`."
_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>flashgen: masks</title>
<style>
:root{{color-scheme:light dark}}
body{{font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;margin:2rem auto;
max-width:1300px;padding:0 1rem;background:#f6f8fa;color:#1f2328}}
p{{max-width:70ch}}
main{{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(410px,100%),1fr));gap:1.5rem}}
figure{{margin:0}}
figure img{{max-width:100%;height:auto}}
figcaption{{max-width:400px;padding:.4rem .6rem;font-size:14px}}
code{{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:.92em}}
@media(prefers-color-scheme:dark){{body{{background:#010409;color:#f0f6fc}}}}
</style>
<h1>Masks</h1>
<p>{intro}</p>
<main>
{figures}
</main>
</html>
"""


def gallery(given: argparse.Namespace) -> None:
    """Write `<mask>.svg` for each mask, index.md and index.html."""
    folder = Path(given.folder)
    write(folder / "index.md", _markdown())
    pictures = {name: picture(name) for name in catalogue.masks()}
    for name, svg in pictures.items():
        write(folder / f"{name}.svg", svg)
    write(folder / "index.html", _html())
    print(f"wrote {len(pictures)} pictures, index.md and index.html to {folder}")


def picture(name: str) -> str:
    """The gallery's SVG of a mask, with its example data."""
    given = argparse.Namespace(name=name, n=_LENGTHS, seed=None, param=[])
    found = target.find(given)
    mask = found.program.mask
    assert mask is not None
    drawn = draw(mask, found.data, _LENGTHS, _BLOCK)
    scalars = drawn.bound.scalars
    values = ", ".join(f"{p.name}={scalars[p.name]}" for p in mask.params if p.name in scalars)
    return drawn.svg(f"{name}({values})" if values else name)


def _markdown() -> str:
    """A section per mask: what it does, where it is, its picture."""
    lines = ["# Masks", "", _INTRO, "", _MADE_BY]
    for mask in catalogue.masks().values():
        where = f"[masks/{mask.file}](../../masks/{mask.file})"
        lines += ["", f"## {mask.name}", "", f"{mask.doc} `{mask.brief}`, {where}"]
        lines += ["", f"![{mask.name}]({mask.name}.svg)"]
    return "\n".join([*lines, ""])


def _html() -> str:
    figures = "\n".join(
        f'<figure id="{mask.name}">\n<img src="{mask.name}.svg" alt="{mask.name}" loading="lazy">\n'
        f"<figcaption>{_code(mask.doc)}<br><code>{html.escape(mask.brief)}</code></figcaption>\n"
        "</figure>"
        for mask in catalogue.masks().values()
    )
    return _PAGE.format(intro=_code(f"{_INTRO} {_MADE_BY}"), figures=figures)


def _code(text: str) -> str:
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))
