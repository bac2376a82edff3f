"""The published OpenAPI document: served as it is, and the one source that requests are checked against."""

import copy
import functools
import json
import pathlib
import re

import jsonschema

from deals import Refusal

PATH = pathlib.Path(__file__).with_name("openapi.json")


@functools.cache
def document():
    """Return the document as committed."""
    return json.loads(PATH.read_text())


def _pattern(validator, pattern, instance, schema):
    """Read ``$`` as JSON Schema does: the very end. Python's also matches before a last line break."""
    if isinstance(instance, str) and not re.search(re.sub(r"\$$", r"\\Z", pattern), instance):
        yield jsonschema.ValidationError(f"does not match {pattern}")


_Validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"pattern": _pattern})


@functools.cache
def _validator(name):
    schema = {"$ref": f"#/components/schemas/{name}", "components": document()["components"]}
    return _Validator(schema)


def compile_all(*names):
    """Build the validators once, at start, so that no request pays for it."""
    for name in names:
        _validator(name)


def check(name, value):
    """Refuse ``value`` with invalid_request unless it fits the component schema ``name``; says where and why."""
    error = jsonschema.exceptions.best_match(_validator(name).iter_errors(value))
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


def served(base_url):
    """Return a copy of the document that names the service's real address."""
    found = copy.deepcopy(document())
    found["servers"] = [{"url": base_url}]
    return found
