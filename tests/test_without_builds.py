"""Where there are no builds of the faster parts, others do: Python's own SQLite, with a rollback journal if its WAL is
not safe, and the Keccak of eth-account's."""

import os
import pathlib
import subprocess
import sys

import eth_hash.auto

import chain

HERE = pathlib.Path(__file__).parent
WHICH = """
import sqlite3, sys, chain, db
assert db.sqlite3 is sqlite3
assert chain.keccak.__module__ != "chain"
assert db.journal_mode(db.connect(sys.argv[1])) == ("wal" if sqlite3.sqlite_version_info >= (3, 51, 3) else "persist")
"""
TESTS = "test_together.py", "test_paid_call.py", "test_counters.py", "test_express.py", "test_health.py"


def test_the_service_works_without_the_parts_that_are_not_built_for_every_machine(tmp_path):
    for name in ("pysqlite3", "sha3"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not built for this machine')\n")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, HERE.parent)))}
    subprocess.run([sys.executable, "-c", WHICH, str(tmp_path / "some.db")], env=environ, check=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(HERE / name) for name in TESTS)]
    run = subprocess.run(command, env=environ, cwd=HERE.parent, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-3000:]


def test_both_keccaks_agree():
    assert chain.keccak(b"").hex() == "c5d2460186f7233c927e7db2dcc703c0e500b653ca82273b7bfad8045d85a470"
    for size in range(0, 600, 7):  # the block of the hash has 136 bytes
        data = os.urandom(size)
        assert chain.keccak(data) == eth_hash.auto.keccak(data)
