"""Against a restart that blames nobody, or a rank that only waited for another one."""

from forge.launch import lost_ranks
from forge.launch.heartbeat import Activity, LastCollectives
from forge.launch.rank_records import RankRecord

COLLECTIVE = "all-reduce of gradients in step 18"


def ended(rank):
    """A rank that left nothing."""
    return RankRecord("lost", rank, message="it exited without a record", host=f"n{rank}")


def hanging(rank, phase="data read of step 18"):
    """A rank that hangs in work of its own, as its watchdog recorded it."""
    activity = Activity(18, phase, waits=False, sec=35, stalled=True)
    return RankRecord("lost", rank, host=f"n{rank}", activity=activity)


def waiting(rank, *, stalled=True, step=18, reaches_slurm=None):
    """A rank that lost a peer in a collective."""
    sec = 30 if stalled else 0
    activity = Activity(step, COLLECTIVE, True, sec, stalled, reaches_slurm)
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


def test_rank_that_has_completed_is_no_witness():
    found = lost_ranks.judged([RankRecord("completed", 0), ended(1)])
    assert found.message == "rank 1 of 2 exited without a record on n1"


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


def test_rank_on_a_node_that_does_not_reach_slurm_is_named_and_not_one_that_came_late():
    late = waiting(0, stalled=False)
    found = lost_ranks.judged(
        [late, waiting(1, reaches_slurm=True), waiting(2, reaches_slurm=False)]
    )
    assert found.message == (
        "rank 2 of 3 on n2 did not arrive at the all-reduce of gradients in step 18: its node is cut off,"
        f" and does not reach Slurm either; rank 1 saw: {COLLECTIVE}: timed out"
    )
    assert (found.cause, found.host, found.connected) == ("hang", "n2", ("n1",))


def test_controller_that_is_away_cuts_off_no_node():
    found = lost_ranks.judged([waiting(rank, reaches_slurm=False) for rank in range(2)])
    assert found.message.startswith("ranks lost each other") and found.host == ""


def test_node_that_starts_no_process_is_to_blame_and_not_the_rank_of_another_one():
    told = lost_ranks.judged([waiting(0, stalled=False), waiting(1), waiting(2)])
    assert told.host == "n0"
    found, gone = lost_ranks.on_nodes(told, ["n2"], "n1")
    assert found.message.startswith(
        "n2 starts no process, so it is down or cut off; the ranks say: rank 0 of 3 on n0 arrived too"
    )
    assert (found.host, gone) == ("n2", ["n2"])
    itself, gone = lost_ranks.on_nodes(told, ["n0"], "n1")
    assert (itself.message, itself.cause, gone) == (told.message, "peer lost", ["n0"])
    assert lost_ranks.on_nodes(told, [], "n1") == (told, [])


def test_broken_link_between_two_nodes_that_both_reach_slurm_names_both_and_loses_none():
    told = lost_ranks.judged([waiting(rank, reaches_slurm=True) for rank in range(2)])
    found, gone = lost_ranks.on_nodes(told, ["n1"], "n0")
    assert gone == []
    assert found.message.startswith(
        "n0 and n1 do not reach each other, and both reach Slurm; the ranks say: ranks lost each"
    )


def test_hosts_are_those_of_the_placement():
    records = [ended(0), ended(1), RankRecord("lost", 2), RankRecord("lost", 3)]
    found = lost_ranks.with_hosts(records, ["n0", "n9"], 2)
    assert [record.host for record in found] == ["n0", "n0", "n9", "n9"]


# --- a GPU that hangs: all hosts wait alike -------------------------------------------------------


def on_gpu(rank, *numbers, phase="results of step 18", waits=True):
    """A rank whose host waits for its GPU. numbers: enqueued, started and completed, by group."""
    groups = tuple(LastCollectives(f"nccl {i}", *group) for i, group in enumerate(numbers))
    activity = Activity(18, phase, waits, 35, stalled=True, collectives=groups)
    facts = {"cause": "peer lost", "message": f"no progress: {activity.where}", "host": f"n{rank}"}
    return RankRecord("failed" if waits else "lost", rank, 69, **facts, activity=activity)


WAITS, ABSENT = (820, 812, 811), (820, 811, 811)


def test_rank_whose_gpu_has_not_started_the_collective_of_the_others_is_to_blame():
    found = lost_ranks.judged([on_gpu(0, WAITS), on_gpu(1, WAITS), on_gpu(2, ABSENT)])
    assert found.message == (
        "rank 2 of 3 on n2 has not started collective 812 of the process group nccl 0, in which others"
        " wait (its last one is 811); rank 0 saw: no progress: in the results of step 18 for 35 s"
    )
    assert (found.cause, found.rank, found.host) == ("hang", 2, "n2")


def test_gpus_that_are_all_in_the_same_collective_blame_nobody():
    """Such as where a link breaks: all nodes are checked."""
    found = lost_ranks.judged([on_gpu(0, WAITS), on_gpu(1, WAITS)])
    assert (found.cause, found.host) == ("peer lost", "")


def test_without_start_events_hosts_that_ran_ahead_blame_nobody():
    found = lost_ranks.judged([on_gpu(0, (820, -1, 811)), on_gpu(1, (820, -1, 811))])
    assert (found.cause, found.host) == ("peer lost", "")


def test_rank_that_has_not_even_enqueued_the_collective_is_to_blame_without_start_events():
    found = lost_ranks.judged([on_gpu(0, (812, -1, 811)), on_gpu(1, (811, -1, 811))])
    assert (found.cause, found.host) == ("hang", "n1")


def test_rank_that_waits_in_one_group_is_not_to_blame_in_another():
    """HSDP: ranks 0 and 1 share a copy, 2 and 3 another; rank 0 waits for 1, and 2 for 0."""
    waits, absent, copy = (60, 50, 49), (60, 49, 49), (20, 20, 19)
    records = [
        *(on_gpu(0, waits, (20, 19, 19)), on_gpu(1, absent, (20, 19, 19))),
        *(on_gpu(2, (60, 50, 50), copy), on_gpu(3, (60, 50, 50), copy)),
    ]
    found = lost_ranks.judged(records)
    assert (found.cause, found.host, found.message[:11]) == ("hang", "n1", "rank 1 of 4")


def test_host_that_a_full_queue_of_its_gpu_stops_in_work_of_its_own_is_not_to_blame():
    busy = {"phase": "work after losses of step 18", "waits": False}
    found = lost_ranks.judged([on_gpu(0, WAITS, **busy), on_gpu(1, ABSENT), on_gpu(2, WAITS)])
    assert (found.cause, found.host, found.lost) == ("hang", "n1", ())


def test_host_that_hangs_in_work_of_its_own_is_named_with_it():
    """Its GPU has done all that it was given."""
    read = on_gpu(1, (811, 811, 811), phase="data read of step 18", waits=False)
    found = lost_ranks.judged([on_gpu(0, WAITS), read])
    assert "rank 1 of 2 on n1 did not arrive at the results of step 18 and was in the data" in (
        found.message
    )


def test_recorder_that_did_not_answer_blames_nobody():
    found = lost_ranks.judged([on_gpu(0, WAITS), on_gpu(1)])
    assert (found.cause, found.host) == ("peer lost", "")
