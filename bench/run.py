"""Compare the service with a bare Flask route and with the official x402 middleware. Run: ``make bench``.

Three gunicorns with the same configuration (gunicorn.conf.py: two workers) on one machine, one stub that is
facilitator and Base node for all. The service runs in live mode: real signatures, its real chain reader, and every
deal durably committed twice; the middleware stores nothing. Payments are signed before the clock starts. Rounds
are interleaved, so that a noisy neighbour hurts all alike; figures are medians, ratios medians of each round's.
"""

import base64
import contextlib
import json
import os
import pathlib
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time

import coincurve
import load

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import chain  # noqa: E402
import db as database  # noqa: E402
import demo  # noqa: E402
import settings as configuration  # noqa: E402
from db import sqlite3  # noqa: E402

ROUNDS = 9
QUOTES, PAYMENTS, READS = 3000, 600, 5000
TOKEN = chain.Token(configuration.USDC_ON_BASE, "USD Coin", "2", configuration.CHAIN_ID)
BUYER = secrets.token_bytes(32)
PAYER = chain.address_of(coincurve.PublicKey.from_secret(BUYER).format())
TARGETS = [
    ("unpaid quote", "middleware", 1.0),
    ("paid creation", "middleware", 1.0),
    ("deal read", "bare", 0.8),
]


def main():
    with tempfile.TemporaryDirectory(prefix="bench-", dir=_folder()) as folder, contextlib.ExitStack() as stack:
        ports = dict(zip(("stub", "bare", "middleware", "service"), _free_ports(4)))
        environ = _environ(folder, ports)
        run = lambda *command: stack.enter_context(_process([sys.executable, *command], environ, f"{folder}/log"))
        subprocess.run([sys.executable, ROOT / "cli.py", "init"], env=environ, check=True, stdout=subprocess.DEVNULL)
        run(str(ROOT / "bench" / "stub.py"), str(ports["stub"]))
        _wait(ports["stub"])
        for name, target in (("bare", "peers:bare()"), ("middleware", "peers:middleware()"), ("service", "app:create_app()")):
            run("-m", "gunicorn", "-c", str(ROOT / "gunicorn.conf.py"), "--no-control-socket", "--bind",
                f"127.0.0.1:{ports[name]}", target)
        for name in ("bare", "middleware", "service"):
            _wait(ports[name])
        print(_title(environ["DEALS_DATABASE"]))
        try:
            _report(_measure(ports))
        except Exception:
            print(pathlib.Path(folder, "log").read_text()[-5000:], file=sys.stderr)
            raise


def _measure(ports):
    """Return {(what, who): requests per second of each round}."""
    deals, found = [], {}
    for number in range(ROUNDS + 1):
        who = ("middleware", "service") if number % 2 else ("service", "middleware")
        results = {}
        for name in who:
            results["unpaid quote", name] = load.run(ports[name], _quotes(QUOTES), expect=402)
        payments = {name: _payments(ports[name], PAYMENTS) for name in who}
        for name in who:
            results["paid creation", name] = load.run(ports[name], [data for data, _ in payments[name]])
        deals += [deal_id for _, deal_id in payments["service"]]
        reads = [load.request("GET", f"/v1/deals/{deals[i % len(deals)]}") for i in range(READS)]
        for name in ("bare", "service") if number % 2 else ("service", "bare"):
            results["deal read", name] = load.run(ports[name], reads)
        if number:  # the first round warms up
            for key, value in results.items():
                found.setdefault(key, []).append(value)
        if sys.stderr.isatty():
            print(f"\rround {number} of {ROUNDS}", end="\n" if number == ROUNDS else "", file=sys.stderr, flush=True)
    return found


def _report(found):
    row = "{:<15}{:>12}{:>17}{:>14}   {}".format
    print(row("requests/s", "bare Flask", "x402 middleware", "this service", "ratio, median of rounds"))
    for what, peer, least in TARGETS:
        figures = {name: f"{statistics.median(found[what, name]):.0f}" for name in (peer, "service")}
        ratios = [ours / theirs for ours, theirs in zip(found[what, "service"], found[what, peer])]
        ratio = statistics.median(ratios)
        verdict = "reached" if ratio >= least else "MISSED"
        text = f"{ratio:.2f} of {peer} ({min(ratios):.2f} to {max(ratios):.2f}); at least {least:.1f}: {verdict}"
        print(row(what, figures.get("bare", "-"), figures.get("middleware", "-"), figures["service"], text))


# -- Requests -----------------------------------------------------------------------------------------------


def _body():
    return json.dumps(
        {
            "amount_usd": "20.00",
            "seller_address": "0x3C44CdDdB6a900fa2b585dd299e03d12FA4293BC",
            "network": "base",
            "secret_hash": secrets.token_hex(32),
            "ref": "bench",
        }
    ).encode()


def _quotes(count):
    return [load.request("POST", "/x402/deal", _body()) for _ in range(count)]


def _payments(port, count):
    """Return (request, deal id or None) pairs: each quoted by the server itself, and signed, beforehand."""
    found = []
    for _ in range(count):
        body = _body()
        answer = load.fetch(port, load.request("POST", "/x402/deal", body))
        head = dict(line.split(": ", 1) for line in answer.partition(b"\r\n\r\n")[0].decode().split("\r\n")[1:])
        head = {name.lower(): value for name, value in head.items()}
        required = json.loads(base64.b64decode(head["payment-required"]))
        header = demo.x402_header(required, PAYER, lambda authorization: chain.sign(BUYER, authorization.digest(TOKEN)))
        deal = required.get("extensions", {}).get("deal", {}).get("info", {}).get("id")
        found.append((load.request("POST", "/x402/deal", body, [("PAYMENT-SIGNATURE", header)]), deal))
    return found


# -- Processes ----------------------------------------------------------------------------------------------


def _environ(folder, ports):
    stub = f"http://127.0.0.1:{ports['stub']}"
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("DEALS_", "GUNICORN_"))},
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'bench'}",
        "NO_PROXY": "127.0.0.1",
        "STUB_URL": stub,
        "DEALS_MODE": "live",
        "DEALS_DATABASE": f"{folder}/deals.db",
        "DEALS_WALLET": f"{folder}/wallet.json",
        "DEALS_WALLET_PASSPHRASE": secrets.token_hex(8),
        "DEALS_BASE_URL": f"http://127.0.0.1:{ports['service']}",
        "DEALS_FACILITATORS": stub,
        "DEALS_RPC_URL": f"{stub}/rpc",
    }


@contextlib.contextmanager
def _process(command, environ, log):
    """Run a server for the length of a with block; what it says goes into ``log``, shown when something fails."""
    with open(log, "a+") as file:
        process = subprocess.Popen(command, env=environ, cwd=ROOT, stderr=file)
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def _folder():
    """Return a place on the disk the project is on: a database in memory would flatter the service."""
    (ROOT / "bench" / ".work").mkdir(exist_ok=True)
    return ROOT / "bench" / ".work"


def _free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def _wait(port):
    for _ in range(300):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.1)
    raise TimeoutError(f"nothing listens on port {port}")


def _title(path):
    with contextlib.closing(database.connect(path)) as db:
        journal = database.journal_mode(db)
        level = {2: "FULL", 3: "EXTRA"}[db.execute("PRAGMA synchronous").fetchone()[0]]
    return (
        f"Python {sys.version.split()[0]}, SQLite {sqlite3.sqlite_version} (journal {journal}, synchronous {level}),"
        f" {os.cpu_count()} cores; gunicorn, 2 workers each; {ROUNDS} rounds of"
        f" {QUOTES} quotes, {PAYMENTS} payments, {READS} reads over 8 connections at a time, {load.IN_A_ROW} requests each"
    )


if __name__ == "__main__":
    main()
