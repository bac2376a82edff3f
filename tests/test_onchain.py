"""The whole way on a real EVM: official clients pay, the official facilitator settles, the token decides."""

import asyncio
import dataclasses

import pytest
from eth_account import Account
from evm import rig
from evm.rig import USDC

import app as application
import chain
import db as database
import keys
import operations
import settings as configuration
import transfers
import world as worlds
from parties import SECRET

TREASURY = "0x00000000000000000000000000000000deadbeef"


class Service:
    """The service in live mode, served over HTTP, with its operator's commands."""

    def __init__(self, url, settings, world):
        self.url, self.settings, self.world = url, settings, world
        self.wallets = keys.open_wallets(settings)

    @property
    def db(self):
        return database.here(self.settings.database)

    def sweep(self, times=4):
        for _ in range(times):
            counts = transfers.sweep(self.db, self.world, self.wallets)
            assert not counts["errors"]

    def audit(self):
        return operations.audit(self.db, self.world)


@pytest.fixture
def service(anvil, facilitator, tmp_path):
    holder = {}
    with rig.serve(lambda environ, start: holder["app"](environ, start)) as url:
        settings = configuration.Settings(
            mode="live", database=str(tmp_path / "deals.db"), wallets=(str(tmp_path / "wallet.json"),),
            passphrase="test", base_url=url, treasury=TREASURY, rpc_url=anvil.url, facilitators=(facilitator.url,),
        )  # fmt: skip
        db = database.connect(settings.database)
        database.init(db, mode="live")
        database.set_meta(db, "master_key", keys.create_wallet(settings.wallets[0], "test", sandbox=True).hex())
        keys.create_secrets(settings.secrets_path)
        world = worlds.build(settings, db)
        holder["app"] = application.create_app(world=world)
        yield Service(url, settings, world)


@pytest.fixture
def payer(anvil):
    account = Account.create()
    anvil.mint(account.address, 1_000_000_000)
    return account


@pytest.fixture
def seller():
    return Account.create()


def terms(seller, **fields):
    body = {
        "amount_usd": "20.00",
        "seller_address": seller.address,
        "network": "base",
        "secret_hash": chain.sha256(SECRET.encode()).hex(),
    }
    return {**body, **fields}


def pay(service, payer, body, client, path):
    """Pay with one of the official clients, unmodified; returns (status, headers, JSON)."""
    url = service.url + path
    if client == "x402 requests":
        answer = rig.x402_session(payer).post(url, json=body, timeout=60)
        return answer.status_code, answer.headers, answer.json()

    async def later():
        maker = {"x402 httpx": lambda: rig.x402_async_client(payer, timeout=60), "pympp": lambda: rig.mpp_client(payer)}
        async with maker[client]() as session:
            if client == "pympp":
                return await session.fetch(url, method="POST", json=body)
            return await session.post(url, json=body)

    answer = asyncio.run(later())
    return answer.status_code, answer.headers, answer.json()


def deal_for(service, payer, seller, client="x402 requests", path="/x402/deal", **fields):
    status, _, value = pay(service, payer, terms(seller, **fields), client, path)
    assert status == 200, value
    return value[0]


def act(service, deal, action, fields=None, *, key=None, secret=None):
    """Act as the documents tell: ask for the text, sign it, send it."""
    import requests
    from eth_account.messages import encode_defunct

    url = f"{service.url}/v1/deals/{deal['id']}/{action}"
    body = dict(fields or {})
    if key:
        asked = requests.post(url, json=body, timeout=30).json()
        text = asked.get("sign_as", {}).get("seller") or asked["sign"]
        body["signature"] = "0x" + key.sign_message(encode_defunct(text=text)).signature.hex().removeprefix("0x")
    else:
        body["secret"] = secret or SECRET
    answer = requests.post(url, json=body, timeout=30)
    assert answer.status_code == 200, answer.json()
    return answer.json()


def record(service, deal):
    import requests

    return requests.get(f"{service.url}/v1/deals/{deal['id']}", timeout=30).json()


@pytest.mark.parametrize("path", ["/x402/deal", "/mpp/deal"])
@pytest.mark.parametrize("client", ["x402 requests", "x402 httpx", "pympp"])
def test_an_official_client_funds_a_deal_on_either_path(service, anvil, payer, seller, client, path):
    status, headers, value = pay(service, payer, terms(seller), client, path)
    assert (status, value[0]["state"]) == (200, "funded")
    assert ("Payment-Receipt" if client == "pympp" else "PAYMENT-RESPONSE") in headers
    assert anvil.balance(value[0]["deposit_address"]) == 20_292_000
    assert anvil.balance(payer.address) == 1_000_000_000 - 20_292_000
    receipt = anvil.rpc("eth_getTransactionReceipt", [value[0]["payment"]["transaction"]])
    assert receipt["status"] == "0x1"


def test_a_confirmed_deal_pays_the_seller_then_the_fee_on_chain(service, anvil, payer, seller):
    deal = deal_for(service, payer, seller)
    act(service, deal, "accept", key=seller)
    act(service, deal, "deliver", {"note": "done"}, key=seller)
    act(service, deal, "confirm")
    service.sweep()
    assert anvil.balance(seller.address) == 20_000_000
    assert anvil.balance(TREASURY) == 292_000
    assert anvil.balance(deal["deposit_address"]) == 0
    legs = record(service, deal)["transfers"]
    assert [(leg["leg"], leg["status"]) for leg in legs] == [("seller", "confirmed"), ("fee", "confirmed")]
    assert all(anvil.rpc("eth_getTransactionReceipt", [leg["transaction"]])["status"] == "0x1" for leg in legs)
    assert service.audit() == []


def test_a_refund_and_a_split_land_on_chain_to_the_unit(service, anvil, payer, seller):
    refunded = deal_for(service, payer, seller, client="pympp", path="/mpp/deal")
    act(service, refunded, "refund", key=seller)
    split = deal_for(service, payer, seller, ref="second", amount_usd="7.77")
    act(service, split, "accept", key=seller)
    act(service, split, "split", {"seller_usd": "2.50"}, key=seller)
    act(service, split, "split", {"seller_usd": "2.50"})
    service.sweep()
    fees = 292_000 + 92_000 + 77_700
    assert anvil.balance(seller.address) == 2_500_000
    assert anvil.balance(TREASURY) == fees
    assert anvil.balance(payer.address) == 1_000_000_000 - 2_500_000 - fees
    assert service.audit() == []


def test_any_stranger_can_cash_a_published_payout(service, anvil, payer, seller, facilitator):
    deal = deal_for(service, payer, seller)
    act(service, deal, "refund", key=seller)
    broken = dataclasses.replace(service.world, facilitators=())
    transfers.sweep(service.db, broken, service.wallets)  # signs, but has nobody to send it with
    published = record(service, deal)["transfers"][0]
    assert published["status"] in ("sent", "signed") and anvil.balance(payer.address) < 1_000_000_000
    anvil.submit(published["authorization"], sender=anvil.accounts[5])
    assert anvil.balance(payer.address) == 1_000_000_000 - 292_000
    service.db.execute("UPDATE transfers SET next_at = 0 WHERE next_at IS NOT NULL")
    service.sweep()
    assert record(service, deal)["transfers"][0]["status"] == "confirmed"
    assert anvil.balance(TREASURY) == 292_000 and service.audit() == []


def test_the_refund_guarantee_returns_the_whole_price_when_the_operator_has_vanished(service, anvil, payer, seller):
    deal = deal_for(service, payer, seller, deadline_hours=1, review_hours=1)
    service.sweep(1)
    guarantee = record(service, deal)["refund_guarantee"]
    with pytest.raises(rig.Reverted, match="not yet valid"):
        anvil.submit(guarantee)
    anvil.move_clock((1 + 1 + 168 + 7 * 24) * 3600 + 60)
    anvil.submit(guarantee)
    assert anvil.balance(payer.address) == 1_000_000_000
    assert anvil.balance(deal["deposit_address"]) == 0


def test_the_refund_guarantee_is_harmless_once_the_deal_is_paid_out(service, anvil, payer, seller):
    deal = deal_for(service, payer, seller, deadline_hours=1, review_hours=1)
    act(service, deal, "refund", key=seller)
    service.sweep()
    anvil.move_clock((1 + 1 + 168 + 7 * 24) * 3600 + 60)
    with pytest.raises(rig.Reverted, match="exceeds balance"):
        anvil.submit(record(service, deal)["refund_guarantee"])


def test_a_payout_to_a_blacklisted_seller_is_blocked_told_and_paid_once_it_is_free(service, anvil, payer, seller):
    deal = deal_for(service, payer, seller)
    act(service, deal, "accept", key=seller)
    act(service, deal, "deliver", key=seller)
    anvil.blacklist(seller.address)
    act(service, deal, "confirm")
    service.sweep(1)
    leg = record(service, deal)["transfers"][0]
    assert (leg["leg"], leg["status"]) == ("seller", "blocked")
    assert anvil.balance(TREASURY) == 0, "the fee waits for the parties"
    assert operations.health(service.db, service.world)[1]["open_transfers"]["blocked"] == 1
    anvil.unblacklist(seller.address)
    service.db.execute("UPDATE transfers SET next_at = 0 WHERE next_at IS NOT NULL")
    service.sweep()
    assert anvil.balance(seller.address) == 20_000_000 and service.audit() == []


def test_money_sent_on_top_of_the_price_goes_back_to_the_payer(service, anvil, payer, seller):
    deal = deal_for(service, payer, seller)
    anvil.mint(deal["deposit_address"], 1_234_567)
    act(service, deal, "refund", key=seller)
    service.sweep(8)
    assert anvil.balance(payer.address) == 1_000_000_000 - 292_000 + 1_234_567
    assert [leg["leg"] for leg in record(service, deal)["transfers"]][-1] == "surplus-1"
    assert service.audit() == []


def test_a_payment_submitted_by_a_stranger_first_funds_the_deal_once(service, anvil, payer, seller, facilitator):
    session = rig.x402_session(payer)
    real = facilitator.answer

    def front_run(verb):
        import flask

        body = flask.request.get_json()["paymentPayload"]["payload"]
        if flask.request.path == "/settle" and body["authorization"]["from"] == payer.address:
            anvil.submit({**body["authorization"], "signature": body["signature"]}, sender=anvil.accounts[4])
        return real(verb)

    facilitator.answer = front_run
    answer = session.post(service.url + "/x402/deal", json=terms(seller), timeout=60)
    assert (answer.status_code, answer.json()[0]["state"]) == (200, "funded")
    assert anvil.balance(answer.json()[0]["deposit_address"]) == 20_292_000
    assert anvil.balance(payer.address) == 1_000_000_000 - 20_292_000


def test_a_payer_without_the_money_gets_402_and_can_pay_after_topping_up(service, anvil, seller):
    poor = Account.create()
    status, _, value = pay(service, poor, terms(seller), "x402 requests", "/x402/deal")
    assert status == 402 and "insufficient" in value["error"]
    anvil.mint(poor.address, 50_000_000)
    status, _, value = pay(service, poor, terms(seller), "x402 requests", "/x402/deal")
    assert (status, value[0]["state"]) == (200, "funded")


def test_payouts_count_only_when_they_are_as_deep_as_configured(service, anvil, payer, seller):
    deep = dataclasses.replace(service.world, settings=dataclasses.replace(service.settings, confirmations=3))
    deal = deal_for(service, payer, seller)
    act(service, deal, "refund", key=seller)
    transfers.sweep(service.db, deep, service.wallets)
    assert record(service, deal)["transfers"][0]["status"] == "sent"
    anvil.mine(5)
    service.db.execute("UPDATE transfers SET next_at = 0 WHERE next_at IS NOT NULL AND status <> 'due'")
    transfers.sweep(service.db, deep, service.wallets)
    assert record(service, deal)["transfers"][0]["status"] == "confirmed"


def test_a_deposit_that_a_reorganisation_took_away_is_paid_again_with_the_same_bytes(
    service, anvil, payer, seller, facilitator
):
    before = anvil.snapshot()
    deal = deal_for(service, payer, seller)
    anvil.revert(before)
    facilitator.reset()
    assert anvil.balance(deal["deposit_address"]) == 0
    service.db.execute("UPDATE deals SET look_at = 0")
    service.sweep(1)
    assert anvil.balance(deal["deposit_address"]) == 20_292_000
    service.db.execute("UPDATE deals SET look_at = 0")
    service.sweep(1)
    assert service.db.execute("SELECT look_at FROM deals").fetchone()["look_at"] is None


def test_a_deposit_lost_for_good_is_told_to_the_operator(service, anvil, payer, seller, facilitator):
    before = anvil.snapshot()
    deal_for(service, payer, seller)
    anvil.revert(before)
    facilitator.reset()
    anvil.move_clock(3600)
    service.db.execute("UPDATE deals SET look_at = 0")
    service.sweep(1)
    fit, facts = operations.health(service.db, service.world)
    assert not fit and "the chain has lost a deposit" in facts["problems"]
    assert len(service.audit()) == 1


def test_the_quote_names_usdc_on_base_under_its_own_signing_domain(service, seller):
    import requests

    quote = requests.post(service.url + "/x402/deal", json=terms(seller), timeout=30)
    wanted = quote.json()["accepts"][0]
    assert (wanted["asset"], wanted["network"], wanted["amount"]) == (USDC, "eip155:8453", "20292000")
    assert wanted["extra"] == {"name": "USD Coin", "version": "2"}
    assert quote.json()["resource"]["url"] == service.url + "/x402/deal"
