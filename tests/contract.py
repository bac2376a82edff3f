"""Holds every answer that a test gets against the published document; a client of the app that forgives nothing."""

import functools
import json
import re

import jsonschema
from flask.testing import FlaskClient

import spec


class Client(FlaskClient):
    """Flask's test client, which fails a test whose answer is not in openapi.json."""

    def open(self, *args, **kwargs):
        response = super().open(*args, **kwargs)
        check(response.request.method, response.request.path, response)
        return response


def check(method, path, response):
    """Fail unless the document has this status, these headers and this body for this operation."""
    where = f"{method} {path} → {response.status_code}"
    if method == "OPTIONS":
        return
    found = operation("GET" if method == "HEAD" else method, path)
    if found is None:
        assert response.status_code in (404, 405), f"{where}: this is not in the document"
        _fits(response.json, {"$ref": "#/components/schemas/Error"}, where)
        return
    documented = found["responses"].get(str(response.status_code))
    assert documented, f"{where}: the status is not documented: {response.get_data(as_text=True)[:300]}"
    documented = resolve(documented)
    _check_headers(response, documented, where)
    if method == "HEAD" or response.status_code == 304:
        assert not response.data
    else:
        _check_body(response, documented, where)


def _check_headers(response, documented, where):
    declared = {name.lower(): resolve(header) for name, header in documented.get("headers", {}).items()}
    for name in spec.document()["components"]["headers"]:
        value = response.headers.get(name)
        if value is None or name == "Cache-Control":
            continue
        assert name.lower() in declared, f"{where}: the header {name} is not documented"
        schema = declared[name.lower()]["schema"]
        _fits(int(value) if schema["type"] == "integer" else value, schema, f"{where}: {name}")


def _check_body(response, documented, where):
    content = documented.get("content")
    if not content:
        assert not response.data, f"{where}: a body is not documented"
        return
    kind = response.content_type.partition(";")[0]
    assert kind in content, f"{where}: {kind} is not documented"
    if "schema" not in content[kind]:
        return  # bytes of no form that a schema could tell
    value = json.loads(response.data) if kind.endswith("json") else response.get_data(as_text=True)
    _fits(value, content[kind]["schema"], where)


def _fits(value, schema, where):
    error = jsonschema.exceptions.best_match(_validator(json.dumps(schema)).iter_errors(value))
    assert error is None, f"{where}: {'/'.join(map(str, error.absolute_path))}: {error.message[:500]}"


@functools.cache
def _validator(schema):
    return jsonschema.Draft202012Validator(
        {**json.loads(schema), "components": spec.document()["components"]},
        format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER,
    )


def resolve(node):
    """Follow a reference into the document's components."""
    while "$ref" in node:
        part = spec.document()
        for name in node["$ref"].removeprefix("#/").split("/"):
            part = part[name]
        node = part
    return node


def operation(method, path):
    """Return the document's operation for a request, the most literal path first; None when there is none."""
    paths = sorted(spec.document()["paths"].items(), key=lambda item: item[0].count("{"))
    for template, item in paths:
        if re.fullmatch(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(template)), path):
            return item.get(method.lower())
    return None
