"""The page of one run: one HTML file that needs nothing else, and the pictures beside it."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from edgc_ddp.report.drawing import Picture
from edgc_ddp.report.load import Run, number
from edgc_ddp.report.phases import phase_label
from edgc_ddp.report.plots import pictures
from edgc_ddp.report.records import Row
from edgc_ddp.report.stage_table import HEADS, stage_rows
from edgc_ddp.report.words import digits, flat, key_figures, rank_words, sentence

_CSS = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #ffffff; --soft: #5a5a5a;
  --line: #d4d4d4; --card: #f5f5f5; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececec; --paper: #17191c; --soft: #b0b0b0;
  --line: #43474d; --card: #22252a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 1.5rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.sentence { font-size: 1.15rem; } .soft, figcaption { color: var(--soft); }
figure { margin: 0; } figcaption { margin-top: .4rem; font-size: .92rem; }
img { display: block; width: 100%; height: auto; background: #ffffff; border-radius: 6px;
  border: 1px solid var(--line); }
.groups { columns: 20rem; column-gap: 1rem; }
.groups div { break-inside: avoid; background: var(--card); margin-bottom: 1rem;
  border-radius: 6px; }
.groups table { width: 100%; }
table { border-collapse: collapse; font-size: .92rem; }
caption { text-align: left; font-weight: 600; padding: .4rem .6rem; }
th, td { text-align: left; vertical-align: top; padding: .25rem .6rem;
  border-top: 1px solid var(--line); font-variant-numeric: tabular-nums; }
th { font-weight: 500; color: var(--soft); } td { overflow-wrap: anywhere; }
 td.number { text-align: right; white-space: nowrap; }
td.words { min-width: 7rem; }
.scroll { overflow: auto; max-height: 32rem; border: 1px solid var(--line); border-radius: 6px; }
.scroll table { width: 100%; }
.scroll thead th { position: sticky; top: 0; background: var(--card); }
.note { border-left: 4px solid #E69F00; padding: .1rem .8rem; margin: .4rem 0;
  background: var(--card); }
"""


def document(title: str, body: Iterable[str]) -> str:
    """A whole HTML page. ``title`` is escaped here, ``body`` is HTML already."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def figure(picture: Picture) -> str:
    """A picture with heading and caption, its bytes inside the page."""
    data = base64.b64encode(picture.png).decode("ascii")
    title, told = escape(picture.title), escape(picture.told)
    return (
        f'<h2 id="{escape(picture.name)}">{title}</h2>\n<figure>'
        f'<img alt="{title}. {told}" src="data:image/png;base64,{data}">'
        f"<figcaption>{told}</figcaption></figure>"
    )


def note(text: str) -> str:
    """A sentence that the reader should not miss.

    >>> note("a < b")
    '<p class="note">a &lt; b</p>'
    """
    return f'<p class="note">{escape(text)}</p>'


def group_table(caption: str, rows: Mapping[str, str]) -> str:
    """Names and values in two columns."""
    cells = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>'
        for name, value in rows.items()
    )
    table = f"<table><caption>{escape(caption)}</caption><tbody>{cells}</tbody></table>"
    return f"<div>{table}</div>"


def wide_table(heads: Sequence[str], rows: Iterable[Sequence[str]], label: str) -> str:
    """A table that scrolls when it is large; ``rows`` are ready cells (``<td>...</td>``)."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    body = "\n".join(f"<tr>{''.join(cells)}</tr>" for cells in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def render_page(run: Run, drawn: Sequence[Picture], missing: Sequence[str] = ()) -> str:
    """The page of a run with these pictures; ``missing`` says what could not be drawn and why."""
    name = run.folder.resolve().name
    body = [
        f"<h1>{escape(name)}</h1>",
        f'<p class="sentence">{escape(sentence(run))}</p>',
        *map(note, run.notes),
        "<h2>Settings</h2>",
        f'<div class="groups">{"".join(_settings(run))}</div>',
        *map(figure, drawn),
    ]
    if missing:
        body.append("<h2>Not shown</h2>")
        body += [f'<p class="soft">{escape(text)}</p>' for text in missing]
    if run.stage_summaries:
        cells = [[f"<td>{escape(cell)}</td>" for cell in row] for row in stage_rows(run)]
        body += ["<h2>Stages at the end</h2>", wide_table(HEADS, cells, "stages")]
    body += ["<h2>Decisions</h2>", _decision_log(run)]
    return document(f"{name} – EDGC run", body)


def write_report(run: Run) -> Path:
    """Write ``report/index.html`` and its pictures into the run's folder; return the page's path.

    Raises OSError when the folder cannot be written.
    """
    drawn, missing = pictures(run)
    return save(run.folder / "report", render_page(run, drawn, missing), drawn)


def save(folder: Path, page: str, drawn: Sequence[Picture]) -> Path:
    """Write a page as ``index.html`` and its pictures as ``<name>.png``; return the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    for picture in drawn:
        (folder / f"{picture.name}.png").write_bytes(picture.png)
    path = folder / "index.html"
    path.write_text(page, encoding="utf-8")
    return path


def _settings(run: Run) -> list[str]:
    tables = [group_table("results", key_figures(run))]
    loose: dict[str, Any] = {}
    for name, value in (run.config or {}).items():
        if isinstance(value, dict):
            tables.append(group_table(str(name), flat(value)))
        else:
            loose[str(name)] = value
    if loose:
        tables.insert(1, group_table("run", flat(loose)))
    if run.environment:
        told = {key: value for key, value in run.environment.items() if value is not run.shapes}
        if run.shapes:
            told["parameters"] = f"{len(run.shapes)} tensors"
        tables.append(group_table("environment", flat(told)))
    return tables


def _decision_log(run: Run) -> str:
    stages = (run.decisions, *run.later_stages)
    if not any(stages):
        return '<p class="soft">No decision was recorded.</p>'
    heads = ["step", "phase", "entropy (nats)", "rank", "reason"]
    if run.stages == 1:
        return wide_table(heads, map(_decision_cells, run.decisions), "decisions")
    rows = [(int(row["step"]), stage, row) for stage, own in enumerate(stages) for row in own]
    rows.sort(key=lambda entry: entry[:2])
    cells = [[f'<td class="number">{stage}</td>', *_decision_cells(row)] for _, stage, row in rows]
    return wide_table(["stage", *heads], cells, "decisions")


def _decision_cells(row: Row) -> list[str]:
    return [
        f'<td class="number">{int(row["step"]):,}</td>',
        f"<td>{escape(phase_label(str(row.get('phase') or '')))}</td>",
        f'<td class="number">{digits(number(row.get("entropy")))}</td>',
        f'<td class="words">{escape(rank_words(row))}</td>',
        f"<td>{escape(str(row.get('reason') or ''))}</td>",
    ]
