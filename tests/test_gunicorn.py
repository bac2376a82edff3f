"""The service as it is deployed: gunicorn with two workers, a sweep beside it, and clients that come all at once."""

import concurrent.futures
import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import pytest
import requests

import chain
from parties import Buyer, Seller

ROOT = pathlib.Path(__file__).parent.parent


class Http:
    """A test client's ``post`` and ``get`` over real HTTP."""

    def __init__(self, url):
        self.url = url

    def post(self, path, **options):
        return self._answer(requests.post(self.url + path, timeout=60, **options))

    def get(self, path, **options):
        return self._answer(requests.get(self.url + path, timeout=60, **options))

    def _answer(self, answer):
        value = answer.json() if answer.content else None
        return types.SimpleNamespace(
            status_code=answer.status_code, headers=answer.headers, json=value, get_data=lambda as_text: answer.text
        )


@pytest.fixture
def url(tmp_path):
    """A sandbox started the way the README says; yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DEALS_")}
    environ |= {"DEALS_DATABASE": str(tmp_path / "deals.db"), "DEALS_WALLET": str(tmp_path / "wallet.json")}
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen(
            [sys.executable, str(ROOT / "cli.py"), "serve", "--port", str(port)], env=environ, stdout=log, stderr=log
        )
    address = f"http://127.0.0.1:{port}"
    wait_for(address)
    yield address
    server.send_signal(signal.SIGTERM)
    assert server.wait(timeout=30) == 0, (tmp_path / "log").read_text()


def wait_for(address):
    for _ in range(100):
        try:
            return requests.get(address + "/health", timeout=5)
        except requests.ConnectionError:
            time.sleep(0.1)


@pytest.fixture
def buyer(url):
    found = buyer_at(url)
    requests.post(url + "/sandbox/faucet", json={"address": found.address}, timeout=10)
    return found


def buyer_at(url):
    """Return a buyer that has seen the service's quote."""
    quote = requests.post(url + "/x402/deal", json={}, timeout=10).json()["accepts"][0]
    token = chain.Token(quote["asset"].lower(), quote["extra"]["name"], quote["extra"]["version"], 8453)
    world = types.SimpleNamespace(
        clock=time.time,
        terminal=types.SimpleNamespace(token=token),
        settings=types.SimpleNamespace(service_name="Deal Holding Service"),
    )
    return Buyer(Http(url), world, 1)


def test_fifty_identical_payments_at_once_are_one_settlement_and_one_deal(url, buyer):
    seller = Seller(buyer.client, buyer.world, 2)
    body = buyer.request(seller)
    payment = buyer.x402(buyer.quote(body))
    with concurrent.futures.ThreadPoolExecutor(50) as crowd:
        answers = list(crowd.map(lambda _: buyer.client.post("/x402/deal", json=body, headers=payment), range(50)))
    codes = {answer.status_code for answer in answers}
    assert 200 in codes and codes <= {200, 409, 429}
    assert len({answer.get_data(as_text=True) for answer in answers if answer.status_code == 200}) == 1
    again = buyer.client.post("/x402/deal", json=body, headers=payment)
    deposit = again.json[0]["deposit_address"]
    assert again.status_code == 200
    assert requests.get(f"{url}/sandbox/balances/{deposit}", timeout=10).json()["balance_usd"] == "20.292"
    assert requests.get(f"{url}/sandbox/balances/{buyer.address}", timeout=10).json()["balance_usd"] == "979.708"


def test_a_four_kilobyte_payment_header_works_and_one_over_sixteen_is_refused_kindly(url, buyer):
    body = buyer.request(Seller(buyer.client, buyer.world, 2), ref="long header")
    quote = buyer.quote(body)
    padded = buyer.x402(quote, extensions={"note": {"info": "x" * 3500}})
    assert len(padded["PAYMENT-SIGNATURE"]) > 4096
    assert buyer.client.post("/x402/deal", json=body, headers=padded).status_code == 200
    huge = {"PAYMENT-SIGNATURE": "A" * 17000}
    answer = buyer.client.post("/x402/deal", json=body, headers=huge)
    assert (answer.status_code, answer.json["error"]) == (400, "invalid_payment")
    assert "PAYMENT-REQUIRED" in answer.headers


def test_a_chunked_body_over_the_limit_is_refused_without_a_length(url):
    chunks = (b"x" * 8192 for _ in range(20))
    answer = requests.post(url + "/x402/deal", data=chunks, headers={"Content-Type": "application/json"}, timeout=30)
    assert (answer.status_code, answer.json()["error"]) == (413, "body_too_large")


def test_the_sweep_beside_the_server_pays_out_by_itself(url, buyer):
    seller = Seller(buyer.client, buyer.world, 2)
    deal = buyer.deal(seller, ref="paid out")
    assert seller.act(deal, "accept").status_code == 200
    assert seller.act(deal, "deliver").status_code == 200
    assert buyer.reveal(deal, "confirm").json["state"] == "released"
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        record = buyer.client.get(f"/v1/deals/{deal}").json
        if all(leg["status"] == "confirmed" for leg in record["transfers"]):
            break
        time.sleep(0.2)
    assert re.fullmatch(r"0x[0-9a-f]{64}", record["transfers"][0]["transaction"])
    assert requests.get(f"{url}/sandbox/balances/{seller.address}", timeout=10).json()["balance_usd"] == "20.00"


@pytest.fixture
def silent():
    """A facilitator that takes every call and answers none, until the end of the test; yields its address."""
    taken, listener = [], socket.create_server(("127.0.0.1", 0), backlog=128)

    def take():
        with contextlib.suppress(OSError):
            while True:
                taken.append(listener.accept()[0])

    threading.Thread(target=take, daemon=True).start()
    yield types.SimpleNamespace(url=f"http://127.0.0.1:{listener.getsockname()[1]}", taken=taken, listener=listener)
    listener.close()


def test_readers_are_answered_while_a_facilitator_keeps_all_payments_waiting(tmp_path, silent):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DEALS_")}
    environ |= {
        "DEALS_MODE": "live", "DEALS_DATABASE": str(tmp_path / "deals.db"), "DEALS_WALLET": str(tmp_path / "wallet.json"),
        "DEALS_WALLET_PASSPHRASE": "only a test", "DEALS_BASE_URL": url, "DEALS_RPC_URL": silent.url,
        "DEALS_FACILITATORS": silent.url, "DEALS_MAX_IN_FLIGHT_PER_CLIENT": "1000",
    }  # fmt: skip
    subprocess.run([sys.executable, str(ROOT / "cli.py"), "init"], env=environ, check=True, capture_output=True)
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "gunicorn", "--bind", f"127.0.0.1:{port}", "app:create_app()"],
            env=environ, cwd=ROOT, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        wait_for(url)
        payments = [signed(buyer_at(url), ref=str(number)) for number in range(70)]
        with concurrent.futures.ThreadPoolExecutor(70) as crowd:
            calls = [crowd.submit(requests.post, url + "/x402/deal", timeout=60, **payment) for payment in payments]
            deadline = time.monotonic() + 10
            while sum(call.done() for call in calls) < 6 and time.monotonic() < deadline:
                time.sleep(0.05)
            assert [call.result().status_code for call in calls if call.done()] == [429] * 6
            started = time.monotonic()
            for _ in range(10):  # connections fall on either worker
                assert requests.get(url + "/v1/deals/deal_" + "a" * 26, timeout=5).status_code == 404
            assert time.monotonic() - started < 5
            silent.listener.close()
            for sock in silent.taken:
                sock.close()
            assert sorted(call.result().status_code for call in calls) == [429] * 6 + [503] * 64
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=30)


def signed(buyer, **fields):
    """Return what a request to the paid endpoint is made of, with its payment."""
    body = buyer.request(Seller(buyer.client, buyer.world, 2), **fields)
    return {"json": body, "headers": buyer.x402(buyer.quote(body))}
