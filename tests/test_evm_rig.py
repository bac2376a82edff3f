"""The rig itself: the token refuses what USDC refuses, in its order, and the official parts move its money."""

import asyncio
import base64
import hashlib
import hmac
import json
import shutil
import subprocess
import time
from datetime import datetime, timezone

import flask
import freezegun
import pytest
import requests
from eth_account import Account
from eth_account.messages import defunct_hash_message
from evm import rig
from evm.rig import (
    AUTHORIZATION,
    NETWORK,
    USDC,
    Reverted,
    RpcError,
    authorize,
    serve,
    sign_cancel,
    unhex,
)

YEAR_2100 = 4_102_444_800
HALF_ORDER_TWIN = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141

# keccak256 of the events' signatures
TRANSFER = "0xddf252ad1be2c89b69c2b068fc378daa952ba7f163c4a11628f55a4df523b3ef"
AUTHORIZATION_USED = "0x98de503528ee59b575ef0c0a2576a82497bfc029a5685b209e9ec333479b10a5"
AUTHORIZATION_CANCELED = "0x1cdd46ff242716cdaa72d159d339a485b3438398348d68f09d7c8c0a59353d81"


@pytest.fixture
def payer(anvil):
    account = Account.create()
    anvil.mint(account.address, 10_000_000)
    return account


@pytest.fixture
def payee():
    return Account.create()


def refused(reason):
    return pytest.raises(Reverted, match=f"^{reason}$")


def word(address):
    return "0x" + address[2:].lower().rjust(64, "0")


# The token


def test_it_describes_itself_as_usdc_on_base_does(anvil):
    assert anvil.rpc("eth_chainId", []) == "0x2105"
    assert anvil.call("name()", returns="string") == "USD Coin"
    assert anvil.call("symbol()", returns="string") == "USDC"
    assert anvil.call("version()", returns="string") == "2"
    assert anvil.call("decimals()") == 6
    # as read from USDC on Base
    separator = "02fa7265e7c5d81118673727957699e4d68f74cd74b7db77da710fe8a2c7834f"
    assert anvil.call("DOMAIN_SEPARATOR()", returns="bytes32").hex() == separator


@pytest.mark.parametrize("overload", ["vrs", "bytes"])
def test_a_stranger_can_submit_a_published_authorization(anvil, payer, payee, overload):
    authorization = authorize(payer, payee.address, 597_000)
    receipt = anvil.submit(authorization, sender=anvil.accounts[3], overload=overload)
    assert (anvil.balance(payer.address), anvil.balance(payee.address)) == (9_403_000, 597_000)
    assert anvil.is_used(payer.address, authorization["nonce"])
    used, moved = receipt["logs"]
    assert used["topics"] == [AUTHORIZATION_USED, word(payer.address), authorization["nonce"]]
    assert moved["topics"] == [TRANSFER, word(payer.address), word(payee.address)]
    assert int(moved["data"], 16) == 597_000


@pytest.mark.parametrize("overload", ["vrs", "bytes"])
def test_a_used_nonce_is_refused_before_the_signature_is_looked_at(anvil, payer, payee, overload):
    authorization = authorize(payer, payee.address, 1)
    anvil.submit(authorization)
    authorization["signature"] = "0x" + "00" * 65
    with refused("FiatTokenV2: authorization is used or canceled"):
        anvil.submit(authorization, overload=overload)


@pytest.mark.parametrize("overload", ["vrs", "bytes"])
def test_a_signature_for_other_terms_is_refused(anvil, payer, payee, overload):
    authorization = authorize(payer, payee.address, 1) | {"value": "2"}
    with refused("FiatTokenV2: invalid signature"):
        anvil.submit(authorization, overload=overload)


def test_a_signature_is_refused_before_the_balance_is_looked_at(anvil, payer, payee):
    authorization = authorize(payer, payee.address, 10_000_001)
    with refused("ERC20: transfer amount exceeds balance"):
        anvil.submit(authorization)
    with refused("FiatTokenV2: invalid signature"):
        anvil.submit(authorization | {"value": "10000002"})


def test_a_failed_transfer_leaves_its_nonce_unused(anvil, payer, payee):
    authorization = authorize(payer, payee.address, 10_000_001)
    with refused("ERC20: transfer amount exceeds balance"):
        anvil.submit(authorization)
    assert not anvil.is_used(payer.address, authorization["nonce"])
    anvil.mint(payer.address, 1)
    anvil.submit(authorization)
    assert anvil.balance(payee.address) == 10_000_001


@pytest.mark.parametrize("overload", ["vrs", "bytes"])
def test_the_twin_of_a_signature_with_high_s_is_refused(anvil, payer, payee, overload):
    authorization = authorize(payer, payee.address, 1)
    signed = unhex(authorization["signature"])
    s = HALF_ORDER_TWIN - int.from_bytes(signed[32:64], "big")
    authorization["signature"] = "0x" + (signed[:32] + s.to_bytes(32, "big") + bytes([55 - signed[64]])).hex()
    with refused("ECRecover: invalid signature 's' value"):
        anvil.submit(authorization, overload=overload)


def test_a_v_of_0_or_1_is_refused(anvil, payer, payee):
    authorization = authorize(payer, payee.address, 1)
    signed = unhex(authorization["signature"])
    authorization["signature"] = "0x" + (signed[:64] + bytes([signed[64] - 27])).hex()
    with refused("ECRecover: invalid signature 'v' value"):
        anvil.submit(authorization)


def test_an_ordinary_account_signs_exactly_65_bytes(anvil, payer, payee):
    with refused("ECRecover: invalid signature length"):
        anvil.submit(authorize(payer, payee.address, 1, prefix=b"\0"), overload="bytes")


@pytest.mark.parametrize(
    "second, reason",
    [
        (0, "FiatTokenV2: authorization is not yet valid"),
        (1, None),
        (9, None),
        (10, "FiatTokenV2: authorization is expired"),
        (11, "FiatTokenV2: authorization is expired"),
    ],
)
def test_the_window_is_strict_on_both_sides(anvil, payer, payee, second, reason):
    start = YEAR_2100
    authorization = authorize(payer, payee.address, 1, valid_after=start, valid_before=start + 10)
    anvil.next_block_at(start + second)
    if reason:
        with refused(reason) as caught:
            anvil.submit(authorization)
        receipt = caught.value.receipt
    else:
        receipt = anvil.submit(authorization)
    block = anvil.rpc("eth_getBlockByNumber", [receipt["blockNumber"], False])
    assert int(block["timestamp"], 16) == start + second
    assert anvil.balance(payee.address) == (0 if reason else 1)


def test_the_window_is_looked_at_before_the_nonce(anvil, payer, payee):
    authorization = authorize(payer, payee.address, 1, valid_before=YEAR_2100)
    anvil.submit(authorization)
    anvil.next_block_at(YEAR_2100)
    with refused("FiatTokenV2: authorization is expired"):
        anvil.submit(authorization)


@pytest.mark.parametrize("overload", ["vrs", "bytes"])
def test_a_cancelled_nonce_reads_as_used_and_moves_nothing(anvil, payer, payee, overload):
    authorization = authorize(payer, payee.address, 1)
    signed, nonce = sign_cancel(payer, authorization["nonce"]), unhex(authorization["nonce"])
    if overload == "vrs":
        rest = "uint8,bytes32,bytes32)", payer.address, nonce, signed[64], signed[:32], signed[32:64]
    else:
        rest = "bytes)", payer.address, nonce, signed
    receipt = anvil.send("cancelAuthorization(address,bytes32," + rest[0], *rest[1:])
    (log,) = receipt["logs"]
    assert log["topics"] == [AUTHORIZATION_CANCELED, word(payer.address), authorization["nonce"]]
    assert anvil.is_used(payer.address, authorization["nonce"])
    with refused("FiatTokenV2: authorization is used or canceled"):
        anvil.submit(authorization)
    assert anvil.balance(payer.address) == 10_000_000


def test_only_the_authorizer_can_cancel(anvil, payer, payee):
    nonce = "0x" + "11" * 32
    signed = sign_cancel(payee, nonce, authorizer=payer.address)
    with refused("FiatTokenV2: invalid signature"):
        anvil.send("cancelAuthorization(address,bytes32,bytes)", payer.address, unhex(nonce), signed)
    assert not anvil.is_used(payer.address, nonce)


@pytest.mark.parametrize("overload", ["vrs", "bytes"])
def test_a_receive_authorization_is_for_the_payee_alone(anvil, payer, overload):
    payee, stranger = anvil.accounts[1], anvil.accounts[2]
    authorization = authorize(payer, payee, 5, verb="Receive")
    signed, values = unhex(authorization["signature"]), rig.arguments(authorization)
    if overload == "vrs":
        tail, rest = ",uint8,bytes32,bytes32)", (signed[64], signed[:32], signed[32:64])
    else:
        tail, rest = ",bytes)", (signed,)
    receive = f"receiveWithAuthorization({AUTHORIZATION}{tail}"
    with refused("FiatTokenV2: caller must be the payee"):
        anvil.send(receive, *values, *rest, sender=stranger)
    with refused("FiatTokenV2: invalid signature"):
        anvil.submit(authorization, overload=overload)
    anvil.send(receive, *values, *rest, sender=payee)
    assert anvil.balance(payee) == 5


def test_a_blacklisted_party_is_refused_before_all_else_but_a_pause(anvil, payer, payee):
    expired = authorize(payer, payee.address, 1, valid_before=1)
    for party in (payer.address, payee.address):
        anvil.blacklist(party)
        with refused("Blacklistable: account is blacklisted"):
            anvil.submit(expired)
        anvil.pause()
        with refused("Pausable: paused"):
            anvil.submit(expired)
        anvil.unpause()
        anvil.unblacklist(party)
    with refused("FiatTokenV2: authorization is expired"):
        anvil.submit(expired)


def test_a_blacklisted_stranger_may_still_submit(anvil, payer, payee):
    anvil.blacklist(anvil.accounts[3])
    anvil.submit(authorize(payer, payee.address, 1), sender=anvil.accounts[3])
    assert anvil.balance(payee.address) == 1


def test_a_pause_stops_everything_that_moves_money(anvil, payer, payee):
    authorization = authorize(payer, payee.address, 1)
    anvil.pause()
    with refused("Pausable: paused"):
        anvil.submit(authorization)
    with refused("Pausable: paused"):
        anvil.send("transfer(address,uint256)", payee.address, 1)
    with refused("Pausable: paused"):
        signed = sign_cancel(payer, authorization["nonce"])
        anvil.send("cancelAuthorization(address,bytes32,bytes)", payer.address, unhex(authorization["nonce"]), signed)
    anvil.unpause()
    anvil.submit(authorization)
    assert anvil.balance(payee.address) == 1


def test_plain_transfers_and_allowances_work(anvil, payee):
    owner, spender = anvil.accounts[1], anvil.accounts[2]
    anvil.mint(owner, 100)
    anvil.send("transfer(address,uint256)", payee.address, 30, sender=owner)
    anvil.send("approve(address,uint256)", spender, 50, sender=owner)
    with refused("ERC20: transfer amount exceeds allowance"):
        anvil.send("transferFrom(address,address,uint256)", owner, payee.address, 51, sender=spender)
    anvil.send("transferFrom(address,address,uint256)", owner, payee.address, 50, sender=spender)
    assert anvil.balance(owner) == 20
    assert anvil.balance(payee.address) == 80
    assert anvil.call("totalSupply()") == 100


# Wallets


@pytest.mark.parametrize("overload, prefix", [("vrs", b""), ("bytes", b""), ("bytes", b"v" * 20)])
def test_a_contract_wallet_pays_with_its_owners_signature(anvil, payee, overload, prefix):
    owner = Account.create()
    wallet = anvil.place_wallet(owner.address)
    anvil.mint(wallet, 7)
    anvil.submit(authorize(owner, payee.address, 7, payer=wallet, prefix=prefix), overload=overload)
    assert (anvil.balance(wallet), anvil.balance(payee.address)) == (0, 7)


def test_a_contract_wallet_refuses_another_signer(anvil, payer, payee):
    wallet = anvil.place_wallet(Account.create().address)
    anvil.mint(wallet, 7)
    with refused("FiatTokenV2: invalid signature"):
        anvil.submit(authorize(payer, payee.address, 7, payer=wallet))


@pytest.mark.parametrize("code", [rig.artifact("Token")["runtime"], "0x00"], ids=["reverts", "answers nothing"])
def test_a_contract_that_is_no_wallet_approves_nothing(anvil, payer, payee, code):
    contract = "0x" + "c0" * 20
    anvil.rpc("anvil_setCode", [contract, code])
    with refused("FiatTokenV2: invalid signature"):
        anvil.submit(authorize(payer, payee.address, 0, payer=contract))


def test_a_wallet_vouches_for_a_personal_message(anvil, payer, payee):
    wallet = anvil.place_wallet(payer.address)
    digest = bytes(defunct_hash_message(text="action: accept"))
    ask = "isValidSignature(bytes32,bytes)"
    for account, answer in ((payer, "1626ba7e"), (payee, "ffffffff")):
        signed = bytes(account.unsafe_sign_hash(digest).signature)
        assert anvil.call(ask, digest, signed, returns="bytes4", to=wallet).hex() == answer
    assert anvil.call(ask, digest, b"short", returns="bytes4", to=wallet).hex() == "ffffffff"


def test_a_wallet_takes_an_owner_once(anvil, payer, payee):
    wallet = anvil.place_wallet(payer.address)
    with refused("Wallet: has an owner"):
        anvil.send("init(address)", payee.address, to=wallet)


# The anvil


def test_a_moved_clock_is_seen_by_reads_and_blocks(anvil):
    before = anvil.clock()
    anvil.move_clock(30 * 86_400)
    latest = int(anvil.rpc("eth_getBlockByNumber", ["latest", False])["timestamp"], 16)
    assert 30 * 86_400 <= latest - before < 30 * 86_400 + 60


def test_a_revert_takes_back_money_nonces_and_time(anvil, payer, payee):
    authorization, before = authorize(payer, payee.address, 1), anvil.clock()
    snapshot = anvil.snapshot()
    anvil.submit(authorization)
    anvil.move_clock(1_000_000)
    anvil.revert(snapshot)
    assert anvil.balance(payee.address) == 0
    assert not anvil.is_used(payer.address, authorization["nonce"])
    assert before <= anvil.clock() < before + 60


def test_a_refused_call_says_why(anvil):
    with pytest.raises(RpcError, match="(?i)method not found"):
        anvil.rpc("eth_noSuchMethod", [])


@pytest.mark.parametrize("ci, outcome", [("", pytest.skip.Exception), ("true", pytest.fail.Exception)])
def test_a_missing_anvil_skips_here_and_fails_in_ci(monkeypatch, ci, outcome):
    monkeypatch.setattr(rig, "anvil_path", lambda: None)
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match="ON-CHAIN TESTS DID NOT RUN"):
        rig.require_anvil()


def test_the_committed_bytecode_is_what_the_sources_compile_to():
    node = shutil.which("node")
    if not node or not (rig.HERE / "node_modules" / "solc").exists():
        rig.cannot_run("needs node and solc: npm ci --prefix tests/evm")
    subprocess.run([node, rig.HERE / "build.mjs", "--check"], check=True)


# The official facilitator and clients, with a shop that sells one thing


def b64(value):
    return base64.urlsafe_b64encode(json.dumps(value, separators=(",", ":")).encode()).decode()


def unb64(text):
    return json.loads(base64.urlsafe_b64decode(text + "=="))


def shop(facilitator_url, pay_to, units, asset=USDC):
    """Return an application whose POST /thing costs `units`, by either protocol."""
    app = flask.Flask("shop")
    terms = {
        "scheme": "exact",
        "network": NETWORK,
        "amount": str(units),
        "asset": asset,
        "payTo": pay_to,
        "maxTimeoutSeconds": 300,
        "extra": {"name": "USD Coin", "version": "2"},
    }

    def challenge():
        details = {"chainId": 8453, "credentialTypes": ["authorization"], "decimals": 6}
        request = {"amount": str(units), "currency": asset, "methodDetails": details, "recipient": pay_to}
        expires = datetime.fromtimestamp(time.time() + 300, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        fields = {"realm": "127.0.0.1", "method": "evm", "intent": "charge"}
        fields |= {"request": b64(request).rstrip("="), "expires": expires}
        id = hmac.new(b"shop", "|".join(fields.values()).encode(), hashlib.sha256).hexdigest()
        return "Payment " + ", ".join(f'{key}="{value}"' for key, value in ({"id": id} | fields).items())

    def read():
        headers = flask.request.headers
        if "Payment-Signature" in headers:
            return unb64(headers["Payment-Signature"])
        if headers.get("Authorization", "").startswith("Payment "):
            payload = unb64(headers["Authorization"].removeprefix("Payment "))["payload"]
            signature = payload.pop("signature")
            del payload["type"]
            return {"x402Version": 2, "accepted": terms, "payload": {"signature": signature, "authorization": payload}}
        return None

    @app.post("/thing")
    def thing():
        payment = read()
        if payment is None:
            resource = {"url": flask.request.url, "description": "a thing", "mimeType": "application/json"}
            quote = {"x402Version": 2, "error": "pay", "resource": resource, "accepts": [terms], "extensions": {}}
            return quote, 402, {"PAYMENT-REQUIRED": b64(quote), "WWW-Authenticate": challenge()}
        body = {"x402Version": 2, "paymentPayload": payment, "paymentRequirements": terms}
        verified = requests.post(facilitator_url + "/verify", json=body, timeout=20).json()
        if not verified["isValid"]:
            return {"refused": verified["invalidReason"]}, 502
        settled = requests.post(facilitator_url + "/settle", json=body, timeout=20).json()
        receipt = {"status": "success", "method": "evm", "timestamp": "2030-01-01T00:00:00Z"}
        receipt |= {"reference": settled["transaction"], "challengeId": "", "chainId": 8453}
        return {"settled": settled}, 200, {"PAYMENT-RESPONSE": b64(settled), "Payment-Receipt": b64(receipt)}

    return app


def assert_paid(anvil, answer, payer, payee, units):
    assert answer.status_code == 200, answer.text
    settled = answer.json()["settled"]
    assert (settled["success"], settled["payer"], settled["network"]) == (True, payer.address, NETWORK)
    receipt = anvil.rpc("eth_getTransactionReceipt", [settled["transaction"]])
    assert receipt["status"] == "0x1"
    assert anvil.balance(payer.address) == 10_000_000 - units
    assert anvil.balance(payee.address) == units


def test_the_official_requests_client_pays(anvil, facilitator, payer, payee):
    with serve(shop(facilitator.url, payee.address, 5_092_000)) as url:
        answer = rig.x402_session(payer).post(url + "/thing", json={})
    assert_paid(anvil, answer, payer, payee, 5_092_000)
    assert [path for path, _ in facilitator.calls] == ["/verify", "/settle"]


def test_the_official_httpx_client_pays(anvil, facilitator, payer, payee):
    async def buy(url):
        async with rig.x402_async_client(payer, timeout=20) as client:
            return await client.post(url + "/thing", json={})

    with serve(shop(facilitator.url, payee.address, 5_092_000)) as url:
        answer = asyncio.run(buy(url))
    assert_paid(anvil, answer, payer, payee, 5_092_000)


def test_the_official_mpp_client_pays_through_the_same_facilitator(anvil, facilitator, payer, payee):
    async def buy(url):
        async with rig.mpp_client(payer) as client:
            return await client.fetch(url + "/thing", method="POST", json={})

    with serve(shop(facilitator.url, payee.address, 5_092_000)) as url:
        answer = asyncio.run(buy(url))
    assert_paid(anvil, answer, payer, payee, 5_092_000)


def test_the_x402_client_refuses_above_its_limit_which_is_a_dollar_unless_raised(anvil, facilitator, payer, payee):
    from x402 import x402ClientSync
    from x402.http.clients import x402_requests
    from x402.http.clients.requests import PaymentError
    from x402.mechanisms.evm.exact import ExactEvmScheme

    untouched = x402_requests(x402ClientSync().register(NETWORK, ExactEvmScheme(payer)))
    with serve(shop(facilitator.url, payee.address, 1_000_001)) as url:
        with pytest.raises(PaymentError, match=r"max_amount_per_payment \(\$1"):
            untouched.post(url + "/thing", json={})
        with pytest.raises(PaymentError, match=r"max_amount_per_payment \(\$0.50"):
            rig.x402_session(payer, limit="$0.50").post(url + "/thing", json={})
    assert facilitator.calls == []


def test_the_x402_client_signs_for_an_unknown_asset_only_when_told_to(anvil, facilitator, payer, payee):
    from x402.http.clients.requests import PaymentError

    other = "0x00000000000000000000000000000000000d011a"
    anvil.rpc("anvil_setCode", [other, rig.artifact("Token")["runtime"]])
    anvil.send("mint(address,uint256)", payer.address, 9_000_000, to=other)
    with serve(shop(facilitator.url, payee.address, 8_000_000, asset=other)) as url:
        with pytest.raises(PaymentError, match="only default assets"):
            rig.x402_session(payer).post(url + "/thing", json={})
        with pytest.raises(PaymentError, match="allowed_assets max_amount_per_payment"):
            rig.x402_session(payer, asset=other, limit_units=7_999_999).post(url + "/thing", json={})
        answer = rig.x402_session(payer, asset=other).post(url + "/thing", json={})
    assert answer.json()["settled"]["success"] is True
    assert anvil.call("balanceOf(address)", payee.address, to=other) == 8_000_000
    assert anvil.balance(payee.address) == 0


def test_the_mpp_client_refuses_above_its_max_amount(anvil, facilitator, payer, payee):
    async def buy(url):
        async with rig.mpp_client(payer, max_amount="5") as client:
            return await client.fetch(url + "/thing", method="POST", json={})

    with serve(shop(facilitator.url, payee.address, 5_000_001)) as url:
        answer = asyncio.run(buy(url))
    assert answer.status_code == 402
    assert facilitator.calls == []


def ask(facilitator, path, authorization):
    terms = {"scheme": "exact", "network": NETWORK, "amount": authorization["value"], "asset": USDC}
    terms |= {"payTo": authorization["to"], "maxTimeoutSeconds": 300, "extra": {"name": "USD Coin", "version": "2"}}
    keys = ("from", "to", "value", "validAfter", "validBefore", "nonce")
    payload = {"signature": authorization["signature"], "authorization": {key: authorization[key] for key in keys}}
    payment = {"x402Version": 2, "accepted": terms, "payload": payload}
    body = {"x402Version": 2, "paymentPayload": payment, "paymentRequirements": terms}
    return requests.post(facilitator.url + path, json=body, timeout=20).json()


def test_the_facilitator_says_what_it_supports(facilitator):
    supported = requests.get(facilitator.url + "/supported", timeout=20).json()
    assert supported["kinds"] == [{"x402Version": 2, "scheme": "exact", "network": "eip155:8453"}]


def test_the_facilitator_settles_once(anvil, facilitator, payer, payee):
    authorization = authorize(payer, payee.address, 2)
    assert ask(facilitator, "/settle", authorization)["success"] is True
    again = ask(facilitator, "/settle", authorization)
    assert again["success"] is False
    assert again["errorReason"]
    assert anvil.balance(payee.address) == 2


@pytest.mark.parametrize(
    "spoil, reason",
    [
        (lambda anvil, a: anvil.submit(a), "invalid_exact_evm_nonce_already_used"),
        (lambda anvil, a: anvil.move_clock(3600), "invalid_exact_evm_payload_authorization_valid_before"),
        (lambda anvil, a: anvil.blacklist(a["to"]), "invalid_exact_evm_transaction_simulation_failed"),
        (lambda anvil, a: anvil.pause(), "invalid_exact_evm_transaction_simulation_failed"),
        (lambda anvil, a: a.update(signature="0x" + "11" * 64 + "1b"), "invalid_exact_evm_payload_signature"),
        (lambda anvil, a: a.update(authorize(Account.create(), a["to"], 2)), "invalid_exact_evm_insufficient_balance"),
    ],
)
def test_the_facilitator_refuses_what_the_token_would(anvil, facilitator, payer, payee, spoil, reason):
    authorization = authorize(payer, payee.address, 2)
    spoil(anvil, authorization)
    verified = ask(facilitator, "/verify", authorization)
    assert (verified["isValid"], verified["invalidReason"]) == (False, reason)
    assert ask(facilitator, "/settle", authorization)["success"] is False


def test_the_facilitator_follows_the_chains_clock(anvil, facilitator, payer, payee):
    opens = anvil.clock() + 30 * 86_400
    guarantee = authorize(payer, payee.address, 2, valid_after=opens, valid_before=opens + 86_400)
    assert ask(facilitator, "/verify", guarantee)["isValid"] is False
    anvil.move_clock(30 * 86_400 + 1)
    assert ask(facilitator, "/settle", guarantee)["success"] is True
    assert anvil.balance(payee.address) == 2


def test_the_facilitator_does_not_live_by_a_frozen_clock(anvil, facilitator, payer, payee):
    authorization = authorize(payer, payee.address, 2)
    with freezegun.freeze_time("2100-01-01"):
        assert ask(facilitator, "/settle", authorization)["success"] is True
    assert anvil.balance(payee.address) == 2


@pytest.mark.parametrize("prefix", [b"", b"v" * 20])
def test_the_facilitator_settles_for_a_contract_wallet(anvil, facilitator, payee, prefix):
    owner = Account.create()
    wallet = anvil.place_wallet(owner.address)
    anvil.mint(wallet, 2)
    authorization = authorize(owner, payee.address, 2, payer=wallet, prefix=prefix)
    assert ask(facilitator, "/verify", authorization)["isValid"] is True
    assert ask(facilitator, "/settle", authorization)["success"] is True
    assert anvil.balance(payee.address) == 2


def test_the_facilitator_settles_again_after_a_revert_and_a_reset(anvil, facilitator, payer, payee):
    authorization, snapshot = authorize(payer, payee.address, 2), anvil.snapshot()
    assert ask(facilitator, "/settle", authorization)["success"] is True
    anvil.revert(snapshot)
    facilitator.reset()
    assert ask(facilitator, "/settle", authorization)["success"] is True
    assert anvil.balance(payee.address) == 2
