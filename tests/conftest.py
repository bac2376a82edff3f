"""Fixtures: a stopped clock, a sandbox world on a real SQLite file, the app and its client."""

import collections
import dataclasses
import os
import sys

import pytest

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import app as application
import contract
import db as database
import keys
import settings as configuration
import transfers
import world as worlds
from feedkit import reader  # noqa: F401 (fixture)
from parties import Buyer, Seller

from evm.rig import anvil, facilitator, pytest_terminal_summary  # noqa: E402, F401 (fixtures)

NOON = 1_790_000_000  # 2026-09-21T14:13:20Z, the moment at which most tests begin


class Clock:
    """A clock that stands still until told otherwise; sleeping on it is what moves it."""

    def __init__(self, now=NOON):
        self.now = float(now)

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def settings(tmp_path):
    """A sandbox service in a folder of its own, initialised."""
    found = configuration.Settings(
        database=str(tmp_path / "deals.db"),
        wallets=(str(tmp_path / "wallet.json"),),
        base_url="http://deals.test",
        service_name="Deal Test Service",
    )
    db = database.connect(found.database)
    database.init(db, mode=found.mode)
    master_key = keys.create_wallet(found.wallets[0], keys.SANDBOX_PASSPHRASE, sandbox=True)
    keys.create_secrets(found.secrets_path)
    database.set_meta(db, "master_key", master_key.hex())
    db.close()
    return found


@pytest.fixture
def db(settings):
    return database.here(settings.database)


@pytest.fixture
def world(settings, db, clock):
    """The sandbox's world on a stopped clock."""
    return dataclasses.replace(worlds.build(settings, db, clock=clock), sleep=clock.sleep)


@pytest.fixture
def wallets(settings):
    return keys.open_wallets(settings)


@pytest.fixture
def app(world):
    found = application.create_app(world=world)
    found.test_client_class = contract.Client  # every answer of every test is held against openapi.json
    return found


@pytest.fixture
def client(app):
    return app.test_client()


@pytest.fixture
def sweep(db, world, wallets):
    """Run the sweep until it finds nothing more to do; returns the sum of its counts."""

    def run(times=6):
        return sum((transfers.sweep(db, world, wallets) for _ in range(times)), start=collections.Counter())

    return run


@pytest.fixture
def buyer(client, world):
    return Buyer(client, world, 1).funded()


@pytest.fixture
def seller(client, world):
    return Seller(client, world, 2)


@pytest.fixture
def charlie(client, world):
    """A stranger with a wallet and money who must gain nothing."""
    return Buyer(client, world, 3).funded()
