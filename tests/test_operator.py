"""The operator's commands, run as from a shell: set up, sweep, look, decide, switch, audit, recover, back up, restore."""

import functools
import json
import os
import stat

import click.testing
import pytest
import sandbox
from conftest import NOON
from parties import Buyer
from states import BUYER, SELLER, reach

import app as application
import chain
import cli
import db as database
import deals
import keys
import settings as configuration
import transfers
import world as worlds


@pytest.fixture
def environ(settings):
    """The environment of the service that the other fixtures made."""
    return {
        "DEALS_DATABASE": settings.database,
        "DEALS_WALLET": settings.wallets[0],
        "DEALS_BASE_URL": settings.base_url,
        "DEALS_SERVICE_NAME": settings.service_name,
    }


@pytest.fixture
def run(environ, clock, monkeypatch):
    """Run one command on the stopped clock; returns what it printed, after checking its exit code."""
    monkeypatch.setattr(worlds, "build", functools.partial(worlds.build, clock=clock))

    def command(line, *more, code=0, **changes):
        result = click.testing.CliRunner().invoke(cli.main, [*line.split(), *more], env={**environ, **changes})
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result.output

    return command


def state(db, deal_id):
    return db.execute("SELECT state FROM deals WHERE id = ?", (deal_id,)).fetchone()["state"]


def legs(db, deal_id):
    rows = db.execute("SELECT leg, status, reason FROM transfers WHERE deal_id = ? AND leg <> 'guarantee'", (deal_id,))
    return {row["leg"]: (row["status"], row["reason"]) for row in rows}


def deposit(db, deal_id):
    return db.execute("SELECT deposit_address FROM deals WHERE id = ?", (deal_id,)).fetchone()[0]


# Setting up.


def test_init_makes_everything_once_and_is_safe_to_run_again(run, tmp_path):
    new = {
        "DEALS_DATABASE": str(tmp_path / "new" / "deals.db"), "DEALS_WALLET": str(tmp_path / "new" / "wallet.json"),
    }  # fmt: skip
    (tmp_path / "new").mkdir()
    first = run("init", **new)
    assert "Made the wallet" in first and "Ready: sandbox mode" in first
    files = {name: (tmp_path / "new" / name).read_bytes() for name in ("wallet.json", "deals.db.secrets")}
    master_key = first.split("master key ")[1]
    again = run("init", **new)
    assert "Made the wallet" not in again and again.split("master key ")[1] == master_key
    for name, content in files.items():
        assert (tmp_path / "new" / name).read_bytes() == content
        assert stat.S_IMODE(os.stat(tmp_path / "new" / name).st_mode) == 0o600
    assert "nothing was due" in run("sweep", **new)


def test_init_again_leaves_deals_alone(run, db, world):
    deal_id = reach(db, world, "accepted")
    run("init")
    assert state(db, deal_id) == "accepted"


@pytest.mark.parametrize("command", ["sweep", "deals list", "audit", "switch deal off", "disputes list", "backup copy.db"])
def test_commands_refuse_a_database_that_was_never_made(run, tmp_path, command):
    output = run(command, code=2, DEALS_DATABASE=str(tmp_path / "none.db"))
    assert "run `python cli.py init`" in output


def test_live_mode_needs_the_address_that_clients_call(run, monkeypatch, environ):
    live = {"DEALS_MODE": "live", "DEALS_BASE_URL": ""}
    for command in ("init", "sweep", "audit"):
        assert "DEALS_BASE_URL is required in live mode" in run(command, code=2, **live)
    for name, value in {**environ, **live}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(configuration.Wrong, match="DEALS_BASE_URL is required"):
        application.create_app()


def test_live_mode_makes_no_wallet_without_a_passphrase(run, tmp_path):
    new = {"DEALS_DATABASE": str(tmp_path / "live.db"), "DEALS_WALLET": str(tmp_path / "live.json")}
    output = run("init", code=2, DEALS_MODE="live", **new)
    assert "DEALS_WALLET_PASSPHRASE" in output
    assert not os.path.exists(tmp_path / "live.json")


@pytest.mark.parametrize("made, started", [("sandbox", "live"), ("live", "sandbox")])
def test_a_database_of_one_mode_is_refused_by_the_other(run, monkeypatch, environ, tmp_path, made, started):
    path = str(tmp_path / "other.db")
    db = database.connect(path)
    database.init(db, mode=made)
    database.set_meta(db, "master_key", "02" * 33)
    db.close()
    other = {
        "DEALS_DATABASE": path, "DEALS_MODE": started, "DEALS_WALLET_PASSPHRASE": "x",
        "DEALS_WALLET": str(tmp_path / "none.json"),
    }  # fmt: skip
    words = f"belongs to the {made} mode and must not be used in {started} mode"
    for command in ("init", "sweep", "audit", "deals list"):
        assert words in run(command, code=2, **other)
    assert not os.path.exists(tmp_path / "none.json")
    for name, value in {**environ, **other}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(database.NotReady, match=words):
        application.create_app()


def test_a_wallet_that_does_not_open_stops_the_sweep_with_a_sentence(run, tmp_path):
    assert "does not exist" in run("sweep", code=2, DEALS_WALLET=str(tmp_path / "gone.json"))
    output = run("sweep", code=2, DEALS_WALLET_PASSPHRASE="not the passphrase")
    assert "does not open" in output and "not the passphrase" not in output


# The sweep.


def test_the_sweep_prints_one_line_or_json(run, db, world):
    reach(db, world, "released")
    line = run("sweep")
    assert line.count("\n") == 1 and "sweep: confirmed 1, guarantees 1, sent 1, signed 1" in line
    counts = json.loads(run("sweep --json"))
    assert (counts["sent"], counts["confirmed"], counts["signed"]) == (1, 1, 1)  # the fee, after the seller
    assert sandbox.balance(db, SELLER) == 20_000_000
    assert sandbox.balance(db, world.treasury) == 292_000
    assert "nothing was due" in run("sweep")


def test_a_deal_that_breaks_the_sweep_is_told_and_does_not_stop_the_others(run, db, world):
    broken, sound = reach(db, world, "released", ref="broken"), reach(db, world, "released", ref="sound")
    db.execute("UPDATE deals SET master_key = 'no key' WHERE id = ?", (broken,))
    output = run("sweep --json", code=1)
    assert json.loads(output[output.index("{") :].splitlines()[0])["errors"] == 2  # its guarantee and its seller's leg
    assert legs(db, sound)["seller"] == ("confirmed", None)


# Looking.


def test_deals_are_listed_and_shown(run, db, world, sweep):
    open_one, ended = reach(db, world, "accepted"), reach(db, world, "released")
    sweep()
    listed = run("deals list")
    assert open_one in listed and ended not in listed and "2026-09-22T00:13:20Z" in listed
    assert [deal["id"] for deal in json.loads(run("deals list --state released --json"))] == [ended]
    shown = run(f"deals show {ended}")
    for words in ("20.00", "20.292", "released", "confirm", "seller", "0.292", "confirmed"):
        assert words in shown
    assert json.loads(run(f"deals show {ended} --json"))["state"] == "released"
    assert "not_found" in run("deals show deal_nonsense", code=2)


def test_disputes_are_listed_with_what_both_sides_say(run, db, world, seller):
    deal_id = reach(db, world, "disputed")
    seller.act(deal_id, "statement", {"statement": "It is all there."})
    reach(db, world, "delivered")
    listed = run("disputes list")
    assert deal_id in listed and "Half of it is missing." in listed and listed.count("deal_") == 1
    assert [deal["id"] for deal in json.loads(run("disputes list --json"))] == [deal_id]
    shown = run(f"disputes show {deal_id}")
    assert "Half of it is missing." in shown and "It is all there." in shown


# Deciding.

OUTCOMES = [
    (["release"], "released", "seller 20.00, buyer 0.00", {"seller": 20_000_000}),
    (["refund"], "refunded", "seller 0.00, buyer 20.00", {"buyer": 20_000_000}),
    (["split", "--seller-usd", "7.50"], "split", "seller 7.50, buyer 12.50", {"seller": 7_500_000, "buyer": 12_500_000}),
    (["split", "--seller-usd", "0"], "split", "seller 0.00, buyer 20.00", {"buyer": 20_000_000}),
]


@pytest.mark.parametrize("words, final, told, paid", OUTCOMES)
def test_a_dispute_is_decided_only_with_yes(run, db, world, client, words, final, told, paid):
    deal_id = reach(db, world, "disputed")
    line = ["disputes", "resolve", deal_id, *words, "--note", "Ten of twelve pages."]
    dry = run("", *line)
    assert "Nothing was done" in dry and told in dry and state(db, deal_id) == "disputed"
    assert told in run("", *line, "--yes") and state(db, deal_id) == final
    record = client.get(f"/v1/deals/{deal_id}").json
    assert record["dispute"]["decision"] == "Ten of twelve pages."
    assert record["history"][-1]["by"] == "operator"
    run("sweep"), run("sweep")
    found = {"seller": sandbox.balance(db, SELLER), "buyer": sandbox.balance(db, BUYER)}
    assert {who: units for who, units in found.items() if units} == paid
    assert "invalid_state" in run("", *line, "--yes", code=2)


@pytest.mark.parametrize(
    "words",
    [
        ["split"], ["release", "--seller-usd", "5"], ["split", "--seller-usd", ""], ["split", "--seller-usd", "five"],
        ["split", "--seller-usd", "-1"], ["split", "--seller-usd", "7.505"], ["split", "--seller-usd", "20.01"],
        ["keep"],
    ],
)  # fmt: skip
@pytest.mark.parametrize("yes", [[], ["--yes"]])
def test_a_decision_that_makes_no_sense_is_refused_also_when_dry(run, db, world, words, yes):
    deal_id = reach(db, world, "disputed")
    output = run("", "disputes", "resolve", deal_id, *words, "--note", "x", *yes, code=2)
    assert "Would decide" not in output and state(db, deal_id) == "disputed"


@pytest.mark.parametrize("where", ["funded", "delivered", "released", "lapsed"])
@pytest.mark.parametrize("yes", [[], ["--yes"]])
def test_only_a_disputed_deal_can_be_decided_and_the_dry_run_says_so(run, db, world, where, yes):
    deal_id = reach(db, world, where)
    output = run("", "disputes", "resolve", deal_id, "release", "--note", "x", *yes, code=2)
    assert "only a disputed deal" in output and state(db, deal_id) == where


def test_a_decision_a_second_too_late_finds_the_buyer_refunded(run, db, world, clock):
    deal_id = reach(db, world, "disputed")
    clock.now = NOON + 168 * 3600
    run(f"disputes resolve {deal_id} release --note x --yes", code=2)
    assert state(db, deal_id) == "refunded"


# Switching.


@pytest.mark.parametrize("name", ["deal", "base"])
def test_a_switch_stops_new_payments_and_nothing_else(run, buyer, seller, client, name):
    deal_id = buyer.deal(seller)
    body = buyer.request(seller, ref="another")
    headers = buyer.x402(buyer.quote(body))
    assert run(f"switch {name} off") == f"{name} is off.\n"
    for options in ({}, {"headers": headers}):
        answer = client.post("/x402/deal", json=body, **options)
        assert (answer.status_code, answer.json["error"]) == (503, "unavailable")
        assert answer.headers["Retry-After"]
    assert client.get("/health").json["switched_off"] == [name]
    assert seller.act(deal_id, "accept").status_code == 200
    run(f"switch {name} on")
    assert client.post("/x402/deal", json=body, headers=headers).status_code == 200
    run("switch everything off", code=2)


# The books.


def test_the_audit_agrees_with_a_sound_service_at_every_stage(run, db, world, sweep):
    for name in ("pending", "funded", "disputed", "released", "refunded", "split", "lapsed"):
        reach(db, world, name)
    assert run("audit") == "All 7 deals agree with the chain.\n"
    sweep(1)
    run("audit")
    sweep()
    assert json.loads(run("audit --json")) == []


@pytest.mark.parametrize(
    "what, change, difference",
    [
        ("money is missing", "UPDATE sandbox_balances SET units = units - 1 WHERE address = :deposit",
         "the deposit holds -1 more"),
        ("money nobody knows of", "UPDATE sandbox_balances SET units = units + 10000 WHERE address = :deposit",
         "holds 10000 units"),
        ("a payout that never was", "DELETE FROM sandbox_authorizations WHERE authorizer = :deposit",
         "confirmed in the books, not on the chain"),
        ("a payout unknown to the books", "UPDATE transfers SET status = 'sent', next_at = 1 WHERE leg = 'seller'",
         "the chain has it, the books do not yet"),
    ],
)  # fmt: skip
def test_the_audit_tells_every_difference_and_fails(run, db, world, sweep, what, change, difference):
    reach(db, world, "funded", ref="sound")
    deal_id = reach(db, world, "funded" if "missing" in what else "released")
    sweep()
    db.execute(change, {"deposit": deposit(db, deal_id)} if ":deposit" in change else {})
    if "missing" in what:
        difference = "holds 20291999 units, the books say 20292000"
    found = json.loads(run("audit --json", code=1))
    assert {line["deal"] for line in found} == {deal_id}
    assert difference in " ".join(line["difference"] for line in found)
    table = run("audit", code=1)
    assert deal_id in table and difference in table


# Stray money.


@pytest.fixture
def stray(db, world, buyer, seller, tmp_path):
    """Two dollars at the deposit of terms that never became a deal; returns the file with the request body."""
    body = buyer.request(seller, ref="never made")
    sandbox.mint(db, buyer.quote(body).json["accepts"][0]["payTo"].lower(), 2_000_000)
    path = tmp_path / "terms.json"
    path.write_text(json.dumps(body))
    return str(path)


def test_money_that_never_became_a_deal_is_returned(run, db, stray, clock):
    to = chain.checksum("0x" + "ab" * 20)
    dry = run("recover --to", to, stray)
    assert "holds 2.00 USDC" in dry and "Nothing was done" in dry
    assert db.execute("SELECT count(*) FROM deals").fetchone()[0] == 0
    assert "next sweep" in run("recover --yes --to", to, stray)
    for _ in range(4):
        run("sweep")
        clock.sleep(100)
    assert sandbox.balance(db, "0x" + "ab" * 20) == 2_000_000
    run("audit")


def test_terms_whose_money_was_recovered_can_still_be_bought_by_anyone(run, buyer, seller, stray, clock):
    run("recover --yes --to", chain.checksum("0x" + "ab" * 20), stray)
    run("sweep"), run("sweep")
    clock.sleep(1000)
    answer = buyer.pay(seller, ref="never made")
    assert (answer.status_code, answer.json[0]["buyer_address"].lower()) == (200, BUYER)


@pytest.mark.parametrize("name", ["released", "refunded", "lapsed"])
def test_money_that_reaches_an_ended_deal_long_after_goes_back_to_its_buyer(
    run, db, world, buyer, seller, sweep, tmp_path, name
):
    deal_id, path = reach(db, world, name), tmp_path / "terms.json"
    path.write_text(json.dumps(buyer.request(seller, deadline_hours=10, review_hours=5, ref=f"{name} None")))
    assert name == "lapsed" or "the sweep looks after it" in run("recover --yes --to", chain.checksum(BUYER), str(path), code=2)
    sweep()
    before = sandbox.balance(db, BUYER)
    sandbox.mint(db, deposit(db, deal_id), 3_000_000)
    run("sweep"), run("audit", code=1)
    assert f"back to {chain.checksum(BUYER)} only" in run("recover --yes --to", chain.checksum(SELLER), str(path), code=2)
    assert "Nothing was done" in run("recover --to", chain.checksum(BUYER), str(path))
    assert "next sweep" in run("recover --yes --to", chain.checksum(BUYER), str(path))
    run("sweep"), run("sweep")
    assert sandbox.balance(db, BUYER) == before + 3_000_000
    assert state(db, deal_id) == name
    run("audit")


@pytest.mark.parametrize("change", [{"amount_usd": "0.01"}, {"extra": 1}, {"network": "mainnet"}])
def test_recovering_by_terms_that_could_never_be_paid_for_is_refused(run, buyer, seller, tmp_path, change):
    path = tmp_path / "terms.json"
    path.write_text(json.dumps(buyer.request(seller, **change)))
    assert "invalid_request" in run("recover --to", chain.checksum(BUYER), str(path), code=2)


def test_the_money_of_an_open_deal_is_never_recovered(run, db, buyer, seller, tmp_path):
    buyer.deal(seller)
    path = tmp_path / "terms.json"
    path.write_text(json.dumps(buyer.request(seller)))
    assert "deal_exists" in run("recover --yes --to", chain.checksum(BUYER), str(path), code=2)
    wrong = chain.checksum(BUYER)[:-1] + "F"
    assert "checksum" in run("recover --yes --to", wrong, str(path), code=2)


# Backups.


@pytest.fixture
def outside(world, tmp_path):
    """The world with a dollar on a file of its own, as a real chain is: restoring the service does not restore it."""
    path = str(tmp_path / "chain.db")
    database.init(database.here(path), mode="sandbox")
    connect = lambda: database.here(path)
    return worlds.dataclasses.replace(
        world,
        ledger=sandbox.Ledger(connect, world.terminal.token, world.clock),
        facilitators=(sandbox.Facilitator(connect, world.terminal.token, world.clock, "sandbox"),),
    )


def restored(outside, path):
    """The world over the restored database instead of the lost one."""
    settings = worlds.dataclasses.replace(outside.settings, database=str(path))
    return worlds.dataclasses.replace(outside, settings=settings, records={})


def test_a_backup_is_complete_and_never_overwrites(run, db, world, tmp_path):
    deal_id = reach(db, world, "funded")
    assert "Copied" in run("backup", str(tmp_path / "copy.db"))
    assert state(database.here(str(tmp_path / "copy.db")), deal_id) == "funded"
    assert "exists already" in run("backup", str(tmp_path / "copy.db"), code=2)


def test_a_restored_backup_pays_nobody_a_second_time(run, db, outside, wallets, clock, tmp_path):
    for number in range(3):
        reach(db, outside, "released", ref=number)
    run("backup", str(tmp_path / "copy.db"))
    for _ in range(3):
        transfers.sweep(db, outside, wallets)
    assert outside.ledger.balance(SELLER) == 60_000_000
    copy, world = database.here(str(tmp_path / "copy.db")), restored(outside, tmp_path / "copy.db")
    counts = [transfers.sweep(copy, world, wallets) for _ in range(3)]
    assert sum(count["sent"] for count in counts) == 0 and sum(count["confirmed"] for count in counts) == 6
    assert (outside.ledger.balance(SELLER), outside.ledger.balance(world.treasury)) == (60_000_000, 3 * 292_000)


def test_a_backup_is_put_in_place_whole_or_not_at_all(run, db, world, settings, tmp_path):
    copy = str(tmp_path / "copy.db")
    first = reach(db, world, "funded")
    run("backup", copy)
    second = reach(db, world, "accepted", ref="later")
    assert "--yes" in run("restore", copy) and deals.find(db, second)
    assert "Restored" in run("restore", copy, "--yes")
    assert deals.find(db, first) and deals.find(db, second) is None
    assert database.journal_mode(db) == ("wal" if database.WAL_IS_SAFE else "persist")
    reach(db, world, "delivered", ref="later")  # and it can be written again
    for damage, words in ((b"PRAGMA nothing", "not a database"), (b"", "not initialised")):
        (tmp_path / "broken.db").write_bytes(damage * 1000)
        assert words in run("restore", str(tmp_path / "broken.db"), "--yes", code=2)
    other = database.connect(str(tmp_path / "other.db"))
    database.init(other, mode="live")
    assert "live mode" in run("restore", str(tmp_path / "other.db"), "--yes", code=2)
    assert deals.find(db, first)


def test_a_deal_decided_otherwise_after_a_restore_still_cannot_be_paid_twice(run, db, outside, wallets, clock, tmp_path):
    deal_id = reach(db, outside, "delivered")
    run("backup", str(tmp_path / "copy.db"))
    Buyer(application.create_app(world=outside).test_client(), outside, 1).reveal(deal_id, "confirm")
    for _ in range(3):
        transfers.sweep(db, outside, wallets)
    copy, world = database.here(str(tmp_path / "copy.db")), restored(outside, tmp_path / "copy.db")
    answer = Buyer(application.create_app(world=world).test_client(), world, 2).act(deal_id, "refund")
    assert answer.json["state"] == "refunded"
    for _ in range(3):
        transfers.sweep(copy, world, wallets)
        clock.sleep(1000)
    assert (outside.ledger.balance(SELLER), outside.ledger.balance(BUYER)) == (20_000_000, 0)
    assert legs(copy, deal_id)["buyer"] == ("blocked", "insufficient_funds")


# Secrets and wallets.


def test_a_rotated_secret_keeps_the_challenges_already_issued_good_for_one_rotation(run, buyer, seller, world, settings):
    bodies = [buyer.request(seller, ref=ref) for ref in ("first", "second")]
    payments = [buyer.mpp(buyer.quote(body, "/mpp/deal")) for body in bodies]

    def pay(number):
        _, secrets = keys.load_secrets(settings.secrets_path)
        terminal = worlds.dataclasses.replace(world.terminal, secrets=secrets)
        client = application.create_app(world=worlds.dataclasses.replace(world, terminal=terminal)).test_client()
        return client.post("/mpp/deal", json=bodies[number], headers=payments[number]).status_code

    assert "restart" in run("rotate-secret")
    assert pay(0) == 200
    run("rotate-secret")
    assert pay(1) == 402


def test_without_the_wallet_of_an_older_key_a_leg_stays_due_and_is_told(
    run, db, world, client, clock, tmp_path, settings
):
    old = reach(db, world, "released")
    new = {"DEALS_WALLET": str(tmp_path / "second.json")}
    run("init", DEALS_WALLET=f"{new['DEALS_WALLET']},{settings.wallets[0]}")
    assert json.loads(run("sweep --json", **new))["unsigned"] == 2  # the seller's leg and the refund guarantee
    status, reason = legs(db, old)["seller"]
    assert status == "due" and world.terminal.master_key.hex() in reason
    assert "no wallet for master key" in run(f"deals show {old}", **new)
    assert sandbox.balance(db, SELLER) == 0
    clock.sleep(3601)
    run("sweep", **new)
    health = client.get("/health")
    assert (health.status_code, health.json["open_transfers"]["stuck"]) == (503, 1)
    run("sweep"), run("sweep")
    clock.sleep(1000)
    run("sweep"), run("sweep")
    assert sandbox.balance(db, SELLER) == 20_000_000
    assert client.get("/health").status_code == 200


def test_init_never_replaces_a_wallet_that_is_merely_missing(run, tmp_path):
    elsewhere = str(tmp_path / "mistyped.json")
    assert "restore its file" in run("init", DEALS_WALLET=elsewhere, code=2)
    assert not os.path.exists(elsewhere)


def test_a_second_wallet_takes_over_and_older_deals_still_pay_out(run, db, world, settings, clock, tmp_path):
    old = reach(db, world, "released")
    both = {"DEALS_WALLET": f"{tmp_path / 'second.json'},{settings.wallets[0]}"}
    key = run("init", **both).split("master key ")[1].strip(" .\n")
    assert key != world.terminal.master_key.hex()
    later = worlds.build(worlds.dataclasses.replace(settings, wallets=tuple(both["DEALS_WALLET"].split(","))), db, clock=clock)
    assert later.terminal.master_key.hex() == key
    new = reach(db, later, "released")
    assert new != old
    for _ in range(3):
        run("sweep", **both)
    assert sandbox.balance(db, SELLER) == 40_000_000
    assert legs(db, old)["seller"][0] == legs(db, new)["seller"][0] == "confirmed"
    run("audit", **both)
