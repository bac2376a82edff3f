"""A real HTTP server that misbehaves in every way seen or feared, as facilitator and as RPC node."""

import contextlib
import json
import os
import socket
import socketserver
import struct
import subprocess
import sys
import threading
import time

import pytest

import chain
import db as database
import exchange
import facilitators
import operations
import sandbox
from parties import balance, error, files, send, serving

PRICE = 20_292_000
GRANT = 10_000_000_000
BUDGET = 1.6  # seconds of settling in these tests; the service gives a settle at least one


def answer(value, status="200 OK", kind="application/json", more=""):
    """Return the bytes of one whole HTTP answer."""
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n{more}\r\n"
    return head.encode() + body


def says(*args, **options):
    return lambda peer: peer.sendall(answer(*args, **options))


def raw(data):
    return lambda peer: peer.sendall(data)


def drip(start, piece):
    """Send ``piece`` again and again, slowly enough that no single read ever times out."""

    def act(peer):
        peer.sendall(start)
        for _ in range(200):
            time.sleep(0.05)
            peer.sendall(piece)

    return act


def endless(peer):
    peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
    for _ in range(4096):
        peer.sendall(b" " * 65536)


def reset(peer):
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()


def stall(peer):
    peer.settimeout(10)
    with contextlib.suppress(OSError):
        peer.recv(1)  # until the client gives up


WON = {"success": True, "transaction": "0x" + "ab" * 32, "network": "eip155:8453", "payer": "0x" + "00" * 20}
LOST = {"success": False, "transaction": "", "network": "eip155:8453", "payer": ""}
ENDS = json.dumps(WON).encode()
SILENCES = {
    "no answer in time": stall,
    "a reset": reset,
    "a close without a word": lambda peer: None,
    "a slow drip in the header": drip(b"HTTP/1.1 200 OK\r\nX-Drip: ", b"x"),
    "a slow drip of headers": drip(b"HTTP/1.1 200 OK\r\n", b"X-Drip: x\r\n"),
    "a slow drip in the body": drip(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b" "),
    "a slow drip in chunks": drip(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "an endless body": endless,
    "a truncated body": raw(b"HTTP/1.1 200 OK\r\nContent-Length: 4000\r\n\r\n" + ENDS[:40]),
    "truncated JSON": raw(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + ENDS[:40]),
    "a cut chunk": raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n" + ENDS[:40]),
    "no HTTP": raw(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "an endless header": raw(b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 200_000),
    "broken gzip": raw(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nnope"),
}
WORDS = {
    "500 without a body": says(b"", "500 Internal Server Error"),
    "500 with text": says(b"oops", "500 Internal Server Error", "text/plain"),
    "HTML": says(b"<html>welcome</html>", kind="text/html"),
    "HTML of a gateway": says(b"<html>502</html>", "502 Bad Gateway", "text/html"),
    "an empty object": says({}),
    "an array": says([WON]),
    "null": says(None),
    "no content": raw(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n"),
    "success as text": says({**WON, "success": "true"}),
    "deep nesting": says(b"[" * 100_000),
    "NaN": says(b'{"success": NaN}'),
    "UTF-16": says(json.dumps(WON).encode("utf-16")),
    "two megabytes": says({**WON, "pad": "x" * (2 << 20)}),
    "rate limited": says({"error": "slow down"}, "429 Too Many Requests"),
    "key required": says({"error": "unauthorized"}, "401 Unauthorized"),
}
LIES = {
    "success with a wrong hash": says(WON),
    "success with an empty hash": says({**WON, "transaction": ""}),
    "success without a hash": says({"success": True}),
    "success with a strange hash": says({**WON, "transaction": {"hash": 1}}),
    "pending as HTTP 500": says({**LOST, "errorReason": "settlement_pending"}, "500 Internal Server Error"),
    "pending as a no": says({**LOST, "errorReason": "settlement_pending"}),
    "transaction failed": says({**LOST, "errorReason": "transaction_failed", "transaction": "0x" + "cd" * 32}),
    "nonce already used": says({**LOST, "errorReason": "invalid_exact_evm_nonce_already_used"}, "400 Bad Request"),
    "a no without a reason": says(LOST),
    "a final no with a hash": says({**LOST, "errorReason": "insufficient_funds", "transaction": "0x" + "cd" * 32}),
}
FINAL = {
    "insufficient funds as 400": (says({**LOST, "errorReason": "insufficient_funds"}, "400 Bad Request"), 402),
    "insufficient funds as 200": (says({**LOST, "errorReason": "insufficient_funds"}), 402),
    "blacklisted": (says({**LOST, "errorReason": "Blacklistable: account is blacklisted"}, "500 Oops"), 502),
}
GOOD = says({"isValid": True, "payer": ""})


class Server(socketserver.ThreadingTCPServer):
    """Does to every request what ``acts`` says for its verb; with ``moves`` it settles for real before that."""

    allow_reuse_address = daemon_threads = True

    def __init__(self, world):
        self.world, self.moves, self.hits, self.acts = world, False, [], {"verify": GOOD}
        super().__init__(("127.0.0.1", 0), Exchange)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def settle(self, request):
        with contextlib.closing(database.connect(self.world.settings.database)) as db:
            real = sandbox.Facilitator(lambda: db, self.world.terminal.token, self.world.clock)
            return real.settle(request["paymentPayload"], request["paymentRequirements"], seconds=1)

    def handle_error(self, request, client_address):
        pass  # a client that hangs up on a misbehaving server is what these tests want


class Exchange(socketserver.StreamRequestHandler):
    def handle(self):
        verb = self.rfile.readline().split()[1].decode().strip("/")
        length = 0
        while (line := self.rfile.readline().strip().lower()) != b"":
            if line.startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        request = json.loads(self.rfile.read(length))
        self.server.hits.append(verb)
        if verb == "settle" and self.server.moves:
            self.server.settle(request)
        self.server.acts[verb](self.connection)


@pytest.fixture
def server(world):
    found = Server(world)
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield found
    found.shutdown()
    found.server_close()


@pytest.fixture
def facilitator(server, world):
    found = facilitators.Facilitator(server.url)
    found.connect = world.facilitators[0].connect
    return found


@pytest.fixture
def client(world, facilitator):
    return serving(world, facilitator, settle_seconds=BUDGET)


def timed(call):
    started = time.monotonic()
    return call(), time.monotonic() - started


@pytest.mark.parametrize("moves", [True, False], ids=["money moved", "money did not move"])
@pytest.mark.parametrize("fault", SILENCES | WORDS | LIES)
def test_no_misbehaviour_at_settling_decides_anything(
    fault, moves, client, server, world, db, buyer, seller, clock, sweep
):
    body = buyer.request(seller)
    quote = client.post("/x402/deal", json=body)
    payment = buyer.x402(quote)
    server.acts["settle"], server.moves = (SILENCES | WORDS | LIES)[fault], moves
    found, seconds = timed(lambda: send(client, body, payment))
    assert found.status_code == (200 if moves else 202), found.text
    assert seconds < 5
    assert server.hits == ["verify", "settle"]  # settling is never repeated by itself
    deal = quote.json["extensions"]["deal"]["info"]["id"]
    assert client.get(f"/v1/deals/{deal}").json["state"] == ("funded" if moves else "pending")
    assert balance(world, buyer.address) == GRANT - PRICE * moves
    clock.now += 90
    sweep()  # its facilitator works
    assert client.get(f"/v1/deals/{deal}").json["state"] == "funded"
    assert (balance(world, buyer.address), operations.audit(db, world)) == (GRANT - PRICE, [])
    assert db.execute("SELECT count(*) FROM sandbox_authorizations").fetchone()[0] == 1


@pytest.mark.parametrize("moves", [True, False], ids=["money moved", "money did not move"])
@pytest.mark.parametrize("fault", FINAL)
def test_a_final_no_ends_the_attempt_unless_the_chain_shows_the_money(fault, moves, client, server, world, db, buyer):
    act, status = FINAL[fault]
    server.acts["settle"], server.moves = act, moves
    body = buyer.request()
    found = send(client, body, buyer.x402(client.post("/x402/deal", json=body)))
    assert found.status_code == (200 if moves else status)
    assert balance(world, buyer.address) == GRANT - PRICE * moves
    assert operations.audit(db, world) == []


@pytest.mark.parametrize("fault", SILENCES | WORDS)
def test_misbehaviour_at_verifying_costs_nothing_and_the_next_facilitator_takes_over(fault, client, server, world, facilitator, buyer):
    server.acts["verify"] = (SILENCES | WORDS)[fault]
    body = buyer.request()
    payment, before = buyer.x402(client.post("/x402/deal", json=body)), files(world)
    found, seconds = timed(lambda: send(client, body, payment))
    assert error(found) == (503, "unavailable") and seconds < 2
    assert files(world) == before and "settle" not in server.hits
    both = serving(world, facilitator, world.facilitators[0], settle_seconds=BUDGET)
    server.acts["settle"] = reset
    assert send(both, body, payment).status_code == 200


def test_a_clear_no_at_verifying_is_believed_at_any_http_status(client, server, world, buyer):
    body = buyer.request()
    payment, before = buyer.x402(client.post("/x402/deal", json=body)), files(world)
    for status in ("200 OK", "400 Bad Request", "500 Internal Server Error"):
        server.acts["verify"] = says({"isValid": False, "invalidReason": "insufficient_funds\r\nX-Evil: 1"}, status)
        found = send(client, body, payment)
        assert found.status_code == 402 and "insufficient_funds X-Evil: 1" in found.json["error"]
        assert "X-Evil" not in found.headers
    assert files(world) == before


@pytest.mark.parametrize("status", ["301 Moved Permanently", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"])
@pytest.mark.parametrize("verb", ["verify", "settle"])
def test_a_redirect_is_never_followed(verb, status, client, server, world, buyer):
    body = buyer.request()
    payment = buyer.x402(client.post("/x402/deal", json=body))
    server.acts["elsewhere"] = says({**WON, "isValid": True})
    server.acts[verb] = says(b"", status, more=f"Location: {server.url}/elsewhere\r\n")
    assert send(client, body, payment).status_code == (503 if verb == "verify" else 202)
    assert "elsewhere" not in server.hits


def test_a_facilitator_that_is_not_there_was_certainly_not_reached(world, buyer):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        gone = facilitators.Facilitator(f"http://127.0.0.1:{nobody.getsockname()[1]}")
        assert gone.settle({}, {}, seconds=1).kind == "unsent"
        assert gone.verify({}, {}, seconds=1).valid is None
    unknown = facilitators.Facilitator("http://no-such-host.invalid")
    assert unknown.settle({}, {}, seconds=2).kind == "unsent"


def test_the_environment_s_proxies_and_credentials_are_not_used(server, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    server.acts["verify"] = says({"isValid": True})
    assert exchange.post_json(f"{server.url}/verify", {}, seconds=2) == (200, {"isValid": True})


# -- The exchange by itself, and the RPC node -----------------------------------------------------------------


@pytest.mark.parametrize("fault", [name for name in SILENCES if "drip" in name or name == "no answer in time"])
def test_an_exchange_ends_at_its_deadline_however_slowly_it_is_fed(fault, server):
    server.acts["verify"] = SILENCES[fault]

    def ask():
        with pytest.raises(exchange.NoAnswer):
            exchange.post_json(f"{server.url}/verify", {}, seconds=0.3)

    _, seconds = timed(ask)
    assert 0.25 < seconds < 1.0


def test_an_answer_is_read_to_one_mebibyte_and_no_further(server):
    server.acts["verify"] = says(b'"' + b"x" * ((1 << 20) - 20) + b'"')
    assert exchange.post_json(f"{server.url}/verify", {}, seconds=5) == (200, None)
    server.acts["verify"] = says(b"[" + b" " * (1 << 20) + b"]")
    with pytest.raises(exchange.NoAnswer, match="larger than"):
        exchange.post_json(f"{server.url}/verify", {}, seconds=5)


def test_only_a_pure_question_is_asked_again_after_a_reset(server):
    server.acts["verify"] = reset
    for again, hits in ((False, 1), (True, 2)):
        server.hits.clear()
        with pytest.raises(exchange.NoAnswer):
            exchange.post_json(f"{server.url}/verify", {}, seconds=2, again=again)
        assert len(server.hits) == hits


NODE = {
    "an error": says({"jsonrpc": "2.0", "id": 0, "error": {"code": -32005, "message": "limit exceeded"}}),
    "another id": says({"jsonrpc": "2.0", "id": 9, "result": "0x1"}),
    "no result": says({"jsonrpc": "2.0", "id": 0}),
    "a null result": says({"jsonrpc": "2.0", "id": 0, "result": None}),
    "a word": says({"jsonrpc": "2.0", "id": 0, "result": "lots"}),
    "an empty word": says({"jsonrpc": "2.0", "id": 0, "result": "0x"}),
    "an object": says({"jsonrpc": "2.0", "id": 0, "result": {}}),
    "a list of junk": says([1, None, "x"]),
    "a block without fields": says({"jsonrpc": "2.0", "id": 0, "result": {"number": "0x1"}}),
}


@pytest.mark.parametrize("fault", SILENCES | WORDS | NODE)
def test_a_node_that_misbehaves_leaves_the_chain_unknown_and_never_a_wrong_figure(fault, server, world):
    server.acts[""] = (SILENCES | WORDS | NODE)[fault]
    ledger = chain.Ledger(server.url, world.terminal.token, seconds=0.3)
    account, word = "0x" + "11" * 20, "0x" + "22" * 32
    paid = chain.Authorization(account, account, 1, 0, 1, word)
    asks = [lambda: ledger.balance(account), lambda: ledger.used([(account, word)]), ledger.head,
            lambda: ledger.transaction_of(paid, since=0), lambda: ledger.transaction_of(paid, since=0, hint=word)]  # fmt: skip
    for ask in asks[:1] if fault in SILENCES else asks:
        with pytest.raises(chain.ChainUnknown):
            ask()
    with contextlib.suppress(chain.ChainUnknown):  # a wallet's signature needs a clear yes
        assert ledger.signed_by_contract(account, bytes(32), "0x" + "11" * 65) is False


@pytest.mark.parametrize("receipt", [7, "x", {"status": "0x1", "logs": 7}, {"status": "0x1", "logs": [{}]},
                                     {"status": "0x1", "logs": [None]}, {"status": "0x1", "logs": [{"address": None}]}])
def test_a_malformed_transaction_receipt_is_no_answer(receipt, world, monkeypatch):
    ledger = chain.Ledger("http://node.test", world.terminal.token)
    monkeypatch.setattr(ledger, "_ask", lambda *calls: ["0x1", receipt][: len(calls)])
    paid = chain.Authorization("0x" + "11" * 20, "0x" + "11" * 20, 1, 0, 1, "0x" + "22" * 32)
    with pytest.raises(chain.ChainUnknown):
        ledger.payment(paid, since=0, hint="0x" + "ab" * 32)


# -- Nesting --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, deep", [
    ("[" * 100 + "]" * 100, False), ("[" * 101 + "]" * 101, True), ('{"a":' * 101, True), ("[{}]," * 5000, False),
    ('"' + "[" * 5000 + '"', False), ('"\\"' + "[" * 5000, False), ('"\\\\"' + "[" * 101, True), ("[" * 1_000_000, True),
    ("[]" * 500_000, False), ('"\\' * 500_000, False),
])  # fmt: skip
def test_only_real_nesting_counts_as_deep(text, deep):
    assert exchange.too_deep(text) is deep


def test_opening_a_wallet_leaves_the_recursion_limit_where_it_was(settings):
    code = (
        "import sys, app, keys; web = 'eth_account' in sys.modules; keys.create_wallet(sys.argv[1], 'x', sandbox=True);"
        "print(web, sys.getrecursionlimit())"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, f"{settings.database}.wallet"], capture_output=True, text=True, check=True,
        cwd=os.path.dirname(os.path.abspath(exchange.__file__)),
    )  # fmt: skip
    assert found.stdout.split() == ["False", "1000"]
