"""``python -m prove``: many seeds in several processes, a report, and for a failure one command that replays it."""

import argparse
import collections
import multiprocessing
import os
import sys
import tempfile
import time
import traceback

from .engine import NOON, Violation
from .events import LAW
from .faults import FAULTS, IMPOSSIBLE
from .simulation import Simulation

COUNT = 16  # deals of one seed


def main(arguments=None):
    """Run the command; the exit code is 1 when a promise was broken."""
    options = _parser().parse_args(arguments)
    if options.seed is not None:
        return _replay(options)
    return _campaign(options)


def _parser():
    parser = argparse.ArgumentParser(prog="python -m prove", description=__doc__)
    parser.add_argument("--deals", type=int, default=10_000, help="how many deals in all (default 10,000)")
    parser.add_argument("--seconds", type=float, default=120.0, help="begin nothing new after this time (default 120)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="how many at once (default: all cores)")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="replay this one seed and tell its story")
    parser.add_argument("--count", type=int, default=COUNT, help=f"deals in one seed (default {COUNT})")
    parser.add_argument("--faults", help="only these faults, comma-separated ('none': no faults at all)")
    parser.add_argument("--all", action="store_true", help="with --seed: tell of every deal, not only the broken one")
    return parser


def folder():
    """Return a directory for the databases: in memory where the system has one."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)


def run_seed(seed, where, *, count=COUNT, faults=None, heat=1.0):
    """Live one seed; returns its figures, with the violation if there was one."""
    simulation, broken = Simulation(seed, where, count=count, faults=faults, heat=heat), None
    try:
        simulation.live()
    except Violation as violation:
        broken = {"law": violation.law, "words": violation.words, "deal": violation.deal}
    except Exception:
        broken = {"law": "the simulator itself works", "words": traceback.format_exc(), "deal": None}
    return {
        "seed": seed, "deals": count, "steps": simulation.steps, "deaths": simulation.deaths,
        "faults": simulation.faults, "moves": simulation.moves, "cells": simulation.cells, "broken": broken,
        "unattributed": simulation.laws.unattributed, "trace": simulation.trace if broken else [],
    }  # fmt: skip


# -- Many seeds -----------------------------------------------------------------------------------------------------


def _work(job):
    seed, where, count, faults, until = job
    return run_seed(seed, where, count=count, faults=faults) if time.time() < until else None


def _campaign(options):
    began, faults = time.time(), _faults(options)
    seeds = range(options.first, options.first + max(1, -(-options.deals // options.count)))
    total, figures = collections.Counter(), {"faults": collections.Counter(), "moves": collections.Counter()}
    cells, broken = collections.Counter(), []
    with folder() as where, multiprocessing.get_context("fork").Pool(options.processes) as pool:
        jobs = ((seed, where, options.count, faults, began + options.seconds) for seed in seeds)
        for done, result in enumerate(pool.imap_unordered(_work, jobs), 1):
            _progress(done, len(seeds), began)
            if result is None:
                continue
            total["seeds"] += 1
            total.update({name: result[name] for name in ("deals", "steps", "deaths", "unattributed")})
            for name, counter in figures.items():
                counter.update(result[name])
            cells.update(result["cells"])
            if result["broken"]:
                broken.append(result)
        _report(total, figures, cells, time.time() - began, len(seeds))
        for result in sorted(broken, key=lambda r: r["seed"])[:3]:
            _tell(result, where, options)
    print(f"violations {len(broken)}")
    return 1 if broken else 0


def _faults(options):
    if options.faults is None:
        return None
    return [name for name in options.faults.split(",") if name in FAULTS]


def _progress(done, whole, began):
    if sys.stderr.isatty():
        bar = "#" * (30 * done // whole)
        end = "\n" if done == whole else ""
        print(f"\rseeds [{bar:30}] {done}/{whole} {time.time() - began:.0f} s{end}", end="", file=sys.stderr)


def _report(total, figures, cells, seconds, wanted):
    print(
        f"seeds {total['seeds']}, deals {total['deals']}, steps {total['steps']}, deaths of processes {total['deaths']},"
        f" faults {sum(figures['faults'].values())}, seconds {seconds:.0f}"
    )
    if total["seeds"] < wanted:
        print(f"The time was up: {wanted - total['seeds']} of {wanted} seeds were not run.")
    print("\nfaults by kind")
    for name in FAULTS:
        print(f"  {figures['faults'][name]:8} {name:14} {FAULTS[name][1]}")
    print("\nmoves")
    print("  " + ", ".join(f"{name} {figures['moves'][name]}" for name in LAW))
    _coverage(cells)
    if total["unattributed"]:
        print(
            f"\n{total['unattributed']} payments of somebody the service had refused were submitted by a third party to the"
            " deposit of another buyer's deal; that money goes to the deal's buyer (a limit, not a violation)."
        )
    print()


def _coverage(cells):
    """Print which moves were made on deals that each fault had struck before, and which pair is nearest to being missed."""
    pairs = [(move, fault) for move in LAW for fault in FAULTS if (move, fault) not in IMPOSSIBLE]
    missing = {move: [fault for m, fault in pairs if m == move and not cells[move, fault]] for move in LAW}
    least = min(pairs, key=lambda pair: cells[pair])
    print(f"\ncoverage of moves x faults: {sum(pair in cells for pair in pairs)} of {len(pairs)}")
    print(f"  covered least: {least[0]} on deals that {least[1]} had struck, {cells[least]} times")
    for move, faults in missing.items():
        if faults:
            print(f"  {move} has not yet followed: {', '.join(faults)}")


# -- One seed -------------------------------------------------------------------------------------------------------


def _replay(options):
    with folder() as where:
        result = run_seed(options.seed, where, count=options.count, faults=_faults(options))
        if result["broken"] is None:
            print(f"seed {options.seed}: {result['deals']} deals, {result['steps']} steps, nothing is broken")
            return 0
        _story(result, everything=options.all)
    return 1


def _tell(result, where, options):
    """Print a failure: its replay command, then the shortest story found that breaks the same promise."""
    print(f"\nBROKEN in seed {result['seed']}: {result['broken']['law']}\n  {result['broken']['words']}")
    print(f"  replay: python -m prove --seed {result['seed']} --count {options.count}"
          + (f" --faults {options.faults}" if options.faults else ""))  # fmt: skip
    small, count, faults = shrink(result, where, options.count)
    print(f"  the shortest found: python -m prove --seed {small['seed']} --count {count} --faults {','.join(faults) or 'none'}")
    _story(small)


def shrink(result, where, count, *, seconds=20.0):
    """Search for a smaller history that breaks the same promise: fewer deals, fewer faults, a shorter story."""
    until, law = time.time() + seconds, result["broken"]["law"]
    faults = sorted(result["faults"])
    best = result, count, faults

    def search(count, faults, tries):
        for seed in (result["seed"], *range(tries)):
            if time.time() > until:
                return None
            found = run_seed(seed, where, count=count, faults=faults)
            if found["broken"] and found["broken"]["law"] == law:
                return found, count, faults
        return None

    for fewer in (1, 2, 4):
        found = fewer < count and search(fewer, faults, 60)
        if found:
            best = found
            break
    for fault in faults:
        kept = [name for name in best[2] if name != fault]
        found = search(best[1], kept, 25)
        if found:
            best = found
    return best


def _story(result, *, everything=False):
    """Print what happened to the deal concerned, in order, in plain words."""
    broken = result["broken"]
    for moment, task, deal, words in result["trace"][-3000:]:
        if everything or broken["deal"] is None or deal == broken["deal"]:
            print(f"  {moment - NOON:10.1f} s  {f'[{task}] ' if task else ''}{words}"[:230])
    print(f"  => {broken['law']}: {broken['words']}")


if __name__ == "__main__":
    sys.exit(main())
