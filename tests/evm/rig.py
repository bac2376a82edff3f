"""Run a private Base: anvil with a dollar at USDC's address, the official facilitator and the official clients.

Fixtures for conftest.py: ``from evm.rig import anvil, facilitator, pytest_terminal_summary``.

Two clocks. The chain has its own, which `Chain.move_clock` moves and which no frozen Python clock touches. The
facilitator here lives by the chain's; the clients and the service live by Python's. A test that moves one may have to
move the other.
"""

import json
import os
import pathlib
import queue
import secrets
import subprocess
import threading
import time
import types
from contextlib import contextmanager

import eth_abi
import flask
import pytest
import requests
import werkzeug.serving
from eth_utils import keccak, to_checksum_address

HERE = pathlib.Path(__file__).parent
CHAIN_ID = 8453
NETWORK = "eip155:8453"
USDC = "0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913"
DOMAIN = {"name": "USD Coin", "version": "2", "chainId": CHAIN_ID, "verifyingContract": USDC}
AUTHORIZATION = "address,address,uint256,uint256,uint256,bytes32"
NO_ANVIL = "ON-CHAIN TESTS DID NOT RUN: anvil is not installed (with Node.js: npm ci --prefix tests/evm)"

# Account 0 of anvil's public development mnemonic: it has ether on every anvil and nothing anywhere else.
FACILITATOR_KEY = "0xac0974bec39a17e36ba4a6b4d238ff944bacb478cbed5efcae784d7bf4f2ff80"


class RpcError(Exception):
    """The node refused a call; the message is its own."""


class Reverted(Exception):
    """A transaction was mined and failed; the message is the contract's reason, `receipt` its receipt."""

    def __init__(self, reason, receipt):
        super().__init__(reason)
        self.receipt = receipt


# Tools


def anvil_path():
    """Return anvil's own binary, or None.

    Not the wrapper in .bin: that starts anvil as a child, which outlives it when it is killed.
    """
    scope = HERE / "node_modules" / "@foundry-rs"
    found = [*scope.glob("anvil-*/bin/anvil"), *scope.glob("anvil/anvil")]
    return found[0] if found else None


def cannot_run(reason):
    """Skip the test, or fail it where the environment says CI."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


def require_anvil():
    """Return anvil's path; without it the test cannot run."""
    return anvil_path() or cannot_run(NO_ANVIL)


def pytest_terminal_summary(terminalreporter):
    """Say in one loud line that on-chain tests were skipped."""
    if any(NO_ANVIL in str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])):
        terminalreporter.write_sep("!", NO_ANVIL, red=True, bold=True)


def artifact(name):
    """Return {abi, runtime, …} of a committed contract."""
    return json.loads((HERE / f"{name}.json").read_text())


# The chain


class Chain:
    """A running anvil. Amounts are base units, times are Unix seconds, addresses are hex text."""

    def __init__(self, url):
        self.url = url
        self.accounts = [to_checksum_address(a) for a in self.rpc("eth_accounts", [])]
        self.rpc("anvil_setCode", [USDC, artifact("Token")["runtime"]])

    def rpc(self, method, params):
        call = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        answer = requests.post(self.url, json=call, timeout=30).json()
        if "error" in answer:
            raise RpcError(answer["error"]["message"])
        return answer["result"]

    def call(self, signature, *args, returns="uint256", to=USDC):
        """Read from a contract: call("balanceOf(address)", who)."""
        data = self.rpc("eth_call", [{"to": to, "data": encode(signature, *args)}, "latest"])
        return eth_abi.decode([returns], bytes.fromhex(data[2:]))[0]

    def send(self, signature, *args, to=USDC, sender=None):
        """Send a transaction from one of anvil's accounts (by default the last) and return its receipt.

        It is mined even if it fails, as on a real chain; then `Reverted` is raised with the reason.
        """
        transaction = {
            "from": sender or self.accounts[-1],
            "to": to,
            "data": encode(signature, *args),
            "gas": hex(500_000),  # given, so that no estimate refuses the transaction before a block does
        }
        receipt = self.rpc("eth_sendTransactionSync", [transaction])  # the plain call returns before the block is mined
        if receipt["status"] != "0x1":
            trace = self.rpc("debug_traceTransaction", [receipt["transactionHash"], {"tracer": "callTracer"}])
            raise Reverted(revert_reason(trace.get("output", "0x")), receipt)
        return receipt

    # The dollar

    def mint(self, address, units):
        return self.send("mint(address,uint256)", address, units)

    def balance(self, address):
        return self.call("balanceOf(address)", address)

    def is_used(self, authorizer, nonce):
        """Say whether an authorization was used or cancelled."""
        return self.call("authorizationState(address,bytes32)", authorizer, unhex(nonce), returns="bool")

    def pause(self):
        return self.send("pause()")

    def unpause(self):
        return self.send("unpause()")

    def blacklist(self, address):
        return self.send("blacklist(address)", address)

    def unblacklist(self, address):
        return self.send("unBlacklist(address)", address)

    def submit(self, authorization, *, sender=None, overload="vrs"):
        """Send a signed transferWithAuthorization as any stranger can; takes the flat object `authorize` returns."""
        name, signed = f"transferWithAuthorization({AUTHORIZATION}", unhex(authorization["signature"])
        if overload == "vrs":
            assert len(signed) == 65, "only 65 bytes split into v, r, s"
            tail, rest = ",uint8,bytes32,bytes32)", (signed[64], signed[:32], signed[32:64])
        else:
            tail, rest = ",bytes)", (signed,)
        return self.send(name + tail, *arguments(authorization), *rest, sender=sender)

    # Wallets

    def place_wallet(self, owner, address=None):
        """Place an ERC-1271 wallet of `owner` (an address) and return its address."""
        address = address or to_checksum_address(secrets.token_hex(20))
        self.rpc("anvil_setCode", [address, artifact("Wallet")["runtime"]])
        self.send("init(address)", owner, to=address)
        return address

    # The clock

    def clock(self):
        """Return the time that the next block would have."""
        return int(self.rpc("eth_getBlockByNumber", ["pending", False])["timestamp"], 16)

    def move_clock(self, seconds):
        """Move the chain's clock forward and mine a block there, so that reads see it too."""
        self.rpc("evm_increaseTime", [seconds])
        self.mine()

    def next_block_at(self, timestamp):
        """Give the next block exactly this time; the clock goes on from there."""
        self.rpc("evm_setNextBlockTimestamp", [timestamp])

    def mine(self, blocks=1):
        self.rpc("anvil_mine", [hex(blocks)])

    def snapshot(self):
        """Return an id for `revert`. It is good for one revert."""
        return self.rpc("evm_snapshot", [])

    def revert(self, snapshot):
        """Go back to a snapshot: state, blocks and clock.

        A `Facilitator` that settled since then has counted its nonces on: call its `reset` too.
        """
        assert self.rpc("evm_revert", [snapshot]), f"no snapshot {snapshot}"


@contextmanager
def running_chain():
    """Run anvil on a free port, with Base's chain id, until the block ends."""
    command = [require_anvil(), "--chain-id", str(CHAIN_ID), "--host", "127.0.0.1", "--port", "0"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    lines = queue.Queue()
    # Read on for ever: anvil stops when the pipe is full.
    threading.Thread(target=lambda: [lines.put(line) for line in process.stdout], daemon=True).start()
    try:
        line = ""
        while "Listening on " not in line:
            line = lines.get(timeout=20)
        yield Chain("http://" + line.split()[-1])
    finally:
        process.kill()
        process.wait()


# Bytes and signatures


def unhex(text):
    return bytes.fromhex(text.removeprefix("0x"))


def encode(signature, *args):
    """Return call data for a signature such as "transfer(address,uint256)"."""
    inside = signature[signature.index("(") + 1 : -1]
    return "0x" + (keccak(text=signature)[:4] + eth_abi.encode(inside.split(",") if inside else [], args)).hex()


def revert_reason(output):
    """Return the text of Error(string) data, or the data itself."""
    if not output.startswith("0x08c379a0"):
        return output
    return eth_abi.decode(["string"], unhex(output)[4:])[0]


def arguments(authorization):
    """Return the six values that every EIP-3009 transfer function takes first."""
    numbers = (int(authorization[key]) for key in ("value", "validAfter", "validBefore"))
    return authorization["from"], authorization["to"], *numbers, unhex(authorization["nonce"])


def authorize(
    account, to, units, *, payer=None, valid_after=0, valid_before=None, nonce=None, prefix=b"", verb="Transfer"
):
    """Sign an EIP-3009 transfer of the dollar and return it flat: from, to, value, …, signature, asset, chainId.

    `payer` is the contract wallet that `account` owns, `prefix` what its signature has before the owner's 65 bytes.
    `verb` may be Receive. Good for an hour of Python's clock unless told.
    """
    message = {
        "from": payer or account.address,
        "to": to,
        "value": units,
        "validAfter": valid_after,
        "validBefore": int(time.time()) + 3600 if valid_before is None else valid_before,
        "nonce": nonce or "0x" + secrets.token_hex(32),
    }
    kinds = zip(message, AUTHORIZATION.split(","))
    fields = [{"name": name, "type": kind} for name, kind in kinds]
    signed = account.sign_typed_data(DOMAIN, {f"{verb}WithAuthorization": fields}, message)
    texts = {key: str(message[key]) for key in ("value", "validAfter", "validBefore")}
    signature = "0x" + (prefix + bytes(signed.signature)).hex()
    return {**message, **texts, "signature": signature, "asset": USDC, "chainId": CHAIN_ID}


def sign_cancel(account, nonce, *, authorizer=None):
    """Return the 65 bytes that cancel an unused authorization."""
    fields = [{"name": "authorizer", "type": "address"}, {"name": "nonce", "type": "bytes32"}]
    message = {"authorizer": authorizer or account.address, "nonce": nonce}
    return bytes(account.sign_typed_data(DOMAIN, {"CancelAuthorization": fields}, message).signature)


# The facilitator


@contextmanager
def serve(app):
    """Serve a WSGI application on a free loopback port, a thread per request; yields its URL."""
    server = werkzeug.serving.make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Quiet(werkzeug.serving.WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_request(self, *args):
        pass


class Facilitator:
    """The official x402 facilitator for one chain, as a WSGI application; `url` is set while it is served.

    It checks time windows by `time.time()`, the token by the block's time. So its module's clock is replaced by the
    chain's: after `move_clock` it settles what the chain would take, whatever Python's clock says or is frozen at.
    """

    def __init__(self, chain):
        self.chain = chain
        self.calls = []  # (path, body) of every request, oldest first
        self.url = None
        self.reset()
        self.app = flask.Flask("facilitator")
        self.app.get("/supported")(self.supported)
        self.app.post("/verify")(self.verify)
        self.app.post("/settle")(self.settle)

    def reset(self):
        """Start anew, as after a restart: it counts its own transactions, which `Chain.revert` takes back."""
        from x402 import x402FacilitatorSync
        from x402.mechanisms.evm import FacilitatorWeb3Signer
        from x402.mechanisms.evm.exact import ExactEvmFacilitatorScheme

        signer = FacilitatorWeb3Signer(FACILITATOR_KEY, self.chain.url, confirmation_timeout_seconds=10)
        self.official = x402FacilitatorSync().register([NETWORK], ExactEvmFacilitatorScheme(signer))

    def supported(self):
        return dump(self.official.get_supported())

    def verify(self):
        return self.answer(self.official.verify)

    def settle(self):
        return self.answer(self.official.settle)

    def answer(self, verb):
        from x402.schemas import PaymentPayload, PaymentRequirements

        body = flask.request.get_json()
        self.calls.append((flask.request.path, body))
        payload = PaymentPayload.model_validate(body["paymentPayload"])
        return dump(verb(payload, PaymentRequirements.model_validate(body["paymentRequirements"])))


def dump(model):
    return model.model_dump(by_alias=True, exclude_none=True, mode="json")


@contextmanager
def running_facilitator(chain):
    import x402.mechanisms.evm.exact.facilitator as module

    facilitator, real = Facilitator(chain), module.time
    module.time = types.SimpleNamespace(time=chain.clock)
    try:
        with serve(facilitator.app) as facilitator.url:
            yield facilitator
    finally:
        module.time = real


# The official clients. $600 is above the highest price; a real client's owner picks the limit.


def x402_session(account, *, limit="$600", asset=None, limit_units=600_000_000):
    """Return a requests.Session that pays by x402; `asset` allows a token that the SDK does not know."""
    from x402 import x402ClientSync
    from x402.http.clients import x402_requests

    return x402_requests(prepared(x402ClientSync(), account, limit, asset, limit_units))


def x402_async_client(account, *, limit="$600", asset=None, limit_units=600_000_000, **options):
    """Return an httpx.AsyncClient that pays by x402."""
    from x402 import x402Client
    from x402.http.clients import x402HttpxClient

    return x402HttpxClient(prepared(x402Client(), account, limit, asset, limit_units), **options)


def prepared(client, account, limit, asset, limit_units):
    from x402.mechanisms.evm.exact import ExactEvmScheme

    client.register(NETWORK, ExactEvmScheme(account))
    controls = {"max_amount_per_payment": limit}
    if asset:
        allowed = {"network": NETWORK, "asset": asset, "max_amount_per_payment": str(limit_units)}
        controls["allowed_assets"] = [allowed]
    return client.set_spend_controls(controls)


def mpp_client(account, *, max_amount="600", currency=None, **options):
    """Return pympp's client (``await client.fetch(url, method="POST", json=…)``) paying evm/charge in USDC on Base.

    Another token: `currency`, with chain_id, decimals and authorization={"name": …, "version": …}.
    """
    from mpp.client import Mpp
    from mpp.methods.evm import BASE_USDC
    from mpp.methods.evm import client as evm

    charge = evm.charge(currency=currency or BASE_USDC, account=account, max_amount=max_amount, **options)
    return Mpp(methods=[charge])


# Fixtures: each test has a chain of its own, which takes anvil a twentieth of a second


@pytest.fixture
def anvil():
    with running_chain() as chain:
        yield chain


@pytest.fixture
def facilitator(anvil):
    with running_facilitator(anvil) as facilitator:
        yield facilitator
