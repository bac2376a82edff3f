"""Payments on the wire: what is read, what is refused as unreadable (400), and what does not pay our terms (402)."""

import base64
import copy
import dataclasses
import json
import random
import re

import pytest

import app as application
import chain
from conftest import NOON
from parties import Buyer, balance, error, files, nonce, send
from test_quotes import PATHS

HALF = 0x7FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF5D576E7357A4501DDFE92F46681B20A0
ORDER = 2 * HALF + 1
PROTOCOLS = ("x402", "mpp")


def opened(payment):
    """Return the JSON inside either payment header."""
    text = next(iter(payment.values())).removeprefix("Payment ")
    return json.loads(base64.urlsafe_b64decode(text.replace("+", "-").replace("/", "_") + "=" * (-len(text) % 4)))


def sealed(value, encode=base64.b64encode, raw=False):
    """Return the payment header for a JSON value (or raw bytes), as x402 or MPP by what is in it."""
    text = encode(value if isinstance(value, bytes) else json.dumps(value).encode()).decode()
    if raw or (isinstance(value, dict) and "challenge" in value):
        return {"Authorization": "Payment " + text.rstrip("=")}
    return {"PAYMENT-SIGNATURE": text}


def changed(value, path, new):
    """Return a copy of a JSON value with one place replaced; ... removes it."""
    value = copy.deepcopy(value)
    *parents, last = path.split(".")
    inner = value
    for name in parents:
        inner = inner[name]
    if new is ...:
        del inner[last]
    else:
        inner[last] = new
    return value


def authorization(value):
    """Return the object that holds the authorization's fields in either protocol."""
    return value["payload"].get("authorization", value["payload"])


@pytest.fixture
def body(buyer):
    return buyer.request()


@pytest.fixture
def quote(buyer, body):
    return buyer.quote(body)


def untouched(client, world, buyer, body, payment, status, code):
    """Send a payment that must not be taken, and check that it was not; returns the answer."""
    before, held = files(world), balance(world, buyer.address)
    answer = send(client, body, payment)
    assert answer.status_code == status, answer.text
    if status == 402:
        assert re.search(code, answer.json["error"], re.IGNORECASE), answer.json["error"]
        assert base64.b64decode(answer.headers["PAYMENT-REQUIRED"]) == answer.data
    else:
        assert answer.json["error"] == code
    assert answer.headers["WWW-Authenticate"].startswith("Payment id=")
    fresh = json.loads(base64.b64decode(answer.headers["PAYMENT-REQUIRED"]))
    assert fresh["accepts"] == buyer.quote(body).json["accepts"]
    assert answer.headers["Cache-Control"] == "no-store"
    assert "X-Svc-Invalid-Request" not in answer.headers
    assert files(world) == before and balance(world, buyer.address) == held
    return answer


# -- Variants of one payment --------------------------------------------------------------------------------


def spelled(spell):
    """Return a change that writes the hex fields of an authorization differently."""

    def change(value):
        fields = authorization(value)
        for name in ("from", "to", "nonce"):
            fields[name] = "0x" + spell(fields[name][2:])
        value["payload"]["signature"] = "0x" + spell(value["payload"]["signature"][2:])
        return value

    return change


def small_v(value):
    signature = value["payload"]["signature"]
    value["payload"]["signature"] = signature[:-2] + {"1b": "00", "1c": "01"}[signature[-2:]]
    return value


VARIANTS = {
    "the url alphabet": (lambda value: value, base64.urlsafe_b64encode),
    "the url alphabet unpadded": (lambda value: value, lambda data: base64.urlsafe_b64encode(data).rstrip(b"=")),
    "the standard alphabet unpadded": (lambda value: value, lambda data: base64.b64encode(data).rstrip(b"=")),
    "the standard alphabet padded": (lambda value: value, base64.b64encode),
    "other white space": (lambda value: value, lambda data: base64.b64encode(json.dumps(json.loads(data), indent=3).encode())),
    "other key order": (lambda value: dict(reversed(value.items())), base64.b64encode),
    "upper-case hex": (spelled(str.upper), base64.b64encode),
    "lower-case hex": (spelled(str.lower), base64.b64encode),
    "v as 0 or 1": (small_v, base64.b64encode),
    "leading zeros": (lambda value: authorization(value).update(validAfter="000") or value, base64.b64encode),
    "unknown fields": (lambda value: {**value, "more": [1]}, base64.b64encode),
}


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_spelling_of_a_payment_is_the_same_payment(client, buyer, body, quote, world, protocol, variant, first):
    plain = getattr(buyer, protocol)(quote)
    change, encode = VARIANTS[variant]
    payment = {**change(opened(plain)), "note": "??>>~~" * 3}  # so that the two alphabets differ
    other = sealed(payment, encode)
    assert other != plain
    answers = [send(client, body, one) for one in ((other, plain) if first else (plain, other))]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].data == answers[1].data
    assert balance(world, buyer.address) == 10_000_000_000 - 20_292_000


@pytest.mark.parametrize("scheme", ["Payment ", "payment ", "PAYMENT   ", " Payment "])
def test_the_scheme_is_read_without_regard_to_case_and_spaces(client, buyer, body, quote, scheme):
    payment = buyer.mpp(quote)["Authorization"].replace("Payment ", scheme)
    assert send(client, body, {"Authorization": payment}).status_code == 200


@pytest.mark.parametrize("used_on", PATHS)
@pytest.mark.parametrize("quoted_on", PATHS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_either_protocol_works_on_either_path_wherever_it_was_quoted(client, buyer, body, protocol, quoted_on, used_on):
    payment = getattr(buyer, protocol)(buyer.quote(body, quoted_on))
    answer = send(client, body, payment, used_on)
    assert answer.status_code == 200 and answer.json[0]["payment"]["protocol"] == protocol


@pytest.mark.parametrize("style", ["draft", "pympp"])
def test_both_ways_to_derive_the_nonce_from_the_challenge_are_taken(client, buyer, body, quote, style):
    assert send(client, body, buyer.mpp(quote, nonce=style)).status_code == 200


# -- 400: what cannot be read -------------------------------------------------------------------------------

GARBAGE = {
    "nothing": "", "a blank": " ", "no base64": "!!!", "an inner space": "e3 0=", "too much padding": "e30===", "a comma": "e30=,e30=",
    "a quote": '"e30="', "one character": "e", "non-ASCII": "\xe4\xf6", "plain JSON": "{}", "a key": "token=abc",
}  # fmt: skip
CONTENTS = {
    "empty": b"", "null": b"null", "a number": b"1", "a string": b'"x"', "an array": b"[]", "an empty object": b"{}",
    "not UTF-8": b"\xff\xfe", "UTF-16": '{"x402Version":2}'.encode("utf-16"), "cut off": b'{"x402Version":2',
    "a key twice": b'{"x402Version":2,"x402Version":2}', "NaN": b'{"x402Version":NaN}', "deep nesting": b"[" * 9000,
    "a huge number": b'{"x402Version":1' + b"0" * 4000 + b"}", "a lone surrogate": b'{"x402Version":2,"a":"\\udc00"}',
    "binary": bytes(range(256)),
}  # fmt: skip


@pytest.mark.parametrize("text", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.parametrize("header, prefix", [("PAYMENT-SIGNATURE", ""), ("Authorization", "Payment ")])
def test_a_header_that_is_no_base64_is_refused_with_a_fresh_challenge(client, world, buyer, body, header, prefix, text):
    untouched(client, world, buyer, body, {header: prefix + text}, 400, "invalid_payment")


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
@pytest.mark.parametrize("mpp", [False, True])
def test_a_header_whose_content_is_no_object_of_ours_is_refused(client, world, buyer, body, content, mpp):
    untouched(client, world, buyer, body, sealed(content, raw=mpp), 400, "invalid_payment")


FIELDS = ("from", "to", "value", "validAfter", "validBefore", "nonce")
ADDRESS_JUNK = (..., None, 1, "", "0x", "0x" + "1" * 39, "0x" + "1" * 41, "0X" + "1" * 40, "1" * 40, "0x" + "g" * 40, ["0x"])
NUMBER_JUNK = (..., None, 1, 1.5, True, "", "-1", "+1", "1.0", "1e3", " 1", "1\n", "0x1", "٣", "9" * 79, str(1 << 256))
NONCE_JUNK = (..., None, 0, "", "0x", "0x" + "1" * 63, "0x" + "1" * 65, "1" * 64, "0x" + "g" * 64)
SIGNATURE_JUNK = (..., None, 1, "", "0x", "0x" + "1" * 126, "1" * 130, "0x" + "1" * 129, "0x" + "g" * 130, "0x" + "11" * 6001, {})
JUNK = {"from": ADDRESS_JUNK, "to": ADDRESS_JUNK, "nonce": NONCE_JUNK} | dict.fromkeys(FIELDS[2:5], NUMBER_JUNK)
UNREADABLE = {
    "x402": [(f"payload.authorization.{name}", bad) for name in FIELDS for bad in JUNK[name]]
    + [("payload.signature", bad) for bad in SIGNATURE_JUNK]
    + [("x402Version", bad) for bad in (..., None, "2", 2.0, True, [2])]
    + [(name, bad) for name in ("accepted", "payload", "payload.authorization") for bad in (..., None, "x", [], 7)]
    + [(f"accepted.{name}", bad) for name in ("scheme", "network", "amount", "asset", "payTo") for bad in (..., None, 1, {})],
    "mpp": [(f"payload.{name}", bad) for name in FIELDS for bad in JUNK[name]]
    + [("payload.signature", bad) for bad in SIGNATURE_JUNK]
    + [(name, bad) for name in ("challenge", "payload") for bad in (..., None, "x", [], 7)]
    + [(f"challenge.{name}", bad) for name in ("id", "realm", "method", "intent", "request") for bad in (..., None, 1, {})]
    + [(f"challenge.{name}", bad) for name in ("expires", "digest", "opaque") for bad in (None, 1, {})]
    + [("source", bad) for bad in (1, {}, ["did:pkh"])],
}  # fmt: skip


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_field_that_is_missing_or_malformed_is_unreadable(client, world, buyer, body, quote, protocol):
    value, before = opened(getattr(buyer, protocol)(quote)), files(world)
    for path, bad in UNREADABLE[protocol]:
        answer = send(client, body, sealed(changed(value, path, bad)))
        assert error(answer) == (400, "invalid_payment"), (path, bad, answer.text)
        assert "PAYMENT-REQUIRED" in answer.headers and "WWW-Authenticate" in answer.headers
    assert files(world) == before
    assert send(client, body, sealed(value)).status_code == 200  # and nothing but the junk was wrong


def test_two_payments_at_once_are_refused_in_every_combination(client, world, buyer, body, quote):
    x402, mpp = buyer.x402(quote), buyer.mpp(quote)
    one, two = x402["PAYMENT-SIGNATURE"], mpp["Authorization"]
    for headers in (
        [*x402.items(), *mpp.items()],
        [*x402.items(), *x402.items()],
        [*mpp.items(), *mpp.items()],
        [("PAYMENT-SIGNATURE", f"{one},{one}")],
        [("Authorization", f"{two}, {two}")],
        [*x402.items(), ("Authorization", "Payment")],
    ):
        answer = client.post("/x402/deal", json=body, headers=headers)
        assert error(answer) == (400, "invalid_payment")
    assert balance(world, buyer.address) == 10_000_000_000


@pytest.mark.parametrize("value", ["Bearer abc", "Basic YTpi", "Payments abc", "PaymentX", ""])
def test_another_authorization_scheme_is_no_payment(client, body, value):
    answer = client.post("/x402/deal", json=body, headers={"Authorization": value})
    assert answer.status_code == 402 and "X-Svc-Invalid-Request" not in answer.headers


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("size, status", [(4096, 200), (16384, 200), (16386, 400), (32000, 400)])
def test_a_header_may_have_16_kib_and_no_more(client, buyer, body, quote, protocol, size, status):
    text = json.dumps(opened(getattr(buyer, protocol)(quote))).encode()
    room = size - 8 if protocol == "mpp" else size  # the scheme's name counts too
    header = sealed(text + b" " * (room * 3 // 4 - len(text)), lambda data: base64.b64encode(data).rstrip(b"="),
                    raw=protocol == "mpp")  # fmt: skip
    assert len(next(iter(header.values()))) == size
    answer = send(client, body, header)
    assert answer.status_code == status, answer.text
    if answer.status_code == 400:
        assert answer.json["error"] == "invalid_payment" and "WWW-Authenticate" in answer.headers


# -- 402: readable, but not our terms -----------------------------------------------------------------------

ELSEWHERE = "0x000000000000000000000000000000000000dEaD"
USDC = "0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913"
SIGNED = {  # what the payer really signed, and the word by which the answer names it
    "one unit less": ({"value": 20_291_999}, "20291999"),
    "one unit more": ({"value": 20_292_001}, "20292001"),
    "nothing": ({"value": 0}, "units"),
    "everything there is": ({"value": (1 << 256) - 1}, "units"),
    "another payee": ({"to": ELSEWHERE.lower()}, "pays 0x000000000000000000000000000000000000dEaD"),
    "expired long ago": ({"valid_before": 1}, "validBefore"),
    "expires this second": ({"valid_before": NOON}, "validBefore"),
    "five seconds ahead": ({"valid_before": NOON + 5}, "too soon"),
    "over 15 minutes ahead": ({"valid_before": NOON + 901}, "too long"),
    "for ever": ({"valid_before": (1 << 256) - 1}, "too long"),
    "valid from this second": ({"valid_after": NOON}, "validAfter"),
    "valid tomorrow": ({"valid_after": NOON + 86400}, "validAfter"),
}


@pytest.mark.parametrize("case", SIGNED)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_authorization_for_other_terms_is_told_which(client, world, buyer, body, quote, protocol, case):
    changes, word = SIGNED[case]
    untouched(client, world, buyer, body, getattr(buyer, protocol)(quote, **changes), 402, word)


@pytest.mark.parametrize("changes", [{"valid_before": NOON + 6}, {"valid_before": NOON + 900}, {"valid_after": NOON - 1}])
def test_the_edges_of_the_accepted_window_are_inside(client, buyer, body, quote, changes):
    assert send(client, body, buyer.x402(quote, **changes)).status_code == 200


STATED = {
    "accepted.amount": (["20291999", "20292001", "20292000.0", "020292000", ""], "amount"),
    "accepted.payTo": ([ELSEWHERE, ""], "payTo"),
    "accepted.asset": ([USDC, ELSEWHERE], "asset"),
    "accepted.network": (["eip155:1", "eip155:84532", "base", "EIP155:8453", ""], "network"),
    "accepted.scheme": (["upto", "Exact", "deferred"], "scheme"),
    "x402Version": ([0, 1, 3, -2], "version 2"),
    "payload.permit2Authorization": ([{"permitted": {}}, None], "Permit2"),
}


@pytest.mark.parametrize("path", STATED)
def test_an_x402_payment_that_states_other_terms_is_told_which(client, world, buyer, body, quote, path):
    values, word = STATED[path]
    for stated in values:
        untouched(client, world, buyer, body, sealed(changed(opened(buyer.x402(quote)), path, stated)), 402, word)


def test_a_whole_payment_of_version_1_is_told_that_we_speak_version_2(client, world, buyer, body, quote):
    value = opened(buyer.x402(quote))
    old = {"x402Version": 1, "scheme": "exact", "network": "base", "payload": value["payload"]}
    untouched(client, world, buyer, body, sealed(old), 402, "version 2")


def high_s(signature):
    r, s, v = signature[2:66], int(signature[66:130], 16), int(signature[130:], 16)
    return f"0x{r}{ORDER - s:064x}{55 - v:02x}"


FORGERIES = {
    "the high-s twin": high_s,
    "the other v": lambda s: s[:-2] + ("1b" if s[-2:] == "1c" else "1c"),
    "v 29": lambda s: s[:-2] + "1d",
    "v 2": lambda s: s[:-2] + "02",
    "no v": lambda s: s[:-2],
    "a longer one": lambda s: s + "00",
    "one bit off": lambda s: s[:40] + ("1" if s[40] == "0" else "0") + s[41:],
    "all zeros": lambda s: "0x" + "00" * 65,
    "r and s of zero": lambda s: "0x" + "00" * 64 + "1b",
    "all ones": lambda s: "0x" + "ff" * 65,
}


@pytest.mark.parametrize("forge", FORGERIES)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_signature_that_the_token_would_not_take_is_refused(client, world, buyer, body, quote, protocol, forge):
    value = opened(getattr(buyer, protocol)(quote))
    value["payload"]["signature"] = FORGERIES[forge](value["payload"]["signature"])
    untouched(client, world, buyer, body, sealed(value), 402, "signature")


@pytest.mark.parametrize("domain", [{"address": USDC.lower()}, {"chain_id": 1}, {"name": "USD Coin"}, {"version": "2"}])
def test_a_signature_for_another_token_or_chain_is_worthless_here(client, world, buyer, body, quote, domain):
    token = dataclasses.replace(world.terminal.token, **domain)
    signature = chain.sign(buyer.key, buyer.authorization(quote).digest(token))
    untouched(client, world, buyer, body, buyer.x402(quote, signature=signature), 402, "signature")


def test_nobody_pays_with_a_signature_of_somebody_else(client, world, buyer, charlie, body, quote):
    theirs = charlie.x402(quote, payer=buyer.address)
    untouched(client, world, buyer, body, theirs, 402, "signature")


def test_the_seller_does_not_pay_for_its_own_deal(client, world):
    seller = Buyer(client, world, 2).funded()
    body = seller.request()
    untouched(client, world, seller, body, seller.x402(seller.quote(body)), 402, "seller")


# -- MPP: the challenge -------------------------------------------------------------------------------------

OTHER = base64.urlsafe_b64encode(b'{"amount":"1"}').decode().rstrip("=")
ECHOES = [("id", "A" * 43), ("id", ""), ("realm", "evil.test"), ("realm", ""), ("method", "tempo"), ("intent", "session"),
          ("request", OTHER), ("request", ""), ("expires", "2026-09-21T14:23:20Z"), ("expires", ""), ("expires", "soon"),
          ("digest", ""), ("digest", "sha-256=:AAAA:"), ("opaque", ""), ("opaque", OTHER), ("expires", ...),
          ("digest", ...), ("opaque", ...)]  # fmt: skip


@pytest.mark.parametrize("name, stated", ECHOES)
def test_a_challenge_of_which_anything_was_changed_is_refused(client, world, buyer, body, quote, name, stated):
    value = changed(opened(buyer.mpp(quote)), f"challenge.{name}", stated)
    word = "issued" if name != "id" or stated else "issued|nonce"
    untouched(client, world, buyer, body, sealed(value), 402, word)


def test_extra_fields_of_the_echo_that_are_not_bound_do_no_harm(client, buyer, body, quote):
    value = opened(buyer.mpp(quote))
    value["challenge"]["description"] = "as some clients echo"
    assert send(client, body, sealed(value)).status_code == 200


def test_a_challenge_expires(client, world, buyer, body, quote, clock):
    payment = buyer.mpp(quote, valid_before=NOON + 306)
    untouched(client, world, buyer, body, payment, 402, "later than the challenge")
    clock.now += 299
    late = buyer.mpp(quote, valid_before=NOON + 300)
    untouched(client, world, buyer, body, late, 402, "too soon")
    clock.now += 1
    untouched(client, world, buyer, body, buyer.mpp(quote, valid_before=NOON + 400), 402, "challenge has expired")


def test_a_challenge_for_one_body_does_not_pay_for_another(client, world, buyer, body, quote):
    same_terms = {"instant": False, **body}
    fresh = client.post("/x402/deal", json=same_terms)
    assert fresh.json["accepts"] == quote.json["accepts"]
    untouched(client, world, buyer, same_terms, buyer.mpp(quote), 402, "another request body")
    other = buyer.request(ref="other")
    untouched(client, world, buyer, other, buyer.mpp(quote), 402, "pays 0x")
    moved = buyer.mpp(quote, to=buyer.quote(other).json["accepts"][0]["payTo"].lower())
    untouched(client, world, buyer, other, moved, 402, "other terms")


def with_secrets(world, *secrets):
    changed = dataclasses.replace(world, terminal=dataclasses.replace(world.terminal, secrets=secrets))
    return application.create_app(world=changed).test_client()


def test_a_challenge_of_the_previous_secret_is_good_and_an_older_one_is_not(client, world, buyer, body, quote):
    (old,) = world.terminal.secrets
    payment = buyer.mpp(quote)
    untouched(with_secrets(world, b"newest", b"newer"), world, buyer, body, payment, 402, "not issued by this service")
    assert send(with_secrets(world, b"newer", old), body, payment).status_code == 200


def test_a_challenge_of_another_service_with_the_same_secret_is_refused(client, world, buyer, body):
    elsewhere = dataclasses.replace(world, settings=dataclasses.replace(world.settings, base_url="http://other.test"))
    quote = application.create_app(world=elsewhere).test_client().post("/x402/deal", json=body)
    untouched(client, world, buyer, body, buyer.mpp(quote), 402, "another service")


@pytest.mark.parametrize("derive", ["random", "id alone", "a bar between", "spaced JSON", "hashed twice", "sha-256"])
def test_a_nonce_that_is_not_derived_from_the_challenge_is_refused(client, world, buyer, body, quote, derive):
    value = opened(buyer.mpp(quote))
    number, realm = value["challenge"]["id"], value["challenge"]["realm"]
    made = {
        "random": nonce(7),
        "id alone": "0x" + chain.keccak(number.encode()).hex(),
        "a bar between": "0x" + chain.keccak(f"{number}|{realm}".encode()).hex(),
        "spaced JSON": "0x" + chain.keccak(json.dumps([number, realm]).encode()).hex(),
        "hashed twice": "0x" + chain.keccak(chain.keccak((number + realm).encode())).hex(),
        "sha-256": "0x" + chain.sha256((number + realm).encode()).hex(),
    }[derive]
    value["payload"] |= buyer.authorization(quote, nonce=made).wire()
    value["payload"]["signature"] = buyer.sign(buyer.authorization(quote, nonce=made))
    untouched(client, world, buyer, body, sealed(value), 402, "nonce is not derived")


@pytest.mark.parametrize("source", [f"did:pkh:eip155:8453:{ELSEWHERE}", "did:pkh:eip155:8453:", "", "0x", "did:key:z6Mk"])
def test_a_source_that_is_not_the_payer_is_refused(client, world, buyer, body, quote, source):
    untouched(client, world, buyer, body, sealed(changed(opened(buyer.mpp(quote)), "source", source)), 402, "source")


def test_a_source_may_be_left_out(client, buyer, body, quote):
    assert send(client, body, sealed(changed(opened(buyer.mpp(quote)), "source", ...))).status_code == 200


@pytest.mark.parametrize("kind", ["hash", "transaction", "permit2", "Authorization", None, ...])
def test_another_type_of_credential_is_refused(client, world, buyer, body, quote, kind):
    untouched(client, world, buyer, body, sealed(changed(opened(buyer.mpp(quote)), "payload.type", kind)), 402, "type")


# -- Anything at all ------------------------------------------------------------------------------------------

ANYTHING = [None, True, 0, -1, 2, 1.5, 1 << 62, "", "0", "0x", "x" * 300, "0x" + "0" * 40, "0x" + "f" * 64, "0x" + "a" * 130,
            "eip155:1", "\x00", "\u2028", "é", "😀", [], {}, [[]], {"a": 1}, "999999999999", "-5", "1e9", "did:pkh:x"]  # fmt: skip


BINDING = {  # every field that a payment's validity hangs on; whatever else changes, it stays the same payment
    "x402": [f"payload.authorization.{name}" for name in FIELDS] + ["x402Version", "payload.signature"]
    + [f"accepted.{name}" for name in ("scheme", "network", "amount", "asset", "payTo")],
    "mpp": [f"payload.{name}" for name in (*FIELDS, "type", "signature")]
    + [f"challenge.{name}" for name in ("id", "realm", "method", "intent", "request", "expires", "digest", "opaque")],
}  # fmt: skip


def essence(value, protocol):
    """Return what binds in a credential, or None where it cannot even be read."""
    found = []
    for path in BINDING[protocol]:
        inner = value
        for name in path.split("."):
            inner = inner.get(name) if isinstance(inner, dict) else None
        found.append(inner.lower() if isinstance(inner, str) else inner)
    return found


def mutant(dice, value, protocol):
    """Return a credential with one field replaced by anything, or with a few bytes of its text overwritten."""
    if dice.random() < 0.6:
        return changed(value, dice.choice(BINDING[protocol]), dice.choice([..., *ANYTHING]))
    text = bytearray(json.dumps(value).encode())
    for _ in range(dice.choice((1, 1, 2, 30))):
        text[dice.randrange(len(text))] = dice.randrange(256)
    return bytes(text)


def same(one, value, protocol):
    try:
        return essence(json.loads(one) if isinstance(one, bytes) else one, protocol) == essence(value, protocol)
    except ValueError:
        return False


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_no_random_change_of_a_payment_settles_or_breaks_anything(client, world, buyer, body, quote, protocol):
    dice, before = random.Random(8402), files(world)
    value = opened(getattr(buyer, protocol)(quote))
    mutants = [mutant(dice, value, protocol) for _ in range(400)]
    mutants = [one for one in mutants if not same(one, value, protocol)]
    assert len(mutants) > 250
    for one in mutants:
        answer = send(client, body, sealed(one, raw=protocol == "mpp" and isinstance(one, bytes)))
        assert answer.status_code in (400, 402), (one, answer.text)
        assert "PAYMENT-REQUIRED" in answer.headers
    assert files(world) == before and balance(world, buyer.address) == 10_000_000_000
    assert send(client, body, sealed(value)).status_code == 200
