"""A race is found where neither access is known to be over, and only there."""

import pytest
from support.simulated_gpu.clocks import HOST, Accesses, Order

pytestmark = pytest.mark.all

WEIGHTS = 7  # a storage


@pytest.fixture
def order():
    return Order()


@pytest.fixture
def races():
    return []


@pytest.fixture
def accesses(order, races):
    return Accesses(order, races.append)


def write(order, accesses, actor, operation="update"):
    order.begin(actor)
    accesses.write(actor, WEIGHTS, operation)


def read(order, accesses, actor, operation="copy"):
    order.begin(actor)
    accesses.read(actor, WEIGHTS, operation)


def test_one_stream_does_one_thing_after_another(order, accesses, races):
    write(order, accesses, 0)
    read(order, accesses, 0)
    write(order, accesses, 0)
    assert races == []


def test_two_streams_race_until_one_waits_for_an_event_of_the_other(order, accesses, races):
    write(order, accesses, 0)
    order.wait(1, order.clock(0))
    read(order, accesses, 1)
    assert races == []
    write(order, accesses, 0)
    assert races == ["update writes on stream 0 what copy on stream 1 may still read"]
    read(order, accesses, 1)
    assert races[1:] == ["copy reads on stream 1 what update on stream 0 may not have written yet"]


def test_two_streams_may_read_at_once(order, accesses, races):
    read(order, accesses, 0)
    read(order, accesses, 1)
    assert races == []


def test_stream_knows_what_the_host_has_waited_for(order, accesses, races):
    write(order, accesses, 0)
    order.wait(HOST, order.clock(0))
    read(order, accesses, HOST)
    read(order, accesses, 1)
    assert races == []


def test_host_races_with_a_stream_that_it_has_not_waited_for(order, accesses, races):
    write(order, accesses, 0)
    read(order, accesses, HOST, "tolist")
    assert races == ["tolist reads on the host what update on stream 0 may not have written yet"]


def test_event_says_nothing_of_what_comes_after_it(order, accesses, races):
    event = order.clock(0)
    write(order, accesses, 0)
    order.wait(1, event)
    read(order, accesses, 1)
    assert len(races) == 1


def test_waiting_for_the_device_waits_for_all_streams(order, accesses, races):
    write(order, accesses, 0)
    order.begin(1)
    order.wait_for_all()
    write(order, accesses, HOST)
    assert races == []
