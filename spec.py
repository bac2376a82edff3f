"""The published OpenAPI document: served as it is, and the one source that requests are checked against."""

import copy
import functools
import json
import math
import pathlib
import re

import jsonschema

import deals
from deals import Refusal

PATH = pathlib.Path(__file__).with_name("openapi.json")
TYPES = {"string": str, "integer": int, "boolean": bool}
WORDS = {"type", "pattern", "enum", "minLength", "maxLength", "minimum", "maximum", "description", "examples", "default"}


@functools.cache
def document():
    """Return the document as committed."""
    return json.loads(PATH.read_text())


@functools.cache
def _regex(pattern):
    """Compile a pattern as ECMA 262, which JSON Schema means: ``$`` is the end, never the place before a last newline."""
    return re.compile(re.sub(r"(?<!\\)\$$", r"\\Z", pattern))


def _pattern(validator, pattern, instance, schema):
    if validator.is_type(instance, "string") and not _regex(pattern).search(instance):
        yield jsonschema.ValidationError("does not match")


_Validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"pattern": _pattern})


@functools.cache
def _validator(name):
    schema = {"$ref": f"#/components/schemas/{name}", "components": document()["components"]}
    return _Validator(schema)


@functools.cache
def _quick_tests(name):
    """Compile a flat object schema into (required names, {property: test}), for a quick yes; None for any other."""
    schema = document()["components"]["schemas"][name]
    rules = schema.get("properties", {})
    flat = {"type", "description", "required", "properties", "additionalProperties", "examples"}
    if set(schema) - flat or schema.get("additionalProperties") is not False:
        return None
    if any(set(rule) - WORDS or rule.get("type") not in list(TYPES) for rule in rules.values()):
        return None
    return set(schema.get("required", ())), {name: _quick_test(rule) for name, rule in rules.items()}


def _quick_test(rule):
    kind, allowed = TYPES[rule["type"]], rule.get("enum")
    matches = _regex(rule.get("pattern", "")).search
    low, high = rule.get("minimum", -math.inf), rule.get("maximum", math.inf)
    shortest, longest = rule.get("minLength", 0), rule.get("maxLength", math.inf)

    def test(value):
        if type(value) is not kind or (allowed and value not in allowed):
            return False
        if kind is str:
            return shortest <= len(value) <= longest and matches(value) is not None
        return low <= value <= high

    return test


def _surely_fits(name, value):
    """Whether ``value`` fits for certain, at a tenth of jsonschema's cost; False only means that it must decide."""
    quick = _quick_tests(name)
    if quick is None or type(value) is not dict:
        return False
    required, tests = quick
    if not (tests.keys() >= value.keys() >= required):
        return False
    for key, part in value.items():
        if not tests[key](part):
            return False
    return True


def compile_all(*names):
    """Build the validators once, at start, so that no request pays for it."""
    for name in names:
        _validator(name)
        _quick_tests(name)


def check(name, value):
    """Refuse ``value`` with invalid_request unless it fits the component schema ``name``; says where and why."""
    return value if _surely_fits(name, value) else _check(_validator(name), value)


def check_against(schema, value):
    """Like :func:`check`, against a schema that stands by itself."""
    return _check(_Validator(schema), value)


def _check(validator, value):
    error = jsonschema.exceptions.best_match(validator.iter_errors(value))
    if error is None:
        return value
    where = "/".join(str(part) for part in error.absolute_path) or "the body"
    raise Refusal("invalid_request", f"{where}: {_sentence(error)}")


def _sentence(error):
    """Say what is wrong without echoing long or secret values back."""
    if error.validator == "required":
        missing = sorted(set(error.validator_value) - set(error.instance))
        return f"{', '.join(missing)} is required."
    if error.validator == "additionalProperties":
        extra = sorted(set(error.instance) - set(error.schema.get("properties", {})))
        return f"unknown property {', '.join(extra)[:100]}; see /openapi.json for what may be sent."
    if error.validator == "type":
        return f"must be of type {error.validator_value}."
    if error.validator == "enum":
        return f"must be one of {', '.join(map(str, error.validator_value))}."
    return f"does not meet {error.validator} {json.dumps(error.validator_value)[:200]}."


def served(base_url, settings):
    """Return the document as this service is: its real address, its figures, without what only a sandbox has."""
    found = copy.deepcopy(document())
    found["info"]["title"] = settings.service_name
    found["servers"] = [{"url": base_url}]
    links = found["x-service-info"]["docs"]
    found["x-service-info"]["docs"] = {name: base_url + path for name, path in links.items()}
    if not settings.sandbox:
        found["paths"] = {path: item for path, item in found["paths"].items() if not path.startswith("/sandbox/")}
        found["tags"] = [tag for tag in found["tags"] if tag["name"] != "Sandbox"]
    low, high = settings.min_amount_units, settings.max_amount_units
    for path in ("/x402/deal", "/mpp/deal"):
        price = found["paths"][path]["post"]["x-payment-info"]["price"]
        price["min"], price["max"] = (deals.usd(settings.price_units(units)) for units in (low, high))
    amount = found["components"]["schemas"]["DealRequest"]["properties"]["amount_usd"]
    amount["description"] = (
        "What the seller receives on release, in US dollars, at most 2 decimals."
        f" From {deals.usd(low)} to {deals.usd(high)}."
    )
    return found
