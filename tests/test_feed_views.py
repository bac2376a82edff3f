"""The views over HTTP: shapes, windows, pages, cursors, tags. Every answer is held against the published document."""

import base64
import hashlib
import json
import random

import contract
import feedevents
import feedroutes
import feedviews
import openapi_spec_validator
import pytest
import spec
import targets
from feedkit import answer, body, kind, nanoseconds, poll, watch

A, B = kind("eip155:1"), kind("eip155:2")
FULL = body(A, B, extensions=["bazaar"])
EVENTS = "/v1/feed/events"


@pytest.fixture
def history(db, clock):
    """Two facilitators, ten polls each."""
    watch(db, "payai", name="PayAI")
    watch(db, "dexter")
    for turn in range(10):
        poll(db, clock, FULL, "payai", after=300)
        poll(db, clock, body(A) if turn % 4 else body(A, kind(f"eip155:{turn}")), "dexter", after=300)


# -- Shapes ---------------------------------------------------------------------------------------------------


def test_every_route_is_documented_and_every_documented_feed_path_is_a_route():
    routes = {path.replace("<", "{").replace(">", "}") for path in feedroutes.ROUTES}
    documented = {path for path, item in spec.document()["paths"].items() if "Feed" in item.get("get", {}).get("tags", [])}
    assert routes == documented


def test_the_published_document_is_valid_openapi():
    openapi_spec_validator.validate(spec.document())


def test_every_query_parameter_is_documented_and_the_other_way_round():
    for path, view in feedroutes.ROUTES.items():
        operation = spec.document()["paths"][path.replace("<", "{").replace(">", "}")]["get"]
        documented = [one["name"] for one in operation["parameters"] if one.get("in") == "query"]
        assert sorted(documented) == sorted(view.parameters)


def test_every_example_fits_its_schema():
    for path, item in spec.document()["paths"].items():
        if "Feed" in item.get("get", {}).get("tags", []):
            for response in item["get"]["responses"].values():
                for media in response.get("content", {}).values():
                    if "example" in media and "$ref" in media.get("schema", {}):
                        contract._fits(media["example"], media["schema"], path)


@pytest.mark.parametrize("path", ["/v1/feed/summary", "/v1/feed/facilitators", "/v1/feed/standards", EVENTS, "/v1/feed/facilitators/payai"])
def test_the_envelope_is_on_every_view(reader, history, path):
    found = reader.get(path).json
    assert list(found) == ["data_mode", "fabricated", "as_of", "disclaimer", "data"]
    assert (found["data_mode"], found["fabricated"]) == ("live", False)
    assert found["as_of"] == "2026-09-21T15:53:20.000000000Z" or found["as_of"] > "2026-09-21T15:53:20.000000000Z"


@pytest.mark.parametrize("path", ["/v1/feed/facilitators/nobody", "/v1/feed/summary?x=1", f"{EVENTS}?limit=0"])
def test_the_envelope_is_on_refusals_too(reader, path):
    found = reader.get(path).json
    assert list(found) == ["error", "message", "docs", "data_mode", "fabricated", "as_of", "disclaimer"]


def test_an_empty_feed_has_its_shapes(reader):
    assert reader.data("/v1/feed/facilitators") == []
    summary = reader.data("/v1/feed/summary")
    assert {name: summary[name] for name in summary if name != "scope"} == {
        "total": 0, "operational": 0, "unavailable": 0, "pending": 0, "reachable": 0, "median_response_ms": None,
    }  # fmt: skip
    page = reader.data(EVENTS)
    assert page["events"] == [] and "next_cursor" not in page


def test_the_summary_counts_each_target_once(db, clock, reader):
    for id, ms in (("a", 100), ("b", 200), ("c", 401)):
        watch(db, id)
        poll(db, clock, answer(FULL, ms=ms), id)
    watch(db, "gated")
    poll(db, clock, answer(b"", 401, ms=5), "gated")
    watch(db, "gone")
    poll(db, clock, answer(None, None, reason="timeout", ms=15_000), "gone")
    watch(db, "later", base_url=None)
    watch(db, "off", enabled=False)
    summary = reader.data("/v1/feed/summary")
    assert {name: summary[name] for name in summary if name != "scope"} == {
        "total": 6, "operational": 3, "unavailable": 2, "pending": 1, "reachable": 4, "median_response_ms": 200,
    }  # fmt: skip


def test_one_facilitator_is_told_whole(db, clock, reader):
    watch(db, name="PayAI")
    said = body({**A, "extra": {"feePayer": "x"}}, signers={"eip155:*": ["0x1"]}, pricing={"creditUsd": "0.01"}, odd=1)
    check = poll(db, clock, answer(said, ms=132))
    shown = reader.data("/v1/feed/facilitators/payai")
    assert (shown["id"], shown["name"], shown["endpoint"]) == ("payai", "PayAI", "https://payai.example")
    assert {name: shown["check"][name] for name in ("status", "reason", "response_ms", "reachable", "http_status", "checked_at")} == {
        "status": "operational", "reason": "ok", "response_ms": 132, "reachable": True, "http_status": 200,
        "checked_at": "2026-09-21T14:28:20.000000000Z",
    }  # fmt: skip
    assert shown["check"]["evidence"]["raw"] is None
    assert shown["supported"] == {
        "kinds": [{**A, "extra": {"feePayer": "x"}}], "extensions": [], "signers": {"eip155:*": ["0x1"]},
        "pricing": {"creditUsd": "0.01"},
    }  # fmt: skip
    proof = shown["supported_evidence"]
    assert (proof["check_id"], proof["source"], proof["source_type"]) == (str(check.at), "https://payai.example/supported", "http_get")
    assert proof["raw"] == json.loads(said)
    assert hashlib.sha256(said).hexdigest() in proof["note"]
    [record] = shown["capabilities"]
    assert (record["basis"], record["state"], record["removed_at"]) == ("declared", "present", None)
    assert reader.data("/v1/feed/facilitators") == [shown]


def test_the_last_declaration_stays_when_the_facilitator_fails(db, clock, reader):
    watch(db)
    poll(db, clock, FULL)
    poll(db, clock, answer(b"", 500))
    shown = reader.data("/v1/feed/facilitators/payai")
    assert shown["check"]["status"] == "unavailable"
    assert len(shown["supported"]["kinds"]) == 2
    assert [record["last_confirmed"][:19] for record in shown["capabilities"]] == ["2026-09-21T14:28:20"] * 3


def test_the_standards_are_those_that_declarations_name(reader):
    found = {entry["id"]: entry["category"] for entry in reader.data("/v1/feed/standards")}
    assert {"v1": "protocol", "v2": "protocol", "bazaar": "extension"}.items() <= found.items()


def test_every_endpoint_name_is_plain_ascii_json(db, clock, client):
    watch(db)
    poll(db, clock, body(kind("\u2028</script>\u202e")))
    assert client.get("/v1/feed/facilitators").data.isascii()


# -- Windows --------------------------------------------------------------------------------------------------


def test_the_default_page_is_seven_days_and_a_hundred_events(reader, history):
    page = reader.data(EVENTS)
    assert page["limit"] == 100
    assert (page["start"], page["end"]) == ("2026-09-14T15:53:20.000000002Z", "2026-09-21T15:53:20.000000002Z")


def test_events_older_than_the_window_are_not_shown(db, clock, reader):
    watch(db)
    poll(db, clock, FULL)
    poll(db, clock, FULL, after=8 * 86_400)
    assert len(reader.events()) == 4
    assert len(reader.events(since="2026-09-01T00:00:00Z")) == 8


def test_a_window_holds_what_is_from_its_start_until_before_its_end(db, clock, reader):
    watch(db)
    poll(db, clock, FULL)  # 14:28:20.000000000 to …3
    first, last = "2026-09-21T14:28:20.000000001Z", "2026-09-21T14:28:20.000000003Z"
    assert [event["at"][-4:-1] for event in reader.events(since=first, until=last)] == ["001", "002"]
    assert reader.events(since=last, until=last) == []
    assert [event["at"][-4:-1] for event in reader.events(since="2026-09-21T16:28:20.000000002+02:00")] == ["002", "003"]


def test_since_the_end_of_one_page_goes_on_without_gap_or_overlap(db, clock, reader):
    watch(db)
    poll(db, clock, FULL)
    page = reader.data(EVENTS)
    again = reader.data(EVENTS, query_string={"since": page["end"]})
    assert again["events"] == []
    poll(db, clock, FULL, after=0)  # a poll whose clock is no later than the page
    assert len(reader.events(since=again["end"])) == 4


def test_a_follower_whose_start_is_still_to_come_gets_an_empty_page(db, clock, reader):
    watch(db)
    poll(db, clock, FULL)
    assert reader.events(since="2027-01-01T00:00:00Z") == []


@pytest.mark.parametrize(
    "query, named",
    [
        ("limit=0", "limit"), ("limit=101", "limit"), ("limit=-1", "limit"), ("limit=1.5", "limit"), ("limit=", "limit"),
        ("limit=ten", "limit"), ("limit=%D9%A1", "limit"), ("limit=" + "9" * 5000, "limit"), ("limit=1&limit=2", "limit"),
        ("since=yesterday", "since"), ("since=2026-09-21", "since"), ("since=2026-09-21T14:00:00", "since"),
        ("since=2026-13-01T00:00:00Z", "since"), ("since=2026-02-30T00:00:00Z", "since"), ("since=2026-09-21T14:00:00+02:00", "since"),
        ("since=2026-09-21T24:00:00Z", "since"), ("since=2026-09-21T14:00:00.1234567891Z", "since"),
        ("since=1969-12-31T23:59:59Z", "since"), ("until=2263-01-01T00:00:00Z", "until"), ("until=0000-01-01T00:00:00Z", "until"),
        ("until=now", "until"), ("since=2026-09-22T00:00:00Z&until=2026-09-21T00:00:00Z", "since"),
        ("change=deleted", "change"), ("change=", "change"), ("cursor=", "cursor"), ("cursor=abc", "cursor"),
        ("cursor=%C3%A4", "cursor"), ("facilitor=payai", "facilitor"), ("cursor=a&cursor=b", "cursor"),
        ("since=2026-09-21T14:00:00%2B99:00", "since"),
    ],
)  # fmt: skip
def test_a_parameter_out_of_range_is_refused_by_name(reader, history, query, named):
    status, code, message = reader.refusal(f"{EVENTS}?{query}")
    assert (status, code) == (400, "invalid_request")
    assert named in message


@pytest.mark.parametrize("path", ["/v1/feed/facilitators/nobody", "/v1/feed/facilitators/nobody/events", f"{EVENTS}?facilitator=nobody",
                                  "/v1/feed/facilitators/nobody/changes.atom", "/v1/feed/facilitators/nobody/changes.json",
                                  "/v1/feed/facilitators/nobody/badge.svg", "/v1/feed/checks/7/raw"])  # fmt: skip
def test_what_nobody_knows_is_not_found(reader, history, path):
    assert reader.refusal(path)[:2] == (404, "not_found")


@pytest.mark.parametrize("id", ["0", "-1", "07", "x", "9" * 19, "9" * 40, "1.0", "\u0661"])
def test_a_check_id_that_can_be_none_is_not_found(client, history, id):
    assert client.get(f"/v1/feed/checks/{id}/raw").status_code == 404


# -- Pages ----------------------------------------------------------------------------------------------------


def pages(reader, path=EVENTS, between=lambda: None, **query):
    """Follow the Link headers from the first page on; return all events."""
    found, response = [], reader.get(path, query_string=query)
    while True:
        page = response.json["data"]
        found += page["events"]
        if "next_cursor" not in page:
            assert "Link" not in response.headers
            return found
        assert len(page["events"]) == page["limit"]
        between()
        assert response.headers["Link"] == f'<{path}?cursor={page["next_cursor"]}>; rel="next"'
        response = reader.get(f"{path}?cursor={page['next_cursor']}")


def expected(db):
    """Work all events out of the tables, the plain way."""
    found = []
    for check in db.execute("SELECT * FROM feed_checks JOIN feed_outcomes USING (outcome) JOIN feed_sets USING (facet_set)"):
        own = {check["at"]: "snapshot"} | {check["at"] + 1 + place: "confirmed" for place in range(check["size"])}
        rows = db.execute("SELECT id, change FROM feed_changes WHERE at = ?", (check["at"],))
        found += (own | dict(map(tuple, rows))).items()
    return sorted(found)


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
def test_pages_of_any_size_hold_every_event_once_in_order(db, reader, history, limit):
    found = [(int(event["id"]), event["change"]) for event in pages(reader, limit=limit)]
    assert found == expected(db)


@pytest.mark.parametrize("change", ["snapshot", "first_seen", "confirmed", "removed", "returned"])
@pytest.mark.parametrize("facilitator", [None, "payai", "dexter"])
def test_filters_take_out_nothing_else(db, reader, history, change, facilitator):
    query = {"change": change} | ({"facilitator": facilitator} if facilitator else {})
    found = pages(reader, limit=3, **query)
    everything = pages(reader)
    assert found == [event for event in everything if event["change"] == change and facilitator in (None, event["facilitator"])]
    if facilitator:
        path = f"/v1/feed/facilitators/{facilitator}/events"
        assert pages(reader, path, limit=2, change=change) == found


@pytest.mark.parametrize("query", [{"facilitator": "payai"}, {}])
def test_a_long_search_goes_on_from_page_to_page(db, clock, reader, monkeypatch, query):
    monkeypatch.setattr(feedevents, "CHECKS", 3)
    watch(db)
    for said in [FULL] * 3 + [body()] * 10 + [FULL] * 3:
        poll(db, clock, said)
    found, counts, page = [], [], reader.data(EVENTS, query_string={"change": "confirmed", **query})
    while "next_cursor" in page:
        counts.append(len(page["events"]))
        found += page["events"]
        page = reader.data(EVENTS, query_string={"cursor": page["next_cursor"]})
    found += page["events"]
    assert [int(event["id"]) for event in found] == [id for id, change in expected(db) if change == "confirmed"]
    assert len(found) == 12  # three facets in two checks at each end
    assert counts == [6, 0, 0, 0, 3]  # three checks a page; the last page has the sixteenth


@pytest.mark.parametrize("seed", range(5))
def test_pages_have_no_gap_and_no_overlap_while_polls_go_on(db, clock, reader, seed):
    chance = random.Random(seed)
    watch(db)
    watch(db, "dexter")
    networks = [f"eip155:{number}" for number in range(1, 6)]

    def some_polls():
        for _ in range(chance.randrange(3)):
            entries = [kind(network) for network in networks if chance.random() < 0.7]
            said = answer(b"", 500) if chance.random() < 0.2 else body(*entries)
            poll(db, clock, said, chance.choice(["payai", "dexter"]), after=chance.choice([0, 0, -5, 60]))

    for _ in range(20):
        some_polls()
    # One reader follows one window by cursors; another goes on from the end of each page it gets.
    window = expected(db)
    found = pages(reader, between=some_polls, limit=chance.randrange(1, 8))
    assert [(int(event["id"]), event["change"]) for event in found] == window
    followed, since = [], "2026-09-01T00:00:00Z"
    for _ in range(10):
        first = reader.data(EVENTS, query_string={"since": since, "limit": 4})
        followed += pages(reader, since=since, until=first["end"], limit=4)
        since = first["end"]
        some_polls()
    followed += pages(reader, since=since)
    assert [(int(event["id"]), event["change"]) for event in followed] == expected(db)


# -- Cursors --------------------------------------------------------------------------------------------------


@pytest.fixture
def cursor(reader, history):
    return reader.data(EVENTS, query_string={"limit": 3, "change": "confirmed", "facilitator": "payai"})["next_cursor"]


def test_a_cursor_alone_goes_on_and_agreeing_parameters_may_stand_beside_it(reader, cursor):
    alone = reader.events(cursor=cursor)
    assert alone == reader.events(cursor=cursor, change="confirmed", facilitator="payai")
    assert len(alone) == 3
    assert len(reader.events(cursor=cursor, limit=5)) == 5


@pytest.mark.parametrize(
    "query", [{"change": "snapshot"}, {"facilitator": "dexter"}, {"since": "2026-09-01T00:00:00Z"}, {"until": "2026-09-22T00:00:00Z"}]
)
def test_a_cursor_of_another_query_is_refused(reader, cursor, query):
    [name] = query
    status, code, message = reader.refusal(EVENTS, query_string={"cursor": cursor, **query})
    assert (status, code) == (400, "invalid_request")
    assert name in message and "cursor" in message


def test_a_cursor_of_another_path_is_refused(reader, cursor):
    assert reader.refusal("/v1/feed/facilitators/payai/events", query_string={"cursor": cursor})[0] == 400


def test_a_cursor_with_any_character_changed_is_refused(reader, cursor):
    for place in range(len(cursor)):
        other = cursor[:place] + ("A" if cursor[place] != "A" else "B") + cursor[place + 1 :]
        assert reader.refusal(EVENTS, query_string={"cursor": other})[0] == 400
    for other in (cursor[:-1], cursor + "A", cursor + "=", cursor.upper(), " " + cursor):
        assert reader.refusal(EVENTS, query_string={"cursor": other})[0] == 400


@pytest.mark.parametrize(
    "parts",
    [
        [], [EVENTS], [EVENTS, None, None, 0, 1, 0], [EVENTS, None, None, 0, 1, 0, 1000], [EVENTS, None, None, 0, 1, 0, 0],
        [EVENTS, None, None, "0", 1, 0, 10], [EVENTS, None, None, -1, 1, 0, 10], [EVENTS, None, None, 0, 10**30, 0, 10],
        [EVENTS, 7, None, 0, 1, 0, 10], [EVENTS, None, "x", 0, 1, 0, 10], [EVENTS, None, [], 0, 1, 0, 10], {"a": 1}, 7, None,
        [EVENTS, None, None, True, 1, 0, 10],
    ],
)  # fmt: skip
def test_a_cursor_made_by_hand_is_checked_like_any_other_input(reader, parts):
    text = json.dumps(parts).encode()
    forged = base64.urlsafe_b64encode(hashlib.sha256(text).digest()[:9] + text).decode().rstrip("=")
    assert reader.refusal(EVENTS, query_string={"cursor": forged})[0] == 400


# -- Tags -----------------------------------------------------------------------------------------------------

TAGGED = ["/v1/feed/summary", "/v1/feed/facilitators", "/v1/feed/facilitators/payai", EVENTS, f"{EVENTS}?limit=2",
          "/v1/feed/facilitators/dexter/events", "/v1/feed/capabilities?scheme=exact", "/v1/feed/changes.atom",
          "/v1/feed/changes.json", "/v1/feed/facilitators/payai/badge.svg", "/metrics"]  # fmt: skip


@pytest.mark.parametrize("path", TAGGED)
def test_a_tag_holds_while_the_facts_hold_and_no_longer(db, clock, reader, history, path):
    first = reader.get(path)
    tag = first.headers["ETag"]
    assert tag.startswith('"')
    clock.sleep(5)
    assert reader.get(path, headers={"If-None-Match": tag}).status_code == 304
    assert reader.get(path, headers={"If-None-Match": f'"x", W/{tag}'}).status_code == 304
    assert reader.get(path, headers={"If-None-Match": "*"}).status_code == 304
    assert reader.get(path, headers={"If-None-Match": '"x"'}).status_code == 200
    poll(db, clock, answer(b"", 500), "payai")
    for _ in range(2):
        poll(db, clock, body(kind("eip155:77")), "dexter", after=9 * 86_400)
    assert reader.get(path, headers={"If-None-Match": tag}).status_code == 200


def test_two_bodies_never_share_a_strong_tag(clock, reader, history):
    seen = {}
    for _ in range(3):
        for path in TAGGED:
            response = reader.get(path)
            assert seen.setdefault((path, response.headers["ETag"]), response.data) == response.data
        clock.sleep(1)


def test_any_page_may_read_the_feed(client, history):
    response = client.get(EVENTS, headers={"Origin": "https://elsewhere.example"})
    assert response.headers["Access-Control-Allow-Origin"] == "*"
    assert {"ETag", "Link"} <= set(response.headers["Access-Control-Expose-Headers"].split(", "))
    asked = client.options(EVENTS, headers={"Origin": "https://x.example", "Access-Control-Request-Method": "GET"})
    assert asked.status_code == 200
    assert "If-None-Match" in asked.headers["Access-Control-Allow-Headers"]


@pytest.mark.parametrize("method", ["post", "put", "delete", "patch"])
def test_the_feed_is_read_only(client, method):
    response = getattr(client, method)("/v1/feed/summary")
    assert (response.status_code, response.json["error"]) == (405, "method_not_allowed")


# -- Evidence -------------------------------------------------------------------------------------------------


def test_the_raw_declaration_is_its_exact_bytes_in_a_form_that_no_browser_renders(db, clock, reader):
    watch(db)
    said = b'\r\n {"kinds" : [ ],\n "x":"<script>alert(1)</script>"}\t'
    check = poll(db, clock, said)
    response = reader.get(f"/v1/feed/checks/{check.at}/raw")
    assert response.data == said
    assert response.headers["Content-Type"] == "application/octet-stream"
    assert response.headers["Content-Disposition"] == f'attachment; filename="supported-{check.at}.json"'
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Content-Security-Policy"] == "sandbox; default-src 'none'"
    digest = base64.b64encode(hashlib.sha256(said).digest()).decode()
    assert response.headers["Repr-Digest"] == f"sha-256=:{digest}:"


WRITTEN = {
    "plain": (b'{"kinds": []}', b'{"kinds": []}'),
    "blanks": (b'\r\n {"kinds" :\t[ ]}\n', b'\r\n {"kinds" :\t[ ]}\n'),
    "numbers": (b'{"kinds":[],"x":[1E2,-0,1e-400,-9223372036854775808]}', b'{"kinds":[],"x":[1E2,-0,1e-400,-9223372036854775808]}'),
    "escapes": (rb'{"kinds":[],"x":"\ud83d\ude00\/\u0041"}', rb'{"kinds":[],"x":"\ud83d\ude00\/\u0041"}'),
    "byte order mark": (b'\xef\xbb\xbf{"kinds": []}', b'{"kinds":[]}'),
    "accents": ('{"kinds": [], "x": "\u00e9\U0001f600"}'.encode(), rb'{"kinds":[],"x":"\u00e9\ud83d\ude00"}'),
    "turned text": ('{"kinds": [], "\u202e": "\u2028"}'.encode(), rb'{"kinds":[],"\u202e":"\u2028"}'),
    "terminal codes": ('{"kinds": [], "x": "\u009b2J\x7f"}'.encode(), rb'{"kinds":[],"x":"\u009b2J\u007f"}'),
    "delete": (b'{"kinds": [], "x": "\x7f", "y": 1E2}', rb'{"kinds":[],"x":"\u007f","y":100.0}'),
}


@pytest.mark.parametrize("path", [f"{EVENTS}?change=snapshot", "/v1/feed/facilitators", "/v1/feed/facilitators/payai"])
@pytest.mark.parametrize(("said", "shown"), WRITTEN.values(), ids=WRITTEN.keys())
def test_evidence_carries_the_declaration_as_it_came_or_written_in_plain_ascii(db, clock, reader, said, shown, path):
    watch(db)
    poll(db, clock, said)
    response = reader.get(path)
    assert b'"raw":' + shown + b',"note":' in response.data
    assert response.data.isascii()
    assert response.json["data"]  # the whole of it is JSON


def test_every_snapshot_carries_its_own_declaration(db, clock, reader):
    for id in ("payai", "dexter"):
        watch(db, id)
        for place in (1, 2, 1):
            poll(db, clock, json.dumps({"kinds": [], "said": [id, place]}).encode(), id)
    found = reader.events(change="snapshot")
    assert [event["evidence"]["raw"]["said"] for event in found] == [
        ["payai", 1], ["payai", 2], ["payai", 1], ["dexter", 1], ["dexter", 2], ["dexter", 1],
    ]  # fmt: skip


def test_a_thinned_declaration_leaves_the_others_in_their_places(db, clock, reader):
    watch(db)
    for place in (1, 2, 3):
        poll(db, clock, json.dumps({"kinds": [], "said": place}).encode())
    db.execute("UPDATE feed_bodies SET content = NULL WHERE body = 2")
    found = [event["evidence"]["raw"] for event in reader.events(change="snapshot")]
    assert found == [{"kinds": [], "said": 1}, None, {"kinds": [], "said": 3}]


@pytest.mark.parametrize("name", [r"\ud800", r'"\ud800"', '"raw":null', r'\"\\ud800'])
def test_a_name_that_looks_like_the_place_of_a_declaration_is_a_name(db, clock, reader, name):
    watch(db)
    said = body(kind(name))
    poll(db, clock, said)
    snapshot, first_seen = reader.events()
    assert snapshot["evidence"]["raw"] == json.loads(said)
    assert first_seen["facet"]["value"] == f"v2 · exact · {name}"
    assert reader.data("/v1/feed/facilitators/payai")["supported"]["kinds"] == [kind(name)]


def test_only_a_declaration_goes_into_an_answer_unread():
    with pytest.raises(TypeError):
        feedviews.as_json({"raw": b"{}"})


def test_a_check_without_a_body_has_no_raw(db, clock, reader):
    watch(db)
    check = poll(db, clock, answer(None, None, reason="timeout"))
    assert reader.refusal(f"/v1/feed/checks/{check.at}/raw")[:2] == (404, "not_found")


# -- Who declares it ------------------------------------------------------------------------------------------


def test_who_declares_it(db, clock, reader):
    for id, content in (("a", body(kind("base", version=1), kind())), ("b", body(kind(scheme="upto"), extensions=["bazaar"])),
                        ("c", body(kind()))):  # fmt: skip
        watch(db, id)
        poll(db, clock, content, id)
    for _ in range(2):
        poll(db, clock, body(), "c")

    def who(**query):
        return [(found["facilitator"], found["facet"]["value"]) for found in reader.data("/v1/feed/capabilities", query_string=query)]

    assert who(scheme="exact") == [("a", "v1 · exact · base"), ("a", "v2 · exact · eip155:8453")]
    assert who(scheme="exact", network="eip155:8453") == [("a", "v2 · exact · eip155:8453")]
    assert who(network="eip155:8453") == [("a", "v2 · exact · eip155:8453"), ("b", "v2 · upto · eip155:8453")]
    assert who(version="1") == [("a", "v1 · exact · base")]
    assert who(extension="bazaar") == [("b", "bazaar")]
    assert who(scheme="EXACT") == []
    targets.enable(db, "a", False)
    assert who(scheme="exact") == []


@pytest.mark.parametrize(
    "query, named",
    [("", "at least one"), ("version=0", "version"), ("version=x", "version"), ("scheme=", "scheme"), ("network=" + "x" * 201, "network"),
     ("extension=bazaar&scheme=exact", "extension"), ("extension=bazaar&version=2", "extension"), ("state=removed", "state")],
)  # fmt: skip
def test_a_question_that_makes_no_sense_is_refused(reader, query, named):
    status, code, message = reader.refusal(f"/v1/feed/capabilities?{query}")
    assert (status, code) == (400, "invalid_request")
    assert named in message


def test_the_clock_of_the_tests_is_exact(clock):
    assert nanoseconds(clock)() == 1_790_000_000_000_000_000
