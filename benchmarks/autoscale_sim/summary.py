"""From runs to figures: means with confidence intervals over the seeds, the Pareto front, and what is saved."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.autoscale_sim.runs import Result

# Two-sided 95 % quantiles of Student's t for n - 1 degrees of freedom.
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
# Half a percentage point of attainment is the same attainment: seeds differ by as much.
EQUAL = 0.005
OURS = ("ours", "ours_known")
NO_BASELINES = (*OURS, "oracle", "told", "foreseen")
HINDSIGHT = ("static_peak", "static_mean")  # counts that somebody who knows the whole trace would set


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean of the seeds, and half the width of its 95 % confidence interval (0 with one seed)."""

    mean: float
    half: float

    def __str__(self) -> str:
        return f"{self.mean:.4g} ± {self.half:.2g}"


@dataclass(frozen=True, slots=True)
class Row:
    trace: str
    policy: str
    attainment: Estimate
    underrun_free: Estimate
    hours: Estimate
    events: Estimate
    max_waiting: Estimate


def estimate(values: Sequence[float]) -> Estimate:
    if len(values) < 2:
        return Estimate(values[0], 0.0)
    quantile = STUDENT.get(len(values) - 1, 2.0)
    return Estimate(statistics.fmean(values), quantile * statistics.stdev(values) / math.sqrt(len(values)))


def rows(results: Iterable[Result]) -> tuple[Row, ...]:
    grouped: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        grouped.setdefault((result.trace, result.policy), []).append(result)
    return tuple(
        Row(
            trace,
            policy,
            estimate([r.attainment for r in runs]),
            estimate([r.underrun_free for r in runs]),
            estimate([r.accelerator_hours for r in runs]),
            estimate([float(r.scale_events) for r in runs]),
            estimate([float(r.max_waiting) for r in runs]),
        )
        for (trace, policy), runs in grouped.items()
    )


def dominating(row: Row, others: Iterable[Row]) -> list[Row]:
    """Policies that are at least as good in attainment and hours, and better in one. The oracle does not count."""
    return [
        o
        for o in others
        if o.policy not in NO_BASELINES
        and o.attainment.mean >= row.attainment.mean
        and o.hours.mean <= row.hours.mean
        and (o.attainment.mean > row.attainment.mean or o.hours.mean < row.hours.mean)
    ]


def saving(trace_rows: Sequence[Row], leave_out: tuple[str, ...] = NO_BASELINES) -> tuple[float, str] | None:
    """(share of the hours that ours saves, against whom): the cheapest baseline that attains as much as ours does.

    Static counts are baselines, too, though somebody would have to know them beforehand. None: nobody attains it.
    """
    mine = next((r for r in trace_rows if r.policy == "ours"), None)
    if mine is None:
        return None
    equal = [r for r in trace_rows if r.policy not in leave_out and r.attainment.mean >= mine.attainment.mean - EQUAL]
    if not equal:
        return None
    best = min(equal, key=lambda r: r.hours.mean)
    return 1.0 - mine.hours.mean / best.hours.mean, best.policy


def figures(table: Sequence[Row]) -> Mapping[str, float]:
    found: dict[str, float] = {}
    for trace in dict.fromkeys(r.trace for r in table):
        mine = [r for r in table if r.trace == trace]
        for row in mine:
            prefix = f"{trace}.{row.policy}"
            for name, value in (
                ("attainment", row.attainment),
                ("underrun_free", row.underrun_free),
                ("accelerator_hours", row.hours),
                ("scale_events", row.events),
                ("max_waiting", row.max_waiting),
            ):
                found[f"{prefix}.{name}"] = round(value.mean, 5)
                found[f"{prefix}.{name}_ci95"] = round(value.half, 5)
        won = saving(mine)
        if won is not None:
            found[f"{trace}.saving_at_equal_attainment"] = round(won[0], 4)
        online = saving(mine, (*NO_BASELINES, *HINDSIGHT))
        if online is not None:
            found[f"{trace}.saving_against_autoscalers"] = round(online[0], 4)
        ours = next((r for r in mine if r.policy == "ours"), None)
        oracle = next((r for r in mine if r.policy == "oracle"), None)
        if ours is not None:
            found[f"{trace}.ours_on_pareto_front"] = float(not dominating(ours, mine))
        if ours is not None and oracle is not None:
            found[f"{trace}.hours_over_oracle"] = round(ours.hours.mean / oracle.hours.mean, 4)
    return found


def markdown(table: Sequence[Row]) -> str:
    """The tables of docs/autoscaling.md."""
    lines = []
    for trace in dict.fromkeys(r.trace for r in table):
        mine = sorted((r for r in table if r.trace == trace), key=lambda r: r.hours.mean)
        lines += [
            f"\n{trace}\n",
            "| policy | TTFP attained | underrun-free | accelerator-hours | changes | longest queue |",
        ]
        lines += ["|---|---:|---:|---:|---:|---:|"]
        for r in mine:
            name = f"**{r.policy}**" if r.policy in OURS else r.policy
            lines.append(
                f"| {name} | {100 * r.attainment.mean:.1f} ± {100 * r.attainment.half:.1f} % "
                f"| {100 * r.underrun_free.mean:.1f} % | {r.hours.mean:.1f} ± {r.hours.half:.1f} "
                f"| {r.events.mean:.0f} | {r.max_waiting.mean:.0f} |"
            )
        won = saving(mine)
        ours = next((r for r in mine if r.policy == "ours"), None)
        if won is not None and ours is not None:
            better = ", ".join(f"{r.policy}" for r in dominating(ours, mine))
            lines.append(
                f"\nAt equal attainment {100 * won[0]:+.0f} % saved against {won[1]}; dominated by: {better or 'none'}."
            )
        elif ours is not None:
            lines.append("\nNo baseline attains as much.")
    return "\n".join(lines) + "\n"
