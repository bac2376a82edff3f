"""Two agents do three deals over HTTP against a sandbox, with the payment headers that real clients send."""

import base64
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time

import click
import coincurve
import requests

import chain
import protocols

DAY = 24 * 3600


class Agent:
    """A party with a wallet of its own."""

    def __init__(self, name, url):
        self.name, self.url, self.key = name, url, secrets.token_bytes(32)
        self.address = chain.address_of(coincurve.PublicKey.from_secret(self.key).format())

    def call(self, method, path, *, body=None, headers=None, say=""):
        """Make one call and print it on one line."""
        answer = requests.request(method, self.url + path, json=body, headers=headers, timeout=60)
        shown = re.sub(r"deal_\w{20}(\w+)", r"deal_…\1", path)
        color = "green" if answer.status_code in (200, 402) else "red"
        status = click.style(answer.status_code, fg=color, bold=True)
        click.echo(f"  {self.name:6} {method:4} {shown:36} → {status}  {say or _gist(answer)}")
        return answer

    def sign(self, deal, action, fields=None):
        """Return the body that proves this agent for an action: its fields and the signature of the exact text."""
        text = requests.post(f"{self.url}/v1/deals/{deal}/{action}", json=fields or {}, timeout=60).json()
        text = text.get("sign_as", {}).get(self.name) or text["sign"]
        return {**(fields or {}), "signature": chain.sign(self.key, chain.personal_digest(text))}


def _gist(answer):
    value = answer.json()
    if isinstance(value, list):
        value = value[0]
    return value.get("error") or f"{value.get('state', '')}".strip()


def main(url=None):
    """Run the story against ``url``, or against a sandbox started for it. Returns the exit code."""
    if url:
        return _story(url.rstrip("/"))
    with tempfile.TemporaryDirectory() as folder:
        server, url = _start(folder)
        try:
            return _story(url)
        finally:
            server.terminate()
            server.wait(timeout=20)


def _start(folder):
    """Start gunicorn and the sweep on a fresh sandbox in ``folder``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DEALS_")}
    environ |= {"DEALS_DATABASE": f"{folder}/deals.db", "DEALS_WALLET": f"{folder}/wallet.json"}
    here = os.path.dirname(os.path.abspath(__file__))
    with open(f"{folder}/log", "w", encoding="utf-8") as log:
        server = subprocess.Popen(
            [sys.executable, os.path.join(here, "cli.py"), "serve", "--port", str(port)],
            env=environ, stdout=log, stderr=log,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    for _ in range(200):
        try:
            requests.get(f"{url}/health", timeout=5)
            return server, url
        except requests.ConnectionError:
            if server.poll() is not None:
                break
            time.sleep(0.1)
    with open(f"{folder}/log", encoding="utf-8") as log:
        raise click.ClickException(f"The sandbox did not start:\n{log.read()}")


def _story(url):
    if requests.get(f"{url}/health", timeout=10).json().get("mode") != "sandbox":
        raise click.ClickException(f"{url} is not a sandbox; the demo uses no real money.")
    buyer, seller = Agent("buyer", url), Agent("seller", url)
    click.secho(f"A sandbox at {url}: its dollar is worth nothing, everything else is real.\n", bold=True)
    granted = requests.post(f"{url}/sandbox/faucet", json={"address": buyer.address}, timeout=10).json()
    click.echo(f"  buyer  {chain.checksum(buyer.address)} has {granted['balance_usd']} from the faucet")
    click.echo(f"  seller {chain.checksum(seller.address)} has nothing yet")
    ended = [
        _good_deal(buyer, seller),
        _disputed_deal(buyer, seller),
        _forgotten_deal(buyer, seller),
    ]
    return _balances(url, buyer, seller, ended)


def _title(text):
    click.echo()
    click.secho(text, bold=True)


def _terms(seller, secret, amount, **more):
    return {
        "amount_usd": amount,
        "seller_address": chain.checksum(seller.address),
        "network": "base",
        "secret_hash": chain.sha256(secret.encode()).hex(),
        **more,
    }


def _good_deal(buyer, seller):
    _title("1. x402: accepted, delivered, confirmed, paid out")
    secret = secrets.token_hex(16)
    deal = _pay_x402(buyer, _terms(seller, secret, "20.00", ref="logo design"))
    path = f"/v1/deals/{deal}"
    seller.call("POST", f"{path}/accept", body=seller.sign(deal, "accept"))
    work = {"url": "https://files.example/logo.svg", "note": "final version"}
    seller.call("POST", f"{path}/deliver", body=seller.sign(deal, "deliver", work))
    buyer.call("POST", f"{path}/confirm", body={"secret": secret})
    return _paid_out(seller, deal)


def _disputed_deal(buyer, seller):
    _title("2. MPP: delivered, disputed, settled by a split that both name")
    secret = secrets.token_hex(16)
    deal = _pay_mpp(buyer, _terms(seller, secret, "50.00", ref="translation"))
    path = f"/v1/deals/{deal}"
    seller.call("POST", f"{path}/accept", body=seller.sign(deal, "accept"))
    seller.call("POST", f"{path}/deliver", body=seller.sign(deal, "deliver", {"note": "translated"}))
    buyer.call("POST", f"{path}/dispute", body={"reason": "Half of the pages are missing.", "secret": secret})
    statement = {"statement": "The rest was not in the order."}
    seller.call("POST", f"{path}/statement", body=seller.sign(deal, "statement", statement))
    say = "offers the seller 30.00 of the 50.00"
    buyer.call("POST", f"{path}/split", body={"seller_usd": "30.00", "secret": secret}, say=say)
    seller.call("POST", f"{path}/split", body=seller.sign(deal, "split", {"seller_usd": "30.00"}))
    return _paid_out(buyer, deal)


def _forgotten_deal(buyer, seller):
    _title("3. x402: nobody accepts, so the clock refunds")
    deal = _pay_x402(buyer, _terms(seller, secrets.token_hex(16), "5.00", deadline_hours=24))
    click.echo("  (the demo moves this deal 24 hours into the past; only a sandbox can do that)")
    requests.post(f"{buyer.url}/sandbox/deals/{deal}/skip", json={"seconds": DAY}, timeout=10)
    buyer.call("GET", f"/v1/deals/{deal}")
    return _paid_out(buyer, deal)


# -- Paying as clients do -------------------------------------------------------------------------------------


def _pay_x402(buyer, terms):
    """Answer the 402 as an x402 client does: sign what it requires, send the same request again."""
    quote = buyer.call("POST", "/x402/deal", body=terms, say="the quote: price, deposit address, deal id")
    required = json.loads(base64.b64decode(quote.headers["PAYMENT-REQUIRED"]))
    wanted, deal = required["accepts"][0], required["extensions"]["deal"]["info"]
    _check_deposit(deal, wanted["payTo"])
    header = x402_header(required, buyer.address, lambda authorization: _signed(buyer, authorization, wanted))
    say = f"paid {int(wanted['amount']) / 1e6:.2f}, funded"
    receipt = buyer.call("POST", "/x402/deal", body=terms, headers={"PAYMENT-SIGNATURE": header}, say=say).json()
    return receipt[0]["id"]


def x402_header(required, payer, sign):
    """Return the PAYMENT-SIGNATURE with which ``payer`` pays what a 402 requires; ``sign`` signs the authorization."""
    wanted = required["accepts"][0]
    authorization = chain.Authorization(
        payer=payer, to=wanted["payTo"].lower(), value=int(wanted["amount"]), valid_after=0,
        valid_before=int(time.time()) + wanted["maxTimeoutSeconds"], nonce="0x" + secrets.token_hex(32),
    )  # fmt: skip
    payment = {
        "x402Version": 2,
        "resource": required["resource"],
        "accepted": wanted,
        "payload": {"authorization": authorization.wire(), "signature": sign(authorization)},
    }
    return base64.b64encode(json.dumps(payment).encode()).decode()


def _pay_mpp(buyer, terms):
    """Answer the 402 as an MPP client does: a credential that echoes the challenge, its nonce bound to it."""
    quote = buyer.call("POST", "/mpp/deal", body=terms, say="the quote, as an MPP challenge")
    challenge = dict(re.findall(r'(\w+)="([^"]*)"', quote.headers["WWW-Authenticate"]))
    request = json.loads(base64.urlsafe_b64decode(challenge["request"] + "=="))
    wanted = quote.json()["accepts"][0]
    _check_deposit(quote.json()["extensions"]["deal"]["info"], request["recipient"])
    authorization = chain.Authorization(
        payer=buyer.address, to=request["recipient"].lower(), value=int(request["amount"]), valid_after=0,
        valid_before=protocols.expiry(challenge["expires"]),
        nonce="0x" + chain.keccak((challenge["id"] + challenge["realm"]).encode()).hex(),
    )  # fmt: skip
    payload = {"type": "authorization", **authorization.wire(), "signature": _signed(buyer, authorization, wanted)}
    credential = {"challenge": challenge, "payload": payload}
    header = "Payment " + base64.urlsafe_b64encode(json.dumps(credential).encode()).decode().rstrip("=")
    say = f"paid {int(request['amount']) / 1e6:.2f}, funded"
    receipt = buyer.call("POST", "/mpp/deal", body=terms, headers={"Authorization": header}, say=say).json()
    return receipt[0]["id"]


def _signed(buyer, authorization, wanted):
    token = chain.Token(wanted["asset"].lower(), wanted["extra"]["name"], wanted["extra"]["version"], 8453)
    return chain.sign(buyer.key, authorization.digest(token))


def _check_deposit(deal, pay_to):
    """Recompute the deposit address from the published key and our own terms, before signing anything."""
    expected = chain.deposit_address(bytes.fromhex(deal["masterKey"]), deal["terms"].encode())
    if pay_to.lower() != expected:
        raise click.ClickException("The deposit address does not follow from the terms: do not pay.")
    click.echo(f"  buyer  checks that {chain.checksum(expected)} follows from the terms: it does")


# -- What came of it ------------------------------------------------------------------------------------------


def _paid_out(agent, deal):
    """Wait until the sweep has paid everything out; returns the record."""
    for _ in range(150):
        record = requests.get(f"{agent.url}/v1/deals/{deal}", timeout=10).json()
        if record["transfers"] and all(leg["status"] == "confirmed" for leg in record["transfers"]):
            legs = ", ".join(f"{leg['leg']} {leg['amount_usd']}" for leg in record["transfers"])
            click.echo(f"  sweep  pays out: {legs}")
            return record
        time.sleep(0.2)
    raise click.ClickException(f"{deal} was not paid out within 30 s: is a sweep running?")


def _balances(url, buyer, seller, ended):
    """Print where the money is; returns 0 when it adds up to what the faucet gave."""
    _title("Where the money is")

    def held(address):
        return float(requests.get(f"{url}/sandbox/balances/{address}", timeout=10).json()["balance_usd"])

    fees = sum(float(leg["amount_usd"]) for record in ended for leg in record["transfers"] if leg["leg"] == "fee")
    deposits = sum(held(record["deposit_address"]) for record in ended)
    parts = {"buyer": held(buyer.address), "seller": held(seller.address), "fees": fees, "deposits": deposits}
    for name, dollars in parts.items():
        click.echo(f"  {name:9} {dollars:11.4f}")
    total, expected = round(sum(parts.values()), 6), 1000.0
    word = click.style("adds up", fg="green", bold=True) if total == expected else click.style("IS OFF", fg="red")
    click.echo(f"  {'total':9} {total:11.4f}  of {expected:.2f} from the faucet: {word}")
    return 0 if total == expected else 1
