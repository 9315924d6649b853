import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.codec import from_json, from_value, to_json
from model.errors import ModelError
from model.ids import DeviceId, Epoch, NodeId
from model.job_spec import parse_job_spec
from model.placement import Placement, check_placement

A, B = NodeId("a", 1), NodeId("b", 1)


def device(name, node=A):
    return DeviceId(node, tuple(name.split("/")))


def place(devices, ranks, *, epoch=1, group=1):
    return Placement(Epoch(epoch), tuple(devices), tuple(ranks), group)


def test_it_knows_who_is_where():
    placement = place([device("g0"), device("g1"), device("g0", B)], [0, 0, 1, 2])
    assert (placement.width, placement.world_size, placement.nodes) == (3, 4, (A, B))
    assert placement.ranks_on(device("g0")) == (0, 1)
    assert placement.ranks_on(device("g9")) == ()
    assert placement.ranks_at(A) == (0, 1, 2)
    assert placement.device(3) == device("g0", B)


BAD = [
    ("before the first", dict(devices=[device("g0")], ranks=[0], epoch=0), "`epoch` is 0"),
    ("empty", dict(devices=[], ranks=[]), "must not be empty"),
    ("no rank", dict(devices=[device("g0")], ranks=[]), "must not be empty"),
    ("no such device", dict(devices=[device("g0")], ranks=[0, 1]), r"`device_of_rank\[1\]` is 1"),
    ("negative", dict(devices=[device("g0")], ranks=[-1]), r"`device_of_rank\[0\]` is -1"),
    ("unused device", dict(devices=[device("g0"), device("g1")], ranks=[0, 0]), r"`devices\[1\]` has no rank"),
    ("same device", dict(devices=[device("g0"), device("g0")], ranks=[0, 1]), "listed twice"),
    ("devices swapped", dict(devices=[device("g0"), device("g1")], ranks=[1, 0]), "first rank on each"),
    ("part of a used one", dict(devices=[device("g0"), device("g0/m1")], ranks=[0, 1]), "a part of a@1/g0"),
    ("two lives", dict(devices=[device("g0"), device("g1", NodeId("a", 2))], ranks=[0, 1]), "another incarnation"),
    ("odd group", dict(devices=[device("g0")], ranks=[0, 0, 0], group=2), "does not divide the 3 ranks"),
    ("no group", dict(devices=[device("g0")], ranks=[0], group=0), "does not divide"),
    ("torn tree", dict(devices=[device("g0"), device("g0", B)], ranks=[0, 1], group=2), "Keep a process tree on one"),
]


@pytest.mark.parametrize(("arguments", "words"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_what_is_no_placement(arguments, words):
    with pytest.raises(ModelError, match=words) as caught:
        place(**arguments)
    assert caught.value.code == "model.placement"
    assert caught.value.faults


def test_all_faults_come_at_once():
    with pytest.raises(ModelError) as caught:
        place([device("g0"), device("g0")], [1, 0], epoch=0)
    assert len(caught.value.faults) == 3


def test_faults_found_on_reading_have_their_path():
    value = {"epoch": 1, "devices": ["a@1/g0", "a@1/g0"], "device_of_rank": [0, 1]}
    with pytest.raises(ModelError, match=r"Placement: `devices\[1\]` names a@1/g0, which is listed twice"):
        from_value(Placement, value)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(1, 2**40))
def test_every_contiguous_placement_is_one(counts, epoch):
    devices = [device(f"g{index}") for index in range(len(counts))]
    ranks = [index for index, count in enumerate(counts) for _ in range(count)]
    placement = place(devices, ranks, epoch=epoch)
    assert [len(placement.ranks_on(each)) for each in devices] == counts
    assert from_json(Placement, to_json(placement)) == placement


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_devices_come_in_the_order_of_their_first_ranks(ranks):
    devices = [device(f"g{index}") for index in range(max(ranks) + 1)]
    ordered = list(dict.fromkeys(ranks)) == list(range(len(devices)))
    try:
        place(devices, ranks)
    except ModelError:
        assert not ordered
    else:
        assert ordered


def spec(**fields):
    return parse_job_spec({"apiVersion": "ergosphere/v1", "argv": ["x"], **fields})


def test_a_placement_fits_its_job():
    check_placement(spec(ranks=4, min_width=2, max_width=2), place([device("g0"), device("g1")], [0, 0, 1, 1]))
    tree = spec(pack="node", ranks=2, devices_per_rank=2)
    check_placement(tree, place([device("g0"), device("g0", B)], [0, 0, 1, 1], group=2))


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"ranks": 3}, "device_of_rank"),
        ({"ranks": 4, "min_width": 3}, "devices"),
        ({"ranks": 4, "max_width": 1}, "devices"),
        ({"ranks": 2, "pack": "node", "devices_per_rank": 2}, "ranks_per_group"),
    ],
)
def test_a_placement_of_another_job(fields, where):
    with pytest.raises(ModelError) as caught:
        check_placement(spec(**fields), place([device("g0"), device("g1")], [0, 0, 1, 1]))
    assert [fault.where for fault in caught.value.faults] == [where]


def test_what_starts_its_own_ranks_keeps_its_width():
    tree = spec(pack="node", devices_per_rank=4)
    with pytest.raises(ModelError, match="has 2 devices, but the job runs on 4 to 4"):
        check_placement(tree, place([device("g0"), device("g1")], [0, 0, 1, 1], group=4))
