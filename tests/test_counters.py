"""The file of the shared counters: made by many at once, torn by a crash, lost under way. None of it costs a payment."""

import pathlib
import threading

import limits


def test_a_torn_file_of_counters_is_made_anew(settings):
    path = f"{settings.database}.counters"
    pathlib.Path(path).write_bytes(b"torn by a crash " * 512)
    assert limits.usable(limits.connect(settings.database), "https://f.test", now=1) == "well"


def test_a_file_of_counters_that_others_are_using_is_waited_for_and_kept(settings):
    first = limits.connect(settings.database)
    limits.failed(first, "https://f.test", "refused", now=1)
    first.execute("BEGIN EXCLUSIVE")
    timer = threading.Timer(0.3, lambda: first.execute("COMMIT"))
    timer.start()
    second = limits.connect(settings.database)
    timer.join()
    assert limits.usable(second, "https://f.test", now=1) == "troubled"


def test_many_that_open_the_counters_at_once_all_count_in_one_file(settings):
    gate, errors = threading.Barrier(8), []

    def count():
        try:
            gate.wait()
            limits.failed(limits.connect(settings.database), "https://f.test", "refused", now=1)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (row,) = limits.circuits(limits.connect(settings.database))
    assert not errors and row["failures"] == 8


def test_counters_that_break_under_way_never_stop_a_payment(client, world, buyer, seller, monkeypatch):
    body = buyer.request(seller)
    payment = buyer.x402(buyer.quote(body))
    facilitator = world.facilitators[0]
    verify = facilitator.verify

    def verified(*args, **options):
        world.counters().execute("ALTER TABLE circuits RENAME TO lost")
        return verify(*args, **options)

    monkeypatch.setattr(facilitator, "verify", verified)
    assert client.post("/x402/deal", json=body, headers=payment).status_code == 200
