"""Everything outside the database: settings, clock, chain, facilitators, and keys that hold no money."""

import dataclasses
import time
from collections.abc import Callable

import baton
import chain
import db as database
import deals
import discovery
import documents
import facilitators
import feed
import keys
import limits
import protocols
import sandbox
from settings import CHAIN_ID

DECLARED_SECONDS = 10  # for which the feed's word about a facilitator is remembered


@dataclasses.dataclass(frozen=True)
class World:
    """What the service needs from outside, chosen once, at start; a simulator brings its own."""

    settings: object
    terminal: protocols.Terminal
    frame: deals.Frame
    treasury: str
    ledger: object  # chain.Ledger or sandbox.Ledger
    facilitators: tuple  # facilitators.Facilitator or sandbox.Facilitator, tried in order
    counters: Callable  # this thread's connection to the shared counters
    receipt_key: bytes
    clock: Callable = time.time
    sleep: Callable = time.sleep
    working: Callable = baton.held  # for the length of a settlement; it saves time, and nothing depends on it
    records: dict = dataclasses.field(default_factory=dict)  # rendered records of this worker, by id and version
    declares: Callable = lambda url: None  # does the feed's latest check of this facilitator declare our kind?

    def now(self):
        return int(self.clock())


def build(settings, db, *, clock=time.time):
    """Choose the real parts or the sandbox's from the settings, once. Raises keys.Locked, db.NotReady."""
    master_key = bytes.fromhex(database.meta(db, "master_key", ""))
    if not master_key:
        raise database.NotReady("The database has no master key yet: run `python cli.py init`.")
    receipt_key, challenge_secrets = keys.load_secrets(settings.secrets_path)
    token = chain.Token(settings.asset, *settings.asset_domain, CHAIN_ID)
    connect = lambda: database.here(settings.database)
    if settings.sandbox:
        ledger = sandbox.Ledger(connect, token, clock)
        clients = (sandbox.Facilitator(connect, token, clock, "sandbox"),)
    else:
        ledger = chain.Ledger(settings.rpc_url, token)
        secret = settings.facilitator_token
        clients = tuple(facilitators.Facilitator(url, token=secret) for url in settings.facilitators)
    return World(
        settings=settings,
        terminal=protocols.Terminal(
            token=token, master_key=master_key, mode=settings.mode, description=description(settings),
            secrets=challenge_secrets, extensions={"bazaar": discovery.bazaar()},
        ),
        frame=deals.Frame(settings.mode, chain.checksum(token.address), CHAIN_ID),
        treasury=(settings.treasury or chain.address_of(master_key)).lower(),
        ledger=ledger,
        facilitators=clients,
        counters=lambda: database.here(settings.database, limits.connect),
        receipt_key=receipt_key,
        clock=clock,
        declares=_remembered(lambda url: feed.declares(connect(), url), clock),
    )  # fmt: skip


def _remembered(ask, clock):
    """Return ``ask``, whose answers are good for a while: the feed learns something new every few minutes at most."""
    known = {}

    def answer(url):
        value, until = known.get(url, (None, 0))
        if not until - DECLARED_SECONDS <= clock() < until:
            value = ask(url)
            known[url] = value, clock() + DECLARED_SECONDS
        return value

    return answer


def description(settings):
    """Say in every quote what is bought, and the cure for the official SDKs' default limit of one dollar."""
    kind = "SANDBOX, no real money: " if settings.sandbox else ""
    cure = documents.client_lines(settings)["x402_limit_line"]
    return (
        f"{kind}Hold a payment between buyer and seller until delivery. x402 SDKs refuse more than $1 by default:"
        f" {cure}. See /agents.md."
    )
