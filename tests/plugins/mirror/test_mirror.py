"""What a node sends that does not see the run's directory: only what has changed, never under a name that
its ranks do not have, never through a link."""

from __future__ import annotations

import base64
import os

import pytest

from forge.core.errors import DataError
from forge.core.paths import RunPaths
from forge.hosts.nodes import NodeFailure
from forge.hosts.placement import Placement
from forge.launch.launcher import verdict
from forge.launch.rank_records import RankRecord
from forge.plugins.mirror import mirror, mirror_on_node
from forge.plugins.mirror.arrivals import Arrivals, RankFiles
from forge.plugins.mirror.mirrored_node import MirroredNode, NodeGone

LAUNCH = "20261126T000000000-1"
FILES = RankFiles(LAUNCH, "7.0", range(2, 4), r"checkpoint\-[0-9]+(/.+)?", beats=["beats/2"])


@pytest.fixture
def home(tmp_path):
    """The directory of the run on the first node, and what writes there for another one."""
    root = tmp_path / "run"
    (root / ".launch" / LAUNCH).mkdir(parents=True)
    (root / "logs").mkdir()
    return Arrivals(root, FILES, root / ".launch" / LAUNCH / "arriving")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("logs/7.0.node02.3.log", "grows"),
        ("monitor/node02.jsonl", "grows"),
        ("logs/7.0.flight-recorder.2", "whole"),
        (f".launch/{LAUNCH}/rank-2.json", "whole"),
        (f".launch/{LAUNCH}/rank-3.program.pid", "whole"),
        (f".launch/{LAUNCH}/stop", "whole"),
        (".launch/heartbeats/3.saved", "whole"),
        ("beats/2", "whole"),
        ("checkpoints/checkpoint-20/rng_state_2.pth", "part"),
    ],
)
def test_files_of_the_ranks_of_a_node_are_known(name, kind):
    assert FILES.kind(name) == kind


@pytest.mark.parametrize(
    "name",
    [
        "logs/7.0.node02.1.log",  # a rank of another node
        "logs/6.0.node02.2.log",  # of another job
        "logs/7.0.../x.2.log",
        f".launch/{LAUNCH}/rank-1.json",
        f".launch/{LAUNCH}/spec.json",
        ".launch/other/rank-2.json",
        ".launch/heartbeats/1.saved",
        "config.json",
        "STOP",
        "events.jsonl",
        "beats/1",
        "checkpoints/latest",
        "checkpoints/checkpoint-20.forge.json",
        "checkpoints/checkpoint-20/../../config.json",
        "checkpoints/checkpoint-20//x",
        "../run/beats/2",
        "/etc/passwd",
        "checkpoints/checkpoint-20/\x1b[2J",
        "",
    ],
)
def test_any_other_name_is_refused(home, name):
    assert FILES.kind(name) == ""
    for write in (home.append, home.replace, home.part):
        with pytest.raises(DataError, match="not a file that ranks of this node write"):
            write(name, b"x" if write != home.part else [b"x"])
    assert sorted(path.name for path in home.root.iterdir()) == [".launch", "logs"]


def test_link_in_place_of_a_file_is_not_written_through(home, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    log = home.root / "logs/7.0.node02.2.log"
    log.symlink_to(victim)
    with pytest.raises(DataError, match="is a link"):
        home.append("logs/7.0.node02.2.log", b"x")
    record = home.root / f".launch/{LAUNCH}/rank-2.json"
    record.symlink_to(victim)
    home.replace(f".launch/{LAUNCH}/rank-2.json", b"record")
    assert record.read_text() == "record" and not record.is_symlink()
    assert victim.read_text() == "mine"


def test_link_in_place_of_a_directory_is_not_followed(home, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (home.root / "checkpoints").mkdir()
    (home.root / "checkpoints/checkpoint-20").symlink_to(elsewhere)
    with pytest.raises(DataError, match="checkpoint-20 is a link"):
        home.part("checkpoints/checkpoint-20/a", [b"x"])
    assert list(elsewhere.iterdir()) == []


def test_logs_that_are_kept_elsewhere_are_written_there(home, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (home.root / "logs").rmdir()
    (home.root / "logs").symlink_to(elsewhere)  # FORGE_LOG_DIR
    home.append("logs/7.0.node02.2.log", b"x\n")
    assert (elsewhere / "7.0.node02.2.log").read_text() == "x\n"


def test_log_is_appended_to_after_a_restart(home):
    log = home.root / "logs/7.0.node02.2.log"
    log.write_text("of the launch before\n")
    home.append("logs/7.0.node02.2.log", b"of this one\n")
    assert log.read_text() == "of the launch before\nof this one\n"


def test_part_of_a_checkpoint_replaces_only_what_came_from_the_same_node(home):
    home.part("checkpoints/checkpoint-20/a", [b"1", b"2"])
    home.part("checkpoints/checkpoint-20/a", [b"3"])
    assert (home.root / "checkpoints/checkpoint-20/a").read_bytes() == b"3"
    (home.root / "checkpoints/checkpoint-20/model").write_bytes(b"of rank 0")
    with pytest.raises(DataError, match="is there already"):
        home.part("checkpoints/checkpoint-20/model", [b"x"])
    assert (home.root / "checkpoints/checkpoint-20/model").read_bytes() == b"of rank 0"


def test_half_of_a_part_is_never_under_its_name(home):
    def pieces():
        yield b"half"
        raise ConnectionError

    with pytest.raises(ConnectionError):
        home.part("checkpoints/checkpoint-20/a", pieces())
    assert list((home.root / "checkpoints/checkpoint-20").iterdir()) == []


def test_checkpoints_that_are_gone_are_told_once(home):
    home.part("checkpoints/checkpoint-20/a", [b"x"])
    home.part("checkpoints/checkpoint-40/a", [b"x"])
    assert home.forgotten() == []
    (home.root / "checkpoints/checkpoint-20").rename(home.root / "moved")
    assert home.forgotten() == ["checkpoint-20"]
    assert home.forgotten() == []


# --- the node's side ---------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    base = tmp_path / "disk"
    folder = mirror_on_node.begin_mirror(base=str(base), job="7", name="run", checkpoint="")
    return RunPaths(type(tmp_path)(folder))


def news(folder, **given):
    keys = {"have": {}, "sizes": {}, "given": {}, "drop": [], "beats": []}
    return mirror_on_node.mirror_round(folder=str(folder.root), launch=LAUNCH, **keys | given)


def test_only_what_has_changed_is_told(folder):
    (folder.logs / "7.0.node02.2.log").write_text("one\n")
    (folder.heartbeats / "2").write_text("5")
    first = news(folder)
    assert list(first.grown) == ["logs/7.0.node02.2.log"]
    [(name, (sign, text))] = first.whole.items()
    assert (name, base64.b64decode(text)) == (".launch/heartbeats/2", b"5")
    told = {"have": {name: sign}, "sizes": {"logs/7.0.node02.2.log": 4}}
    assert news(folder, **told) == mirror_on_node.MirrorNews()
    with open(folder.logs / "7.0.node02.2.log", "a") as log:
        log.write("two\n")
    (folder.heartbeats / "2").unlink()
    later = news(folder, **told)
    assert base64.b64decode(later.grown["logs/7.0.node02.2.log"]) == b"two\n"
    assert later.gone == [".launch/heartbeats/2"]


def test_file_that_was_given_is_not_told_back(folder):
    given = {".launch/heartbeats/0": base64.b64encode(b"9").decode()}
    first = news(folder, given=given)
    assert (folder.heartbeats / "0").read_text() == "9"
    assert first.whole == {} and list(first.given) == [".launch/heartbeats/0"]
    assert news(folder, have=first.given).whole == {}
    assert news(folder, have=first.given, given=given).whole == {}


def test_long_log_is_told_in_pieces(folder, monkeypatch):
    monkeypatch.setattr(mirror_on_node, "PIECE_BYTES", 4)
    (folder.logs / "7.0.node02.2.log").write_text("123456")
    [text] = news(folder).grown.values()
    assert base64.b64decode(text) == b"1234"


def test_links_pipes_and_names_that_are_no_text_are_not_told(folder, tmp_path):
    (tmp_path / "secret").write_text("secret")
    (folder.logs / "7.0.node02.2.log").symlink_to(tmp_path / "secret")
    os.mkfifo(folder.heartbeats / "2")
    (folder.checkpoints / "checkpoint-20").symlink_to(tmp_path)
    (folder.heartbeats / os.fsdecode(b"\xff")).write_text("x")
    assert news(folder) == mirror_on_node.MirrorNews()


def test_checkpoint_that_was_sent_is_not_told_back(tmp_path):
    copy = tmp_path / "disk" / "copy" / "checkpoint-20"
    copy.mkdir(parents=True)
    (copy / "model").write_text("weights")
    root = mirror_on_node.begin_mirror(
        base=str(tmp_path / "disk"), job="7", name="run", checkpoint=str(copy)
    )
    paths = RunPaths(tmp_path.joinpath(root))
    assert (paths.latest / "model").read_text() == "weights"
    (paths.checkpoints / "checkpoint-40").mkdir()
    (paths.checkpoints / "checkpoint-40/rng").write_text("state")
    assert list(news(paths).parts) == ["checkpoints/checkpoint-40/rng"]


def test_piece_of_a_file_that_has_changed_is_empty(folder):
    (folder.checkpoints / "a").write_text("one")
    [(name, sign)] = news(folder).parts.items()
    read = {"folder": str(folder.root), "name": name, "sign": sign}
    assert base64.b64decode(mirror_on_node.mirror_piece(**read, offset=1)) == b"ne"
    (folder.checkpoints / "a").write_text("longer")
    assert mirror_on_node.mirror_piece(**read, offset=0) == ""


def test_dropped_checkpoint_is_removed_and_no_other(folder):
    for name in ("checkpoint-20", "checkpoint-40"):
        (folder.checkpoints / name).mkdir()
    news(folder, drop=["checkpoint-20"])
    assert [path.name for path in folder.checkpoints.iterdir()] == ["checkpoint-40"]
    with pytest.raises(ValueError):
        news(folder, drop=["../logs"])
    assert folder.logs.is_dir()


def test_first_node_has_a_link_at_the_same_path(tmp_path):
    run = tmp_path / "results/run"
    run.mkdir(parents=True)
    keys = {"base": str(tmp_path / "disk"), "job": "7", "name": "run"}
    link = mirror_on_node.link_mirror(**keys, run=run)
    assert link.readlink() == run
    assert str(link) == mirror_on_node.begin_mirror(**keys, checkpoint="")
    assert run.is_dir() and not link.is_symlink()


# --- both sides --------------------------------------------------------------------------------------


class Connection:
    """In place of a NodePool: calls the functions of the node here. broken: what comes in place of the
    response to a request of this name."""

    def __init__(self):
        self.broken = {}

    def ask(self, request, *, timeout_sec, again, hosts, **arguments):
        if (name := request.__name__) in self.broken:
            return {hosts[0]: self.broken[name]}
        return {hosts[0]: request(**arguments)}


@pytest.fixture
def node(home, folder):
    return MirroredNode("node02", str(folder.root), Connection(), home)


def test_rank_says_that_it_has_saved_only_after_its_part_has_come(node, folder, home):
    (folder.checkpoints / "checkpoint-20").mkdir()
    (folder.checkpoints / "checkpoint-20/rng_state_2.pth").write_text("state")
    (folder.heartbeats / "2.saved").write_text("20")
    (folder.launches / LAUNCH).mkdir()
    (folder.launches / LAUNCH / "rank-2.json").write_text("{}")
    node.pool.broken["mirror_piece"] = ""  # the file changes while it is read
    assert not node.round({})
    assert not (home.root / ".launch/heartbeats/2.saved").exists()
    assert (home.root / f".launch/{LAUNCH}/rank-2.json").exists()
    node.pool.broken.clear()
    assert node.round({})
    assert (home.root / "checkpoints/checkpoint-20/rng_state_2.pth").read_text() == "state"
    assert (home.root / ".launch/heartbeats/2.saved").read_text() == "20"
    assert not node.round({})


def test_heartbeats_of_others_go_to_the_node_and_its_own_do_not_come_back(node, folder, home):
    (folder.heartbeats / "2").write_text("5")
    node.round({})
    own, other = (home.root / ".launch/heartbeats" / name for name in ("2", "0"))
    other.write_text("7")
    given = node.changed([own, other])
    assert given == {".launch/heartbeats/0": b"7"}
    assert not node.round(given)
    assert (folder.heartbeats / "0").read_text() == "7"
    assert node.changed([own, other]) == {}


def test_sign_of_life_of_a_program_goes_round_once(node, folder, home):
    """Else nodes would tell each other for ever that the program has printed something."""
    output = home.root / ".launch/heartbeats/output"
    (folder.heartbeats / "output").touch()
    assert node.round({})
    assert node.changed([output]) == {} and not node.round({})
    output.touch()
    assert not node.round(node.changed([output]))
    assert node.changed([output]) == {} and not node.round({})


def test_withdrawn_record_is_withdrawn_here(node, folder, home):
    (folder.launches / LAUNCH).mkdir()
    record = folder.launches / LAUNCH / "rank-2.provisional"
    record.write_text("{}")
    node.round({})
    assert (home.root / f".launch/{LAUNCH}/rank-2.provisional").exists()
    record.unlink()
    node.round({})
    assert not (home.root / f".launch/{LAUNCH}/rank-2.provisional").exists()


def test_refused_file_is_named_once_and_not_asked_for_again(node, folder, home, capsys):
    (folder.logs / "7.0.node02.0.log").write_text("of rank 0\n")
    (folder.heartbeats / "0").write_text("7")
    node.round({})
    assert not node.round({})
    said = capsys.readouterr().err
    assert said.count("which is not written") == 2 and "'.launch/heartbeats/0'" in said
    assert sorted(path.name for path in (home.root / ".launch").rglob("*")) == [LAUNCH]


def test_response_that_is_lost_loses_nothing(node, folder, home):
    log = folder.logs / "7.0.node02.2.log"
    log.write_text("one\n")
    node.pool.broken["mirror_round"] = NodeFailure("no answer")
    with pytest.raises(NodeGone, match="no answer"):
        node.round({})
    node.pool.broken.clear()
    log.write_text("one\ntwo\n")
    node.round({})
    assert (home.root / "logs/7.0.node02.2.log").read_text() == "one\ntwo\n"


def test_parts_of_a_pruned_checkpoint_are_removed_on_the_node(node, folder, home):
    for name in ("checkpoint-20", "checkpoint-40"):
        (folder.checkpoints / name).mkdir()
        (folder.checkpoints / name / "rng").write_text("state")
    node.round({})
    (home.root / "checkpoints/checkpoint-20").rename(home.root / "pruned")
    node.round({})
    assert [path.name for path in folder.checkpoints.iterdir()] == ["checkpoint-40"]


def test_rank_of_a_node_whose_connection_has_ended_is_lost_and_its_node_named(spec, home):
    spec = spec.model_copy(update={"nodes": 2, "ranks_per_node": 2})
    node = MirroredNode("node02", "", Connection(), home)
    RankRecord("completed", 2).write(spec)  # it came before
    mirror._record_loss(spec, node, "no answer within 60 s")
    records = [RankRecord.read(spec, rank) for rank in range(4)]
    judged = verdict(records)
    assert (judged.status, judged.rank, judged.host) == ("lost", 3, "node02")
    assert judged.message == "the connection to node02 has ended: no answer within 60 s"
    assert records[2].status == "completed"


@pytest.mark.parametrize("text", ["abc", "!!!!"], ids=["cut", "no base64"])
def test_response_that_cannot_be_read_ends_the_connection(spec, node, home, text):
    name = ".launch/heartbeats/2"
    node.pool.broken["mirror_round"] = mirror_on_node.MirrorNews(whole={name: ((1, 2, 3), text)})
    of_launch = mirror.Mirror(spec, RunPaths(home.root), Placement(("node02",)), "python", "")
    of_launch._ending.set()
    of_launch._follow(node)
    assert of_launch.lost["node02"].startswith("its answer cannot be read: ")
    assert not (home.root / name).exists()
