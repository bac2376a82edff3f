"""What a body declares. The hostile ones: every trap costs one failed check and nothing else."""

import json

import declaration
import pytest
from declaration import Malformed
from feedkit import answer, body, kind, poll, watch

BASE = "v2 · exact · eip155:8453"


def values(content):
    return [facet.value for facet in declaration.parse(content).facets]


def refused(content):
    with pytest.raises(Malformed) as caught:
        declaration.parse(content)
    assert str(caught.value).endswith(".")
    return caught.value.reason


# -- Real shapes ----------------------------------------------------------------------------------------------


def test_a_version_1_declaration_without_extensions_or_signers_is_complete():
    found = declaration.parse(b'{"kinds":[{"x402Version":1,"scheme":"exact","network":"base"}]}')
    assert [facet.value for facet in found.facets] == ["v1 · exact · base"]
    assert found.complete
    assert found.notes == ()


def test_kinds_come_before_extensions_and_both_in_order_whatever_the_order_declared():
    content = body(kind("solana:x"), kind(), kind("base", version=1), extensions=["payment-identifier", "bazaar"])
    assert values(content) == ["v1 · exact · base", BASE, "v2 · exact · solana:x", "bazaar", "payment-identifier"]


def test_a_facet_id_is_the_digest_of_its_parts():
    [kind_facet, extension] = declaration.parse(body(kind(), extensions=["bazaar"])).facets
    # printf '[2,"exact","eip155:8453"]' | sha256sum; printf '["bazaar"]' | sha256sum
    assert kind_facet.id == "kind-7b7c5e0bd9e9a79364df7396243889f0c65d28b3cb89b9ab8126f5698e3d6e7b"
    assert extension.id == "extension-464793b75bae0ffeb6ee778f475414bfe33f1037d21cf7df547f9e0e63737968"


@pytest.mark.parametrize("extra", [{}, {"extra": None}, {"extra": {}}, {"extra": {"feePayer": "a"}}])
def test_extra_is_no_part_of_a_facet(extra):
    assert values(body(kind(), kind(**extra))) == [BASE]


@pytest.mark.parametrize("more", [{"extensions": None}, {"extensions": []}, {"signers": None}, {"fee": 1, "networkAliases": {}, "schemes": []}])
def test_what_is_missing_is_empty_and_what_is_unknown_declares_nothing(more):
    found = declaration.parse(body(kind(), **more))
    assert (len(found.facets), found.complete) == (1, True)


def test_kinds_grouped_by_version_take_their_version_from_the_key():
    content = b'{"kinds":{"1":[{"scheme":"exact","network":"base"}],"2":[{"scheme":"exact","network":"eip155:8453","x402Version":2}]}}'
    found = declaration.parse(content)
    assert [facet.value for facet in found.facets] == ["v1 · exact · base", BASE]
    assert found.complete
    assert found.notes == ("Kinds are grouped by version.",)
    assert declaration.shown(declaration.load(content))["kinds"] == [
        {"x402Version": 1, "scheme": "exact", "network": "base"},
        {"x402Version": 2, "scheme": "exact", "network": "eip155:8453"},
    ]


@pytest.mark.parametrize("group", ['{"1":[{"scheme":"exact","network":"base","x402Version":2}]}', '{"1":{"scheme":"exact"}}', '{"1":[true]}'])
def test_a_group_that_contradicts_itself_is_skipped(group):
    content = f'{{"kinds":{group[:-1]},"2":[{{"scheme":"exact","network":"eip155:8453"}}]}}}}'.encode()
    found = declaration.parse(content)
    assert [facet.value for facet in found.facets] == [BASE]
    assert not found.complete


@pytest.mark.parametrize(
    "extensions, names, complete",
    [
        ([{"name": "bazaar"}, {"key": "a"}, {"id": "b"}], ["a", "b", "bazaar"], True),
        ([{"name": 7, "key": "a"}], ["a"], True),
        ({"bazaar": {"x": 1}, "a": None}, ["a", "bazaar"], True),
        (["bazaar", {"title": "x"}], ["bazaar"], False),
        (["bazaar", 7, None, ["x"]], ["bazaar"], False),
        (["bazaar", "bazaar"], ["bazaar"], True),
        ("bazaar", [], False),
        (["", " ", "a\nb", "x" * 201], [], False),
    ],
)
def test_extensions_come_in_several_shapes(extensions, names, complete):
    found = declaration.parse(body(kind(), extensions=extensions))
    assert [facet.value for facet in found.facets[1:]] == names
    assert found.complete is complete


def test_names_are_kept_to_the_letter():
    odd = ["algorand:wGHE2Pwdvd7S12BL5FaOP20EGYesN73ktiC1qzkkit8=", "base", "BASE", " base", "eip155:8453\u202e"]
    found = declaration.parse(body(*(kind(network) for network in odd)))
    assert sorted(facet.network for facet in found.facets) == sorted(odd)


def test_nothing_declared_is_a_valid_declaration():
    assert declaration.parse(b'{"kinds":[]}') == declaration.Declaration((), True, ())


def test_a_byte_order_mark_is_passed_over():
    assert values(b"\xef\xbb\xbf" + body(kind())) == [BASE]


# -- Half-bad -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        {"x402Version": "1"}, {"x402Version": True}, {"x402Version": 2.0}, {"x402Version": None}, {"x402Version": 0},
        {"x402Version": -1}, {"x402Version": 10**7}, {"scheme": None}, {"scheme": ""}, {"scheme": 7}, {"network": ["base"]},
        {"network": "  "}, {"network": "a\tb"}, {"network": "a\x85b"}, {"network": "x" * 201},
    ],
    ids=repr,
)  # fmt: skip
def test_a_bad_entry_among_good_ones_is_skipped_and_noted(bad):
    found = declaration.parse(body(kind(), {**kind("eip155:1"), **bad}))
    assert [facet.value for facet in found.facets] == [BASE]
    assert not found.complete
    assert found.notes == ("Partial: 1 of the entries in kinds could not be understood and count neither way.",)


@pytest.mark.parametrize("bad", [None, 7, "exact", [], {}, {"scheme": "exact", "network": "base"}])
def test_an_entry_that_is_no_kind_is_skipped(bad):
    assert not declaration.parse(body(kind(), bad)).complete


def test_bad_entries_alone_are_no_declaration():
    assert refused(body({"scheme": "exact"}, None)) == "malformed"


# -- Hostile --------------------------------------------------------------------------------------------------

HOSTILE = {
    "nothing": b"",
    "blank": b"  \n",
    "a page": b"<!doctype html><title>hi</title>",
    "cut short": b'{"kinds":[',
    "more after the end": b'{"kinds":[]}{"kinds":[]}',
    "a list": b"[]",
    "a string": b'"kinds"',
    "null": b"null",
    "no kinds": b"{}",
    "kinds null": b'{"kinds":null}',
    "kinds a string": b'{"kinds":"exact"}',
    "kinds by name": b'{"kinds":{"exact":[]}}',
    "kinds by a number that only looks like one": '{"kinds":{"\u0661":[]}}'.encode(),
    "NaN": b'{"kinds":[],"x":NaN}',
    "Infinity": b'{"kinds":[],"x":-Infinity}',
    "a number out of range": b'{"kinds":[],"x":1e999}',
    "a duplicate key": b'{"kinds":[{"x402Version":2,"scheme":"exact","network":"a"}],"kinds":[]}',
    "a duplicate key deep down": b'{"kinds":[],"x":[{"a":1,"a":2}]}',
    "UTF-16": '{"kinds":[]}'.encode("utf-16"),
    "UTF-32": '{"kinds":[]}'.encode("utf-32"),
    "Latin-1": '{"kinds":[],"x":"ä"}'.encode("latin-1"),
    "overlong UTF-8": b'{"kinds":[],"x":"\xc0\xaf"}',
    "a surrogate in UTF-8": b'{"kinds":[],"x":"\xed\xa0\x80"}',
    "a lone surrogate": b'{"kinds":[],"x":"\\ud800"}',
    "a lone surrogate as a key": b'{"kinds":[],"\\udfff":1}',
    "NUL": b'{"kinds":[],"x":"\\u0000"}',
    "a raw NUL": b'{"kinds":[],"x":"\0"}',
    "a huge integer": b'{"kinds":[],"x":' + b"9" * 5000 + b"}",
    "an integer of 65 bits": b'{"kinds":[],"x":18446744073709551616}',
    "an integer below 64 bits": b'{"kinds":[],"x":-9223372036854775809}',
    "lists a hundred thousand deep": b'{"kinds":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "objects fifty deep": b'{"kinds":[],"x":' + b'{"a":' * 50 + b"1" + b"}" * 50 + b"}",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_it_is_malformed_and_never_a_crash(content):
    assert refused(content) == "malformed"


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_it_costs_one_failed_check_and_no_facet(db, clock, reader, content):
    watch(db)
    poll(db, clock, body(kind()))
    for _ in range(3):
        check = poll(db, clock, content)
        assert (check.reason, check.changes) == ("malformed", 0)
    shown = reader.data("/v1/feed/facilitators/payai")
    assert shown["check"]["status"] == "unavailable"
    assert [record["state"] for record in shown["capabilities"]] == ["present"]
    raw = reader.get(f"/v1/feed/checks/{check.at}/raw")
    assert raw.data == content


def test_a_declaration_of_more_than_a_thousand_things_is_too_large():
    networks = [f"eip155:{number}" for number in range(1, 1002)]
    assert len(values(body(*map(kind, networks[:1000])))) == 1000
    assert refused(body(*map(kind, networks))) == "too_large"


def test_a_facilitator_that_invents_things_without_end_is_stopped(db, clock):
    watch(db)
    for batch in range(6):
        content = body(*(kind(f"eip155:{batch}{number:04}") for number in range(1, 1001)))
        check = poll(db, clock, content)
    assert check.reason == "too_large"
    assert db.execute("SELECT count(*) FROM feed_facets").fetchone()[0] == 5000


def test_integers_of_64_bits_and_nested_extra_come_back_as_they_were(db, clock, reader):
    watch(db)
    extra = {"max": 9223372036854775807, "min": -9223372036854775808, "deep": {"a": [{"b": [1.5, None, True]}]}, "\u202e": "<script>"}
    poll(db, clock, body(kind(extra=extra)))
    assert reader.data("/v1/feed/facilitators/payai")["supported"]["kinds"][0]["extra"] == extra


def test_signers_and_pricing_are_shown_only_where_they_have_their_shape():
    shown = declaration.shown(
        declaration.load(
            json.dumps({"kinds": [], "signers": {"eip155:*": ["0x1", 7], "*": "0x2"}, "pricing": [1], "fee": 3}).encode()
        )
    )
    assert shown == {"kinds": [], "extensions": [], "signers": {"eip155:*": ["0x1"]}}


def test_an_answer_without_a_body_is_malformed(db, clock):
    watch(db)
    assert poll(db, clock, answer(b"")).reason == "malformed"
