"""What is published: figures that follow the settings, links that lead somewhere, pages that are safe to show."""

import dataclasses
import datetime
import html.parser
import re

import pytest

import app as application
import ask
import deals
import deprecations
import documents

PATHS = ["/", "/llms.txt", "/agents.md", "/pricing.md", "/docs", "/docs/deals", "/docs/trust", "/docs/mcp", "/docs/sandbox",
         "/docs/errors", "/deprecation-policy"]  # fmt: skip


def read(client, path, accept="*/*"):
    answer = client.get(path, headers={"Accept": accept})
    assert answer.status_code == 200, path
    return answer.get_data(as_text=True)


@pytest.fixture
def remade(world):
    """Return a client of the same service with some settings changed."""

    def make(**changes):
        settings = dataclasses.replace(world.settings, **changes)
        return application.create_app(world=dataclasses.replace(world, settings=settings)).test_client()

    return make


# -- Figures ------------------------------------------------------------------------------------------------


def test_the_price_list_says_what_a_call_costs(client):
    text = read(client, "/pricing.md")
    assert "`amount_usd` × 1.01 + 0.092 dollars" in text
    assert "| 0.50 | 0.597 | 0.097 |" in text
    assert "| 500.00 | 505.092 | 5.092 |" in text


def test_a_changed_fee_changes_every_document(remade):
    client = remade(fee_units=150_000, fee_percent=2, min_amount_units=1_000_000, decide_hours=72)
    text = "".join(read(client, path, "text/markdown, text/plain") for path in PATHS)
    assert "0.092" not in text and "0.597" not in text and "168 hours" not in text
    assert text.count("× 1.02 + 0.15") == 2
    assert "1.17 to 510.15 dollars" in text
    assert "72 hours" in text


def test_no_figure_is_left_open(client):
    for path in PATHS:
        text = read(client, path, "text/markdown, text/plain")
        assert "{{" not in text and "{%" not in text and documents.BASE not in text, path


def test_a_source_that_names_an_unknown_figure_fails_at_start(monkeypatch):
    monkeypatch.setattr(documents, "SOURCES", {"/docs": ("index.md", (documents.MARKDOWN,))})
    with pytest.raises(documents.jinja2.UndefinedError):
        documents.build({"name": "x"}, None)


def test_the_sandbox_is_known_by_the_name_it_is_called_by(remade):
    client = remade(base_url="")
    text = client.get("/agents.md", base_url="http://127.0.0.1:8402").get_data(as_text=True)
    assert 'SERVICE = "http://127.0.0.1:8402"' in text


def test_a_host_header_that_is_none_is_refused(remade):
    answer = remade(base_url="").get("/agents.md", headers={"Host": 'a"><script>'})
    assert (answer.status_code, answer.json["error"]) == (400, "invalid_request")


def test_only_a_sandbox_talks_about_the_sandbox(world, client):
    figures = dict(master_key=world.terminal.master_key, treasury=world.treasury, receipt_signer=world.treasury)
    settings = dataclasses.replace(world.settings, mode="live", base_url="https://deals.example")
    facts = documents.figures(settings, **figures)
    pages = documents.build(facts, documents.frame(facts))
    assert "/docs/sandbox" not in pages
    for page in pages.values():
        for body in page.bodies.values():
            assert b"sandbox" not in body.lower().replace(b".sandbox", b"").replace(b'"sandbox"', b""), page.path
    assert b'client.set_spend_controls({"max_amount_per_payment": "$600"})' in pages["/agents.md"].bodies[documents.MARKDOWN]
    guide = pages["/agents.md"].bodies[documents.MARKDOWN].decode()
    for example in re.findall(r"^```python.*?\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL):
        compile(example, "agents.md", "exec")  # what the sandbox's guide runs, as a live service words it
    assert "set_spend_controls" in read(client, "/agents.md")


# -- Forms --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/agents.md", "/pricing.md"])
def test_markdown_is_served_as_such_unless_a_browser_asks(client, path):
    assert client.get(path).content_type == "text/markdown; charset=utf-8"
    assert client.get(path, headers={"Accept": "text/html,*/*;q=0.8"}).content_type == "text/html; charset=utf-8"


@pytest.mark.parametrize("path", ["/docs", "/docs/trust", "/deprecation-policy", "/"])
def test_pages_for_people_are_html_unless_markdown_is_asked_for(client, path):
    assert client.get(path).content_type == "text/html; charset=utf-8"
    answer = client.get(path, headers={"Accept": "text/markdown"})
    assert answer.content_type == "text/markdown; charset=utf-8"
    assert answer.headers["Vary"] == "Accept"


@pytest.mark.parametrize("path", [*PATHS, "/openapi.json", "/docs/states.svg", "/favicon.ico", "/robots.txt", "/ask?q=fee"])
def test_a_document_is_not_sent_twice_to_who_has_it(client, path):
    etag = client.get(path).headers["ETag"]
    assert re.fullmatch(r'"[0-9a-f]{32}"', etag)
    assert client.get(path, headers={"If-None-Match": etag}).status_code == 304
    assert client.get(path, headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize("path", ["/agents.md", "/docs", "/docs/states.svg", "/openapi.json"])
@pytest.mark.parametrize("accept", ["*/*", "text/html", "text/markdown"])
def test_a_document_is_served_again_exactly_as_the_first_time(client, path, accept):
    first, again = (client.get(path, headers={"Accept": accept}) for _ in range(2))
    assert again.data == first.data
    changed = {name for name, value in first.headers if again.headers.get(name) != value}
    assert (set(first.headers.keys()), changed) == (set(again.headers.keys()), {"RateLimit-Remaining"})


def test_two_names_of_a_sandbox_do_not_share_a_page(remade):
    client = remade(base_url="")
    for name in ("http://one.test", "http://two.test", "https://one.test", "http://one.test"):
        assert f'SERVICE = "{name}"' in client.get("/agents.md", base_url=name).get_data(as_text=True)


def test_head_answers_without_a_body(client):
    answer = client.head("/agents.md")
    assert (answer.status_code, answer.data) == (200, b"")


class Reader(html.parser.HTMLParser):
    """Collects a page's links, anchors and anything that could run."""

    def __init__(self, text):
        super().__init__()
        self.links, self.anchors, self.tags, self.open = set(), set(), set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags.add(tag)
        self.links |= {found[name] for name in ("href", "src") if name in found}
        self.anchors.add(found.get("id"))
        assert not [name for name in found if name.startswith("on")]


def test_every_link_of_every_page_leads_somewhere(client, clock):
    seen, waiting = set(), ["/"]
    pages = {}
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        clock.now += 1
        answer = client.get(path, headers={"Accept": "text/html, */*;q=0.1"})
        assert answer.status_code in (200, 405), path
        if answer.content_type.startswith("text/html"):
            pages[path] = Reader(answer.get_data(as_text=True))
            for link in pages[path].links:
                link = link.removeprefix("http://deals.test")
                if link.startswith("/"):
                    waiting.append(link.partition("#")[0])
    assert len(pages) > 30
    for page in pages.values():
        for link in page.links:
            path, _, anchor = link.removeprefix("http://deals.test").partition("#")
            if anchor:
                assert anchor in pages[path].anchors, link


def test_pages_run_nothing_and_say_so(client):
    for path in PATHS:
        answer = client.get(path, headers={"Accept": "text/html"})
        if answer.content_type.startswith("text/html"):
            assert "script" not in Reader(answer.get_data(as_text=True)).tags
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy


def test_every_answer_carries_the_security_headers_and_no_cookie(client):
    for path in ("/", "/x402/deal", "/v1/deals/none", "/nothing", "/openapi.json"):
        answer = client.get(path)
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert "Set-Cookie" not in answer.headers
        assert "Strict-Transport-Security" not in answer.headers


def test_no_security_header_is_sent_twice(client):
    for path in ("/", "/docs", "/feed", "/v1/feed/summary", "/nothing"):
        for name in ("Content-Security-Policy", "X-Content-Type-Options", "Referrer-Policy"):
            assert len(client.get(path).headers.getlist(name)) == 1, (path, name)


def test_a_service_behind_https_asks_browsers_to_stay_there(remade):
    answer = remade(base_url="https://deals.example").get("/v1")
    assert answer.headers["Strict-Transport-Security"] == "max-age=31536000"


# -- Errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", deals.Refusal.STATUS)
def test_every_error_code_has_a_page_that_says_how_to_mend_it(client, code):
    text = read(client, f"/docs/errors/{code}", "text/markdown")
    assert text.startswith(f"# {code}\n\n**Status {deals.Refusal.STATUS[code]}")
    assert "## How to mend it" in text


def test_every_error_body_links_its_page(client):
    answer = client.get("/v1/deals/none")
    assert answer.json["docs"] == "http://deals.test/docs/errors/not_found"


def test_an_unknown_page_is_not_found(client):
    assert client.get("/docs/errors/nothing").status_code == 404
    assert client.get("/docs/..").status_code == 404


# -- Questions ----------------------------------------------------------------------------------------------


def test_a_question_finds_the_passage_that_answers_it(client):
    for question, expected in [
        ("what does a dispute cost", "/pricing.md"),
        ("secret lost", "/docs/errors/invalid_secret"),
        ("how do I verify the deposit address?", "deposit-address"),
        ("payment_in_progress", "/docs/errors/payment_in_progress"),
        ("refunds guarantee", "refund-guarantee"),
    ]:
        found = client.get("/ask", query_string={"q": question}).json
        assert any(expected in result["url"] for result in found["results"]), (question, found)


def test_without_a_question_it_says_how_to_ask(client):
    for path in ("/ask", "/ask?q=", "/ask?q=%20%3F"):
        assert client.get(path).json == {"query": client.get(path).json["query"], "results": [], "hint": ask.HOW_TO}


def test_no_hit_is_answered_helpfully(client):
    found = client.get("/ask?q=xylophone").json
    assert (found["results"], found["hint"]) == ([], ask.NOTHING)


@pytest.mark.parametrize("question", ['"', "a OR", "NEAR(a b)", "col:x", "'; DROP TABLE passages; --", "*", "(", "\x00", "💥",
                                      "AND NOT", "^fee", "ref" * 3000, "ﬁ ²", "-", "{fee}", "fee\n\tfee"])  # fmt: skip
def test_no_question_breaks_the_search(client, question):
    assert client.get("/ask", query_string={"q": question}).status_code == 200


def test_answers_come_as_markdown_and_as_a_page_too(client):
    assert "](http://deals.test/" in read(client, "/ask?q=fee", "text/markdown")
    page = read(client, "/ask?q=<script>alert(1)</script>+fee", "text/html")
    assert "<script" not in page and 'href="http://deals.test/' in page


# -- Deprecations -------------------------------------------------------------------------------------------


def entry(days):
    since = datetime.date(2026, 10, 1)
    return deprecations.Deprecation("GET", "/v1", since, since + datetime.timedelta(days=days), "GET /endpoints")


def test_less_than_90_days_notice_is_refused_at_start(world, monkeypatch):
    monkeypatch.setattr(deprecations, "DEPRECATIONS", (entry(89),))
    with pytest.raises(deprecations.TooSoon):
        application.create_app(world=world)


def test_a_deprecation_is_announced_in_headers_and_on_the_policy_page(world, monkeypatch):
    monkeypatch.setattr(deprecations, "DEPRECATIONS", (entry(90),))
    client = application.create_app(world=world).test_client()
    answer = client.get("/v1")
    assert answer.headers["Deprecation"] == "@1790812800"
    assert answer.headers["Sunset"] == "Wed, 30 Dec 2026 23:59:59 GMT"
    assert "deprecation-policy" in answer.headers["Link"]
    assert client.get("/openapi.json").json["paths"]["/v1"]["get"]["deprecated"] is True
    assert "Deprecation" not in client.get("/endpoints").headers
    assert "| `GET /v1` | 2026-10-01 | 2026-12-30 | GET /endpoints |" in read(client, "/deprecation-policy", "text/markdown")


def test_a_deprecated_path_with_a_parameter_is_announced_for_every_value():
    table = (dataclasses.replace(entry(90), path="/v1/deals/{id}"),)
    assert deprecations.headers("GET", "/v1/deals/deal_x", "", table)
    assert not deprecations.headers("POST", "/v1/deals/deal_x", "", table)
    assert not deprecations.headers("GET", "/v1/deals/deal_x/accept", "", table)


def test_nothing_is_deprecated_now(client):
    assert read(client, "/deprecation-policy", "text/markdown").endswith("## Deprecated now\n\nNothing.\n")
