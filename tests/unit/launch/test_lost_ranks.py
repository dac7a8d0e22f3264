"""Against a restart that blames nobody, or a rank that only waited for another one."""

from forge.launch import lost_ranks
from forge.launch.heartbeat import Activity
from forge.launch.rank_records import RankRecord

COLLECTIVE = "all-reduce of gradients in step 18"


def ended(rank):
    """A rank that left nothing."""
    return RankRecord("lost", rank, message="it exited without a record", host=f"n{rank}")


def hanging(rank, phase="data read of step 18"):
    """A rank that hangs in work of its own, as its watchdog recorded it."""
    activity = Activity(18, phase, waits=False, sec=35, stalled=True)
    return RankRecord("lost", rank, host=f"n{rank}", activity=activity)


def waiting(rank, *, stalled=True, step=18):
    """A rank that lost a peer in a collective."""
    activity = Activity(step, COLLECTIVE, waits=True, sec=30 if stalled else 0, stalled=stalled)
    message = f"{COLLECTIVE}: {'timed out' if stalled else 'closed by peer'}"
    facts = {"cause": "peer lost", "message": message, "host": f"n{rank}", "activity": activity}
    return RankRecord("failed", rank, 69, **facts)


def test_rank_that_hangs_is_named_with_its_node_and_what_it_did():
    found = lost_ranks.judged([waiting(0), waiting(1), hanging(2), waiting(3)])
    assert found.message == (
        "rank 2 of 4 on n2 did not arrive at the all-reduce of gradients in step 18 and was in the data"
        " read of step 18 for 35 s; rank 0 saw: all-reduce of gradients in step 18: timed out"
    )
    assert (found.status, found.cause, found.rank, found.host) == ("lost", "hang", 2, "n2")


def test_rank_without_a_record_for_which_others_waited_does_not_respond():
    found = lost_ranks.judged([waiting(0), ended(1), waiting(2)])
    assert found.message.startswith(
        "rank 1 of 3 on n1 did not arrive at the all-reduce of gradients in step 18 and does not"
        " respond; rank 0 saw: "
    )
    assert (found.cause, found.host, found.lost) == ("hang", "n1", (1,))


def test_rank_whose_end_is_noticed_at_once_is_no_hang():
    found = lost_ranks.judged([waiting(0, stalled=False), ended(1), hanging(2)])
    assert found.message == (
        "rank 1 of 3 exited without a record on n1; rank 0 saw: all-reduce of gradients in step 18:"
        " closed by peer"
    )
    assert (found.cause, found.rank, found.host) == ("peer lost", 1, "n1")


def test_rank_that_comes_when_the_others_have_given_up_is_named():
    found = lost_ranks.judged([waiting(0), waiting(1, stalled=False)])
    assert found.message.startswith(
        f"rank 1 of 2 on n1 arrived too late at the {COLLECTIVE}; rank 0 saw: "
    )
    assert found.cause == "hang"


def test_rank_that_is_a_step_behind_is_named():
    found = lost_ranks.judged([waiting(0, step=17), waiting(1), waiting(2)])
    assert (found.rank, found.cause) == (0, "hang")
    assert "; rank 1 saw: " in found.message


def test_ranks_that_all_wait_in_the_same_collective_blame_nobody():
    found = lost_ranks.judged([waiting(0), waiting(1)])
    assert found.message == f"ranks lost each other; rank 0 saw: {COLLECTIVE}: timed out"
    assert (found.cause, found.host) == ("peer lost", "")


def test_hosts_are_those_of_the_placement():
    records = [ended(0), ended(1), RankRecord("lost", 2), RankRecord("lost", 3)]
    found = lost_ranks.with_hosts(records, ["n0", "n9"], 2)
    assert [record.host for record in found] == ["n0", "n0", "n9", "n9"]
