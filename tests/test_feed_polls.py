"""Polling and recording: what is asked when, and what an answer changes."""

import glob
import hashlib
import json
import random
import threading
import zlib

import db as database
import feed
import feedviews
import pytest
import targets
from deals import Refusal
from feedkit import SECOND, Stranger, answer, body, kind, nanoseconds, poll, says, watch

A, B, C = kind("eip155:1"), kind("eip155:2"), kind("eip155:3")
FULL, LESS = body(A, B), body(A)
PARTIAL = body(A, {"scheme": "exact"})
DOWN = answer(b"no", 503)


def changes(db):
    rows = db.execute("SELECT change, network FROM feed_changes JOIN feed_facets USING (facet) ORDER BY feed_changes.id")
    return [(row["change"], row["network"]) for row in rows]


def capability(reader, network="eip155:2", id="payai"):
    shown = reader.data(f"/v1/feed/facilitators/{id}")["capabilities"]
    return next(record for record in shown if record["facet"]["value"].endswith(network))


# -- What an answer changes -----------------------------------------------------------------------------------


def test_the_first_answer_is_a_snapshot_and_first_seen_for_every_facet(db, clock, reader):
    watch(db)
    poll(db, clock, body(A, B, extensions=["bazaar"]))
    found = [(event["change"], (event["facet"] or {}).get("value")) for event in reader.events()]
    assert found == [
        ("snapshot", None),
        ("first_seen", "v2 · exact · eip155:1"),
        ("first_seen", "v2 · exact · eip155:2"),
        ("first_seen", "bazaar"),
    ]


def test_the_same_answer_again_confirms_and_costs_one_row_however_many_facets(db, clock, reader):
    watch(db)
    many = body(*(kind(f"eip155:{number}") for number in range(1, 61)))
    poll(db, clock, many)
    tables = [row[0] for row in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table' AND name LIKE 'feed%'")]
    count = lambda: {table: db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables}
    before = count()
    poll(db, clock, many)
    after = count()
    assert {table: after[table] - before[table] for table in tables if after[table] != before[table]} == {"feed_checks": 1}
    assert [event["change"] for event in reader.events()[61:]] == ["snapshot"] + ["confirmed"] * 38
    assert len(reader.events(change="confirmed")) == 60


def test_last_confirmed_follows_every_check_without_a_write(db, clock, reader):
    watch(db)
    poll(db, clock, FULL)
    poll(db, clock, FULL)
    record = capability(reader)
    assert record["first_seen"] == "2026-09-21T14:28:20.000000002Z"
    assert record["last_confirmed"] == "2026-09-21T14:43:20.000000002Z"


@pytest.mark.parametrize(
    "other",
    [
        body(B, A),
        body(B, A, B),
        body({**A, "extra": {"feePayer": "x"}}, B, generatedAt="now"),
        b" " + FULL,
        body(A, {**B, "extra": None}, signers={"*": ["0x1"]}),
    ],
    ids=["order", "twice", "extra and more", "blanks", "signers"],
)
def test_another_body_with_the_same_kinds_is_no_change(db, clock, other):
    watch(db)
    poll(db, clock, FULL)
    assert poll(db, clock, other).changes == 0
    assert poll(db, clock, FULL).changes == 0


def test_a_changed_spelling_is_one_first_seen_and_one_removal(db, clock):
    watch(db)
    for content in (body(kind("base")), body(kind("Base")), body(kind("Base"))):
        poll(db, clock, content)
    assert changes(db) == [("first_seen", "base"), ("first_seen", "Base"), ("removed", "base")]


# -- Removal: two complete answers in a row -------------------------------------------------------------------

REMOVED = ("removed", "eip155:2")
SEEN = [("first_seen", "eip155:1"), ("first_seen", "eip155:2")]


@pytest.mark.parametrize(
    "said, expected",
    [
        ([LESS], []),
        ([LESS, LESS], [REMOVED]),
        ([LESS, LESS, LESS, LESS], [REMOVED]),
        ([LESS, FULL, LESS, FULL, LESS], []),
        ([LESS, FULL, LESS, LESS], [REMOVED]),
        ([PARTIAL, PARTIAL, PARTIAL], []),
        ([LESS, PARTIAL, LESS], []),
        ([PARTIAL, LESS, PARTIAL, LESS], []),
        ([LESS, PARTIAL, LESS, LESS], [REMOVED]),
        ([DOWN, DOWN, DOWN], []),
        ([LESS, DOWN, LESS], []),
        ([LESS, DOWN, LESS, DOWN, LESS, DOWN], []),
        ([LESS, DOWN, LESS, LESS], [REMOVED]),
        ([answer(b"", 401)] * 3, []),
        ([LESS, answer(b"", 401), LESS], []),
        ([answer(None, None, reason="timeout")] * 3, []),
        ([b"<html>"] * 3, []),
        ([body()], []),
        ([body(), body()], [("removed", "eip155:1"), REMOVED]),
        ([body(), FULL, body(), FULL], []),
        ([body(), LESS], [REMOVED]),
        ([LESS, LESS, FULL], [REMOVED, ("returned", "eip155:2")]),
        ([LESS, LESS, PARTIAL, body(A, B, None)], [REMOVED, ("returned", "eip155:2")]),
        ([LESS, LESS, FULL, LESS], [REMOVED, ("returned", "eip155:2")]),
        ([LESS, LESS, FULL, LESS, LESS], [REMOVED, ("returned", "eip155:2"), REMOVED]),
        ([LESS, LESS, DOWN, FULL], [REMOVED, ("returned", "eip155:2")]),
    ],
)
def test_a_facet_is_removed_by_two_complete_answers_in_a_row_and_by_nothing_less(db, clock, said, expected):
    watch(db)
    for content in [FULL, *said]:
        poll(db, clock, content)
    assert changes(db) == SEEN + expected


def test_removed_at_is_the_first_of_the_two_and_the_evidence_the_second(db, clock, reader):
    watch(db)
    poll(db, clock, FULL)
    poll(db, clock, LESS)
    assert capability(reader)["state"] == "present"
    assert capability(reader)["last_confirmed"] == "2026-09-21T14:28:20.000000002Z"
    second = poll(db, clock, LESS)
    record = capability(reader)
    assert record["state"] == "removed"
    assert record["first_seen"] == "2026-09-21T14:28:20.000000002Z"
    assert record["last_confirmed"] == "2026-09-21T14:28:20.000000002Z"
    assert record["removed_at"] == "2026-09-21T14:43:20.000000000Z"
    assert record["evidence"]["check_id"] == str(second.at)
    [event] = reader.events(change="removed")
    assert event["id"] == str(second.at + 2)  # after the snapshot and the one facet left
    assert event["facet"]["value"] == "v2 · exact · eip155:2"


def test_a_facet_that_returned_is_present_again_since_it_was_first_seen(db, clock, reader):
    watch(db)
    for content in (FULL, LESS, LESS, FULL):
        poll(db, clock, content)
    record = capability(reader)
    assert (record["state"], record["removed_at"]) == ("present", None)
    assert record["first_seen"] == "2026-09-21T14:28:20.000000002Z"
    assert record["last_confirmed"] == "2026-09-21T15:13:20.000000002Z"


def test_a_partial_answer_may_add_and_confirm(db, clock, reader):
    watch(db)
    poll(db, clock, FULL)
    check = poll(db, clock, body(B, C, {"bad": 1}))
    assert (check.reason, check.changes) == ("ok", 1)
    assert "Partial" in check.note
    assert capability(reader, "eip155:3")["state"] == "present"
    assert capability(reader, "eip155:1")["last_confirmed"] == "2026-09-21T14:28:20.000000001Z"
    assert capability(reader, "eip155:2")["last_confirmed"] == "2026-09-21T14:43:20.000000001Z"


def test_removals_of_one_check_come_after_its_facets_each_with_its_own_id(db, clock, reader):
    watch(db)
    for content in (body(A, B, C), body(B), body(B)):
        poll(db, clock, content)
    found = reader.events()[-4:]
    assert [event["change"] for event in found] == ["snapshot", "confirmed", "removed", "removed"]
    numbers = [int(event["id"]) for event in found]
    assert numbers == list(range(numbers[0], numbers[0] + 4))


def test_the_capabilities_agree_with_a_plain_model_over_a_long_random_history(db, clock, reader):
    """The model is the rule as a person would write it: keep every check, look back."""
    chance, networks = random.Random(7), ["eip155:1", "eip155:2", "eip155:3"]
    watch(db)
    model, history = {}, []
    for _ in range(150):
        present = [network for network in networks if chance.random() < 0.6]
        mode = chance.choice(["complete", "complete", "complete", "partial", "failed"])
        entries = [kind(network) for network in present]
        if mode == "partial":
            entries += [kind("eip155:99"), None]
        check = poll(db, clock, DOWN if mode == "failed" else body(*entries))
        history.append((mode, present, check.at))
        if mode == "failed":
            continue
        for network in networks:
            if network in present:
                model[network] = ("present", None)
            elif network in model and model[network][0] == "present" and len(history) > 1:
                (before, had, at), (now, _, _) = history[-2:]
                if before == now == "complete" and network not in had:
                    model[network] = ("removed", at)
    shown = reader.data("/v1/feed/facilitators/payai")["capabilities"]
    found = {record["facet"]["value"].split()[-1]: (record["state"], record["removed_at"]) for record in shown}
    stamps = {network: (state, at and feedviews.stamp(at)) for network, (state, at) in model.items()}
    assert {network: found[network] for network in networks} == stamps


# -- Times and ids --------------------------------------------------------------------------------------------


def test_times_strictly_increase_even_when_the_clock_stands_still_or_goes_back(db, clock, reader):
    watch(db)
    watch(db, "dexter")
    for after in (0, 0, -3600, 0):
        poll(db, clock, FULL, after=after)
        poll(db, clock, DOWN, "dexter", after=0)
        poll(db, clock, LESS, "dexter", after=0)
    numbers = [int(event["id"]) for event in reader.events()]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 4 * 5
    assert reader.get("/v1/feed/summary").json["as_of"] >= reader.events()[-1]["at"]


def test_no_event_moves_when_more_is_recorded(db, clock, reader):
    watch(db)
    seen = {}
    for content in (FULL, LESS, LESS, DOWN, FULL, PARTIAL, FULL, body(C), body(C)):
        poll(db, clock, content)
        now = {event["id"]: (event["change"], event["facet"] and event["facet"]["id"]) for event in reader.events()}
        assert seen.items() <= now.items()
        seen = now
    feed.prune(db, now_ns=nanoseconds(clock)() + 365 * feed.DAY)
    assert {event["id"]: (event["change"], event["facet"] and event["facet"]["id"]) for event in reader.events()} == seen


# -- Outcomes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said, reason, reachable",
    [
        (answer(b"{}", 401), "auth_required", True),
        (answer(b"{}", 403), "http_403", True),
        (answer(b"", 404), "http_404", True),
        (answer(b"", 429), "http_429", True),
        (answer(b"", 500), "http_500", True),
        (answer(FULL, 201), "http_201", True),
        (answer(b"", 204), "http_204", True),
        (answer(b"", 304), "http_304", True),
        (answer(b"", 301, headers={"location": "https://elsewhere.example/supported"}), "redirect", True),
        (answer(b"", 308, headers={}), "redirect", True),
        (answer(b"<html>", 200), "malformed", True),
        (answer(None, None, reason="timeout", note="x"), "timeout", False),
        (answer(None, 200, reason="timeout", note="x"), "timeout", True),
        (answer(None, None, reason="tls", note="x"), "tls", False),
        (answer(None, None, reason="dns", note="x"), "dns", False),
        (answer(None, None, reason="refused", note="x"), "refused", False),
        (answer(None, 200, reason="too_large", note="x"), "too_large", True),
    ],
)
def test_what_is_no_declaration_is_unavailable_for_a_reason_and_has_no_events(db, clock, reader, said, reason, reachable):
    watch(db)
    check = poll(db, clock, said)
    shown = reader.data("/v1/feed/facilitators/payai")
    assert check.reason == shown["check"]["reason"] == reason
    assert shown["check"]["status"] == "unavailable"
    assert shown["check"]["reachable"] is reachable
    assert shown["check"]["http_status"] == said.status
    assert shown["check"]["response_ms"] == 120
    assert (shown["supported"], shown["supported_evidence"], shown["capabilities"]) == (None, None, [])
    assert reader.events() == []
    assert reader.data("/v1/feed/summary")["unavailable"] == 1


def test_a_redirect_is_recorded_in_letters_that_can_do_no_harm(db, clock, reader):
    watch(db)
    poll(db, clock, answer(b"", 302, headers={"location": "https://evil.example/\x1b[2J\u202e" + "x" * 500}))
    note = reader.data("/v1/feed/facilitators/payai")["check"]["evidence"]["note"]
    assert "A redirect to https://evil.example/[2J" in note
    assert note.isascii() and note.isprintable() and len(note) < 400


# -- Conditional requests -------------------------------------------------------------------------------------


def asked(db, clock, said):
    """Poll once and return the headers that were sent."""
    clock.sleep(900)
    sent = []

    def get(url, *, headers, loopback):
        sent.append(headers)
        return said

    feed.poll(db, clock=nanoseconds(clock), force=True, get=get)
    return sent[0]


def test_an_etag_is_sent_back_and_not_modified_confirms(db, clock, reader):
    watch(db)
    assert "if-none-match" not in asked(db, clock, answer(FULL, headers={"etag": '"v1"'}))
    assert asked(db, clock, answer(b"", 304))["if-none-match"] == '"v1"'
    assert asked(db, clock, answer(b"", 304))["if-none-match"] == '"v1"'
    assert [event["change"] for event in reader.events()[-3:]] == ["snapshot", "confirmed", "confirmed"]
    assert reader.events()[-3]["evidence"]["raw"] == json.loads(FULL)
    assert reader.data("/v1/feed/facilitators/payai")["check"]["http_status"] == 304


def test_an_answer_without_an_etag_ends_the_conditional_requests(db, clock):
    watch(db)
    asked(db, clock, answer(FULL, headers={"etag": '"v1"'}))
    asked(db, clock, answer(FULL))
    assert "if-none-match" not in asked(db, clock, answer(FULL))


@pytest.mark.parametrize("etag", ["", '"' + "x" * 300 + '"', '"a\r\nX: y"', '"ä"', "bare"])
def test_an_etag_that_could_not_be_sent_is_not_kept(db, clock, etag):
    watch(db)
    asked(db, clock, answer(FULL, headers={"etag": etag}))
    assert "if-none-match" not in asked(db, clock, answer(FULL))


def test_not_modified_after_a_partial_answer_still_removes_nothing(db, clock):
    watch(db)
    poll(db, clock, FULL)
    asked(db, clock, answer(PARTIAL, headers={"etag": '"p"'}))
    for _ in range(3):
        asked(db, clock, answer(b"", 304))
    assert changes(db) == SEEN


# -- Manners --------------------------------------------------------------------------------------------------


def run(db, clock, get, **more):
    return feed.poll(db, clock=nanoseconds(clock), get=get, environ={}, **more)


def test_each_target_is_polled_at_its_own_interval(db, clock):
    watch(db, "often", interval_s=300)
    watch(db, "seldom", interval_s=3600)
    polled = []
    for _ in range(24):  # two hours of a cron job every five minutes
        polled += [check.target for check in run(db, clock, lambda url, **_: answer(FULL))]
        clock.sleep(300)
    assert polled.count("often") == 24
    assert polled.count("seldom") in (2, 3)


def test_targets_do_not_come_due_all_at_once(db, clock):
    for number in range(20):
        watch(db, f"t{number}")
    run(db, clock, lambda url, **_: answer(FULL))
    due = {row[0] for row in db.execute("SELECT due_at FROM feed_targets")}
    assert len(due) == 20


@pytest.mark.parametrize(
    "header, held",
    [("120", 120), ("Mon, 21 Sep 2026 14:33:20 GMT", 1200), ("0", 0), ("999999999", 86_400), ("Mon, 21 Sep 2020 14:33:20 GMT", 0),
     ("soon", 0), ("-5", 0), ("1e9", 0), ("\u0661\u0662", 0), ("Mon, 99 Foo 2026", 0)],
)  # fmt: skip
def test_retry_after_is_honoured_even_by_a_poll_that_will_not_wait(db, clock, header, held):
    watch(db, interval_s=60)
    run(db, clock, lambda url, **_: answer(b"", 429, headers={"retry-after": header}))
    if held:
        clock.sleep(held - 1)
        assert run(db, clock, lambda url, **_: answer(FULL), force=True) == []
        clock.sleep(1)
    assert len(run(db, clock, lambda url, **_: answer(FULL), force=True)) == 1


def test_one_request_a_host_at_a_time_and_four_in_all(db, clock):
    for number in range(6):
        watch(db, f"t{number}")
    watch(db, "twin", base_url="https://t0.example/other")
    under_way, most, hosts, lock = [], [], [], threading.Lock()
    gate = threading.Barrier(4)

    def get(url, **_):
        host = url.split("/")[2]
        with lock:
            hosts.append(host in under_way)
            under_way.append(host)
            most.append(len(under_way))
        try:
            gate.wait(0.2)
        except threading.BrokenBarrierError:
            pass
        with lock:
            under_way.remove(host)
        return answer(FULL)

    assert len(run(db, clock, get)) == 7
    assert max(most) == 4
    assert not any(hosts)


def test_two_polls_at_once_poll_every_target_once(db, settings, clock):
    for number in range(6):
        watch(db, f"t{number}")
    counted, lock = [], threading.Lock()

    def get(url, **_):
        with lock:
            counted.append(url)
        return answer(FULL)

    def other():
        connection = database.connect(settings.database)
        run(connection, clock, get)
        connection.close()

    threads = [threading.Thread(target=other) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(counted) == sorted(f"https://t{number}.example/supported" for number in range(6))
    assert db.execute("SELECT count(*) FROM feed_checks").fetchone()[0] == 6


def test_a_poll_that_died_is_taken_over_after_its_lease_and_can_record_no_more(db, clock):
    watch(db)
    [number] = targets.due(db, now_ns=nanoseconds(clock)())
    dead = targets.claim(db, number, now_ns=nanoseconds(clock)())
    assert run(db, clock, lambda url, **_: answer(FULL)) == []
    clock.sleep(60)
    assert len(run(db, clock, lambda url, **_: answer(FULL))) == 1
    assert feed.record(db, dead, answer(LESS), now_ns=nanoseconds(clock)()) is None
    assert db.execute("SELECT count(*) FROM feed_checks").fetchone()[0] == 1


def test_one_bad_target_costs_the_others_nothing(db, clock):
    for id in ("a", "b", "c"):
        watch(db, id)
    said = {"a": answer(FULL), "b": answer(b"[" * 100_000), "c": answer(FULL)}
    checks = run(db, clock, lambda url, **_: said[url[8]])
    assert {check.target: check.reason for check in checks} == {"a": "ok", "b": "malformed", "c": "ok"}


def test_a_poll_goes_over_real_sockets_with_name_version_and_contact(db, clock):
    with Stranger(says(FULL)) as stranger:
        watch(db, base_url=f"{stranger.url}/ ", loopback=True)
        [check] = feed.poll(db, clock=nanoseconds(clock), contact="https://deals.example")
    assert (check.reason, check.facets) == ("ok", 2)
    assert "user-agent: facilitator-feed/1.0 (+https://deals.example)" in stranger.requests[0]
    assert stranger.requests[0].startswith("GET /supported HTTP/1.1")


# -- Keys -----------------------------------------------------------------------------------------------------


def test_a_header_is_filled_from_the_environment_and_shown_nowhere(db, settings, clock, reader, caplog):
    watch(db, headers={"Authorization": "Bearer ${PAYAI_KEY}"})
    sent = []

    def get(url, *, headers, loopback):
        sent.append(headers)
        return answer(FULL)

    feed.poll(db, clock=nanoseconds(clock), environ={"PAYAI_KEY": "s3cret"}, get=get)
    assert sent[0]["authorization"] == "Bearer s3cret"
    stored = [open(path, "rb").read() for path in glob.glob(settings.database + "*")]
    assert any(b"PAYAI_KEY" in data for data in stored) and not any(b"s3cret" in data for data in stored)
    for path in ("/v1/feed/facilitators", "/v1/feed/events", "/feed", "/feed/payai", "/metrics"):
        assert b"s3cret" not in reader.get(path).data
        assert b"PAYAI_KEY" not in reader.get(path).data
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize("environ", [{}, {"PAYAI_KEY": "a\r\nX: y"}])
def test_a_header_that_cannot_be_filled_is_unconfigured_and_nothing_is_sent(db, clock, reader, environ):
    watch(db, headers={"Authorization": "Bearer ${PAYAI_KEY}"})
    checks = feed.poll(db, clock=nanoseconds(clock), environ=environ, get=lambda *_, **__: pytest.fail("sent"))
    assert [check.reason for check in checks] == ["unconfigured"]
    assert reader.data("/v1/feed/facilitators/payai")["check"]["status"] == "pending"
    assert reader.data("/v1/feed/summary")["pending"] == 1


# -- Targets --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "id, more",
    [
        ("", {}), ("Upper", {}), ("-a", {}), ("a" * 65, {}), ("a/b", {}), ("ä", {}),
        ("a", {"base_url": "http://a.example"}), ("a", {"base_url": "https://a.example/supported/"}), ("a", {"base_url": "a.example"}),
        ("a", {"base_url": "https://key@a.example"}), ("a", {"base_url": "https://a.example?key=1"}), ("a", {"name": ""}),
        ("a", {"name": "x" * 101}), ("a", {"name": "a\x1b[2J"}), ("a", {"interval_s": 59}), ("a", {"interval_s": 86_401}),
        ("a", {"headers": {"Host": "x"}}), ("a", {"headers": {"X": "a\nb"}}),
    ],
)  # fmt: skip
def test_a_target_that_cannot_be_is_refused_in_a_sentence(db, id, more):
    with pytest.raises(Refusal) as caught:
        targets.add(db, id, **{"base_url": "https://a.example"} | more)
    assert caught.value.message.endswith(".")
    assert db.execute("SELECT count(*) FROM feed_targets").fetchone()[0] == 0


def test_slashes_and_blanks_around_a_base_url_are_stripped(db):
    watch(db, base_url="  https://a.example/x//  ")
    assert targets.ever(db, "payai")["base_url"] == "https://a.example/x"


def test_an_id_is_taken_once(db):
    watch(db)
    with pytest.raises(Refusal, match="already"):
        watch(db)


def test_a_pending_target_gets_its_url_later(db, clock, reader):
    watch(db, base_url=None)
    assert reader.data("/v1/feed/facilitators/payai")["check"] == {
        "status": "pending", "reason": "unconfigured", "response_ms": None, "reachable": False, "http_status": None,
        "evidence": None, "checked_at": None,
    }  # fmt: skip
    assert run(db, clock, lambda *_, **__: pytest.fail("asked"), force=True) == []
    watch(db)
    assert poll(db, clock, FULL).reason == "ok"


def test_a_removed_target_leaves_the_lists_but_its_events_stay(db, clock, reader):
    watch(db)
    poll(db, clock, FULL)
    targets.remove(db, "payai")
    assert reader.data("/v1/feed/facilitators") == []
    assert reader.refusal("/v1/feed/facilitators/payai")[:2] == (404, "not_found")
    assert len(reader.events(facilitator="payai")) == 3
    assert run(db, clock, lambda *_, **__: pytest.fail("asked"), force=True) == []
    with pytest.raises(Refusal, match="no target"):
        targets.remove(db, "payai")
    with pytest.raises(Refusal, match="another id"):
        watch(db, base_url="https://other.example")
    watch(db)
    assert poll(db, clock, FULL).changes == 0  # nothing is first seen a second time


def test_a_target_never_polled_is_removed_without_a_trace(db):
    watch(db)
    targets.remove(db, "payai")
    assert targets.ever(db, "payai") is None


def test_the_catalogue_ships_disabled_and_the_sandbox_watches_itself(db, clock, client, reader):
    targets.seed(db, mode="sandbox", base_url="http://127.0.0.1:9")
    targets.seed(db, mode="sandbox", base_url="http://127.0.0.1:9")
    assert len(targets.every(db)) == 23
    assert [target["id"] for target in targets.every(db) if target["enabled"]] == ["sandbox"]
    said = answer(client.get("/sandbox/supported").data)
    [check] = run(db, clock, lambda url, **_: said if url == "http://127.0.0.1:9/sandbox/supported" else None)
    assert check.reason == "ok"
    assert reader.data("/v1/feed/summary")["operational"] == 1


def test_in_live_mode_nobody_is_watched_at_first(db):
    targets.seed(db, mode="live", base_url="https://deals.example")
    assert [target["id"] for target in targets.every(db) if target["enabled"]] == []
    assert targets.ever(db, "sandbox") is None


# -- Evidence and retention -----------------------------------------------------------------------------------


def stored(db):
    return {zlib.decompress(row["content"]) if row["content"] else None for row in db.execute("SELECT content FROM feed_bodies")}


def test_identical_bodies_are_stored_once_whoever_sent_them(db, clock):
    watch(db)
    watch(db, "dexter")
    for id in ("payai", "dexter", "payai"):
        poll(db, clock, FULL, id)
    assert db.execute("SELECT count(*) FROM feed_bodies").fetchone()[0] == 1


def test_prune_keeps_what_shows_a_change_and_the_latest_and_thins_the_rest(db, clock, reader):
    watch(db)
    first, same, gone, gone_too, back, late = (
        body(*entries, at=number)
        for number, entries in enumerate([(A, B), (A, B), (A,), (A,), (A, B), (A, B)])
    )  # fmt: skip
    checks = [poll(db, clock, content) for content in (first, same, gone, gone_too, back, late)]
    failed = poll(db, clock, answer(b"no", 500))
    clock.sleep(31 * 86_400)
    assert feed.prune(db, now_ns=nanoseconds(clock)()) == 2  # same, and the failure's
    assert feed.prune(db, now_ns=nanoseconds(clock)()) == 0
    assert stored(db) == {first, gone, gone_too, back, late, None}
    status, code, message = reader.refusal(f"/v1/feed/checks/{checks[1].at}/raw")
    assert (status, code) == (410, "expired")
    assert hashlib.sha256(same).hexdigest() in message
    assert reader.refusal(f"/v1/feed/checks/{failed.at}/raw")[0] == 410
    assert reader.get(f"/v1/feed/checks/{checks[2].at}/raw").data == gone
    snapshots = reader.events(change="snapshot", since="2026-09-01T00:00:00Z")
    assert [event["evidence"]["raw"] is None for event in snapshots] == [False, True, False, False, False, False]


def test_prune_waits_thirty_days_after_a_body_was_last_received(db, clock):
    watch(db)
    for content in (FULL, b" " + FULL, FULL):
        poll(db, clock, content)
    clock.sleep(29 * 86_400)
    assert feed.prune(db, now_ns=nanoseconds(clock)()) == 0
    clock.sleep(86_400)
    assert feed.prune(db, now_ns=nanoseconds(clock)()) == 1


def test_a_thinned_body_that_is_received_again_is_kept_again(db, clock):
    watch(db)
    for content in (FULL, b" " + FULL, FULL):
        poll(db, clock, content)
    clock.sleep(31 * 86_400)
    feed.prune(db, now_ns=nanoseconds(clock)())
    poll(db, clock, b" " + FULL)
    assert b" " + FULL in stored(db)


def test_large_bodies_that_show_no_change_are_kept_only_while_they_are_the_latest(db, clock):
    watch(db)
    noise = random.Random(1)
    bodies = [body(A, B, noise=noise.randbytes(100_000).hex()) for _ in range(4)]
    for content in bodies:
        poll(db, clock, content)
    poll(db, clock, answer(noise.randbytes(100_000), 500))
    assert stored(db) == {bodies[0], bodies[3], None}


# -- For the service itself -----------------------------------------------------------------------------------


def test_declares_follows_the_latest_complete_check(db, clock):
    url = "https://payai.example/"
    assert feed.declares(db, url) is None
    watch(db)
    assert feed.declares(db, url) is None
    for content, expected in [
        (DOWN, None),
        (PARTIAL, None),
        (body(kind("base", version=1)), True),
        (body(kind("eip155:8453", scheme="upto"), kind("eip155:1")), False),
        (DOWN, False),
        (body(kind("eip155:8453"), None), False),
        (body(kind("eip155:8453")), True),
        (DOWN, True),
    ]:
        poll(db, clock, content)
        assert feed.declares(db, url) is expected
    assert feed.declares(db, url, scheme="upto") is False
    targets.enable(db, "payai", False)
    assert feed.declares(db, url) is None
    assert nanoseconds(clock)() % SECOND == 0


def test_the_service_asks_its_own_feed(db, clock, world):
    watch(db)
    poll(db, clock, body(kind("eip155:1")))
    assert world.declares("https://payai.example") is False
    poll(db, clock, body(kind()))
    assert world.declares("https://payai.example") is True
    assert world.declares("https://nobody.example") is None
