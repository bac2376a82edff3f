"""Contract wallets (ERC-1271) as sellers and as payers, on a real EVM with the official facilitator."""

import base64
import json
import time

import flask
import pytest
import requests
from eth_account import Account
from eth_account.messages import encode_defunct
from evm import rig
from test_onchain import TREASURY, deal_for, payer, record, seller, service, terms  # noqa: F401 (fixtures)

import chain

# Contracts written by hand: each answers isValidSignature in its own way.
SAYS_YES_TO_V_1 = "0x60a43560001a600114631626ba7e0260e01b60005260206000f3"  # as a Safe's pre-approved hash: v is 1
SAYS_TRUE = "0x600160005260206000f3"  # the word 1, not the magic value
SAYS_NOTHING = "0x00"
REVERTS = "0x60006000fd"
NEVER_ENDS = "0x5b600056"
INVALID = "0xfe"
MAGIC_IN_THE_WRONG_PLACE = "0x631626ba7e60005260206000f3"  # right-aligned


@pytest.fixture
def owner():
    return Account.create()


@pytest.fixture
def wallet(anvil, owner):
    return anvil.place_wallet(owner.address)


class At:
    """Somebody that has only an address, for `terms`."""

    def __init__(self, address):
        self.address = address


def sign(text, key, prefix=b""):
    return "0x" + (prefix + bytes(key.sign_message(encode_defunct(text=text)).signature)).hex()


def act(service, deal, action, fields=None, **proof):
    """Post one action; with `key` it is signed by that key, after `prefix`."""
    url, body = f"{service.url}/v1/deals/{deal['id']}/{action}", dict(fields or {})
    if "key" in proof:
        text = requests.post(url, json=body, timeout=30).json()["sign"]
        proof = {"signature": sign(text, proof["key"], proof.get("prefix", b""))}
    return requests.post(url, json={**body, **proof}, timeout=60)


# Sellers.


@pytest.mark.parametrize("prefix", [b"", b"\x01" * 20, b"\x02" * 300], ids=["65 bytes", "85 bytes", "365 bytes"])
def test_a_contract_wallet_sells_and_is_paid(service, anvil, payer, owner, wallet, prefix):
    deal = deal_for(service, payer, At(wallet))
    for action, fields in (("accept", {}), ("deliver", {"note": "done"})):
        answer = act(service, deal, action, fields, key=owner, prefix=prefix)
        assert answer.status_code == 200, answer.json()
    assert act(service, deal, "confirm", secret="correct horse battery staple").json()["state"] == "released"
    service.sweep()
    assert (anvil.balance(wallet), anvil.balance(TREASURY)) == (20_000_000, 292_000)
    assert service.audit() == []


def test_what_the_owner_signed_for_something_else_proves_nothing(service, payer, owner, wallet):
    deal, other = (deal_for(service, payer, At(wallet), ref=ref) for ref in ("one", "two"))
    url = f"{service.url}/v1/deals/{deal['id']}/accept"
    text = requests.post(url, json={}, timeout=30).json()["sign"]
    wrong = [
        sign(text, Account.create()),
        sign(text.replace(deal["id"], other["id"]), owner),
        sign(text.replace("accept", "refund"), owner),
        sign(text.replace(chain.checksum(wallet.lower()), owner.address), owner),
        sign(text, owner)[:-2],
        sign(text, owner) + "00",
        "0x00",
    ]
    answers = [act(service, deal, "accept", signature=signature) for signature in wrong]
    assert {answer.status_code for answer in answers} == {403} and len({answer.content for answer in answers}) == 1
    assert answers[0].json()["error"] == "invalid_signature"
    assert record(service, deal)["state"] == "funded"
    assert act(service, deal, "accept", key=owner).json()["state"] == "accepted"


def test_the_owner_of_the_wallet_is_not_the_wallet(service, payer, owner, wallet):
    deal = deal_for(service, payer, At(owner.address))
    assert act(service, deal, "accept", key=owner).status_code == 200
    other = deal_for(service, payer, At(rig.to_checksum_address("0x" + "ab" * 20)))
    assert act(service, other, "accept", key=owner).status_code == 403


@pytest.mark.parametrize(
    "code", [SAYS_TRUE, SAYS_NOTHING, REVERTS, NEVER_ENDS, INVALID, MAGIC_IN_THE_WRONG_PLACE, "0x"],
    ids="says-true says-nothing reverts never-ends invalid magic-in-the-wrong-place no-code".split(),
)  # fmt: skip
def test_a_contract_that_does_not_say_yes_proves_nothing(service, anvil, payer, owner, code):
    address = rig.to_checksum_address("0x" + "cd" * 20)
    anvil.rpc("anvil_setCode", [address, code])
    deal = deal_for(service, payer, At(address))
    answer = act(service, deal, "accept", key=owner)
    assert (answer.status_code, answer.json()["error"]) == (403, "invalid_signature")
    assert record(service, deal)["state"] == "funded"


def test_a_contract_gets_the_signature_byte_for_byte(service, anvil, payer):
    address = rig.to_checksum_address("0x" + "ce" * 20)
    anvil.rpc("anvil_setCode", [address, SAYS_YES_TO_V_1])
    deal = deal_for(service, payer, At(address))
    assert act(service, deal, "accept", signature="0x" + "00" * 64 + "1c").status_code == 403
    assert act(service, deal, "accept", signature="0x" + "00" * 64 + "01").status_code == 200


class Flaky:
    """An RPC node before anvil that refuses some calls as public nodes do."""

    def __init__(self, anvil):
        self.anvil, self.error, self.app = anvil, None, flask.Flask("node")
        self.app.post("/")(self.answer)

    def answer(self):
        body = flask.request.get_json()
        if self.error and isinstance(body, dict) and body["method"] == "eth_call":
            return {"jsonrpc": "2.0", "id": body["id"], "error": self.error}
        return flask.Response(requests.post(self.anvil.url, json=body, timeout=30).content, content_type="application/json")


@pytest.mark.parametrize(
    "error",
    [
        {"code": -32016, "message": "over rate limit"},
        {"code": -32005, "message": "daily request count exceeded, request rate limited"},
        {"code": -32603, "message": "Internal error"},
        {"code": -32000, "message": "header not found"},
    ],
    ids=lambda error: error["message"],
)
def test_a_node_that_does_not_answer_the_question_is_not_a_no(service, anvil, payer, owner, wallet, error, monkeypatch):
    deal = deal_for(service, payer, At(wallet))
    flaky = Flaky(anvil)
    with rig.serve(flaky.app) as url:
        monkeypatch.setattr(service.world.ledger, "url", url)
        flaky.error = error
        for _ in range(12):
            answer = act(service, deal, "accept", key=owner)
            assert (answer.status_code, answer.json()["error"]) == (503, "unavailable")
            assert answer.headers["Retry-After"] == "5"
        flaky.error = None
        assert act(service, deal, "accept", key=owner).json()["state"] == "accepted", "none of these was a wrong proof"


# Payers.


def pay(service, payer_address, key, seller, *, prefix=b"", tamper=None, **fields):
    """Pay by x402 from the contract wallet that `key` owns, with a header made by hand."""
    url, body = service.url + "/x402/deal", terms(seller, **fields)
    quote = requests.post(url, json=body, timeout=30).json()
    wanted = quote["accepts"][0]
    signed = rig.authorize(
        key, wanted["payTo"], int(wanted["amount"]), payer=payer_address, valid_before=int(time.time()) + 300, prefix=prefix
    )
    names = ("from", "to", "value", "validAfter", "validBefore", "nonce")
    payment = {
        "x402Version": 2, "resource": quote["resource"], "accepted": wanted,
        "payload": {"signature": tamper or signed["signature"], "authorization": {name: signed[name] for name in names}},
    }  # fmt: skip
    header = base64.b64encode(json.dumps(payment).encode()).decode()
    return requests.post(url, json=body, headers={"PAYMENT-SIGNATURE": header}, timeout=60)


@pytest.mark.parametrize("prefix", [b"", b"\x01" * 20], ids=["65 bytes", "85 bytes"])
def test_a_contract_wallet_pays_and_gets_its_refund(service, anvil, owner, wallet, seller, prefix):
    anvil.mint(wallet, 50_000_000)
    answer = pay(service, wallet, owner, seller, prefix=prefix)
    assert answer.status_code == 200, answer.json()
    deal = answer.json()[0]
    assert (deal["state"], deal["buyer_address"], anvil.balance(wallet)) == ("funded", wallet, 50_000_000 - 20_292_000)
    assert act(service, deal, "refund", key=seller).json()["state"] == "refunded"
    service.sweep()
    assert anvil.balance(wallet) == 50_000_000 - 292_000
    assert service.audit() == []


def test_a_contract_wallet_that_lost_the_secret_acts_by_signature(service, anvil, owner, wallet, seller):
    anvil.mint(wallet, 50_000_000)
    deal = pay(service, wallet, owner, seller, prefix=b"\x01" * 20).json()[0]
    assert act(service, deal, "cancel", key=Account.create()).status_code == 403
    assert act(service, deal, "cancel", key=owner, prefix=b"\x01" * 20).json()["state"] == "refunded"


def test_a_contract_wallet_does_not_pay_by_a_strangers_signature(service, anvil, wallet, seller):
    anvil.mint(wallet, 50_000_000)
    answer = pay(service, wallet, Account.create(), seller)
    assert answer.status_code == 402 and "signature" in answer.json()["error"]
    assert pay(service, wallet, Account.create(), seller, tamper="0x" + "5b" * 64 + "1c").status_code == 402
    assert anvil.balance(wallet) == 50_000_000
    assert service.db.execute("SELECT count(*) FROM deals").fetchone()[0] == 0


def test_a_wallet_that_is_not_deployed_yet_cannot_pay(service, anvil, owner, seller):
    address = rig.to_checksum_address("0x" + "ef" * 20)
    anvil.mint(address, 50_000_000)
    answer = pay(service, address, owner, seller, prefix=b"\x01" * 20)
    assert (answer.status_code, anvil.balance(address)) == (402, 50_000_000)


def test_a_contract_wallet_without_the_money_is_asked_to_top_up(service, anvil, owner, wallet, seller):
    answer = pay(service, wallet, owner, seller, prefix=b"\x01" * 20)
    assert answer.status_code == 402 and "insufficient" in answer.json()["error"]
    anvil.mint(wallet, 50_000_000)
    assert pay(service, wallet, owner, seller, prefix=b"\x01" * 20).status_code == 200


def test_a_payer_that_nobody_can_check_now_is_told_so_and_not_charged(service, anvil, owner, wallet, seller, monkeypatch):
    anvil.mint(wallet, 50_000_000)
    flaky = Flaky(anvil)
    with rig.serve(flaky.app) as url:
        monkeypatch.setattr(service.world.ledger, "url", url)
        flaky.error = {"code": -32016, "message": "over rate limit"}
        answer = pay(service, wallet, owner, seller)
        assert (answer.status_code, answer.json()["error"]) == (503, "unavailable")
    assert anvil.balance(wallet) == 50_000_000
    assert service.db.execute("SELECT count(*) FROM deals").fetchone()[0] == 0
