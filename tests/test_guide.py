"""Everything agents.md tells an agent to run is run, against a real server: Python and curl."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time

import pytest
import requests

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """A sandbox with gunicorn and its sweep, as `cli.py serve` starts it."""
    folder = tmp_path_factory.mktemp("guide")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DEALS_")}
    environ |= {"DEALS_DATABASE": str(folder / "deals.db"), "DEALS_WALLET": str(folder / "wallet.json")}
    with open(folder / "log", "w", encoding="utf-8") as log:
        server = subprocess.Popen(
            [sys.executable, os.path.join(HERE, "cli.py"), "serve", "--port", str(port)],
            env=environ, stdout=log, stderr=log,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    for _ in range(200):
        try:
            requests.get(f"{url}/health", timeout=5)
            break
        except requests.ConnectionError:
            time.sleep(0.1)
    yield url
    server.terminate()
    server.wait(timeout=20)


@pytest.fixture(scope="module")
def guide(service):
    return requests.get(f"{service}/agents.md", timeout=10).text


def blocks(guide, language):
    """Return (file name or empty, text) of every example in one language, in order."""
    return re.findall(rf"^```{language} ?([\w.]*)\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)


def run(command, folder):
    path = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_every_python_example_of_the_guide_runs_in_order(guide, tmp_path):
    script = "\n".join(text for name, text in blocks(guide, "python") if not name)
    assert all(action in script for action in ('"accept"', '"deliver"', "/confirm", "/dispute", "check_guarantee", "Mpp("))
    (tmp_path / "guide.py").write_text(script)
    run([sys.executable, "guide.py"], tmp_path)


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not here")
def test_every_curl_example_of_the_guide_runs_in_order(guide, tmp_path):
    for name, text in blocks(guide, "python"):
        if name:
            (tmp_path / name).write_text(text)
    script = "\n".join(text for _, text in blocks(guide, "bash") if not text.startswith("pip "))
    assert script.count("curl") >= 7
    out = run(["bash", "-euo", "pipefail", "-c", script], tmp_path)
    assert '"state":"refunded"' in out


def test_the_guide_s_install_line_names_what_the_tests_install(guide):
    (install,) = (text for _, text in blocks(guide, "bash") if text.startswith("pip "))
    assert install == 'pip install --quiet "x402[evm,requests]" pympp eth-account\n'
