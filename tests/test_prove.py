"""The simulator itself: it is deterministic, it finds nothing in the code as it is, and it notices every guard that goes."""

import collections
import os
import re
import subprocess
import sys

import deals
from prove import cli, engine, mutants
from prove.events import LAW
from prove.faults import FAULTS


def test_a_short_campaign_breaks_no_promise(tmp_path):
    for seed in range(20):
        found = cli.run_seed(seed, str(tmp_path), count=6)
        assert found["broken"] is None, f"python -m prove --seed {seed} --count 6\n{found['broken']}"


def test_a_seed_without_faults_ends_with_every_deal_paid(tmp_path):
    found = cli.run_seed(1, str(tmp_path), count=10, faults=())
    assert found["broken"] is None
    assert found["moves"]["fund"] == 10
    assert sum(found["faults"].values()) == found["deaths"] == 0


HISTORY = """
import sys
from prove import cli
sim = cli.Simulation(5, sys.argv[1], count=6)
sim.live()
print(len(sim.trace), *sim.trace, sep="\\n")
"""


def test_a_seed_is_one_history_in_every_process(tmp_path):
    """Threads, hash seeds and the machine's clock change nothing about it."""
    told = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", HISTORY, str(tmp_path)],
            capture_output=True, text=True, env=environment, cwd=mutants.HERE, check=True,
        )  # fmt: skip
        told.append(done.stdout)
    assert told[0] == told[1]
    assert int(told[0].split()[0]) > 40


def test_the_law_names_every_move_of_the_table():
    assert set(LAW) == set(deals.MOVES) | {"pay", "offer", "statement"}


def test_a_fault_that_is_left_out_does_not_happen(tmp_path):
    found = cli.run_seed(3, str(tmp_path), count=6, faults=["reorg", "rpc_lags"])
    assert set(found["faults"]) <= {"reorg", "rpc_lags"}


def test_the_simulator_notices_every_guard_that_is_taken_away():
    assert len(mutants.ALL) >= 40
    found = mutants.hunt(mutants.ALL, seconds=60, processes=os.cpu_count())
    assert {mutant.name: error for mutant, killed, error, _ in found if killed is None} == {}


def test_a_copy_with_every_guard_in_place_is_not_killed():
    """What kills the mutants is the missing guard, and not the copying."""
    whole = mutants.Mutant("nothing is missing", "deals.py", "def move(", "def move(", "silent,two_sweeps")
    ((_, killed, error, _),) = mutants.hunt([whole], seconds=3, processes=1)
    assert (killed, error) == (None, None)


def test_every_fault_is_explained_in_one_line():
    assert all(0 < chance < 1 and words for chance, words in FAULTS.values())


def test_the_hard_won_list_points_to_tests_that_exist():
    text = (mutants.HERE / "prove" / "README.md").read_text()
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", text)
    assert len(named) > 30
    for file, name in named:
        assert f"def {name}(" in (mutants.HERE / "tests" / file).read_text(), f"{file}::{name}"


def test_every_fault_is_the_favourite_of_people_who_quarrel_and_of_people_who_do_not(tmp_path):
    seen = set()
    for seed in range(2 * len(FAULTS)):
        scheduler = engine.Scheduler(seed, str(tmp_path))
        assert scheduler.favourite in scheduler.enabled
        seen.add((scheduler.favourite, scheduler.quarrels))
    assert seen == {(fault, quarrels) for fault in FAULTS for quarrels in (True, False)}


def test_the_report_names_the_pair_that_is_covered_least(capsys):
    cells = {(move, fault): 9 for move in LAW for fault in FAULTS}
    cli._coverage(collections.Counter({**cells, ("split", "halt"): 2, ("pay", "cashed"): 0}))
    assert "681 of 681\n  covered least: split on deals that halt had struck, 2 times" in capsys.readouterr().out
