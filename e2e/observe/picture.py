"""A picture of a dashboard, with what a real Prometheus answers to its queries. Needs matplotlib (pip)."""

import pathlib
import re
from typing import Any

# The units of Grafana that the dashboards use.
UNITS = {"reqps": "requests/s", "percentunit": "share", "short": ""}
# Colours that colour-blind readers can distinguish (Okabe and Ito).
COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9"]
# Widths of a dashboard's grid, and of its panels.
GRID, PANEL = 24, 8
LEGEND_MAX = 4


def legend(template: str, metric: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda label: metric.get(label[1], ""), template)


def draw(file: pathlib.Path, panels: list[dict[str, Any]], answers: dict[str, list[dict[str, Any]]], spans: list[tuple[float, float]]) -> None:
    """Draws the panels with `answers`, the series by query, and grey for the `spans` in which something was broken."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = GRID // PANEL
    figure, axes = pyplot.subplots(-(-len(panels) // columns), columns, figsize=(13, 8.5), layout="constrained")
    began = min(float(one["values"][0][0]) for series in answers.values() for one in series)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for panel, axis in zip(panels, axes.flat):
        lines = [(target, one) for target in panel["targets"] for one in answers[target["expr"]]]
        for at, (target, one) in enumerate(lines):
            times = [(float(time) - began) / 60 for time, _ in one["values"]]
            label = legend(target.get("legendFormat", ""), one["metric"]) if at < LEGEND_MAX else None
            axis.plot(times, [float(value) for _, value in one["values"]], color=COLOURS[at % len(COLOURS)], linewidth=1.2, label=label)
        for start, end in spans:
            axis.axvspan((start - began) / 60, (end - began) / 60, color="0.93", linewidth=0)
        unit = panel["fieldConfig"]["defaults"].get("unit", "short")
        axis.set_title(panel["title"], fontsize=10, loc="left")
        axis.set_ylabel(UNITS.get(unit, unit), fontsize=8)
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=7, frameon=False, loc="upper left")
    figure.supxlabel("minutes", fontsize=9)
    figure.savefig(file, dpi=80)
