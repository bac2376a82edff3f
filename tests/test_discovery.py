"""How the service is found: the endpoint list, the index, the bazaar entry, the well-known documents, feedback."""

import json
import re

import pytest
from click.testing import CliRunner
from x402.extensions.bazaar import validate_discovery_extension, validate_discovery_extension_spec
from x402.extensions.bazaar.types import parse_discovery_extension

import cli
import discovery
from deals import Refusal

ENTRY = {
    "name": "deal",
    "method": "POST",
    "path": "/x402/deal",
    "mppPath": "/mpp/deal",
    "quote": "GET http://deals.test/x402/deal answers HTTP 402 with the live quote, without payment.",
    "summary": "Hold a payment between a buyer and a seller until the buyer confirms or the timers decide.",
}


def test_endpoints_lists_the_paid_endpoint(client):
    answer = client.get("/endpoints")
    assert answer.json == {"items": [ENTRY], "next_cursor": None, "total": 1}


def test_the_index_has_the_same_entries(client):
    index = client.get("/v1").json
    assert index["items"] == client.get("/endpoints").json["items"]
    assert index["version"] == "1.1.0"


def test_everything_the_index_links_to_is_there(client):
    for link in client.get("/v1").json["links"].values():
        path = link.removeprefix("http://deals.test")
        assert client.get(path).status_code in (200, 405), path


@pytest.mark.parametrize("limit", ["1", "50"])
def test_a_limit_from_1_to_50_is_taken(client, limit):
    assert client.get(f"/endpoints?limit={limit}").status_code == 200


@pytest.mark.parametrize("limit", ["0", "51", "-1", "1.0", "ten", "", "+1", " 1", "1e1", "١", "99999999999999999999"])
def test_a_malformed_limit_is_refused(client, limit):
    answer = client.get("/endpoints", query_string={"limit": limit})
    assert (answer.status_code, answer.json["error"]) == (400, "invalid_request")


@pytest.mark.parametrize("cursor", ["", "x", "ZnJvbToxMA", "ZnJvbTow", "💥", "\x00"])
def test_a_malformed_cursor_is_refused(client, cursor):
    answer = client.get("/endpoints", query_string={"cursor": cursor})
    assert (answer.status_code, answer.json["error"]) == (400, "invalid_request")


def test_a_long_list_is_paged_to_its_end_without_gaps():
    items, seen, cursor = list(range(23)), [], None
    for expected in (10, 10, 3):
        found = discovery.page(items, None, cursor)
        assert (len(found["items"]), found["total"]) == (expected, 23)
        seen += found["items"]
        cursor = found["next_cursor"]
    assert (seen, cursor) == (items, None)
    with pytest.raises(Refusal):
        discovery.page(items, None, discovery._cursor(23))


def test_the_quote_carries_a_bazaar_entry_that_the_sdk_accepts(client):
    entry = client.get("/x402/deal").json["extensions"]["bazaar"]
    for check in (validate_discovery_extension_spec, lambda e: validate_discovery_extension(parse_discovery_extension(e))):
        result = check(entry)
        assert result.valid, result.errors


def test_the_quote_s_header_stays_below_what_common_proxies_take(client, buyer, seller):
    assert len(buyer.quote(buyer.request(seller, ref="x" * 200)).headers["PAYMENT-REQUIRED"]) < 5000


def test_well_known_x402_lists_resources_that_answer_with_a_quote(client):
    document = client.get("/.well-known/x402").json
    assert document["version"] == 1
    for resource in document["resources"]:
        assert client.get(resource.removeprefix("http://deals.test")).status_code == 402


def test_the_api_catalogue_is_a_linkset_whose_links_are_there(client):
    answer = client.get("/.well-known/api-catalog")
    assert answer.content_type.startswith("application/linkset+json")
    (entry,) = answer.json["linkset"]
    for links in list(entry.values())[1:]:
        for link in links:
            assert client.get(link["href"].removeprefix("http://deals.test")).status_code == 200


def test_the_landing_page_tells_machines_where_to_look(client):
    links = dict(re.findall(r'<http://deals.test([^>]*)>; rel="([^"]*)"', client.get("/").headers["Link"]))
    assert links["/openapi.json"] == "service-desc"
    assert all(client.get(path).status_code == 200 for path in links)


def test_the_mcp_card_names_the_endpoint_and_its_tools(client):
    card = client.get("/.well-known/mcp/server-card.json").json
    assert card["transport"] == {"type": "streamable-http", "endpoint": "/mcp"}
    assert "create_deal" in {tool["name"] for tool in card["tools"]}


# -- Feedback -----------------------------------------------------------------------------------------------


def test_a_note_is_kept_for_the_operators(client, db):
    answer = client.post("/feedback", json={"message": "Good.", "contact": "a@b.example"})
    assert answer.status_code == 201
    row = db.execute("SELECT * FROM feedback").fetchone()
    assert (row["id"], row["message"], row["contact"], row["done_at"]) == (answer.json["id"], "Good.", "a@b.example", None)


@pytest.mark.parametrize("body", [{}, {"message": ""}, {"message": "x" * 2001}, {"message": 1}, {"message": "x", "who": "me"},
                                  {"message": "x", "deal_id": "deal_1"}, [], "x"])  # fmt: skip
def test_a_note_that_breaks_the_schema_is_refused(client, body):
    answer = client.post("/feedback", json=body)
    assert (answer.status_code, answer.json["error"]) == (400, "invalid_request")


def test_ten_notes_an_hour_are_enough_for_one_client(client, clock):
    for _ in range(10):
        assert client.post("/feedback", json={"message": "Again."}).status_code == 201
    answer = client.post("/feedback", json={"message": "Again."})
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "3600")
    clock.now += 3600
    assert client.post("/feedback", json={"message": "Again."}).status_code == 201


@pytest.fixture
def run(settings, monkeypatch):
    """Run a command of the operator's and return its output."""
    monkeypatch.setenv("DEALS_DATABASE", settings.database)
    monkeypatch.setenv("DEALS_WALLET", settings.wallets[0])

    def invoke(*arguments, code=0):
        result = CliRunner().invoke(cli.main, arguments)
        assert result.exit_code == code, result.output
        return result.output

    return invoke


def test_the_operator_reads_notes_and_marks_them_done(client, run):
    first = client.post("/feedback", json={"message": "A line\nand \x1b[31mred"}).json["id"]
    second = client.post("/feedback", json={"message": "Another."}).json["id"]
    listed = run("feedback", "list")
    assert "A line\ufffdand \ufffd[31mred" in listed and "Another." in listed and "\x1b" not in listed
    run("feedback", "done", first)
    assert [note["id"] for note in json.loads(run("feedback", "list", "--json"))] == [second]
    assert len(json.loads(run("feedback", "list", "--all", "--json"))) == 2
    assert "not_found" in run("feedback", "done", "nothing", code=2)
