"""The free documents: 120 requests in any 60 seconds per client, exact, whoever of the workers counts."""

import dataclasses
import multiprocessing
import time

import pytest

import app as application
import db as database
import limits
from conftest import NOON

FREE = ["/openapi.json", "/llms.txt", "/agents.md", "/pricing.md", "/docs", "/ask", "/health"]


def headers(answer):
    return tuple(answer.headers.get(f"RateLimit-{name}") for name in ("Limit", "Policy", "Remaining", "Reset"))


@pytest.mark.parametrize("path", FREE)
def test_every_free_document_carries_the_four_headers(client, path):
    answer = client.get(path)
    assert answer.status_code == 200
    assert headers(answer) == ("120", "120;w=60", "119", "60")
    assert "Retry-After" not in answer.headers


def test_the_documents_share_one_window(client):
    assert [headers(client.get(path))[2] for path in FREE] == ["119", "118", "117", "116", "115", "114", "113"]


def test_the_121st_request_in_a_window_is_refused_and_says_when_to_come_back(client, clock):
    for _ in range(120):
        assert client.get("/llms.txt").status_code == 200
    clock.now += 12.5
    answer = client.get("/llms.txt")
    assert (answer.status_code, answer.json["error"]) == (429, "rate_limited")
    assert headers(answer) == ("120", "120;w=60", "0", "48")
    assert answer.headers["Retry-After"] == "48"


def test_a_slot_opens_when_the_oldest_request_is_60_seconds_old_and_not_before(client, clock):
    client.get("/llms.txt")
    clock.now = NOON + 30
    for _ in range(119):
        assert client.get("/llms.txt").status_code == 200
    clock.now = NOON + 59.999
    assert headers(client.get("/llms.txt"))[2:] == ("0", "1")
    assert client.get("/llms.txt").status_code == 429
    clock.now = NOON + 60
    answer = client.get("/llms.txt")
    assert (answer.status_code, headers(answer)[2:]) == (200, ("0", "30"))
    assert client.get("/llms.txt").status_code == 429


def test_no_60_seconds_ever_see_more_than_120_however_the_requests_fall(client, clock):
    admitted = []
    for step in range(400):
        clock.now = NOON + step * 0.37
        if client.get("/llms.txt").status_code == 200:
            admitted.append(clock.now)
    assert max(sum(1 for other in admitted if moment - 60 < other <= moment) for moment in admitted) == 120


def test_refused_requests_do_not_count(client, clock):
    for _ in range(200):
        client.get("/llms.txt")
    clock.now = NOON + 60
    assert headers(client.get("/llms.txt"))[2] == "119"


def test_an_answer_that_has_not_changed_counts_too_and_carries_the_headers(client):
    etag = client.get("/llms.txt").headers["ETag"]
    answer = client.get("/llms.txt", headers={"If-None-Match": etag})
    assert (answer.status_code, headers(answer)[2]) == (304, "118")


def test_other_clients_are_not_affected(client):
    for _ in range(121):
        client.get("/llms.txt", environ_base={"REMOTE_ADDR": "192.0.2.1"})
    assert client.get("/llms.txt", environ_base={"REMOTE_ADDR": "192.0.2.2"}).status_code == 200


def test_deals_and_the_lists_are_not_limited(client, buyer, seller):
    deal = buyer.deal(seller)
    for _ in range(130):
        assert client.get(f"/v1/deals/{deal}").status_code == 200
    assert "RateLimit-Limit" not in client.get("/endpoints").headers


def test_x_forwarded_for_is_not_believed_without_a_proxy(client):
    for number in range(121):
        answer = client.get("/llms.txt", headers={"X-Forwarded-For": f"198.51.100.{number}"})
    assert answer.status_code == 429


def test_behind_one_proxy_the_right_most_entry_counts(world):
    settings = dataclasses.replace(world.settings, proxies=1)
    client = application.create_app(world=dataclasses.replace(world, settings=settings)).test_client()
    for number in range(121):
        answer = client.get("/llms.txt", headers={"X-Forwarded-For": f"203.0.113.{number}, 198.51.100.7"})
    assert answer.status_code == 429
    answer = client.get("/llms.txt", headers={"X-Forwarded-For": "198.51.100.7, 198.51.100.8"})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "address, key",
    [
        ("192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("unix:", "unix:"),
        ("", ""),
    ],
)
def test_a_client_is_an_ipv4_address_or_an_ipv6_64(address, key):
    assert limits.client_key(address) == key


def test_one_ipv6_subscriber_is_one_client(client):
    for number in range(121):
        answer = client.get("/llms.txt", environ_base={"REMOTE_ADDR": f"2001:db8::{number:x}"})
    assert answer.status_code == 429
    assert client.get("/llms.txt", environ_base={"REMOTE_ADDR": "2001:db8:0:1::1"}).status_code == 200


def test_a_restart_forgets_nothing(world, client):
    for _ in range(120):
        client.get("/llms.txt")
    database._thread.open.clear()  # as after a restart: every file is opened anew
    assert application.create_app(world=world).test_client().get("/llms.txt").status_code == 429


def test_a_clock_set_back_by_hours_locks_nobody_out(world):
    part = limits.log(world.settings.database, "a")
    for _ in range(120):
        limits.visit(part, "a", now=NOON)
    assert limits.visit(part, "a", now=NOON - 7200) == (True, 119, 60)


def test_a_worker_whose_clock_reads_a_little_less_still_counts(world):
    part = limits.log(world.settings.database, "a")
    assert limits.visit(part, "a", now=NOON + 0.002) == (True, 119, 60)
    assert limits.visit(part, "a", now=NOON) == (True, 118, 60)


def test_the_store_keeps_nothing_that_is_over(world):
    part = limits.log(world.settings.database, "a")
    for number in range(300):
        limits.visit(part, f"early {number}", now=NOON)
    for number in range(300):
        limits.visit(part, f"late {number}", now=NOON + 61)
    clients = [row["client"] for row in part.execute("SELECT client FROM visits")]
    assert len(clients) == 300
    assert all(client.startswith("late") for client in clients)


def _worker(path, results):
    part = limits.log(path, "a")
    results.put(sum(limits.visit(part, "a", now=time.time())[0] for _ in range(100)))


def test_four_processes_at_once_admit_exactly_120(world):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [context.Process(target=_worker, args=(world.settings.database, results)) for _ in range(4)]
    for worker in workers:
        worker.start()
    admitted = sum(results.get(timeout=60) for _ in workers)
    for worker in workers:
        worker.join(60)
    assert admitted == 120
