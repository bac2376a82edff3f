"""How fast the free documents are: against a bare Flask route, with the rate limit on; and /ask by itself.

Run by `make bench`. One gunicorn with two workers each, the same small load generator for both.
"""

import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)
SECONDS, CONNECTIONS, CLIENTS = 4, 8, 2000
BARE = """
import flask
app = flask.Flask("bare")
body = "x" * %d
@app.get("/")
def page():
    return flask.Response(body, content_type="text/markdown; charset=utf-8")
"""


def start(folder, target, environ):
    """Start gunicorn on ``target``; returns (process, port)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = open(os.path.join(folder, "log"), "a", encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "gunicorn", "--config", os.path.join(HERE, "gunicorn.conf.py"), "--bind", f"127.0.0.1:{port}",
         "--pythonpath", folder, "--chdir", HERE, target],
        env={**os.environ, **environ}, stdout=log, stderr=log,
    )  # fmt: skip
    for _ in range(100):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            time.sleep(3)  # until both workers have built their app
            return process, port
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"gunicorn did not start: see {log.name}")


def load(port, path, seconds):
    """Return requests per second with every answer read; each client address asks only so often."""
    stop, counts = time.monotonic() + seconds, []

    def run(number):
        done, connection = 0, None
        while time.monotonic() < stop:
            if connection is None:
                connection = socket.create_connection(("127.0.0.1", port))
            client = (number + done * CONNECTIONS) % CLIENTS
            address = f"198.18.{client // 250}.{client % 250 + 1}"
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: bench\r\nX-Forwarded-For: {address}\r\n\r\n".encode())
            answer = connection.recv(65536)
            while (end := answer.find(b"\r\n\r\n")) < 0:
                answer += connection.recv(65536)
            if not answer.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"{path}: {answer[:40]!r}")
            left = int(re.search(rb"\r\nContent-Length: (\d+)", answer)[1]) + end + 4 - len(answer)
            while left > 0:
                left -= len(connection.recv(65536))
            if b"\r\nConnection: close" in answer[:end]:
                connection = None
            done += 1
        counts.append(done)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / seconds


def ask_times(folder):
    """Return the milliseconds that questions to the whole corpus take."""
    import ask
    import documents
    import settings as configuration

    settings = configuration.Settings(database=os.path.join(folder, "deals.db"))
    facts = documents.figures(settings, master_key=b"\x02" * 33, treasury="0x" + "1" * 40, receipt_signer="0x" + "1" * 40)
    passages = ask.index(documents.build(facts, documents.frame(facts)))
    times = []
    for question in ["fee", "how do I dispute a delivery", "the deal the buyer the seller payment state", "deposit address " * 12] * 50:
        start_at = time.perf_counter()
        ask.ask(passages, question, "http://bench")
        times.append((time.perf_counter() - start_at) * 1000)
    return times


def main():
    with tempfile.TemporaryDirectory() as folder:
        environ = {"DEALS_DATABASE": f"{folder}/deals.db", "DEALS_WALLET": f"{folder}/wallet.json", "DEALS_PROXIES": "1"}
        cli = [sys.executable, os.path.join(HERE, "cli.py"), "init"]
        subprocess.run(cli, env={**os.environ, **environ}, check=True, stdout=subprocess.DEVNULL)
        with open(os.path.join(folder, "bare.py"), "w", encoding="utf-8") as file:
            file.write(BARE % 19000)
        rates = {"bare": [], "document": []}
        bare, bare_port = start(folder, "bare:app", {})
        ours, our_port = start(folder, "app:create_app()", environ)
        try:
            for _ in range(3):  # in turns, so that a busy machine is busy for both
                rates["bare"].append(load(bare_port, "/", SECONDS))
                rates["document"].append(load(our_port, "/agents.md", SECONDS))
        finally:
            for process in (bare, ours):
                process.terminate()
                process.wait()
        best = {name: max(found) for name, found in rates.items()}
        times = ask_times(folder)
    print(f"bare Flask route            {best['bare']:8.0f} requests/s")
    print(f"/agents.md, rate limit on   {best['document']:8.0f} requests/s   ratio {best['document'] / best['bare']:.2f} (to reach: 0.70)")
    print(f"/ask, median and worst      {statistics.median(times):8.2f} ms  {max(times):.2f} ms (to reach: under 5)")


if __name__ == "__main__":
    main()
