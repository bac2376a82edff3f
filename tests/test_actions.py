"""What the parties do over HTTP: proofs, repeats, refusals, offers, and the public record."""

import hashlib

import pytest
from conftest import NOON
from eth_account import Account
from eth_account.messages import encode_defunct
from parties import SECRET, Buyer
from states import reach

BUYER_ADDRESS = "0x7E5F4552091A69125d5DfCb7b8C2659029395Bdf"  # of the private key 1
SELLER_ADDRESS = "0x2B5AD5c4795c026514f8317c7a215E218DcCD6cF"  # of the private key 2
HALF_ORDER_TWIN = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141

# Every action: the state it is made in, what is sent, the canonical JSON that `details` is the hash of, who makes it.
ACTIONS = {
    "accept": ("funded", {}, None, "seller"),
    "deliver": ("accepted", {"url": "https://files.test/a.pdf", "note": "12 pages – done"},
                '{"note":"12 pages – done","url":"https://files.test/a.pdf"}', "seller"),
    "refund": ("delivered", {}, None, "seller"),
    "statement": ("disputed", {"statement": "All of it is there."}, '{"statement":"All of it is there."}', "seller"),
    "confirm": ("delivered", {}, None, "buyer"),
    "cancel": ("funded", {}, None, "buyer"),
    "dispute": ("delivered", {"reason": "Half is missing."}, '{"reason":"Half is missing."}', "buyer"),
    "split": ("accepted", {"seller_usd": "7.50"}, '{"seller_usd":"7.50"}', "buyer"),
}  # fmt: skip
AFTERWARDS = {
    "accept": "accepted", "deliver": "delivered", "refund": "refunded", "statement": "disputed", "confirm": "released",
    "cancel": "refunded", "dispute": "disputed", "split": "accepted",
}  # fmt: skip
ADDRESSES = {"seller": SELLER_ADDRESS, "buyer": BUYER_ADDRESS}
KEYS = {"buyer": 1, "seller": 2, "charlie": 3}
SIGNED = [*((action, who) for action, (_, _, _, who) in ACTIONS.items()), ("split", "seller")]


def text_for(deal_id, action, *, who=None, canonical=None, service="Deal Test Service", account=None):
    details = "0x" + hashlib.sha256(canonical.encode()).hexdigest() if canonical else "-"
    account = account or ADDRESSES[who or ACTIONS[action][3]]
    return f"{service}\ndeal: {deal_id}\naction: {action}\naccount: {account}\ndetails: {details}"


def sign(text, who):
    """Sign as any wallet does, by a library that the service does not use for it."""
    signed = Account.from_key(KEYS[who].to_bytes(32, "big")).sign_message(encode_defunct(text=text))
    return "0x" + signed.signature.hex().removeprefix("0x")


@pytest.fixture
def start(db, world):
    """Return the id of a new deal from which an action can be made."""
    return lambda action, **options: reach(db, world, ACTIONS[action][0], **options)


@pytest.fixture
def post(client):
    def send(deal_id, action, body, ip="203.0.113.1", **options):
        options = options or {"json": body}
        return client.post(f"/v1/deals/{deal_id}/{action}", environ_base={"REMOTE_ADDR": ip}, **options)

    return send


def events(db, deal_id):
    return [tuple(row) for row in db.execute("SELECT event, actor FROM deal_events WHERE deal_id = ? ORDER BY number", (deal_id,))]


# Proofs.


@pytest.mark.parametrize("action, who", SIGNED)
def test_an_action_without_proof_is_told_the_exact_text_to_sign(start, post, action, who):
    deal_id = start(action)
    _, fields, canonical, _ = ACTIONS[action]
    answer = post(deal_id, action, fields)
    assert (answer.status_code, answer.json["error"]) == (403, "proof_required")
    text = text_for(deal_id, action, who=who, canonical=canonical)
    found = answer.json["sign_as"][who] if action == "split" else answer.json["sign"]
    assert found == text
    done = post(deal_id, action, {**fields, "signature": sign(found, who)})
    assert (done.status_code, done.json["state"]) == (200, AFTERWARDS[action])


@pytest.mark.parametrize("action", ["confirm", "cancel", "dispute", "split"])
def test_the_secret_alone_proves_the_buyer(start, post, action):
    deal_id = start(action)
    answer = post(deal_id, action, {**ACTIONS[action][1], "secret": SECRET})
    assert (answer.status_code, answer.json["state"]) == (200, AFTERWARDS[action])


def test_the_secret_may_be_any_unicode_text(buyer, seller, post):
    secret = "pässwörd 🗝 ​"
    deal_id = buyer.deal(seller, secret_hash=hashlib.sha256(secret.encode()).hexdigest().upper())
    assert post(deal_id, "cancel", {"secret": secret.strip("​")}).status_code == 403
    assert post(deal_id, "cancel", {"secret": secret}).json["state"] == "refunded"


def altered(signature, v=None, high_s=False):
    raw = bytearray.fromhex(signature[2:])
    if high_s:
        raw[32:64] = (HALF_ORDER_TWIN - int.from_bytes(raw[32:64], "big")).to_bytes(32, "big")
        raw[64] = 55 - raw[64]
    if v == "01":
        raw[64] -= 27
    return "0x" + raw.hex()


def test_a_signature_may_write_v_as_0_or_1_and_its_hex_in_capitals(start, post):
    deal_id = start("accept")
    signature = altered(sign(text_for(deal_id, "accept"), "seller"), v="01")
    assert post(deal_id, "accept", {"signature": "0x" + signature[2:].upper()}).json["state"] == "accepted"


WRONG_SIGNATURES = {
    "by the buyer": lambda d: sign(text_for(d, "deliver", canonical=DETAILS), "buyer"),
    "by a stranger": lambda d: sign(text_for(d, "deliver", canonical=DETAILS), "charlie"),
    "by the buyer for its own account": lambda d: sign(text_for(d, "deliver", who="buyer", canonical=DETAILS), "buyer"),
    "for another deal": lambda d: sign(text_for("deal_" + "a" * 26, "deliver", canonical=DETAILS), "seller"),
    "for another action": lambda d: sign(text_for(d, "refund", canonical=DETAILS), "seller"),
    "for other details": lambda d: sign(text_for(d, "deliver", canonical='{"note":"nothing"}'), "seller"),
    "for no details": lambda d: sign(text_for(d, "deliver"), "seller"),
    "for another account": lambda d: sign(text_for(d, "deliver", who="buyer", canonical=DETAILS), "seller"),
    "for an account in lower case": lambda d: sign(
        text_for(d, "deliver", canonical=DETAILS, account=SELLER_ADDRESS.lower()), "seller"),
    "for another service": lambda d: sign(text_for(d, "deliver", canonical=DETAILS, service="Other"), "seller"),
    "with a line more": lambda d: sign(text_for(d, "deliver", canonical=DETAILS) + "\n", "seller"),
    "as its high-s twin": lambda d: altered(sign(text_for(d, "deliver", canonical=DETAILS), "seller"), high_s=True),
    "cut to 64 bytes": lambda d: sign(text_for(d, "deliver", canonical=DETAILS), "seller")[:-2],
    "with a byte more": lambda d: sign(text_for(d, "deliver", canonical=DETAILS), "seller") + "00",
    "of one byte": lambda d: "0x00",
    "of zeros": lambda d: "0x" + "00" * 65,
    "of ones": lambda d: "0x" + "ff" * 65,
    "not on the curve": lambda d: "0x" + "00" * 31 + "05" + "00" * 31 + "01" + "1b",
    "very long": lambda d: "0x" + "5b" * 6000,
}  # fmt: skip
DETAILS = '{"note":"12 pages – done","url":"https://files.test/a.pdf"}'


def test_every_wrong_signature_gets_the_same_answer_and_changes_nothing(start, client, post):
    deal_id = start("deliver")
    record, answers = client.get(f"/v1/deals/{deal_id}").data, set()
    for number, (what, make) in enumerate(WRONG_SIGNATURES.items()):
        body = {**ACTIONS["deliver"][1], "signature": make(deal_id)}
        answer = post(deal_id, "deliver", body, ip=f"203.0.113.{number}")
        assert (answer.status_code, answer.json["error"]) == (403, "invalid_signature"), what
        assert answer.json["sign"] == text_for(deal_id, "deliver", canonical=DETAILS)
        answers.add(answer.data)
    assert len(answers) == 1
    assert client.get(f"/v1/deals/{deal_id}").data == record


@pytest.mark.parametrize("action", ["confirm", "cancel", "dispute", "split"])
def test_every_wrong_secret_gets_the_same_answer_and_changes_nothing(start, client, post, action):
    deal_id = start(action)
    digest = hashlib.sha256(SECRET.encode()).hexdigest()
    wrong = ["x", SECRET[:-1], SECRET + " ", SECRET.upper(), digest, "0x" + digest, "\u0000", "é" * 1000]
    record = client.get(f"/v1/deals/{deal_id}").data
    answers = [post(deal_id, action, {**ACTIONS[action][1], "secret": secret}) for secret in wrong]
    assert {(a.status_code, a.json["error"]) for a in answers} == {(403, "invalid_secret")}
    assert len({a.data for a in answers}) == 1
    assert client.get(f"/v1/deals/{deal_id}").data == record


def test_a_wrong_secret_is_not_made_good_by_a_signature_beside_it(start, post):
    deal_id = start("cancel")
    right = sign(text_for(deal_id, "cancel"), "buyer")
    answer = post(deal_id, "cancel", {"secret": "wrong", "signature": right})
    assert (answer.status_code, answer.json["error"]) == (403, "invalid_secret")


@pytest.mark.parametrize("action", ["accept", "deliver", "refund", "statement"])
def test_the_sellers_actions_take_no_secret(start, post, action):
    answer = post(start(action), action, {**ACTIONS[action][1], "secret": SECRET})
    assert (answer.status_code, answer.json["error"]) == (400, "invalid_request")
    assert "secret" in answer.json["message"] and SECRET not in answer.text


# Too many wrong proofs.


def test_ten_wrong_proofs_in_a_minute_stop_that_client_for_that_deal_and_nobody_else(db, world, clock, post):
    deal_id, other = (reach(db, world, "funded", ref=ref) for ref in ("one", "two"))
    for number in range(10):
        clock.now = NOON + number
        wrong = {"secret": "wrong"} if number % 2 else {"signature": "0x" + "00" * 65}
        assert post(deal_id, "cancel", wrong).status_code == 403
    answer = post(deal_id, "cancel", {"secret": SECRET})
    assert (answer.status_code, answer.json["error"]) == (429, "rate_limited")
    assert answer.headers["Retry-After"] == "51"  # the first of the ten is a minute old then
    accept = {"signature": sign(text_for(deal_id, "accept"), "seller")}
    assert post(deal_id, "accept", accept).status_code == 429
    assert post(deal_id, "accept", {}).status_code == 403, "asking for the text is free"
    assert post(other, "cancel", {"secret": SECRET}).status_code == 200, "another deal is not affected"
    assert post(deal_id, "accept", accept, ip="198.51.100.7").status_code == 200, "nor the other party"
    clock.now = NOON + 59
    assert post(deal_id, "refund", {"signature": "0x00"}).headers["Retry-After"] == "1"
    clock.now = NOON + 60
    assert post(deal_id, "refund", {"signature": "0x00"}).status_code == 403
    assert post(deal_id, "refund", {"signature": "0x00"}).status_code == 429


def test_a_header_that_anyone_can_write_does_not_make_another_client(start, client):
    deal_id, path = start("cancel"), "/v1/deals/{}/cancel"
    answers = [
        client.post(path.format(deal_id), json={"secret": "x"}, headers={"X-Forwarded-For": f"192.0.2.{n}"})
        for n in range(11)
    ]
    assert [a.status_code for a in answers] == [403] * 10 + [429]


def test_right_proofs_do_not_count(start, post):
    deal_id = start("split")
    for number in range(15):
        assert post(deal_id, "split", {"seller_usd": f"{number}", "secret": SECRET}).status_code == 200


# Repeats.


@pytest.mark.parametrize("action, who", SIGNED)
def test_a_repeat_is_answered_like_the_first_time_and_adds_nothing(start, post, db, clock, action, who):
    deal_id = start(action)
    _, fields, canonical, _ = ACTIONS[action]
    body = {**fields, "signature": sign(text_for(deal_id, action, who=who, canonical=canonical), who)}
    first = post(deal_id, action, body)
    history = events(db, deal_id)
    clock.sleep(600)
    again = post(deal_id, action, body)
    assert (again.status_code, again.data) == (200, first.data)
    if who == "buyer":
        assert post(deal_id, action, {**fields, "secret": SECRET}).data == first.data
    assert events(db, deal_id) == history


def test_a_repeat_is_still_good_when_the_deal_has_gone_on(buyer, seller, clock):
    deal_id = buyer.deal(seller)
    seller.act(deal_id, "accept")
    seller.act(deal_id, "deliver", {"note": "done"})
    assert seller.act(deal_id, "accept").json["state"] == "delivered"
    clock.sleep(24 * 3600)
    assert seller.act(deal_id, "deliver", {"note": "done"}).json["state"] == "released"
    assert seller.act(deal_id, "accept").status_code == 200


@pytest.mark.parametrize(
    "action, other, possible",
    [
        ("deliver", {"note": "13 pages"}, {"refund", "confirm", "dispute", "split"}),
        ("deliver", {}, {"refund", "confirm", "dispute", "split"}),
        ("dispute", {"reason": "All is missing."}, {"refund", "confirm", "statement", "split"}),
        ("statement", {"statement": "None of it is."}, {"refund", "confirm", "split"}),
    ],
)
def test_the_same_action_with_other_content_is_refused_and_says_what_can_be_done(
    start, buyer, seller, action, other, possible
):
    deal_id = start(action)
    party = {"buyer": buyer, "seller": seller}[ACTIONS[action][3]]
    first = party.act(deal_id, action, ACTIONS[action][1])
    answer = party.act(deal_id, action, other)
    assert (answer.status_code, answer.json["error"]) == (409, "invalid_state")
    assert answer.json["state"] == first.json["state"] == AFTERWARDS[action]
    assert {entry["action"] for entry in answer.json["actions"]} == possible
    assert all(name in answer.json["message"] for name in possible | {AFTERWARDS[action], action})
    now = party.client.get(f"/v1/deals/{deal_id}").json
    assert (now["delivery"], now["dispute"]) == (first.json["delivery"], first.json["dispute"])


def test_after_the_end_a_refusal_says_that_nothing_more_can_be_done(db, world, seller):
    answer = seller.act(reach(db, world, "released"), "refund")
    assert (answer.status_code, answer.json["state"], answer.json["actions"]) == (409, "released", [])
    assert "nothing more can be done" in answer.json["message"]


# Split offers.


def offer(party, deal_id, seller_usd):
    return party.act(deal_id, "split", {"seller_usd": seller_usd})


@pytest.mark.parametrize("state", ["accepted", "delivered", "disputed"])
@pytest.mark.parametrize("order", [("buyer", "seller"), ("seller", "buyer")])
def test_two_offers_of_the_same_figure_split_the_deal(db, world, buyer, seller, state, order):
    deal_id, parties = reach(db, world, state), {"buyer": buyer, "seller": seller}
    first = offer(parties[order[0]], deal_id, "7.5").json
    assert (first["state"], first["offers"]) == (state, {"seller": None, "buyer": None} | {order[0]: "7.50"})
    last = offer(parties[order[1]], deal_id, "7.50").json
    assert (last["state"], last["offers"]) == ("split", {"seller": "7.50", "buyer": "7.50"})
    assert [(leg["leg"], leg["to"], leg["amount_usd"]) for leg in last["transfers"][:2]] == [
        ("seller", SELLER_ADDRESS, "7.50"), ("buyer", BUYER_ADDRESS, "12.50"),
    ]  # fmt: skip


def test_an_offer_stands_until_another_takes_its_place(db, world, buyer, seller):
    deal_id = reach(db, world, "accepted")
    offer(seller, deal_id, "15")
    assert offer(seller, deal_id, "12").json["offers"] == {"seller": "12.00", "buyer": None}
    assert offer(buyer, deal_id, "15").json["state"] == "accepted", "the seller's 15 no longer stands"
    offer(buyer, deal_id, "10")
    assert offer(seller, deal_id, "10").json["state"] == "split"


def test_an_earlier_offer_made_again_is_a_new_one(db, world, buyer, seller):
    deal_id = reach(db, world, "accepted")
    for figure in ("15", "12", "15"):
        offers = offer(seller, deal_id, figure).json["offers"]
    assert offers["seller"] == "15.00"
    assert offer(buyer, deal_id, "15").json["state"] == "split"


def test_one_party_alone_cannot_split(db, world, buyer, seller):
    deal_id = reach(db, world, "accepted")
    for party in (seller, buyer):
        stranger = offer(Buyer(party.client, party.world, 3), deal_id, "5")
        assert (stranger.status_code, stranger.json["error"]) == (403, "invalid_signature")
    for _ in range(3):
        assert offer(buyer, deal_id, "0").json["state"] == "accepted"
    assert buyer.reveal(deal_id, "split", {"seller_usd": "0"}).json["state"] == "accepted"


@pytest.mark.parametrize("seller_usd", ["20.01", "21", "999999999999.99"])
def test_an_offer_above_the_amount_is_refused(db, world, buyer, seller_usd):
    deal_id = reach(db, world, "accepted")
    answer = offer(buyer, deal_id, seller_usd)
    assert (answer.status_code, answer.json["error"]) == (400, "invalid_request")
    assert "20.00" in answer.json["message"]


@pytest.mark.parametrize("state", ["pending", "funded", "released", "refunded", "split", "lapsed"])
def test_there_is_nothing_to_split_before_work_or_after_the_end(db, world, seller, state):
    answer = offer(seller, reach(db, world, state), "6")
    assert (answer.status_code, answer.json["error"], answer.json["state"]) == (409, "invalid_state", state)


# Bodies.

TEXT = 5 * "word " + "x" * 2000
SIGNATURE = "0x" + "5b" * 64 + "1c"
BAD_BODIES = [
    *((action, {**ACTIONS[action][1], "signature": SIGNATURE, "extra": 1}, "extra") for action in ACTIONS),
    *((action, {**ACTIONS[action][1], "signature": value}, "signature") for action in ACTIONS
      for value in (None, 7, [], "", "0x", "0x0", "5b5b", "0xzz", "0x" + "5b" * 6001)),
    *((action, {**ACTIONS[action][1], "secret": value}, "secret") for action in ("confirm", "cancel", "dispute", "split")
      for value in (None, 7, ["x"], {}, "", "s" * 1001)),
    ("dispute", {"secret": "x"}, "reason"),
    *(("dispute", {"reason": value, "secret": "x"}, "reason") for value in (None, 1, "", "x" * 2001)),
    ("statement", {"signature": SIGNATURE}, "statement"),
    *(("statement", {"statement": value, "signature": SIGNATURE}, "statement") for value in (None, "", TEXT)),
    *(("deliver", {"url": value, "signature": SIGNATURE}, "url") for value in (
        None, "", "files.test/a", "javascript:alert(1)", "ftp://files.test/a", "https://a b", "https://a\n",
        "https://" + "a" * 2000)),
    *(("deliver", {"sha256": value, "signature": SIGNATURE}, "sha256") for value in ("", "ab", "g" * 64, "a" * 65)),
    *(("deliver", {"note": value, "signature": SIGNATURE}, "note") for value in (None, 1, TEXT)),
    ("split", {"secret": "x"}, "seller_usd"),
    *(("split", {"seller_usd": value, "secret": "x"}, "seller_usd") for value in (
        None, 5, 5.5, "", "-1", "+1", "1.", ".5", "05", "1.234", "1e3", "NaN", "1,5", " 1", "5\n", "5.5\n", "٣")),
]  # fmt: skip


@pytest.mark.parametrize("action, body, named", BAD_BODIES)
def test_a_body_that_does_not_fit_is_refused_with_the_part_that_does_not(start, client, post, action, body, named):
    deal_id = start(action)
    record = client.get(f"/v1/deals/{deal_id}").data
    answer = post(deal_id, action, body)
    assert (answer.status_code, answer.json["error"]) == (400, "invalid_request")
    assert named in answer.json["message"] and len(answer.json["message"]) < 400
    assert client.get(f"/v1/deals/{deal_id}").data == record


@pytest.mark.parametrize(
    "data, content_type, status, error",
    [
        (b"{", "application/json", 400, "invalid_request"),
        (b"[]", "application/json", 400, "invalid_request"),
        (b"null", "application/json", 400, "invalid_request"),
        (b'"accept"', "application/json", 400, "invalid_request"),
        (b'{"signature": "0x00", "signature": "0x01"}', "application/json", 400, "invalid_request"),
        (b'{"signature": NaN}', "application/json", 400, "invalid_request"),
        (b'{"signature": "\\ud800"}', "application/json", 400, "invalid_request"),
        (b'{"signature": "\xff"}', "application/json", 400, "invalid_request"),
        (b'{"signature": ' + b"[" * 50_000 + b"]" * 5_000, "application/json", 400, "invalid_request"),
        (b"{}", "text/plain", 415, "unsupported_media_type"),
        (b"{}", "application/x-www-form-urlencoded", 415, "unsupported_media_type"),
        (b"{}", None, 415, "unsupported_media_type"),
        (b'{"signature": "' + b"0" * 65536 + b'"}', "application/json", 413, "body_too_large"),
        (b"", "application/json", 403, "proof_required"),
        (b"", None, 403, "proof_required"),
        (b" {} ", "application/json; charset=utf-8", 403, "proof_required"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused_kindly(start, post, data, content_type, status, error):
    answer = post(start("accept"), "accept", None, data=data, content_type=content_type)
    assert (answer.status_code, answer.json["error"]) == (status, error)
    assert answer.json["message"]


# Strangers, unknown deals.


def test_charlie_can_do_nothing(db, world, client, clock, buyer, seller, charlie):
    mine = charlie.deal(seller, secret_hash=hashlib.sha256(b"my own").hexdigest())
    for action, (state, fields, canonical, who) in ACTIONS.items():
        deal_id = reach(db, world, state, ref=f"against {action}")
        record = client.get(f"/v1/deals/{deal_id}").data
        honest = {"buyer": buyer, "seller": seller}[who].proof(mine, action, fields)
        for body in (charlie.proof(deal_id, action, fields), honest, {**fields, "secret": "my own"}, fields):
            answer = charlie.post(deal_id, action, body)
            assert answer.status_code in (400, 403) and answer.json["error"] != "internal_error", (action, body)
            assert SECRET not in answer.text
        assert client.get(f"/v1/deals/{deal_id}").data == record
    assert charlie.reveal(mine, "cancel", secret="my own").json["state"] == "refunded"


@pytest.mark.parametrize("deal_id", ["deal_" + "a" * 26, "deal_", "x", "deal_" + "A" * 26, "deal_" + "a" * 26 + "%0A", "%00", "🗝"])
def test_an_unknown_deal_is_not_found(client, post, seller, deal_id):
    answers = [client.get(f"/v1/deals/{deal_id}"), *(post(deal_id, action, {"extra": 1}) for action in ACTIONS)]
    assert {(a.status_code, a.json["error"]) for a in answers} == {(404, "not_found")}


def test_an_unknown_action_is_not_found_and_reading_an_action_is_not_allowed(start, client, post):
    deal_id = start("accept")
    assert post(deal_id, "steal", {}).status_code == 404
    answer = client.get(f"/v1/deals/{deal_id}/accept")
    assert (answer.status_code, answer.json["error"]) == (405, "method_not_allowed")
    assert "POST" in answer.headers["Allow"] and "GET" not in answer.headers["Allow"]
