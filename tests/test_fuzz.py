"""A fuzzer over the whole published document: no 5xx, no undocumented status, no broken schema."""

import dataclasses
import os

import hypothesis
import pytest
import schemathesis
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

import app as application
import spec
import world as worlds
from conftest import NOON
from parties import Buyer, Seller

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "40"))  # for each operation; the same ones in every run


class Ticking:
    """A clock on which every look takes a second, so that no limit of requests per minute is ever met."""

    now = float(NOON)

    def __call__(self):
        self.now += 1
        return self.now

    def sleep(self, seconds):
        self.now += seconds


# What a schema cannot say is refused although the schema allows it, and a quote is refused by no client.
EXCUSED = {
    "/x402/deal": [positive_data_acceptance, negative_data_rejection],  # 402 is the answer to good and bad alike
    "/mpp/deal": [positive_data_acceptance, negative_data_rejection],
    "/endpoints": [positive_data_acceptance],  # a cursor is what was given out before
    "/v1/feed/events": [positive_data_acceptance],  # likewise, and a window begins before it ends
    "/v1/feed/facilitators/{id}/events": [positive_data_acceptance],
    "/v1/feed/capabilities": [positive_data_acceptance],  # at least one parameter, and an extension alone
    "/mcp": [positive_data_acceptance],  # JSON-RPC has methods and parameters of its own
    "/sandbox/balances/{address}": [positive_data_acceptance],  # EIP-55 checksums
    "/v1/feed/events": [positive_data_acceptance],  # moments that fit into 64 bits of nanoseconds; cursors
    "/v1/feed/facilitators/{id}/events": [positive_data_acceptance],
    "/v1/feed/capabilities": [positive_data_acceptance],  # at least one of four parameters
    "/sandbox/faucet": [positive_data_acceptance],  # likewise, and amounts
}
OPERATIONS = [(method, path) for path, item in spec.document()["paths"].items() for method in item]


@pytest.fixture
def fuzzed(settings, db):
    """The document as a fuzzer reads it, bound to an app that already has a deal."""
    clock = Ticking()
    world = dataclasses.replace(worlds.build(settings, db, clock=clock), sleep=clock.sleep)
    app = application.create_app(world=world)
    client = app.test_client()
    Buyer(client, world, 1).funded().deal(Seller(client, world, 2), deadline_hours=720)
    return schemathesis.openapi.from_wsgi("/openapi.json", app)


@pytest.mark.parametrize("method, path", OPERATIONS)
def test_no_request_gets_an_answer_that_is_not_published(fuzzed, method, path):
    operation = fuzzed[path][method]
    good, bad = (operation.as_strategy(generation_mode=mode) for mode in schemathesis.GenerationMode)

    @hypothesis.given(case=good | bad)
    @hypothesis.settings(
        max_examples=EXAMPLES, derandomize=True, deadline=None, database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    def fuzz(case):
        case.call_and_validate(excluded_checks=EXCUSED.get(path, []))

    fuzz()
