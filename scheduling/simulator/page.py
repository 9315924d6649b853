"""A report as one HTML page with charts, which needs nothing from elsewhere: the charts' programs are inside."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import Any, cast

from scheduling.simulator.charts import Drawing, drawings
from scheduling.simulator.experiment import Report
from scheduling.simulator.figures import rows
from scheduling.simulator.measures import Measures

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.45 system-ui, sans-serif; color: #1e293b; background: #fff; }
body { max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; }
h2 { font-size: 1.05rem; margin: 0 0 .4rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .8rem .15rem 0; text-align: right; white-space: nowrap; }
tr > th:first-child { text-align: left; font-weight: normal; }
tr > th.inner { padding-left: 1.2rem; }
tr.head > th { font-weight: 600; padding-top: .6rem; border-bottom: 1px solid #cbd5e1; }
.settings th { vertical-align: top; }
.settings td { text-align: left; white-space: normal; }
.note, figcaption { color: #475569; max-width: 48rem; }
.wide, figure { overflow-x: auto; }
figure { margin: 2rem 0; }
"""
_DRAW = """
.forEach((spec, number) => vegaEmbed("#chart-" + number, spec, {actions: false, renderer: "svg"}));
"""


def page(report: Report) -> str:
    """The whole page."""
    import vl_convert

    made = list(drawings(report.policies))
    figures = "".join(_figure(number, one) for number, one in enumerate(made))
    title = html.escape(f"Simulation of {', '.join(report.settings.source)}")
    settings = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in report.settings.told()
    )
    # No "<" in a script: a name in the data could end it.
    data = json.dumps([one.spec for one in made]).replace("<", "\\u003c")
    programs: str = cast("Any", vl_convert).javascript_bundle()
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>",
            f'<p class="note">{html.escape(report.settings.tiers)}</p>',
            f'<div class="wide"><table>{_table(report.policies)}</table></div>',
            '<p class="note">A click on a policy\'s name beside a chart shows it alone.</p>',
            f'{figures}\n<h2>Settings</h2>\n<table class="settings">{settings}</table>',
            f"<script>{programs}</script>\n<script>{data}{_DRAW}</script>\n</body>\n</html>\n",
        ]
    )


def _figure(number: int, drawing: Drawing) -> str:
    return (
        f'<figure><h2>{html.escape(drawing.title)}</h2><div id="chart-{number}"></div>'
        f"<figcaption>{html.escape(drawing.text)}</figcaption></figure>"
    )


def _table(policies: Sequence[Measures]) -> str:
    head = "".join(f"<th>{html.escape(one.policy)}</th>" for one in policies)
    lines = [f"<tr><th></th>{head}</tr>"]
    for row in rows(policies):
        label = html.escape(row.label.strip())
        if not row.cells:
            lines.append(f'<tr class="head"><th colspan="{len(policies) + 1}">{label}</th></tr>')
            continue
        inner = ' class="inner"' if row.label.startswith(" ") else ""
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row.cells)
        lines.append(f"<tr><th{inner}>{label}</th>{cells}</tr>")
    return "".join(lines)
