"""What one body of ``GET /supported`` declares: bytes in, facets out.

The bytes are a stranger's. :func:`parse` either returns a :class:`Declaration` that is safe to store, compare and show as JSON,
or raises :class:`Malformed`; nothing else comes out of it.
"""

import hashlib
import json
import math
import re
import unicodedata
from typing import NamedTuple

DEPTH = 40  # levels of nesting; real declarations have 6
FACETS = 1000  # in one declaration; the longest real one has 78
NAME = 200  # characters in a scheme, network or extension name
VERSION = 1_000_000

_DECIMAL = re.compile(r"[1-9][0-9]{0,5}")
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
_TOKENS = re.compile(r'"(?:[^"\\]+|\\.)*"?|[\[\]{}]', re.DOTALL)  # an open string reaches to the end: one pass, always


class Malformed(Exception):
    """The body is no declaration. ``reason`` is ``malformed`` or ``too_large``; the text is one sentence."""

    def __init__(self, sentence, reason="malformed"):
        super().__init__(sentence)
        self.reason = reason


class Facet(NamedTuple):
    """One thing declared: a kind (version, scheme, network) or an extension (name)."""

    category: str
    version: int | None = None
    scheme: str | None = None
    network: str | None = None
    name: str | None = None

    @property
    def id(self):
        """Return ``kind-`` or ``extension-`` and the SHA-256 of the identifying parts, written as a JSON array without blanks."""
        parts = [self.version, self.scheme, self.network] if self.category == "kind" else [self.name]
        text = json.dumps(parts, ensure_ascii=False, separators=(",", ":"))
        return f"{self.category}-{hashlib.sha256(text.encode()).hexdigest()}"

    @property
    def value(self):
        return f"v{self.version} · {self.scheme} · {self.network}" if self.category == "kind" else self.name


class Declaration(NamedTuple):
    facets: tuple[Facet, ...]  # each once; kinds by version, scheme and network, then extensions by name
    complete: bool  # every entry was understood
    notes: tuple[str, ...]


def parse(body):
    """Read what ``body`` declares. Raises :class:`Malformed`."""
    value = load(body)
    if not isinstance(value, dict):
        raise Malformed("The answer is JSON, but not an object.")
    notes = []
    kinds, skipped_kinds = _kinds(value.get("kinds"), notes)
    extensions, skipped_extensions = _extensions(value.get("extensions"))
    if skipped_kinds and not kinds:
        raise Malformed("Not one entry of kinds could be understood.")
    for count, what in ((skipped_kinds, "kinds"), (skipped_extensions, "extensions")):
        if count:
            notes.append(f"Partial: {count} of the entries in {what} could not be understood and count neither way.")
    if len(kinds) + len(extensions) > FACETS:
        raise Malformed(f"The answer declares more than {FACETS} different things.", "too_large")
    return Declaration((*sorted(kinds), *sorted(extensions)), not (skipped_kinds or skipped_extensions), tuple(notes))


def load(body):
    """Decode ``body`` as strict JSON: UTF-8, no duplicate keys, nothing that JSON or SQLite could not give back."""
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise Malformed("The answer is not UTF-8.") from None
    _measure(text)
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except ValueError:  # of the parser, of an integer with thousands of digits, of our two hooks
        raise Malformed("The answer is not strict JSON.") from None
    _inspect(value)
    return value


def reload(body):
    """Decode a body that :func:`parse` accepted when it came."""
    return json.loads(body.decode("utf-8-sig"))


def written(body):
    """Return a body that :func:`parse` accepted as JSON text of printable ASCII.

    Most bodies are that already and stay as they came, for parsing and writing them again is what takes the time.
    """
    if body.isascii() and b"\x7f" not in body:
        return body
    return json.dumps(reload(body), separators=(",", ":"), allow_nan=False).encode()


def shown(value):
    """Return the parts of a loaded declaration that its published shape knows, with only what has the right type."""
    pairs = [(entry, _kind(entry, version)) for entry, version in _entries(value["kinds"])]
    out = {"kinds": [_shown_kind(entry, facet) for entry, facet in pairs if facet]}
    out["extensions"] = sorted(facet.name for facet in _extensions(value.get("extensions"))[0])
    signers = value.get("signers")
    out["signers"] = {
        network: [address for address in addresses if isinstance(address, str)]
        for network, addresses in (signers if isinstance(signers, dict) else {}).items()
        if isinstance(addresses, list)
    }
    if isinstance(value.get("pricing"), dict):
        out["pricing"] = value["pricing"]
    return out


def _shown_kind(entry, facet):
    kept = {"x402Version": facet.version, "scheme": facet.scheme, "network": facet.network}
    return {**kept, "extra": entry["extra"]} if isinstance(entry.get("extra"), dict) and entry["extra"] else kept


def _kinds(value, notes):
    """Return the facets of ``kinds`` and how many entries were skipped."""
    entries = _entries(value)
    if entries is None:
        raise Malformed("The answer has no list of kinds.")
    if isinstance(value, dict):
        notes.append("Kinds are grouped by version.")
    found = [_kind(entry, version) for entry, version in entries]
    return {facet for facet in found if facet}, found.count(None)


def _entries(kinds):
    """Return each entry of ``kinds`` with the version of its group (None in a plain list); None if it is neither."""
    if isinstance(kinds, list):
        return [(entry, None) for entry in kinds]
    if isinstance(kinds, dict) and all(_DECIMAL.fullmatch(key) for key in kinds):
        groups = [(group if isinstance(group, list) else [None], int(key)) for key, group in kinds.items()]
        return [(entry, version) for group, version in groups for entry in group]
    return None


def _kind(entry, version=None):
    """Return the facet of one entry, or None. ``version`` is that of its group, which the entry may repeat."""
    if not isinstance(entry, dict):
        return None
    declared = entry.get("x402Version", version)
    if type(declared) is not int or not 0 < declared <= VERSION or version not in (None, declared):
        return None
    if not _is_name(entry.get("scheme")) or not _is_name(entry.get("network")):
        return None
    return Facet("kind", version=declared, scheme=entry["scheme"], network=entry["network"])


def _extensions(value):
    """Return the facets of ``extensions`` and how many entries were skipped."""
    if value is None:
        value = []
    if isinstance(value, dict):
        value = list(value)
    if not isinstance(value, list):
        return set(), 1
    names = [_extension(entry) for entry in value]
    return {Facet("extension", name=name) for name in names if name}, names.count(None)


def _extension(entry):
    candidates = [entry.get(key) for key in ("name", "key", "id")] if isinstance(entry, dict) else [entry]
    return next((name for name in candidates if _is_name(name)), None)


def _is_name(value):
    """Names are kept to the letter, so only what could not be shown or told apart at all is no name."""
    if not isinstance(value, str) or not value.strip() or len(value) > NAME:
        return False
    return not any(unicodedata.category(character) == "Cc" for character in value)


def _object(pairs):
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("duplicate key")
    return found


def _constant(name):
    raise ValueError(name)


def _measure(text):
    """Refuse deep nesting before the parser sees it.

    The parser recurses on the C stack, and what stops it, the interpreter's recursion limit, is raised by some libraries
    beyond what the stack holds: then it is no exception but a crash.
    """
    depth = 0
    for match in _TOKENS.finditer(text):
        token = match[0]
        depth += (token in "[{") - (token in "]}")
        if depth > DEPTH:
            raise Malformed("The answer is nested too deeply.")


def _inspect(value):
    """Refuse what parses but could not be stored, hashed or written again."""
    if isinstance(value, dict):
        for key, item in value.items():
            _inspect(key)
            _inspect(item)
    elif isinstance(value, list):
        for item in value:
            _inspect(item)
    elif isinstance(value, str):
        if _NO_TEXT.search(value):
            raise Malformed("The answer has characters that no text can have.")
    elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise Malformed("The answer has an integer of more than 64 bits.")
    elif isinstance(value, float) and not math.isfinite(value):
        raise Malformed("The answer has a number out of range.")
