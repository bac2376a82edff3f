"""What people and other programs see: pages, Atom, JSON Feed, badge and metrics; hostile names do no harm in any of them."""

import html.parser
import json
import re
import shutil
import subprocess
import threading
import xml.etree.ElementTree as ET

import pytest
from feedkit import answer, body, kind, poll, watch
from werkzeug.serving import make_server

ATOM = "{http://www.w3.org/2005/Atom}"
NASTY = ["<script>document.title='taken'</script>", '"><img src=x onerror="document.title=1">', "{{7*7}}", "\u202egnp.exe", "]]>",
         "&lt;b&gt;", "\ufffe", "zalgo" + "\u0301" * 100, "javascript:alert(1)", "A" * 200]  # fmt: skip
VOID = {"meta", "link", "img", "br", "input"}


class Page(html.parser.HTMLParser):
    """Collects tags and text, and insists that tags close in order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.attributes, self.words = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture
def nasty(db, clock):
    watch(db, "evil", name='Evil & <Sons> "Ltd"')
    poll(db, clock, body(*(kind(name) for name in NASTY), kind(scheme=NASTY[0]), extensions=NASTY), "evil")


# -- Pages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/feed", "/feed/evil"])
def test_hostile_names_stay_text(reader, nasty, path):
    response = reader.get(path)
    page = Page(response.text)
    assert "script" not in page.tags
    assert page.tags.count("img") == (path != "/feed")  # our own badge
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert all(value.startswith(("/", "#")) for name, value in page.attributes if name in ("href", "src"))
    assert "<script>document.title='taken'</script>" in "".join(page.words)
    assert path == "/feed" or "v2 · exact · {{7*7}}" in response.text  # the overview names only some


def test_characters_that_only_rearrange_their_neighbours_are_written_out(reader, nasty):
    text = reader.get("/feed/evil").text
    assert "\u202e" not in text
    assert "\u27e8U+202E\u27e9gnp.exe" in text


@pytest.mark.parametrize("path", ["/feed", "/feed/evil"])
def test_pages_forbid_all_that_they_do_not_need(reader, nasty, path):
    policy = reader.get(path).headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "script-src" not in policy


def test_an_empty_feed_has_a_page_that_says_what_to_do(reader):
    text = reader.get("/feed").text
    Page(text)
    assert "facilitators list" in text


def test_the_page_of_one_who_was_never_polled_or_only_failed_is_whole(db, clock, reader):
    watch(db, "later", base_url=None)
    watch(db, "gone")
    poll(db, clock, answer(None, None, reason="timeout", note="No whole answer in time."), "gone")
    assert "unconfigured" in reader.get("/feed/later").text
    text = reader.get("/feed/gone").text
    Page(text)
    assert "timeout" in text and "No whole answer in time." in text


def test_the_page_of_nobody_is_not_found_in_words(client):
    response = client.get("/feed/nobody")
    assert response.status_code == 404
    assert response.mimetype == "text/html"
    assert "No facilitator" in response.text


def test_the_strip_has_ninety_days_and_tells_each(db, clock, reader):
    watch(db)
    poll(db, clock, body(kind()), after=86_400)
    for said in (body(kind()), answer(b"", 500)):
        poll(db, clock, said, after=43_200)
    poll(db, clock, answer(b"", 500), after=86_400)
    text = reader.get("/feed").text
    cells = re.findall(r'<rect class="(\w+)" x="\d+" width="3" height="28"><title>([^<]*)', text)
    assert len(cells) == 90
    assert cells[-4:] == [
        ("none", "21 September 2026: not checked"),
        ("good", "22 September 2026: 1 of 1 checks valid"),
        ("some", "23 September 2026: 1 of 2 checks valid"),
        ("bad", "24 September 2026: 0 of 1 checks valid"),
    ]


def test_the_plot_breaks_where_nothing_was_answered(db, clock, reader):
    watch(db)
    for hour, ms in ((1, 100), (1, 50), (5, 200), (5, 20)):
        poll(db, clock, answer(body(kind()), ms=ms), after=hour * 3600)
    text = reader.get("/feed/payai").text
    [path] = re.findall(r'<path d="([^"]*)"', text)
    assert (path.count("M"), path.count("L")) == (3, 1)
    assert text.count("<circle") == 2
    assert ">200 ms<" in text


def test_the_pages_show_what_changed_with_its_evidence(db, clock, reader):
    watch(db)
    for entries in ([kind(), kind("eip155:1")], [kind()], [kind()]):
        check = poll(db, clock, body(*entries))
    for path in ("/feed", "/feed/payai"):
        text = reader.get(path).text
        assert "<b>removed</b> <bdi>v2 · exact · eip155:1</bdi>" in text
        assert f'href="/v1/feed/checks/{check.at}/raw"' in text


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs Chromium")
@pytest.mark.parametrize("path", ["/feed", "/feed/evil"])
def test_a_real_browser_runs_nothing_and_loads_nothing_foreign(app, nasty, tmp_path, path):
    server = make_server("127.0.0.1", 0, app, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        page = subprocess.run(
            ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
             "--disable-background-networking", "--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path}",
             "--virtual-time-budget=2000", "--dump-dom", f"http://127.0.0.1:{server.server_port}{path}"],
            capture_output=True, text=True, timeout=60, check=True,
        ).stdout  # fmt: skip
    finally:
        server.shutdown()
    [title] = re.findall(r"<title>([^<]*)</title>", page)[:1]
    assert "·" in title  # ours: no script has changed it
    assert "<script" not in page


# -- Feeds ----------------------------------------------------------------------------------------------------


@pytest.fixture
def history(db, clock):
    watch(db, name="PayAI")
    watch(db, "dexter")
    for entries in ([kind(), kind("eip155:1")], [kind()], [kind()], [kind(), kind("eip155:1")]):
        poll(db, clock, body(*entries))
        poll(db, clock, body(kind()), "dexter")


def test_atom_has_changes_only_one_entry_a_check_newest_first(reader, history):
    root = ET.fromstring(reader.get("/v1/feed/facilitators/payai/changes.atom").data)
    titles = [entry.findtext(f"{ATOM}title") for entry in root.findall(f"{ATOM}entry")]
    assert titles == ["PayAI: 1 returned", "PayAI: 1 removed", "PayAI: 2 first seen"]
    assert root.find(f"{ATOM}entry").findtext(f"{ATOM}content") == "returned: v2 · exact · eip155:1"
    ids = [entry.findtext(f"{ATOM}id") for entry in root.findall(f"{ATOM}entry")]
    assert len(set(ids)) == 3 and all(id.startswith("tag:deals.test,2026:facilitator-feed/") for id in ids)
    assert root.findtext(f"{ATOM}updated") == root.find(f"{ATOM}entry").findtext(f"{ATOM}updated")
    assert root.find(f"{ATOM}link[@rel='self']").get("href") == "http://deals.test/v1/feed/facilitators/payai/changes.atom"


def test_the_feed_of_all_has_everybodys_changes(reader, history):
    root = ET.fromstring(reader.get("/v1/feed/changes.atom").data)
    titles = [entry.findtext(f"{ATOM}title") for entry in root.findall(f"{ATOM}entry")]
    assert titles == ["PayAI: 1 returned", "PayAI: 1 removed", "dexter: 1 first seen", "PayAI: 2 first seen"]


def test_json_feed_says_the_same(reader, history):
    for path in ("/v1/feed", "/v1/feed/facilitators/payai"):
        atom = ET.fromstring(reader.get(f"{path}/changes.atom").data)
        found = json.loads(reader.get(f"{path}/changes.json").data)
        assert found["feed_url"] == f"http://deals.test{path}/changes.json"
        assert [item["id"] for item in found["items"]] == [entry.findtext(f"{ATOM}id") for entry in atom.findall(f"{ATOM}entry")]
        assert {"confirmed", "snapshot"}.isdisjoint(tag for item in found["items"] for tag in item["tags"])


def test_hostile_names_do_not_break_the_feeds(reader, nasty):
    root = ET.fromstring(reader.get("/v1/feed/changes.atom").data)
    assert "first seen: v2 · exact · ]]>" in root.find(f"{ATOM}entry").findtext(f"{ATOM}content")
    [item] = json.loads(reader.get("/v1/feed/changes.json").data)["items"]
    assert "\ufffe" in item["content_text"]


def test_an_empty_feed_is_a_feed(reader):
    assert ET.fromstring(reader.get("/v1/feed/changes.atom").data).findall(f"{ATOM}entry") == []
    assert json.loads(reader.get("/v1/feed/changes.json").data)["items"] == []


def test_at_most_fifty_checks_are_told(db, clock, reader):
    watch(db)
    for number in range(60):
        poll(db, clock, body(*(kind(f"eip155:{one}") for one in range(number + 1))))
    assert len(json.loads(reader.get("/v1/feed/changes.json").data)["items"]) == 50


# -- Badge and metrics ----------------------------------------------------------------------------------------


def test_the_badge_is_a_picture_of_the_status(db, clock, reader, nasty):
    root = ET.fromstring(reader.get("/v1/feed/facilitators/evil/badge.svg").data)
    assert root.get("aria-label") == 'Evil & <Sons> "Ltd": operational'
    poll(db, clock, answer(b"", 500), "evil")
    assert b"unavailable" in reader.get("/v1/feed/facilitators/evil/badge.svg").data


def test_metrics_have_one_series_per_facilitator_and_figure(db, clock, reader, history):
    watch(db, "later", base_url=None)
    poll(db, clock, answer(b"", 500, ms=7), "dexter")
    lines = [line for line in reader.get("/metrics").text.splitlines() if not line.startswith("#")]
    assert lines == [
        'facilitator_up{facilitator="dexter"} 0',
        'facilitator_up{facilitator="payai"} 1',
        'facilitator_response_seconds{facilitator="dexter"} 0.12',
        'facilitator_response_seconds{facilitator="payai"} 0.12',
        'facilitator_last_check_timestamp_seconds{facilitator="dexter"} 1790008100',
        'facilitator_last_check_timestamp_seconds{facilitator="payai"} 1790006300',
        'facilitator_last_success_timestamp_seconds{facilitator="dexter"} 1790007200',
        'facilitator_last_success_timestamp_seconds{facilitator="payai"} 1790006300',
        'facilitator_facets{facilitator="dexter"} 1',
        'facilitator_facets{facilitator="later"} 0',
        'facilitator_facets{facilitator="payai"} 2',
        'facilitator_changes_total{facilitator="dexter"} 1',
        'facilitator_changes_total{facilitator="later"} 0',
        'facilitator_changes_total{facilitator="payai"} 4',
    ]
