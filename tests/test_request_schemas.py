"""Requests are checked quickly when they surely fit, and by jsonschema when there is any doubt."""

import json

import pytest

import spec
from deals import Refusal

FITS = {
    "amount_usd": "20.00",
    "seller_address": "0x3C44CdDdB6a900fa2b585dd299e03d12FA4293BC",
    "network": "base",
    "secret_hash": "ab" * 32,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"amount_usd": 20}, {"amount_usd": "20.00\n"}, {"amount_usd": "020"}, {"amount_usd": "1" * 16}, {"network": "Base"},
        {"secret_hash": "ab" * 31}, {"secret_hash": None}, {"deadline_hours": 0}, {"deadline_hours": 721},
        {"deadline_hours": True}, {"deadline_hours": "24"}, {"instant": 1}, {"ref": "x" * 201}, {"ref": None}, {"other": "x"},
    ],
    ids=json.dumps,
)  # fmt: skip
def test_what_does_not_fit_is_refused_whichever_check_decides(changes):
    body = {**FITS, **changes}
    assert not spec._surely_fits("DealRequest", body)
    with pytest.raises(Refusal) as refused:
        spec.check("DealRequest", body)
    assert refused.value.code == "invalid_request"


@pytest.mark.parametrize("body", [None, [], "x", {}, {"amount_usd": "20.00"}], ids=json.dumps)
def test_something_else_than_a_complete_object_is_refused(body):
    assert not spec._surely_fits("DealRequest", body)
    with pytest.raises(Refusal):
        spec.check("DealRequest", body)


def test_every_published_example_surely_fits():
    for example in spec.document()["components"]["schemas"]["DealRequest"]["examples"]:
        assert spec._surely_fits("DealRequest", example)


def test_a_whole_number_written_as_a_fraction_is_left_to_jsonschema():
    assert not spec._surely_fits("DealRequest", {**FITS, "deadline_hours": 24.0})
    assert spec.check("DealRequest", {**FITS, "deadline_hours": 24.0})

