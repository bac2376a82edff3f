"""/health: 200 while money can be taken, moved and recorded, 503 with the reason when it cannot."""

import dataclasses

import pytest
from conftest import NOON
from facilitators import Outcome
from parties import Buyer, Scripted
from states import reach

import app as application
import db as database
import limits
import operations
import transfers

HOUR = 3600


@pytest.fixture
def problems(client):
    """Return what /health complains of, after checking that status and answer agree."""

    def ask(through=client):
        answer = through.get("/health")
        assert (answer.status_code, answer.json["status"]) in {(200, "ok"), (503, "failing")}
        assert (answer.status_code == 200) == (answer.json["problems"] == [])
        assert answer.headers["Cache-Control"] == "no-store"
        return answer.json["problems"]

    return ask


def test_a_new_service_is_healthy(client):
    facts = client.get("/health").json
    assert facts.pop("database") in [{"schema": 1, "journal_mode": mode} for mode in ("persist", "wal")]
    assert facts == {
        "status": "ok",
        "problems": [],
        "mode": "sandbox",
        "last_sweep_at": None,
        "open_deals": {"count": 0, "amount_usd": "0.00"},
        "open_transfers": {"count": 0, "amount_usd": "0.00", "blocked": 0, "stuck": 0},
        "facilitators": [{"url": "sandbox", "state": "ok"}],
        "switched_off": [],
    }


def test_it_adds_up_what_is_held_and_what_is_owed(db, world, client, sweep):
    for name in ("pending", "funded", "accepted", "delivered", "disputed", "lapsed", "released", "split"):
        reach(db, world, name)
    facts = client.get("/health").json
    assert facts["open_deals"] == {"count": 4, "amount_usd": "81.168"}  # four prices of 20.292
    assert facts["open_transfers"] == {"count": 5, "amount_usd": "40.584", "blocked": 0, "stuck": 0}
    sweep()
    facts = client.get("/health").json
    assert facts["open_transfers"]["count"] == 0
    assert facts["last_sweep_at"] == "2026-09-21T14:13:20Z"


@pytest.mark.parametrize(
    "state, waits_since",
    [("funded", 10 * HOUR), ("delivered", 5 * HOUR), ("disputed", 168 * HOUR), ("pending", 30), ("released", 0)],
)
def test_a_sweep_that_is_a_quarter_of_an_hour_late_is_an_incident(db, world, clock, problems, sweep, state, waits_since):
    reach(db, world, state)
    if waits_since > HOUR:  # the last sweep did what there was to do soon after funding
        clock.now = NOON + 30
        sweep()
    clock.now = NOON + waits_since + 899
    assert problems() == []
    clock.now = NOON + waits_since + 900
    assert problems() == ["the sweep is overdue"]
    sweep()
    assert problems() == []


def test_a_transfer_on_its_way_for_an_hour_is_an_incident(db, world, clock, wallets, client, problems):
    lost = Scripted(world.facilitators[0], outcome=Outcome("unknown", reason="no answer"))
    broken = dataclasses.replace(world, facilitators=(lost,))
    deal_id = reach(db, world, "released")
    for second in range(0, 3600, 600):
        clock.now = NOON + second
        transfers.sweep(db, broken, wallets)
    clock.now = NOON + 3599
    assert problems() == []
    clock.now = NOON + 3600
    assert problems() == ["transfers could not be signed or have been on their way for over an hour"]
    assert client.get("/health").json["open_transfers"]["stuck"] == 1, "the fee only waits for the seller's leg"
    clock.now = NOON + 4500
    for _ in range(2):
        transfers.sweep(db, world, wallets)
    assert problems() == [] and client.get(f"/v1/deals/{deal_id}").json["transfers"][0]["status"] == "confirmed"


def test_a_blocked_transfer_is_counted_and_no_incident(db, world, clock, client, problems, wallets):
    reach(db, world, "released")
    deposit = db.execute("SELECT deposit_address FROM deals").fetchone()[0]
    held = db.execute("SELECT units FROM sandbox_balances WHERE address = ?", (deposit,)).fetchone()[0]
    db.execute("UPDATE sandbox_balances SET units = 0 WHERE address = ?", (deposit,))
    for hour in range(3):
        clock.now = NOON + hour * HOUR
        transfers.sweep(db, world, wallets)
    assert problems() == []
    assert client.get("/health").json["open_transfers"] == {
        "count": 2, "amount_usd": "20.292", "blocked": 1, "stuck": 0,
    }  # fmt: skip
    db.execute("UPDATE sandbox_balances SET units = ? WHERE address = ?", (held, deposit))
    clock.now += HOUR
    assert transfers.sweep(db, world, wallets)["confirmed"] == 1, "a blocked leg is tried again by itself"


def test_facilitators_that_all_rest_are_an_incident_until_one_works(world, clock, seller, problems):
    lost = Scripted(world.facilitators[0], outcome=Outcome("unknown", reason="no answer"), url="https://lost.test")
    alone = application.create_app(world=dataclasses.replace(world, facilitators=(lost,))).test_client()
    both = application.create_app(
        world=dataclasses.replace(world, facilitators=(lost, world.facilitators[0]))
    ).test_client()
    for number in range(4):
        limits.failed(world.counters(), lost.url, "no answer", now=clock())
    assert problems(alone) == []
    assert alone.get("/health").json["facilitators"] == [{"url": "https://lost.test", "state": "failing"}]
    limits.failed(world.counters(), lost.url, "no answer", now=clock())
    assert problems(alone) == ["no payment facilitator works"]
    assert alone.get("/health").json["facilitators"] == [{"url": "https://lost.test", "state": "resting"}]
    assert problems(both) == []
    clock.sleep(30)
    assert problems(alone) == []
    lost.outcome = None
    buyer = Buyer(alone, world, 1).funded()
    assert buyer.pay(seller).status_code == 200
    assert alone.get("/health").json["facilitators"] == [{"url": "https://lost.test", "state": "ok"}]


def test_a_database_that_cannot_be_written_is_an_incident(db, settings, problems):
    other = database.connect(settings.database)
    db.execute("PRAGMA busy_timeout = 0")
    other.execute("BEGIN IMMEDIATE")
    assert problems() == ["the database cannot be written: database is locked"]
    other.execute("ROLLBACK")
    assert problems() == []


def test_a_database_that_cannot_even_be_read_answers_503(db, client):
    db.execute("ALTER TABLE deals RENAME TO lost")
    answer = client.get("/health")
    assert (answer.status_code, answer.json["error"]) == (503, "unavailable")


def test_a_disk_that_is_almost_full_is_an_incident(problems, monkeypatch):
    monkeypatch.setattr(operations, "DISK_LEFT", 1 << 80)
    assert problems() == ["the disk is almost full"]


def test_what_the_operator_switched_off_itself_is_no_incident(db, client, problems):
    operations.switch(db, "deal", on=False)
    operations.switch(db, "base", on=False)
    assert problems() == [] and client.get("/health").json["switched_off"] == ["deal", "base"]
