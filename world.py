"""Everything outside the database: settings, clock, chain, facilitators, and keys that hold no money."""

import dataclasses
import time
from collections.abc import Callable

import chain
import db as database
import deals
import facilitators
import limits
import protocols
import sandbox
import secretfile
from settings import CHAIN_ID

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
    declares: Callable = lambda url: None  # does the feed's latest check of this facilitator declare our kind?

    def now(self):
        return int(self.clock())
