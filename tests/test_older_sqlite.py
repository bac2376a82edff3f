"""Where there is no build of pysqlite3, Python's own SQLite does: with a rollback journal if its WAL is not safe."""

import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
WHICH = """
import sqlite3, sys, db
assert db.sqlite3 is sqlite3
assert db.journal_mode(db.connect(sys.argv[1])) == ("wal" if sqlite3.sqlite_version_info >= (3, 51, 3) else "persist")
"""
TESTS = "test_together.py", "test_paid_call.py", "test_counters.py", "test_express.py", "test_health.py"


def test_the_service_works_with_the_sqlite_that_python_brings(tmp_path):
    (tmp_path / "pysqlite3.py").write_text("raise ImportError('not built for this machine')\n")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, HERE.parent)))}
    subprocess.run([sys.executable, "-c", WHICH, str(tmp_path / "some.db")], env=environ, check=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(HERE / name) for name in TESTS)]
    run = subprocess.run(command, env=environ, cwd=HERE.parent, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-3000:]
