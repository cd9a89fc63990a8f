"""Every scaling policy on every trace.

    python -m benchmarks.autoscale_sim --all [--json FILE] [--plots FOLDER] [--markdown FILE]
    python -m benchmarks.autoscale_sim --trace azure_code --policy ours hpa [--seeds 2]
    python -m benchmarks.autoscale_sim --hindsight servegen [--seed 0] [--interval 600] [--free-starts]
    python -m benchmarks.autoscale_sim --restart servegen azure_code [--seeds 5]

Figures per trace t and policy p, means over the seeds, each with `_ci95`: t.p.attainment, t.p.accelerator_hours,
t.p.underrun_free, t.p.scale_events, t.p.max_waiting; t.saving_at_equal_attainment, t.ours_on_pareto_front,
t.hours_over_oracle; calibration.<row>.ttfp_error and .rtf_error. Without arguments: one seed of every pair.
--hindsight: the fewest hours that one set of counts per interval can have that knows the trace (see hindsight.py).
--restart: what the end of the operator's process costs in the half hour after it (see restart.py).
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from benchmarks._report import machine, report
from benchmarks.autoscale_sim.calibrate import TOLERANCE, calibration
from benchmarks.autoscale_sim.hindsight import best_counts, problem_of
from benchmarks.autoscale_sim.plots import front, timeline
from benchmarks.autoscale_sim.restart import KINDS, MOMENTS, half_hour, moment_of
from benchmarks.autoscale_sim.runs import FOR_COMPARISON, POLICIES, TAIL_SECONDS, Result, run_job
from benchmarks.autoscale_sim.stack import DOCUMENTED
from benchmarks.autoscale_sim.summary import figures, markdown, rows
from benchmarks.autoscale_sim.workload import MAIN, TRACES_BY_NAME, requests_of

SEEDS = 5
PROCESSES = 2


def _done(file: Path | None, jobs: list[tuple[str, str, int]]) -> list[Result]:
    if file is None or not file.exists():
        return []
    found = [msgspec.json.decode(line, type=Result) for line in file.read_bytes().splitlines()]
    return [r for r in found if (r.trace, r.policy, r.seed) in set(jobs)]


def _look_back(options: argparse.Namespace, described: Mapping[str, Any]) -> int:
    trace, started = TRACES_BY_NAME[options.hindsight], time.monotonic()
    requests = requests_of(trace, options.seed)
    problem = problem_of(
        DOCUMENTED,
        requests,
        trace.ttfp_seconds,
        requests[-1].arrived + TAIL_SECONDS,
        interval=options.interval,
        attainment=options.attainment,
        paid=not options.free_starts,
    )
    found = best_counts(problem)
    for index, counts in enumerate(found.schedule):
        print(f"{index * options.interval:>8.0f} s  " + " ".join(f"{n:>3}" for n in counts))
    prefix = f"{trace.name}.hindsight"
    figures = {
        f"{prefix}.accelerator_hours": round(found.hours, 3),
        f"{prefix}.attainment": round(found.attainment, 5),
        f"{prefix}.floor_hours": round(found.floor, 3),
        f"{prefix}.cells": float(found.cells),
        "seconds": round(time.monotonic() - started, 1),
    }
    report("autoscale_sim", described, figures, options.json)
    return 0


def _restart(options: argparse.Namespace, described: Mapping[str, Any]) -> int:
    found: dict[str, float] = {}
    for trace in options.restart:
        for moment in MOMENTS:
            for kind in KINDS:
                rows = [half_hour(trace, s, moment_of(trace, s, moment), kind) for s in range(options.seeds)]
                prefix = f"{trace}.{moment}.{kind}"
                found[f"{prefix}.attainment"] = round(fmean(r.attainment for r in rows), 4)
                found[f"{prefix}.accelerator_hours"] = round(fmean(r.hours for r in rows), 2)
                found[f"{prefix}.scale_events"] = round(fmean(r.changes for r in rows), 1)
    report("autoscale_sim", described, found, options.json)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.autoscale_sim", description=__doc__)
    parser.add_argument("--all", action="store_true", help=f"every trace and policy with {SEEDS} seeds")
    parser.add_argument("--trace", nargs="+", default=list(MAIN), choices=TRACES_BY_NAME)
    parser.add_argument("--policy", nargs="+", default=list(POLICIES), choices=(*POLICIES, *FOR_COMPARISON))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--hindsight", metavar="TRACE", choices=TRACES_BY_NAME)
    parser.add_argument("--seed", type=int, default=0, help="of --hindsight")
    parser.add_argument("--interval", type=float, default=600.0, help="of --hindsight, seconds")
    parser.add_argument("--attainment", type=float, default=0.958, help="of --hindsight")
    parser.add_argument("--free-starts", action="store_true", help="of --hindsight: replicas are there at once")
    parser.add_argument("--restart", nargs="+", metavar="TRACE", choices=TRACES_BY_NAME)
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--runs", type=Path, help="file that keeps each run; what it has already is not run again")
    parser.add_argument("--plots", type=Path, help="folder for PNG files")
    parser.add_argument("--markdown", type=Path, help="file for the tables of the documentation")
    options = parser.parse_args()
    described, started = machine(), time.monotonic()
    if options.hindsight is not None:
        return _look_back(options, described)
    if options.restart is not None:
        return _restart(options, described)
    reproduced = calibration()
    print("published row                       TTFP ms  published      RTF  published")
    for r in reproduced:
        print(f"{r.row.name:<32}{r.ttfp_ms:>11.0f}{r.row.ttfp_ms:>11.0f}{r.rtf:>9.2f}{r.row.rtf:>11.2f}")
    seeds = SEEDS if options.all else options.seeds
    jobs = [(t, p, s) for s in range(seeds) for t in options.trace for p in options.policy]
    results = _done(options.runs, jobs)
    known = {(r.trace, r.policy, r.seed) for r in results}
    left = [job for job in jobs if job not in known]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for number, result in enumerate(pool.imap_unordered(run_job, left), start=1):
            results.append(result)
            if options.runs is not None:
                with options.runs.open("ab") as file:
                    file.write(msgspec.json.encode(result) + b"\n")
            if number % 20 == 0 or number == len(left):
                print(f"[{number}/{len(left)}] {time.monotonic() - started:.0f} s", flush=True)
    order = {job: i for i, job in enumerate(jobs)}
    results.sort(key=lambda r: order[r.trace, r.policy, r.seed])
    table = rows(results)
    text = markdown(table)
    print(text)
    if options.markdown is not None:
        options.markdown.write_text(text)
    if options.plots is not None:
        for trace in options.trace:
            front(trace, table, options.plots / f"autoscale-front-{trace}.png")
        for result in results:
            if result.policy == "ours" and result.seed == 0:
                timeline(result, options.plots / f"autoscale-replicas-{result.trace}.png")
    found = dict(figures(table))
    for r in reproduced:
        name = r.row.name.replace(",", "").replace(" ", "_")
        found[f"calibration.{name}.ttfp_error"], found[f"calibration.{name}.rtf_error"] = (
            round(e, 4) for e in r.errors
        )
    found["seconds"] = round(time.monotonic() - started, 1)
    report("autoscale_sim", described, found, options.json)
    off = [r.row.name for r in reproduced if max(map(abs, r.errors)) > TOLERANCE]
    if off:
        print(f"not within {TOLERANCE:.0%} of the published rows: {', '.join(off)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
