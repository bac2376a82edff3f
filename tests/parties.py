"""Buyers and sellers for tests: they sign what real clients sign and speak HTTP through a test client."""

import base64
import dataclasses
import glob
import json
import os
import re
import traceback

import coincurve

import app as application
import chain
import db as database
import facilitators
import sandbox

SECRET = "correct horse battery staple"


class Party:
    """Somebody with a wallet whose key is a small number, so that addresses repeat from run to run."""

    def __init__(self, client, world, number):
        self.client, self.world = client, world
        self.key = number.to_bytes(32, "big")
        self.address = chain.address_of(coincurve.PublicKey.from_secret(self.key).format())

    def post(self, deal_id, action, body=None, **options):
        return self.client.post(f"/v1/deals/{deal_id}/{action}", json=body or {}, **options)

    def proof(self, deal_id, action, fields=None, *, account=None):
        """Return the action's body with this wallet's signature of the documented text."""
        fields = fields or {}
        details = "0x" + chain.sha256(chain.canonical(fields)).hex() if fields else "-"
        text = (
            f"{self.world.settings.service_name}\ndeal: {deal_id}\naction: {action}\n"
            f"account: {chain.checksum(account or self.address)}\ndetails: {details}"
        )
        return {**fields, "signature": chain.sign(self.key, chain.personal_digest(text))}

    def act(self, deal_id, action, fields=None, **options):
        """Carry out an action with a signature; returns the response."""
        return self.post(deal_id, action, self.proof(deal_id, action, fields), **options)


class Seller(Party):
    pass


class Buyer(Party):
    def funded(self, units=10_000_000_000):
        sandbox.mint(self.world.facilitators[0].connect(), self.address, units)
        return self

    def request(self, seller=None, **fields):
        """Return a request body for a deal; every field can be overridden, None leaves one out."""
        body = {
            "amount_usd": "20.00",
            "seller_address": chain.checksum(seller.address if seller else chain.address_of(_point(2))),
            "network": "base",
            "secret_hash": chain.sha256(SECRET.encode()).hex(),
        }
        return {name: value for name, value in {**body, **fields}.items() if value is not None}

    def quote(self, body, path="/x402/deal", **options):
        return self.client.post(path, json=body, **options)

    def authorization(self, quote, **changes):
        """Return the authorization that a quote (a 402 response) asks for, as a client would make it."""
        wanted = quote.json["accepts"][0]
        fields = {
            "payer": self.address,
            "to": wanted["payTo"].lower(),
            "value": int(wanted["amount"]),
            "valid_after": 0,
            "valid_before": int(self.world.clock()) + wanted["maxTimeoutSeconds"],
            "nonce": "0x" + chain.keccak(f"{self.address}{wanted['payTo']}".encode()).hex(),
        }
        return chain.Authorization(**{**fields, **changes})

    def sign(self, authorization):
        return chain.sign(self.key, authorization.digest(self.world.terminal.token))

    def x402(self, quote, *, signature=None, extensions=None, **changes):
        """Return the PAYMENT-SIGNATURE header for a quote."""
        authorization = self.authorization(quote, **changes)
        payment = {
            "x402Version": 2,
            "resource": quote.json["resource"],
            "accepted": quote.json["accepts"][0],
            "payload": {
                "authorization": authorization.wire(),
                "signature": signature or self.sign(authorization),
            },
        }
        if extensions:
            payment["extensions"] = extensions
        return {"PAYMENT-SIGNATURE": base64.b64encode(json.dumps(payment).encode()).decode()}

    def mpp(self, quote, *, nonce="draft", echo=None, **changes):
        """Return the Authorization header for a quote's MPP challenge; ``nonce`` as the draft's or pympp's clients."""
        challenge = dict(re.findall(r'(\w+)="([^"]*)"', quote.headers["WWW-Authenticate"]))
        derived = challenge["id"] + challenge["realm"]
        if nonce == "pympp":
            derived = json.dumps([challenge["id"], challenge["realm"]], separators=(",", ":"))
        authorization = self.authorization(
            quote, **{"nonce": "0x" + chain.keccak(derived.encode()).hex(), **changes}
        )
        credential = {
            "challenge": {**challenge, **(echo or {})},
            "payload": {"type": "authorization", **authorization.wire(), "signature": self.sign(authorization)},
            "source": f"did:pkh:eip155:8453:{chain.checksum(self.address)}",
        }
        return {"Authorization": "Payment " + _b64url(json.dumps(credential).encode())}

    def pay(self, seller=None, *, protocol="x402", path=None, headers=None, **fields):
        """Quote and pay for a deal; returns the response of the paid call."""
        body = self.request(seller, **fields)
        path = path or f"/{protocol}/deal"
        quote = self.quote(body, path)
        assert quote.status_code == 402, quote.get_data(as_text=True)
        payment = getattr(self, protocol)(quote)
        return self.client.post(path, json=body, headers={**payment, **(headers or {})})

    def deal(self, seller=None, **fields):
        """Pay for a deal and return its id."""
        answer = self.pay(seller, **fields)
        assert answer.status_code == 200, answer.get_data(as_text=True)
        return answer.json[0]["id"]

    def reveal(self, deal_id, action, fields=None, secret=SECRET, **options):
        """Carry out an action with the secret; returns the response."""
        return self.post(deal_id, action, {**(fields or {}), "secret": secret}, **options)


def writers(path):
    """Return the connections this thread writes with: its own, and the one for what threads do together."""
    own = database.here(path)
    return own, own.door.connection()


def _point(number):
    return coincurve.PublicKey.from_secret(number.to_bytes(32, "big")).format()


def _b64url(data):
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


# -- A service under test -----------------------------------------------------------------------------------


def nonce(number):
    return f"0x{number:064x}"


def send(client, body, payment, path="/x402/deal", **headers):
    """Make the paid call; further headers by name with underscores."""
    more = {name.replace("_", "-"): value for name, value in headers.items()}
    return client.post(path, json=body, headers={**payment, **more})


def error(answer):
    return answer.status_code, answer.json["error"]


def balance(world, address):
    return sandbox.balance(world.facilitators[0].connect(), address.lower())


def files(world):
    """Return the bytes of everything the service has stored that is not a mere counter."""
    found = {}
    for path in glob.glob(world.settings.database + "*"):
        if ".counters" not in path and not path.endswith("-shm"):  # the WAL's index holds marks of who reads
            with open(path, "rb") as file:
                found[path] = file.read()
    return found


class Scripted(facilitators.Facilitator):
    """A facilitator that says what it is told to say; with ``moves`` it really settles before it speaks."""

    def __init__(self, real, verdict=None, outcome=None, moves=False, url="https://one.test"):
        self.real, self.verdict, self.outcome, self.moves, self.url = real, verdict, outcome, moves, url
        self.connect, self.calls = real.connect, []

    def verify(self, payload, requirements, *, seconds):
        self.calls.append("verify")
        return self.verdict or self.real.verify(payload, requirements, seconds=seconds)

    def settle(self, payload, requirements, *, seconds):
        self.calls.append("settle")
        found = self.real.settle(payload, requirements, seconds=seconds) if self.moves or not self.outcome else None
        return self.outcome or found


def serving(world, *peers, **settings):
    """Return a client of the same service with these facilitators and settings."""
    settings = dataclasses.replace(world.settings, **settings)
    return application.create_app(world=dataclasses.replace(world, facilitators=peers, settings=settings)).test_client()


def another(world, **options):
    """Return a client of the same service, whose one facilitator follows a script."""
    return serving(world, Scripted(world.facilitators[0], **options))


def fork(function):
    """Run ``function`` in a process of its own; returns its pid. It exits 0, or 70 after an exception."""
    inherited = dict(vars(database._thread))  # a connection must not even be closed on this side of the fork
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        vars(database._thread).clear()
        function()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
