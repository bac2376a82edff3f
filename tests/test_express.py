"""The answers that are made before Flask wakes are the ones that Flask would make."""

import json

import pytest
import werkzeug.test

import deprecations
from parties import files
from states import reach


@pytest.fixture
def plain(client):
    """A client of the same application without the shortcut."""
    return werkzeug.test.Client(client.application.wsgi_app.application)


def same(one, other):
    """Compare what a client reads; only pages of browsers are told what belongs to pages."""
    assert (one.status_code, one.data) == (other.status_code, other.data)
    mine, theirs = dict(one.headers), dict(other.headers)
    assert {**theirs, **mine} == theirs
    missing = set(theirs) - set(mine)
    assert missing <= {"Referrer-Policy", "Content-Security-Policy", "Access-Control-Allow-Origin", "Access-Control-Expose-Headers"}


@pytest.mark.parametrize("path", ["/x402/deal", "/mpp/deal"])
def test_a_quote_is_the_same_quote(client, plain, world, buyer, seller, path):
    body, before = buyer.request(seller), files(world)
    same(client.post(path, json=body), plain.post(path, json=body))
    assert files(world) == before


@pytest.mark.parametrize(
    "options",
    [
        {"data": b"{", "content_type": "application/json"},
        {"data": b"{}", "content_type": "text/plain"},
        {"json": {"amount_usd": "1"}},
        {"data": b"x" * 65537, "content_type": "application/json"},
        {"json": {}, "headers": {"PAYMENT-SIGNATURE": "nonsense"}},
        {"json": {}, "headers": {"Authorization": "Payment nonsense"}},
        {"json": {}, "headers": {"Content-Length": "-1"}},
        {"json": {}, "headers": {"Content-Length": "1e3"}},
        {"json": {}, "headers": {"Content-Length": "9" * 20}},
    ],
)
def test_what_is_refused_is_refused_in_the_same_words(client, plain, options):
    same(client.post("/x402/deal", **options), plain.post("/x402/deal", **options))


def test_a_paid_call_and_its_retry_are_one_answer_whichever_way_they_go(client, plain, buyer, seller):
    body = buyer.request(seller)
    payment = buyer.x402(buyer.quote(body))
    paid = client.post("/x402/deal", json=body, headers=payment)
    assert paid.status_code == 200
    same(paid, plain.post("/x402/deal", json=body, headers=payment))
    same(client.post("/x402/deal", json=body, headers=payment), paid)


def test_a_failure_in_the_middle_of_a_paid_call_is_answered_once_and_not_tried_again(client, monkeypatch, buyer, seller):
    import payments

    calls = []

    def fails(*_, **__):
        calls.append(1)
        raise RuntimeError("a bug")

    monkeypatch.setattr(payments, "_verify", fails)
    body = buyer.request(seller)
    answer = client.post("/x402/deal", json=body, headers=buyer.x402(buyer.quote(body)))
    assert (answer.status_code, answer.json["error"], calls) == (500, "internal_error", [1])


def test_a_read_that_fails_is_answered_once_and_not_tried_again(client, monkeypatch, db, world):
    import actions

    calls, path = [], f"/v1/deals/{reach(db, world, 'delivered')}"

    def fails(*_, **__):
        calls.append(1)
        raise RuntimeError("a bug")

    monkeypatch.setattr(actions, "read", fails)
    answer = client.get(path)
    assert (answer.status_code, answer.json["error"], calls) == (500, "internal_error", [1])


def test_a_deal_reads_the_same(client, plain, db, world):
    path = f"/v1/deals/{reach(db, world, 'delivered')}"
    same(client.get(path), plain.get(path))
    etag = client.get(path).headers["ETag"]
    assert client.get(path, headers={"If-None-Match": etag}).status_code == 304
    same(client.get("/v1/deals/deal_none"), plain.get("/v1/deals/deal_none"))
    same(client.get("/v1/deals/"), plain.get("/v1/deals/"))
    assert client.head(path).data == b"" and client.put(path).status_code == 405


def test_the_script_of_a_page_of_another_origin_may_read_the_answers(client, db, world, buyer, seller):
    origin = {"Origin": "https://shop.example"}
    path = f"/v1/deals/{reach(db, world, 'funded')}"
    for answer in (client.get(path, headers=origin), client.post("/x402/deal", json=buyer.request(seller), headers=origin)):
        assert answer.headers["Access-Control-Allow-Origin"] == "*"
        assert {"PAYMENT-REQUIRED", "ETag"} <= set(answer.headers["Access-Control-Expose-Headers"].split(", "))


def test_an_announced_end_is_in_every_answer(client, monkeypatch, buyer, seller):
    monkeypatch.setattr(deprecations, "DEPRECATIONS", ["anything: the shortcut is closed then"])
    monkeypatch.setattr(deprecations, "headers", lambda *_: [])
    answer = client.post("/x402/deal", json=buyer.request(seller))
    assert answer.status_code == 402 and "Referrer-Policy" in answer.headers
    assert json.loads(answer.data)["x402Version"] == 2
