"""The published document and the service say the same, in both directions."""

import dataclasses
import itertools
import re

import openapi_spec_validator
import pytest

import contract
import deals
import spec


def test_the_document_is_valid_openapi():
    openapi_spec_validator.validate(spec.document())


def routes(app):
    """Return (method, path) of every route, with converters that allow a few words written out."""
    for rule in app.url_map.iter_rules():
        choices = re.search(r"<any\(([^)]*)\):\w+>", rule.rule)
        words = [word.strip() for word in choices[1].split(",")] if choices else [""]
        for word in words:
            path = rule.rule.replace(choices[0], word) if choices else rule.rule
            for method in rule.methods - {"HEAD", "OPTIONS"}:
                yield method, re.sub(r"<(?:\w+:)?(\w+)>", r"{}", path)


def test_every_route_is_in_the_document_and_every_operation_has_a_route(app):
    documented = {
        (method.upper(), re.sub(r"\{\w+\}", "{}", path))
        for path, item in spec.document()["paths"].items()
        for method in item
    }
    assert set(routes(app)) == documented


def test_operation_ids_are_unique():
    ids = [operation["operationId"] for item in spec.document()["paths"].values() for operation in item.values()]
    assert len(ids) == len(set(ids))


def test_every_example_fits_its_schema():
    document = spec.document()
    for name, schema in document["components"]["schemas"].items():
        for example in schema.get("examples", []):
            spec.check(name, example)
    for where, media in _media(document):
        for example in _examples(media):
            contract._fits(example, media["schema"], where)


def _media(document):
    shared = document["components"]["responses"].items()
    own = (
        (f"{method} {path} {status}", response)
        for path, item in document["paths"].items()
        for method, operation in item.items()
        for status, response in operation["responses"].items()
        if "$ref" not in response
    )
    bodies = (
        (f"{method} {path}", operation["requestBody"])
        for path, item in document["paths"].items()
        for method, operation in item.items()
        if "requestBody" in operation
    )
    for where, response in itertools.chain(shared, own, bodies):
        for kind, media in response.get("content", {}).items():
            if kind == "application/octet-stream":  # bytes as they are: OpenAPI 3.1 gives them no schema
                continue
            yield f"{where} {kind}", media


def _examples(media):
    if "example" in media:
        return [media["example"]]
    return [contract.resolve(example)["value"] for example in media.get("examples", {}).values()]


def test_every_operation_shows_an_example_of_every_json_answer():
    for where, media in _media(spec.document()):
        if where.endswith(" application/json"):
            assert "example" in media or "examples" in media, where


def test_the_error_codes_are_those_of_the_code_with_their_statuses():
    schema = spec.document()["components"]["schemas"]["ErrorCode"]
    assert schema["enum"] == list(schema["x-statuses"])
    assert schema["x-statuses"] == deals.Refusal.STATUS


def test_the_published_price_range_is_the_law_s():
    price = spec.document()["paths"]["/x402/deal"]["post"]["x-payment-info"]["price"]
    assert (price["mode"], price["min"], price["max"]) == ("dynamic", "0.597", "505.092")


def test_the_served_document_names_the_real_address_and_is_valid(client):
    document = client.get("/openapi.json").json
    assert document["servers"] == [{"url": "http://deals.test"}]
    openapi_spec_validator.validate(document)


def test_a_live_service_does_not_publish_the_sandbox(settings):
    live = dataclasses.replace(settings, mode="live")
    document = spec.served("https://deals.example", live)
    assert not [path for path in document["paths"] if path.startswith("/sandbox")]
    openapi_spec_validator.validate(document)


@pytest.mark.parametrize(
    "value, sentence",
    [
        ("20.00\n", "amount_usd"),
        ("0x" + "ab" * 20 + "\n", "seller_address"),
        (24.5, "deadline_hours"),
        (True, "review_hours"),
    ],
)
def test_a_pattern_ends_where_it_says_and_an_integer_is_written_as_one(buyer, value, sentence):
    answer = buyer.quote(buyer.request(**{sentence: value}))
    assert answer.headers["X-Svc-Invalid-Request"] == "1"
    assert sentence in answer.json["error"]


def test_the_hook_notices_an_undocumented_status(client, monkeypatch):
    monkeypatch.delitem(spec.document()["paths"]["/v1"]["get"]["responses"], "200")
    with pytest.raises(AssertionError, match="not documented"):
        client.get("/v1")


def test_the_hook_notices_a_body_that_breaks_its_schema(client, monkeypatch):
    monkeypatch.setitem(spec.document()["components"]["schemas"]["Index"], "required", ["nothing"])
    contract._validator.cache_clear()
    with pytest.raises(AssertionError, match="nothing"):
        client.get("/v1")
    contract._validator.cache_clear()
