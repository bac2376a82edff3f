"""Who takes part: wallets that sign, deals as their parties know them, and requests on the wire."""

import base64
import dataclasses
import json
import random
import re

import coincurve

import chain
import deals

HOST = "https://deals.test"


class Party:
    """Somebody with a wallet: a key, or a contract wallet that the key owns."""

    def __init__(self, name, number, *, contract=False):
        self.name, self.key = name, number.to_bytes(32, "big")
        self.own = chain.address_of(coincurve.PublicKey.from_secret(self.key).format())
        self.contract = contract
        self.address = "0x" + chain.keccak(self.own.encode())[12:].hex() if contract else self.own

    def sign(self, digest):
        """Sign as the account does: 65 bytes, or a contract wallet's longer form."""
        signature = chain.sign(self.key, digest)
        return "0x" + "00" * 32 + signature[2:] if self.contract else signature

    def prove(self, deal_id, action, fields, service, account=None):
        """Return an action's body with this wallet's signature of the documented text."""
        details = "0x" + chain.sha256(chain.canonical(fields)).hex() if fields else "-"
        text = (
            f"{service}\ndeal: {deal_id}\naction: {action}\n"
            f"account: {chain.checksum(account or self.address)}\ndetails: {details}"
        )
        return {**fields, "signature": self.sign(chain.personal_digest(text))}


@dataclasses.dataclass
class Payment:
    """One signed payment, with everything the service has answered to it."""

    payer: Party
    authorization: chain.Authorization
    signature: str
    headers: dict
    path: str
    answers: list = dataclasses.field(default_factory=list)

    @property
    def key(self):
        return self.authorization.payer, self.authorization.nonce


@dataclasses.dataclass
class Deal:
    """One intended deal: its terms, its people, and what happened to them."""

    index: int
    rng: random.Random
    buyer: Party
    rival: Party
    seller: Party
    secret: str
    body: dict
    terms: deals.Terms
    id: str
    deposit: str
    price: int
    master: bytes  # the public master key it is under
    quoted: bool = False  # from here on it stays under this key, whatever wallets the operator makes
    payments: list = dataclasses.field(default_factory=list)


def intend(index, seed, master_key, price_units):
    """Draw one deal from its own stream; ``price_units`` is the published price of an amount."""
    rng = random.Random(f"prove/{seed}/deal/{index}")
    first = 1000 + 3 * index
    buyer = Party(f"buyer {index}", first, contract=rng.random() < 0.1)
    seller = Party(f"seller {index}", first + 1, contract=rng.random() < 0.1)
    rival = Party(f"rival {index}", first + 2)
    secret = f"the secret of {seed}/{index}: {rng.getrandbits(64):x}"
    cents = rng.choice((50, 50_000, rng.randrange(50, 50_001), rng.randrange(50, 500)))
    body = {
        "amount_usd": f"{cents // 100}.{cents % 100:02d}",
        "seller_address": chain.checksum(seller.address),
        "network": "base",
        "secret_hash": chain.sha256(secret.encode()).hex(),
    }
    if rng.random() < 0.8:
        body["deadline_hours"] = rng.choice((1, 1, 2, 24, 720))
        body["review_hours"] = rng.choice((1, 1, 2, 24, 336))
    if rng.random() < 0.3:
        body["instant"] = True
    if rng.random() < 0.2:
        body["ref"] = f"order {index}"
    terms = deals.terms(body)
    return Deal(
        index, rng, buyer, rival, seller, secret, body, terms, terms.deal_id(master_key),
        chain.deposit_address(master_key, terms.canonical), price_units(terms.amount_units), master_key,
    )  # fmt: skip


# -- Payments on the wire -----------------------------------------------------------------------------------------


def pay(deal, payer, token, quote, path, *, now, protocol, extensions=None, **changes):
    """Sign what a 402 asks for, as a client of either protocol would; returns a Payment."""
    wanted = quote.json["accepts"][0]
    challenge = dict(re.findall(r'(\w+)="([^"]*)"', quote.headers["WWW-Authenticate"]))
    derived = challenge["id"] + challenge["realm"]
    if deal.rng.random() < 0.5:
        derived = json.dumps([challenge["id"], challenge["realm"]], separators=(",", ":"))
    nonce = derived if protocol == "mpp" else f"{deal.id}/{payer.name}/{len(deal.payments)}"
    fields = {
        "payer": payer.address,
        "to": wanted["payTo"].lower(),
        "value": int(wanted["amount"]),
        "valid_after": 0,
        "valid_before": int(now) + wanted["maxTimeoutSeconds"],
        "nonce": "0x" + chain.keccak(nonce.encode()).hex(),
    }
    authorization = chain.Authorization(**{**fields, **changes})
    signature = payer.sign(authorization.digest(token))
    if protocol == "x402":
        value = {
            "x402Version": 2, "resource": quote.json["resource"], "accepted": wanted,
            "payload": {"authorization": authorization.wire(), "signature": signature}, "extensions": extensions or {},
        }  # fmt: skip
        headers = {"PAYMENT-SIGNATURE": base64.b64encode(json.dumps(value).encode()).decode()}
    else:
        payload = {"type": "authorization", **authorization.wire(), "signature": signature}
        value = json.dumps({"challenge": challenge, "payload": payload}).encode()
        headers = {"Authorization": "Payment " + base64.urlsafe_b64encode(value).decode().rstrip("=")}
    return Payment(payer, authorization, signature, headers, path)
