"""The unpaid half of the paid call: what the quote says, and bodies that start no deal."""

import base64
import dataclasses
import hashlib
import io
import json
import re

import pytest
from eth_account import Account

import chain
import deals
import payments
from deals import Refusal
from parties import SECRET, balance, error, files

PATHS = ("/x402/deal", "/mpp/deal")
SECRET_HASH = "c4bbcb1fbec99d65bf59d85c8cb62ee2db963f0fe106f483d9afa73bd4e39a8a"  # of parties.SECRET
SELLER = "0x2B5AD5c4795c026514f8317c7a215E218DcCD6cF"  # the wallet of key 2
DOLLAR = "0x5a4DB0c5A4dB0c5a4DB0C5A4dB0c5a4DB0C5A4db"


def deposit(wallets, terms):
    """The deposit address as the published construction says, from the operator's private key."""
    (public, secret), = wallets.items()
    tweak = hashlib.sha256(b"deposit" + public + hashlib.sha256(terms).digest()).digest()
    order = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141
    key = (int.from_bytes(secret, "big") + int.from_bytes(tweak, "big")) % order
    return Account.from_key(key).address


def deal_id(wallets, terms):
    (public, _), = wallets.items()
    digest = hashlib.sha256(b"deal" + public + hashlib.sha256(terms).digest()).digest()
    return "deal_" + base64.b32encode(digest[:16]).decode().rstrip("=").lower()


TERMS = (
    '{"amount_units":20000000,"deadline_hours":24,"instant":false,"network":"base","ref":null,"review_hours":24,'
    f'"secret_hash":"{SECRET_HASH}","seller_address":"{SELLER.lower()}"}}'
).encode()


@pytest.mark.parametrize("path", PATHS)
def test_the_quote_names_price_deposit_and_deal_in_both_protocols(client, buyer, wallets, path):
    body = json.dumps(buyer.request()).encode()
    answer = client.post(path, data=body, content_type="application/json")
    pay_to = deposit(wallets, TERMS)
    assert answer.status_code == 402
    assert base64.b64decode(answer.headers["PAYMENT-REQUIRED"], validate=True) == answer.data
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["Content-Type"] == "application/json"
    assert "X-Svc-Invalid-Request" not in answer.headers
    assert set(answer.json) == {"x402Version", "error", "resource", "accepts", "extensions"}
    assert answer.json["x402Version"] == 2
    assert answer.json["resource"]["url"] == "http://deals.test" + path
    assert answer.json["accepts"] == [
        {
            "scheme": "exact", "network": "eip155:8453", "amount": "20292000", "asset": DOLLAR, "payTo": pay_to,
            "maxTimeoutSeconds": 300, "extra": {"name": "Sandbox Dollar", "version": "1"},
        }
    ]  # fmt: skip
    info = answer.json["extensions"]["deal"]["info"]
    assert info["terms"].encode() == TERMS
    assert (info["id"], info["depositAddress"], info["mode"]) == (deal_id(wallets, TERMS), pay_to, "sandbox")
    scheme, _, rest = answer.headers["WWW-Authenticate"].partition(" ")
    challenge = dict(re.findall(r'(\w+)="([^"]*)"', rest))
    assert scheme == "Payment"
    assert list(challenge) == ["id", "realm", "method", "intent", "request", "expires", "digest", "opaque"]
    assert (challenge["realm"], challenge["method"], challenge["intent"]) == ("deals.test", "evm", "charge")
    assert challenge["expires"] == "2026-09-21T14:18:20Z"  # five minutes after the clock of these tests
    assert challenge["digest"] == f"sha-256=:{base64.b64encode(hashlib.sha256(body).digest()).decode()}:"
    assert "=" not in challenge["request"] + challenge["opaque"]
    assert base64.urlsafe_b64decode(challenge["request"] + "==").decode() == (
        f'{{"amount":"20292000","currency":"{DOLLAR}","methodDetails":{{"chainId":8453,'
        f'"credentialTypes":["authorization"],"decimals":6}},"recipient":"{pay_to}"}}'
    )
    assert json.loads(base64.urlsafe_b64decode(challenge["opaque"] + "==")) == {"deal": info["id"]}


@pytest.mark.parametrize(
    "amount, units",
    [("0.5", "597000"), ("0.50", "597000"), ("0.51", "607100"), ("1", "1102000"), ("19.99", "20281900"),
     ("500", "505092000"), ("500.00", "505092000")],
)  # fmt: skip
def test_the_price_is_a_fixed_fee_and_one_percent_on_top_of_the_amount(buyer, amount, units):
    assert buyer.quote(buyer.request(amount_usd=amount)).json["accepts"][0]["amount"] == units


@pytest.mark.parametrize("path", PATHS)
def test_a_get_quotes_the_minimum_to_the_treasury_and_starts_nothing(client, world, path):
    before = files(world)
    answer = client.get(path)
    assert answer.status_code == 402
    assert base64.b64decode(answer.headers["PAYMENT-REQUIRED"]) == answer.data
    assert (answer.json["accepts"][0]["amount"], answer.json["accepts"][0]["payTo"].lower()) == ("597000", world.treasury)
    assert answer.json["extensions"]["deal"]["info"]["id"] is None
    assert answer.headers["WWW-Authenticate"].startswith('Payment id="')
    assert files(world) == before


@pytest.mark.parametrize("path", PATHS)
def test_head_and_options_behave_as_a_web_developer_expects(client, path):
    head = client.head(path)
    assert (head.status_code, head.data) == (402, b"")
    assert head.headers["PAYMENT-REQUIRED"] and head.headers["WWW-Authenticate"]
    options = client.options(path)
    assert options.status_code in (200, 204)
    assert set(options.headers["Allow"].split(", ")) == {"GET", "HEAD", "OPTIONS", "POST"}
    assert "PAYMENT-SIGNATURE" in options.headers["Access-Control-Allow-Headers"]


@pytest.mark.parametrize("method", ["put", "patch", "delete"])
@pytest.mark.parametrize("path", PATHS)
def test_other_methods_are_told_what_the_path_takes(client, path, method):
    answer = getattr(client, method)(path)
    assert error(answer) == (405, "method_not_allowed")
    assert set(answer.headers["Allow"].split(", ")) == {"GET", "HEAD", "OPTIONS", "POST"}


def test_an_unpaid_request_writes_nothing(client, world, buyer):
    before = files(world)
    for body in (buyer.request(), buyer.request(amount_usd="1"), buyer.request(network="solana"), {}):
        assert client.post("/x402/deal", json=body, headers={"Idempotency-Key": "k"}).status_code == 402
    assert files(world) == before


# -- Bodies -------------------------------------------------------------------------------------------------

GOOD = json.dumps({"amount_usd": "20.00", "seller_address": SELLER, "network": "base", "secret_hash": SECRET_HASH})
BAD_BODIES = {
    "empty": b"",
    "not JSON": b"amount=20",
    "cut off": GOOD[:-1].encode(),
    "an array": b"[]",
    "a string": b'"deal"',
    "null": b"null",
    "a key twice": GOOD[:-1].encode() + b', "network": "base"}',
    "NaN": GOOD[:-1].encode() + b', "deadline_hours": NaN}',
    "Infinity": GOOD[:-1].encode() + b', "deadline_hours": -Infinity}',
    "a huge number": GOOD[:-1].encode() + b', "deadline_hours": 1' + b"0" * 5000 + b"}",
    "a huge exponent": GOOD[:-1].encode() + b', "deadline_hours": 1e400}',
    "deep nesting": b"[" * 60000,
    "deep nesting in a field": GOOD[:-1].encode() + b', "ref": ' + b"[" * 30000 + b"]" * 30000 + b"}",
    "not UTF-8": GOOD.encode().replace(b"base", b"b\xe4se"),
    "UTF-16": GOOD.encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf" + GOOD.encode(),
    "a lone surrogate": GOOD[:-1].encode() + b', "ref": "\\ud800"}',
}
BAD_FIELDS = [
    ("amount_usd", bad) for bad in (20, 20.5, None, "", "20.000", "020", "-20", "+20", "2e1", ".5", "20.", " 20", "20 ",
                                    "20\n", "20.0\n", "20,00", "٢٠", "0.49", "0", "500.01", "1000000000000", "999999999999.99")
] + [
    ("seller_address", bad) for bad in ("", "0x", SELLER[:-1], SELLER + "0", SELLER[2:], "0X" + SELLER[2:], "alice.eth",
                                        "0x2b5AD5c4795c026514f8317c7a215E218DcCD6cF", SELLER + "\n", 2, None,
                                        "0x" + "0" * 40, DOLLAR, DOLLAR.lower())
] + [
    ("network", bad) for bad in ("Base", "ethereum", "eip155:8453", "", None, "base\n")
] + [
    ("secret_hash", bad) for bad in ("", SECRET_HASH[1:], SECRET_HASH + "0", "0x" + SECRET_HASH, "g" * 64, SECRET, None,
                                     SECRET_HASH[1:] + "\n")
] + [
    ("deadline_hours", bad) for bad in (0, -1, 721, 1.5, "24", True, None, 2**62)
] + [
    ("review_hours", bad) for bad in (0, 337, 1.5, "24", False, None)
] + [
    ("instant", bad) for bad in (0, 1, "true", None)
] + [
    ("ref", bad) for bad in ("x" * 201, 7, None, ["x"])
] + [
    ("unknown", 1), ("Amount_usd", "20.00"), ("secret", SECRET), ("", 1),
]  # fmt: skip


def refused(client, world, buyer, raw, status=400, content_type="application/json"):
    """Check the two answers to a body that starts no deal: unpaid a marked quote, paid a plain refusal."""
    before, held = files(world), balance(world, buyer.address)
    unpaid = client.post("/x402/deal", data=raw, content_type=content_type)
    assert unpaid.status_code == 402
    assert unpaid.headers["X-Svc-Invalid-Request"] == "1"
    assert (unpaid.json["accepts"][0]["amount"], unpaid.json["accepts"][0]["payTo"].lower()) == ("597000", world.treasury)
    code, _, sentence = unpaid.json["error"].partition(": ")
    payments = [buyer.x402(unpaid), buyer.mpp(unpaid), buyer.x402(buyer.quote(buyer.request()))]
    for payment in payments:
        answer = client.post("/x402/deal", data=raw, content_type=content_type, headers=payment)
        assert error(answer) == (status, code)
        assert answer.json["message"] == sentence
    assert files(world) == before and balance(world, buyer.address) == held
    return code, sentence


@pytest.mark.parametrize("raw", BAD_BODIES.values(), ids=BAD_BODIES)
def test_a_body_that_cannot_be_read_is_quoted_with_a_warning_and_never_charged(client, world, buyer, raw):
    assert refused(client, world, buyer, raw)[0] == "invalid_request"


@pytest.mark.parametrize("field, value", BAD_FIELDS, ids=[f"{f}={str(v)[:24]!r}" for f, v in BAD_FIELDS])
def test_a_field_outside_its_rule_is_named_and_never_charged(client, world, buyer, field, value):
    raw = json.dumps({**json.loads(GOOD), field: value})
    code, sentence = refused(client, world, buyer, raw)
    assert code == "invalid_request" and (field or "unknown property").lower() in sentence.lower()


@pytest.mark.parametrize("field", ["amount_usd", "seller_address", "network", "secret_hash"])
def test_a_missing_field_is_named(client, world, buyer, field):
    body = {name: value for name, value in json.loads(GOOD).items() if name != field}
    assert refused(client, world, buyer, json.dumps(body)) == ("invalid_request", f"the body: {field} is required.")


@pytest.mark.parametrize("kind", ["text/plain", "", "application/x-www-form-urlencoded", "multipart/form-data", "json"])
def test_another_content_type_is_refused_as_such(client, world, buyer, kind):
    assert refused(client, world, buyer, GOOD, 415, kind)[0] == "unsupported_media_type"


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", "application/json;x=y"])
def test_json_with_parameters_is_json(client, kind):
    answer = client.post("/x402/deal", data=GOOD, content_type=kind)
    assert answer.status_code == 402 and "X-Svc-Invalid-Request" not in answer.headers


def test_the_treasury_and_the_deposit_are_no_sellers(client, world, buyer, monkeypatch):
    refused(client, world, buyer, json.dumps({**json.loads(GOOD), "seller_address": world.treasury}))
    # A deposit that pays itself cannot be found by trying, so the check is shown with a made-up deposit.
    monkeypatch.setattr(chain, "deposit_address", lambda key, terms: SELLER.lower())
    with pytest.raises(Refusal, match="the seller's own wallet"):
        payments.check_terms(world, json.loads(GOOD))


@pytest.mark.parametrize("seller", [SELLER, SELLER.lower(), "0x" + SELLER[2:].upper()])
def test_spellings_of_one_address_and_hash_and_amount_are_one_deal(client, seller):
    spelled = {"amount_usd": "20", "seller_address": seller, "network": "base", "secret_hash": SECRET_HASH.upper(),
               "deadline_hours": 24, "review_hours": 24.0, "instant": False}  # fmt: skip
    answer = client.post("/x402/deal", json=spelled)
    assert answer.json["extensions"]["deal"]["info"]["terms"].encode() == TERMS
    assert "X-Svc-Invalid-Request" not in answer.headers


# -- Sizes --------------------------------------------------------------------------------------------------


def padded(size):
    return GOOD.encode() + b" " * (size - len(GOOD))


def test_a_body_of_exactly_65536_bytes_is_read(client):
    assert client.post("/x402/deal", data=padded(65536), content_type="application/json").status_code == 402


@pytest.mark.parametrize("path", PATHS)
def test_a_larger_body_is_refused_and_not_charged(client, world, buyer, path):
    payment, before = buyer.x402(buyer.quote(buyer.request())), files(world)
    for headers in ({}, payment):
        answer = client.post(path, data=padded(65537), content_type="application/json", headers=headers)
        assert error(answer) == (413, "body_too_large")
    assert files(world) == before


def test_a_chunked_body_without_a_length_is_not_read_past_the_limit(client):
    class Endless(io.RawIOBase):
        given = 0

        def readable(self):
            return True

        def readinto(self, buffer):
            assert self.given < 4 << 20, "the service goes on reading"
            self.given += len(buffer)
            buffer[:] = b" " * len(buffer)
            return len(buffer)

    endless = Endless()
    chunked = {"wsgi.input": endless, "wsgi.input_terminated": True, "HTTP_TRANSFER_ENCODING": "chunked"}
    answer = client.post("/x402/deal", content_type="application/json", environ_overrides=chunked)
    assert error(answer) == (413, "body_too_large")
    assert endless.given <= 2 * 65536


@pytest.mark.parametrize("ref", [None, "order 7", 'a "quoted" \\ one', "ü\u2028\x01</script>", "\U0001f4b0"])
@pytest.mark.parametrize("instant", [True, False])
def test_the_terms_are_written_as_rfc_8785_and_the_id_as_base32(ref, instant):
    terms = deals.Terms(20_000_000, SELLER, "ab" * 32, 24, 48, instant, ref)
    fields = {field.name: getattr(terms, field.name) for field in dataclasses.fields(terms)}
    as_published = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert terms.canonical == as_published == chain.canonical(fields)
    digest = hashlib.sha256(b"deal" + b"M" * 33 + hashlib.sha256(terms.canonical).digest()).digest()
    assert terms.deal_id(b"M" * 33) == "deal_" + base64.b32encode(digest[:16]).decode().rstrip("=").lower()
