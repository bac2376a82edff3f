"""The operator's commands for the feed."""

import json

import cli
import click
import db as database
import pytest
import targets
from click.testing import CliRunner
from feedkit import Stranger, body, kind, says


@pytest.fixture
def run(settings, monkeypatch):
    """Run one command as the operator would; returns its exit code and output."""
    monkeypatch.setenv("DEALS_DATABASE", settings.database)
    monkeypatch.delenv("DEALS_MODE", raising=False)

    def run(*words):
        result = CliRunner().invoke(cli.main, words)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.output

    return run


def test_every_command_has_help(run):
    for words in (["facilitators"], ["poll"], ["prune"], *(["facilitators", name] for name in "list add enable disable remove catalogue".split())):
        code, text = run(*words, "--help")
        assert code == 0
        assert len(text.splitlines()) > 4


def test_a_target_is_added_listed_disabled_and_removed(run, db):
    assert run("facilitators", "add", "payai", "--url", "https://payai.example/", "--name", "PayAI") == (0, "payai is watched.\n")
    code, text = run("facilitators", "list")
    assert code == 0
    assert text.splitlines()[0].split() == ["id", "name", "watched", "status", "last", "check", "every", "url"]
    assert text.splitlines()[1].split() == ["payai", "PayAI", "yes", "pending:", "unchecked", "-", "15", "min", "https://payai.example"]
    assert run("facilitators", "disable", "payai") == (0, "payai is no longer watched.\n")
    assert json.loads(run("facilitators", "list", "--json")[1])[0]["watched"] is False
    assert run("facilitators", "enable", "payai") == (0, "payai is watched.\n")
    assert run("facilitators", "remove", "payai") == (0, "payai is removed.\n")
    assert json.loads(run("facilitators", "list", "--json")[1]) == []


def test_a_target_without_a_url_is_pending(run):
    assert run("facilitators", "add", "later") == (0, "later is watched, pending: it has no URL yet.\n")
    assert run("facilitators", "add", "later", "--url", "https://later.example")[0] == 0


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["add", "Bad"], "An id is"),
        (["add", "a", "--url", "http://a.example"], "must begin with https://"),
        (["add", "a", "--url", "https://a.example", "--header", "nonsense"], "NAME: VALUE"),
        (["enable", "nobody"], "no target nobody"),
        (["disable", "nobody"], "no target nobody"),
        (["remove", "nobody"], "no target nobody"),
    ],
)
def test_a_mistake_is_one_sentence_and_a_code(run, words, sentence):
    code, text = run("facilitators", *words)
    assert code == 2
    assert sentence in text and len(text.splitlines()) == 1


@pytest.mark.parametrize("words", [["--interval", "0"], ["--interval", "1441"], ["--interval", "x"]])
def test_an_interval_out_of_range_is_a_usage_error(run, words):
    assert run("facilitators", "add", "a", *words)[0] == 2


def test_header_values_are_shown_nowhere(run):
    run("facilitators", "add", "cdp", "--url", "https://cdp.example", "--header", "Authorization: Bearer sesame")
    for words in (["list"], ["list", "--json"], ["catalogue"]):
        assert "sesame" not in run("facilitators", *words)[1]
    listed = json.loads(run("facilitators", "list", "--json")[1])
    assert [row["headers"] for row in listed if row["id"] == "cdp"] == [["Authorization"]]


def test_the_catalogue_is_added_disabled_and_shown(run, db):
    code, text = run("facilitators", "catalogue")
    assert code == 0
    assert len(text.splitlines()) == 23
    assert "https://facilitator.payai.network" in text
    assert {target["enabled"] for target in targets.every(db)} == {0}
    assert len(json.loads(run("facilitators", "catalogue", "--json")[1])) == 22


def test_a_poll_says_what_it_found_in_one_line(run):
    with Stranger(says(body(kind(), extensions=["bazaar"]))) as good, Stranger(says(b"", "503 Busy")) as bad:
        run("facilitators", "add", "good", "--url", good.url, "--loopback")
        run("facilitators", "add", "bad", "--url", bad.url, "--loopback")
        assert run("poll") == (0, "Polled 2: 1 operational, 1 not (bad http_503); 2 changes (good 2).\n")
        assert run("poll") == (0, "Polled 0: 0 operational, 0 not; 0 changes.\n")
        assert run("poll", "--now", "--only", "good") == (0, "Polled 1: 1 operational, 0 not; 0 changes.\n")
        [check] = json.loads(run("poll", "--now", "--only", "good", "--json")[1])
    assert (check["target"], check["reason"], check["facets"], check["changes"]) == ("good", "ok", 2, 0)
    assert check["at"].endswith("Z")


def test_only_somebody_watched_can_be_polled(run):
    code, text = run("poll", "--only", "nobody")
    assert (code, "nobody is not watched" in text) == (2, True)


def test_prune_says_what_it_thinned(run):
    assert run("prune") == (0, "Thinned 0 bodies.\n")
    assert json.loads(run("prune", "--days", "1", "--json")[1]) == {"thinned": 0}
    assert run("prune", "--days", "0")[0] == 2


def test_a_database_that_is_not_ready_is_said_in_a_sentence(run, tmp_path, monkeypatch):
    monkeypatch.setenv("DEALS_DATABASE", str(tmp_path / "other.db"))
    code, text = run("poll")
    assert code == 2
    assert "init" in text


def test_init_seeds_the_catalogue_once(run, settings, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DEALS_WALLET", settings.wallets[0])
    monkeypatch.setenv("DEALS_BASE_URL", "http://127.0.0.1:9")
    for _ in range(2):
        assert run("init")[0] == 0
    listed = json.loads(run("facilitators", "list", "--json")[1])
    assert len(listed) == 23
    assert [row["url"] for row in listed if row["watched"]] == ["http://127.0.0.1:9/sandbox"]


def test_a_terminal_is_shown_no_control_characters(run, db):
    targets.add(db, "a", name="plain")
    db.execute("UPDATE feed_targets SET name = :name", {"name": "\x1b[2Jbold\u202e"})
    text = run("facilitators", "list")[1]
    assert "\x1b" not in text and "\u202e" not in text


def test_the_commands_belong_to_the_one_command_line():
    assert {"facilitators", "poll", "prune"} <= cli.main.commands.keys()
    assert isinstance(cli.main.commands["facilitators"], click.Group)
    assert database.NotReady
