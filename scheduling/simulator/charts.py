"""The charts of a report, as Vega-Lite specifications made with altair."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from model.job_spec import Tier
from scheduling.simulator.measures import GUARANTEED, QUANTILES, Measures

LEVELS = {Tier.PREMIUM: 0.95, Tier.STANDARD: 0.70}
_WIDTH, _HEIGHT = 600, 190
# Told apart with any kind of sight, and in grey.
_COLOURS = ("#0b6e99", "#d55e00", "#7c3aed", "#009e73", "#c79200", "#be185d")


@dataclass(frozen=True, slots=True)
class Drawing:
    """A chart: `spec` is its Vega-Lite specification."""

    title: str
    text: str
    spec: dict[str, Any]


def drawings(policies: Sequence[Measures]) -> Iterator[Drawing]:
    """All charts, each with one mark or line a policy."""
    import altair

    alt: Any = altair  # its generated classes are not for a strict type checker
    names = [one.policy for one in policies]
    shown = alt.selection_point(fields=["policy"], bind="legend")
    colour = alt.Color("policy:N", sort=names, scale=alt.Scale(domain=names, range=_colours(len(names))), title=None)
    faded = alt.condition(shown, alt.value(1.0), alt.value(0.08))
    side_by_side = alt.XOffset("policy:N", sort=names)

    def chart(values: list[dict[str, Any]], mark: str, width: int = _WIDTH, **encoding: Any) -> dict[str, Any]:
        made = getattr(alt.Chart(alt.Data(values=values)), f"mark_{mark}")()
        made = made.encode(color=colour, opacity=faded, **encoding).add_params(shown)
        return made.properties(width=width, height=_HEIGHT).to_dict()

    yield Drawing(
        "Job-hours below level",
        "Of guaranteed jobs, counted from submission: an hour in which a job waited counts as one without devices.",
        chart(
            [
                {"policy": one.policy, "tier": tier.value, "share": one.of(tier).from_submission.missed}
                for one in policies
                for tier in GUARANTEED
            ],
            "bar",
            x=alt.X("tier:N", title=None, axis=alt.Axis(labelAngle=0)),
            xOffset=side_by_side,
            y=alt.Y("share:Q", title="hours below level", axis=alt.Axis(format="%")),
            tooltip=["policy:N", "tier:N", alt.Tooltip("share:Q", format=".2%")],
        ),
    )
    yield Drawing(
        "GPU fraction per tier",
        "Of each job that ended: time at full width / time from submission to the end. Dashed: the tier's level.",
        _fractions(alt, policies, colour, faded, shown),
    )
    yield Drawing(
        "Allocation over time",
        "Share of the devices of healthy nodes that jobs had.",
        chart(
            [
                {"policy": one.policy, "day": at / 86_400, "share": share}
                for one in policies
                for at, share, _ in one.allocation_over_time
            ],
            "line",
            x=alt.X("day:Q", title="days", axis=alt.Axis(grid=False)),
            y=alt.Y("share:Q", title="allocated", axis=alt.Axis(format="%"), scale=alt.Scale(domain=[0, 1])),
        ),
    )
    sizes = list(dict.fromkeys(size.devices for one in policies for size in one.sizes))
    yield Drawing(
        "Waiting time by job size",
        "Mean, from submission to the first device.",
        chart(
            [
                {"policy": one.policy, "devices": size.devices, "hours": size.waiting.mean_s / 3600}
                for one in policies
                for size in one.sizes
                if size.waiting.mean_s is not None
            ],
            "bar",
            x=alt.X("devices:N", sort=sizes, title="devices of the job", axis=alt.Axis(labelAngle=0)),
            xOffset=side_by_side,
            y=alt.Y("hours:Q", title="hours"),
            tooltip=["policy:N", "devices:N", alt.Tooltip("hours:Q", format=".2f")],
        ),
    )
    counts = [label for label, _ in policies[0].preempted] if policies else []
    yield Drawing(
        "Preemptions per job",
        "How often a job lost all its devices to another one; jobs that never did are left out.",
        chart(
            [
                {"policy": one.policy, "times": label, "share": jobs / one.jobs}
                for one in policies
                for label, jobs in one.preempted
                if label != "0" and one.jobs
            ],
            "bar",
            x=alt.X("times:N", sort=counts, title="preemptions", axis=alt.Axis(labelAngle=0)),
            xOffset=side_by_side,
            y=alt.Y("share:Q", title="of all jobs", axis=alt.Axis(format="%")),
            tooltip=["policy:N", "times:N", alt.Tooltip("share:Q", format=".2%")],
        ),
    )
    clusters = [cluster.cluster for cluster in policies[0].clusters] if policies else []
    if clusters:
        yield Drawing(
            "Waiting time by cluster",
            "Mean, from submission to the first device, of the jobs submitted to a cluster, wherever they ran.",
            chart(
                [
                    {"policy": one.policy, "cluster": of.cluster, "hours": of.waiting.mean_s / 3600}
                    for one in policies
                    for of in one.clusters
                    if of.waiting.mean_s is not None
                ],
                "bar",
                x=alt.X("cluster:N", sort=clusters, title="submitted to"),
                xOffset=side_by_side,
                y=alt.Y("hours:Q", title="hours"),
                tooltip=["policy:N", "cluster:N", alt.Tooltip("hours:Q", format=".2f")],
            ),
        )
        yield Drawing(
            "Job-hours below level by cluster",
            "Of guaranteed jobs that were submitted to a cluster, wherever they ran, counted from submission.",
            chart(
                [
                    {"policy": one.policy, "cluster": of.cluster, "share": of.from_submission.missed}
                    for one in policies
                    for of in one.clusters
                ],
                "bar",
                x=alt.X("cluster:N", sort=clusters, title="submitted to"),
                xOffset=side_by_side,
                y=alt.Y("share:Q", title="hours below level", axis=alt.Axis(format="%")),
                tooltip=["policy:N", "cluster:N", alt.Tooltip("share:Q", format=".2%")],
            ),
        )
    moving = [one for one in policies if one.moves_between_clusters]
    if moving:
        yield Drawing(
            "Moves between clusters",
            "How many jobs went on in another cluster: from the one on the left to the one below.",
            _moves(alt, moving, clusters),
        )
    yield Drawing(
        "Latency of decisions",
        "So many of a hundred decisions took at most so long, by the clock of the wall.",
        chart(
            [
                {"policy": one.policy, "share": share * 100, "us": value}
                for one in policies
                for share, value in zip(QUANTILES, one.decision_quantiles_us, strict=False)
                if value > 0
            ],
            "line",
            x=alt.X("share:Q", title="of a hundred decisions"),
            y=alt.Y("us:Q", title="µs", scale=alt.Scale(type="log")),
        ),
    )


def _fractions(alt: Any, policies: Sequence[Measures], colour: Any, faded: Any, shown: Any) -> dict[str, Any]:
    """A panel a tier."""
    values = [
        {
            "policy": one.policy,
            "tier": tier.value,
            "share": share * 100,
            "fraction": fraction,
            "level": LEVELS.get(tier),
        }
        for tier in Tier
        for one in policies
        for share, fraction in zip(QUANTILES, one.of(tier).fractions, strict=False)
    ]
    lines = alt.Chart().mark_line()
    lines = lines.encode(
        x=alt.X("share:Q", title="of a hundred jobs"),
        y=alt.Y("fraction:Q", title="GPU fraction", scale=alt.Scale(domain=[0, 1])),
        color=colour,
        opacity=faded,
    ).add_params(shown)
    level = alt.Chart().mark_rule(strokeDash=[4, 3], color="#64748b").encode(y="mean(level):Q")
    panels = alt.layer(lines, level, data=alt.Data(values=values)).properties(width=0.3 * _WIDTH, height=_HEIGHT)
    return panels.facet(column=alt.Column("tier:N", sort=[tier.value for tier in Tier], title=None)).to_dict()


def _moves(alt: Any, policies: Sequence[Measures], clusters: Sequence[str]) -> dict[str, Any]:
    """A panel a policy, a square a pair of clusters."""
    values = [
        {"policy": one.policy, "from": origin, "to": target, "jobs": jobs}
        for one in policies
        for origin, target, jobs in one.moves_between_clusters
    ]
    axes = {
        "x": alt.X("to:N", sort=clusters, title="to", scale=alt.Scale(domain=clusters)),
        "y": alt.Y("from:N", sort=clusters, title="from", scale=alt.Scale(domain=clusters)),
    }
    squares = alt.Chart().mark_rect()
    squares = squares.encode(
        **axes,
        color=alt.Color("jobs:Q", title="jobs", scale=alt.Scale(scheme="blues")),
        tooltip=["policy:N", "from:N", "to:N", "jobs:Q"],
    )
    counts = alt.Chart().mark_text(fontSize=10).encode(**axes, text="jobs:Q")
    side = max(120, 40 * len(clusters))
    panels = alt.layer(squares, counts, data=alt.Data(values=values)).properties(width=side, height=side)
    names = [one.policy for one in policies]
    return panels.facet(column=alt.Column("policy:N", sort=names, title=None)).to_dict()


def _colours(count: int) -> list[str]:
    return [_COLOURS[at % len(_COLOURS)] for at in range(count)]
