"""Findings as HTML: a fragment for notebooks, and a page that needs nothing else: no network, no
script. Plots are there if matplotlib is (the `report` extra)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape

from .. import tables
from . import plots
from .blocks import Block, Bullets, Code, Section, Show, Table, clean, plural
from .content import BAR, run_lines, sections, verdict_rows
from .provenance import how_to_read, run_section
from .results import Findings

_CLASSES = {
    "SAFE": "safe", "NOT SAFE": "unsafe", "NOT ENOUGH DATA": "open", "UNINFORMATIVE": "mute",
}  # fmt: skip
_CAPTIONS = {
    "losses": "Loss of accuracy against the baseline. SAFE needs the whole interval to lie left of "
    "the margin.",
    "positions": "Mean KL by the position of the token, with 95 % intervals. Damage that grows "
    "with length rises to the right.",
    "memory": "What a format saves against what it changes: lower and further left is better. A "
    "point is the mean over all tokens, its line spans the tasks; a star is a mix, whose line is "
    "its interval.",
    "layers": "KL with one layer's K or V alone in the lower format, with 95 % intervals.",
}
_NO_PLOTS = "There are no plots here, because matplotlib is missing: pip install 'qkv[report]'."

# One palette, of middle tones that read on white and on near black: a notebook's theme is not
# known to a style sheet.
_CSS = """
.qkv{--qkv-muted:#7a838d;--qkv-grid:rgba(128,136,144,.28);--qkv-soft:rgba(128,136,144,.11);
--qkv-c0:#3b82f6;--qkv-c1:#e8590c;--qkv-c2:#0d9488;--qkv-c3:#a855f7;--qkv-c4:#6b8e23;
--qkv-c5:#db2777;--qkv-c6:#b7791f;--qkv-c7:#0891b2;
font-family:system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;line-height:1.5;
max-width:68rem;overflow-wrap:anywhere}
@supports(color:color-mix(in srgb,red,blue)){
.qkv{--qkv-muted:color-mix(in srgb,currentColor 66%,transparent)}}
.qkv h1{font-size:1.5rem;line-height:1.25;margin:0 0 .3rem}
.qkv h2{font-size:1.15rem;margin:2.2rem 0 .5rem;padding-bottom:.2rem;
border-bottom:1px solid var(--qkv-grid)}
.qkv h3{font-size:.95rem;margin:1.1rem 0 .3rem}
.qkv p{margin:.5rem 0;max-width:46rem}
.qkv .verdicts{list-style:none;margin:1rem 0;padding:0}
.qkv .verdicts li{border-left:4px solid var(--qkv-tone);background:var(--qkv-soft);
margin:.5rem 0;padding:.55rem .9rem;border-radius:0 4px 4px 0}
.qkv .verdicts li p{margin:.2rem 0 0}
.qkv .lane{font-weight:600;margin-left:.5rem}
.qkv .badge{display:inline-block;background:var(--qkv-tone);color:#fff;border-radius:3px;
padding:.05em .5em;font-size:.8em;font-weight:700;letter-spacing:.02em;white-space:nowrap}
.qkv .safe{--qkv-tone:#15803d}.qkv .unsafe{--qkv-tone:#b91c1c}
.qkv .open{--qkv-tone:#a16207}.qkv .mute{--qkv-tone:#57606a}
.qkv .scroll{overflow-x:auto;margin:.5rem 0}
.qkv table{border-collapse:collapse;font-size:.84rem;font-variant-numeric:tabular-nums;
margin:0;overflow-wrap:normal}
.qkv th,.qkv td{padding:.28rem .5rem;text-align:right;white-space:nowrap;border:0;
border-bottom:1px solid var(--qkv-grid);background:none;vertical-align:baseline}
.qkv th{font-weight:600;color:var(--qkv-muted);border-bottom-width:2px}
.qkv .l1 :is(th,td):nth-child(-n+1),.qkv .l2 :is(th,td):nth-child(-n+2),
.qkv .l3 :is(th,td):nth-child(-n+3),.qkv .l4 :is(th,td):nth-child(-n+4){text-align:left}
.qkv .l2 td:nth-child(2),.qkv .l4 td{white-space:normal}
.qkv .bar{display:inline-block;height:.7em;background:var(--qkv-c0);border-radius:1px}
.qkv pre{background:var(--qkv-soft);padding:.7rem .9rem;border-radius:4px;overflow-x:auto;
font-size:.82rem;line-height:1.45;margin:.4rem 0;overflow-wrap:normal}
.qkv details{margin:.6rem 0}.qkv summary{cursor:pointer;font-size:.9rem;color:var(--qkv-muted)}
.qkv figure{margin:1rem 0}.qkv .plot{overflow-x:auto}
.qkv svg{display:block;width:100%;min-width:27rem;max-width:44rem;height:auto}
.qkv svg *{stroke-linejoin:round;stroke-linecap:butt}
.qkv figcaption,.qkv .note{font-size:.84rem;color:var(--qkv-muted);max-width:44rem}
.qkv dl{display:grid;grid-template-columns:minmax(7rem,auto) 1fr;gap:.35rem 1rem;font-size:.9rem}
.qkv dt{font-weight:600}.qkv dd{margin:0;max-width:44rem}
.qkv nav{font-size:.85rem;margin:.8rem 0;display:flex;flex-wrap:wrap;gap:.2rem 1rem}
"""
_PAGE_CSS = """
:root{color-scheme:light dark;--page:#fff;--ink:#1c2126;--link:#0b5fc4}
@media(prefers-color-scheme:dark){:root{--page:#14171a;--ink:#e4e7ea;--link:#7db4ff}}
body{margin:0;background:var(--page);color:var(--ink)}
.qkv{margin:0 auto;padding:1.6rem 1.2rem 4rem}
a{color:var(--link)}
.qkv :is(th,td):first-child{position:sticky;left:0;background:var(--page)}
@media(max-width:36rem){.qkv{padding:1rem .8rem 3rem}.qkv h1{font-size:1.25rem}
.qkv dl{display:block}.qkv dt{margin-top:.6rem}}
@media print{:root{color-scheme:light;--page:#fff;--ink:#000;--link:#000}
@page{margin:14mm 12mm}body{font-size:9.5pt}.qkv{max-width:none;padding:0}.qkv nav{display:none}
.qkv .scroll,.qkv .plot{overflow:visible}.qkv table{font-size:7pt}
.qkv th,.qkv td{padding:.1rem .3rem}.qkv th,.qkv td{white-space:normal}
.qkv svg{max-width:34rem}.qkv dl{font-size:8.5pt}.qkv pre{white-space:pre-wrap}
.qkv h2,.qkv h3{break-after:avoid}.qkv tr,.qkv figure,.qkv li{break-inside:avoid}
.qkv .badge{print-color-adjust:exact;-webkit-print-color-adjust:exact}
.qkv details::details-content{content-visibility:visible;block-size:auto}}
"""


def html(findings: Findings) -> str:
    """For a notebook: the page's content without the page, on the notebook's own colours."""
    return _content(findings, whole=False)


def page(findings: Findings) -> str:
    """A whole HTML file. The same findings give the same bytes."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(_title(findings))}</title>\n<style>{_CSS}{_PAGE_CSS}</style>\n</head>\n"
        f"<body>\n{_content(findings, whole=True)}\n</body>\n</html>\n"
    )


def _title(findings: Findings) -> str:
    models = dict.fromkeys(clean(lane.model) for lane in findings.lanes)
    return f"KV-cache comparison: {', '.join(models) or 'no model'}"


def _content(findings: Findings, *, whole: bool) -> str:
    show = clean
    drawn: Mapping[str, str] = {}
    missing = ""
    try:
        drawn = plots.draw(findings)
    except ImportError:
        missing = f'<p class="note">{escape(_NO_PLOTS)}</p>'
    found = sections(findings, show)
    run = run_section(findings, show)
    style = "" if whole else f"<style>{_CSS}</style>"
    parts = ['<div class="qkv">', style, f"<h1>{escape(_title(findings))}</h1>"]
    parts.append(_verdicts(findings, show))
    parts += [f"<p>{escape(line)}</p>" for line in run_lines(findings, show)]
    if findings.warnings:
        parts.append(
            f"<p><strong>{plural(len(findings.warnings), 'warning')}, see below.</strong></p>"
        )
    if whole:
        links = [(f"qkv-{section.key}", section.title) for section in [*found, run]]
        links.insert(-1, ("qkv-read", "How to read this"))
        nav = "".join(f'<a href="#{key}">{escape(title)}</a>' for key, title in links)
        parts.append(f"<nav>{nav}</nav>")
    parts += [missing, _figure("losses", drawn)]
    parts += [_section(section, drawn) for section in found]
    parts.append(_reading(findings, whole))
    parts.append(_section(run, {}) if whole else _folded(run))
    parts.append("</div>")
    return "\n".join(part for part in parts if part)


def _badge(kind: str) -> str:
    return f'<b class="badge {_CLASSES.get(kind, "mute")}">{escape(kind)}</b>'


def _verdicts(findings: Findings, show: Show) -> str:
    rows = verdict_rows(findings, show)
    if not rows:
        return "<p>No verdict: there is no lane beside the baseline.</p>"
    items = "".join(
        f'<li class="{_CLASSES.get(kind, "mute")}">{_badge(kind)}'
        f'<span class="lane">{escape(lane)}</span><p>{escape(reason)}</p></li>'
        for lane, kind, reason in rows
    )
    return f'<ul class="verdicts">{items}</ul>'


def _figure(name: str, drawn: Mapping[str, str]) -> str:
    if name not in drawn:
        return ""
    caption = _CAPTIONS[name.rstrip("0123456789")]
    return (
        f'<figure><div class="plot">{drawn[name]}</div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _section(section: Section, drawn: Mapping[str, str]) -> str:
    """The plot comes before the first table that only repeats it in numbers, else last. Without it
    these tables are open."""
    figure = _figure(section.plot, drawn)
    closed = not section.plot or bool(figure)
    parts = [f'<h2 id="qkv-{section.key}">{escape(section.title)}</h2>']
    for block in section.blocks:
        if figure and isinstance(block, Table) and block.folded:
            parts.append(figure)
            figure = ""
        parts.append(_block(block, closed=closed))
    return "\n".join([*parts, figure])


def _folded(section: Section) -> str:
    body = "\n".join(map(_block, section.blocks))
    return f"<details><summary>{escape(section.title)}</summary>\n{body}\n</details>"


def _block(block: Block, *, closed: bool = True) -> str:
    if isinstance(block, str):
        return f"<p>{escape(block)}</p>"
    if isinstance(block, Bullets):
        return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in block.lines) + "</ul>"
    if isinstance(block, Code):
        return f"<h3>{escape(block.title)}</h3><pre>{escape(block.text)}</pre>"
    table = f'<div class="scroll l{block.left}">{_table(block)}</div>'
    title = escape(block.title)
    if block.folded:
        state = "" if closed else " open"
        return f"<details{state}><summary>{title}</summary>{table}</details>"
    return (f"<h3>{title}</h3>" if title else "") + table


def _table(block: Table) -> str:
    found = tables.as_html(block.head, block.rows)
    if "verdict" in block.head:
        for kind in _CLASSES:
            found = found.replace(f"<td>{kind}</td>", f"<td>{_badge(kind)}</td>")
    if "" in block.head:
        found = re.sub(r"<td>(#+) *</td>", _bar, found)
    return found


def _bar(cell: re.Match[str]) -> str:
    width = 8 * len(cell[1]) / BAR
    return f'<td><span class="bar" style="width:{width:g}em"></span></td>'


def _reading(findings: Findings, whole: bool) -> str:
    terms = "".join(
        f"<dt>{escape(term)}</dt><dd>{escape(said)}</dd>" for term, said in how_to_read(findings)
    )
    if whole:
        return f'<h2 id="qkv-read">How to read this</h2>\n<dl>{terms}</dl>'
    return f"<details><summary>How to read this</summary><dl>{terms}</dl></details>"
