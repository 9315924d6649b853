import jsonschema
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.errors import ModelError
from model.job_spec import API_VERSION, UNEVEN, JobSpec, parse_job_spec, parse_submitted_spec
from model.units import parse_bytes

MINIMAL = {"apiVersion": API_VERSION, "argv": ["python", "train.py"]}


def faults(fields):
    with pytest.raises(ModelError) as caught:
        parse_job_spec({**MINIMAL, **fields})
    assert caught.value.code == "model.job-spec"
    return {fault.where: str(fault) for fault in caught.value.faults}


def test_two_fields_are_enough():
    spec = parse_job_spec(MINIMAL)
    assert spec.argv == ("python", "train.py")
    assert (spec.world_size, spec.widest, spec.tier, spec.tenant) == (1, 1, "standard", "default")


def test_it_reads_what_it_writes():
    spec = parse_job_spec({**MINIMAL, "ranks": 4, "min_width": 2, "host_memory_bytes": "1GiB"})
    assert spec.host_memory_bytes == 1 << 30
    assert parse_job_spec(spec.to_json()) == spec


def test_what_starts_its_own_ranks_has_one_width():
    spec = parse_submitted_spec({**MINIMAL, "pack": "node", "devices_per_rank": 4})
    assert (spec.world_size, spec.min_width, spec.widest) == (4, 4, 4)
    assert parse_submitted_spec(spec.to_json()) == spec


def test_a_fleet_starts_a_command_that_starts_its_own_ranks_once():
    with pytest.raises(ModelError, match=r"`ranks` is 2, but a command that starts its own ranks .* is started once"):
        parse_submitted_spec({**MINIMAL, "pack": "node", "ranks": 2})


@pytest.mark.parametrize(
    ("fields", "faults"),
    [
        ({"min_width": 3}, ["min_width"]),
        ({"max_width": 3}, ["max_width"]),
        ({"min_width": 3, "max_width": 3}, ["min_width", "max_width"]),
        ({"min_width": 2, "max_width": 4}, []),
    ],
)
def test_a_fleet_starts_no_job_that_asks_for_widths_at_which_devices_have_unequal_shares(fields, faults):
    assert parse_job_spec({**MINIMAL, "ranks": 4, **fields})  # builds of before have begun such jobs
    submitted = {**MINIMAL, "ranks": 4, **fields}
    if not faults:
        assert parse_submitted_spec(submitted).world_size == 4
        return
    with pytest.raises(ModelError, match=r"evenly over 3 devices. Possible are 1, 2, 4.") as failure:
        parse_submitted_spec(submitted)
    assert [fault.where for fault in failure.value.faults] == faults and failure.value.code == UNEVEN


def test_a_spec_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        parse_job_spec(MINIMAL).ranks = 2


# name, fields, where the fault is, words that the sentence must have
BAD = [
    ("no command", {"argv": []}, "argv", "at least 1 item"),
    ("empty word", {"argv": ["python", ""]}, "argv[1]", "at least 1 character"),
    ("nul", {"argv": ["a\0"]}, "argv[0]", "must match"),
    ("no rank", {"ranks": 0}, "ranks", "is 0, but must be at least 1"),
    ("text for a number", {"ranks": "2"}, "ranks", "is '2', but must be an integer"),
    ("fraction", {"ranks": 1.5}, "ranks", "must be an integer"),
    ("truth for a number", {"ranks": True}, "ranks", "must be an integer"),
    ("misspelt", {"rank": 2}, "rank", "Did you mean `ranks`?"),
    ("python name", {"api_version": API_VERSION}, "api_version", "not a known field"),
    ("misspelt inside", {"checkpoint": {"kep": 2}}, "checkpoint.kep", "not a known field"),
    ("tier", {"tier": "gold"}, "tier", "'premium', 'standard' or 'basic'"),
    ("tenant", {"tenant": "Team A"}, "tenant", "not the id of a tenant"),
    ("volume kind", {"volume": {"kind": "s3"}}, "volume", "'upload', 'path', 'empty'"),
    ("volume without kind", {"volume": {"path": "/x"}}, "volume", "must have the field `kind`"),
    ("relative volume", {"volume": {"kind": "path", "path": "x"}}, "volume.path", "must match"),
    ("volume field", {"volume": {"kind": "empty", "path": "/x"}}, "volume.path", "not a known field"),
    ("memory unit", {"host_memory_bytes": "16EiB"}, "host_memory_bytes", "'16GiB'"),
    ("no memory", {"host_memory_bytes": 0}, "host_memory_bytes", "at least 1"),
    ("too much memory", {"host_memory_bytes": "99999999TiB"}, "host_memory_bytes", "2**63"),
    ("variable name", {"environment": {"A B": "1"}}, "environment.A B", "must match"),
    ("reserved variable", {"environment": {"RANK": "1"}}, "environment", "sets RANK"),
    ("our variable", {"environment": {"ERGO_CHANNEL": "1"}}, "environment", "sets ERGO_CHANNEL"),
    ("secret in plain text", {"environment": {"HF_TOKEN": "x"}}, "environment", "under `secrets`"),
    ("secret itself", {"secrets": [{"variable": "A", "reference": "x"}]}, "secrets[0].reference", "must match"),
    ("secret twice", {"secrets": [{"variable": "A", "reference": "v:x"}] * 2}, "secrets", "set twice"),
    ("widths cross", {"ranks": 4, "min_width": 3, "max_width": 2}, "min_width", "widest allowed is 2"),
    ("too wide", {"ranks": 2, "max_width": 3}, "max_width", "Set it to 2 or less"),
    ("min too wide", {"ranks": 2, "min_width": 3}, "min_width", "widest allowed is 2"),
    ("devices of a rank", {"devices_per_rank": 2}, "devices_per_rank", "`pack: node`"),
    ("tree cut in two", {"pack": "node", "devices_per_rank": 4, "min_width": 2}, "min_width", "4 devices for life"),
    ("tree too narrow", {"pack": "node", "devices_per_rank": 4, "max_width": 2}, "max_width", "4 devices for life"),
    ("tree too wide", {"pack": "node", "devices_per_rank": 2, "max_width": 3}, "max_width", "Set it to 2 or less"),
    ("devices of a tree", {"pack": "node", "devices_per_rank": "two"}, "devices_per_rank", "must be an integer"),
    ("many ranks", {"ranks": 2**20, "devices_per_rank": 2, "pack": "node"}, "ranks", "at most 1048576"),
    ("after twice", {"after": [{"job": "a"}, {"job": "a"}]}, "after", "names the job a twice"),
    ("time limit", {"device_time_limit_s": 0}, "device_time_limit_s", "at least 1"),
    ("infinite deadline", {"checkpoint": {"step_deadline_s": 1e9}}, "checkpoint.step_deadline_s", "at most"),
]


@pytest.mark.parametrize(("fields", "where", "words"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_one_fault_is_one_sentence(fields, where, words):
    found = faults(fields)
    assert list(found) == [where]
    assert words in found[where]
    assert found[where].endswith((".", "?"))


def test_all_faults_come_at_once_also_those_between_fields():
    found = faults(
        {"ranks": 0, "tier": "gold", "rank": 1, "environment": {"API_KEY": "x"}, "after": [{"job": "a"}] * 2}
    )
    assert set(found) == {"ranks", "tier", "rank", "environment", "after"}


def test_a_check_is_silent_where_a_field_that_it_needs_is_faulty():
    assert set(faults({"ranks": "four", "max_width": 4})) == {"ranks"}


def test_missing_fields_are_named():
    with pytest.raises(ModelError) as caught:
        parse_job_spec({})
    assert [fault.where for fault in caught.value.faults] == ["apiVersion", "argv"]


def test_values_that_may_be_confidential_are_not_repeated():
    found = faults({"environment": {"A": 7312}, "secrets": [{"variable": "B", "reference": "hunter2"}]})
    assert len(found) == 2
    assert "7312" not in str(found)
    assert "hunter2" not in str(found)


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "TOKENS", "KEYBOARD", "MONKEY", "SECRETARY"])
def test_harmless_variables_pass(name):
    assert parse_job_spec({**MINIMAL, "environment": {name: "1"}}).environment == {name: "1"}


def test_another_version_is_said_and_nothing_else():
    with pytest.raises(ModelError) as caught:
        parse_job_spec({"apiVersion": "ergosphere/v2", "command": "x"})
    assert [fault.where for fault in caught.value.faults] == ["apiVersion"]
    assert "this build reads ergosphere/v1" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", '{"a": NaN}', b"\xff", '{"argv": ["x"]} x'])
def test_text_that_is_not_json(text):
    with pytest.raises(ModelError) as caught:
        parse_job_spec(text)
    assert caught.value.code == "model.json"


@pytest.mark.parametrize("text", ["[]", "1", "null", '"x"'])
def test_json_that_is_no_mapping(text):
    with pytest.raises(ModelError, match="must be a mapping of fields"):
        parse_job_spec(text)


def test_a_value_that_json_does_not_have():
    with pytest.raises(ModelError, match="JSON does not have"):
        parse_job_spec({**MINIMAL, "name": {1, 2}})


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
fields = st.sampled_from([*JobSpec.json_schema()["properties"], "other"])


@given(st.dictionaries(fields, anything, max_size=6))
def test_any_input_gives_a_spec_or_sentences(mapping):
    try:
        spec = parse_job_spec(mapping)
    except ModelError as error:
        assert all(str(fault).endswith((".", "?")) for fault in error.faults)
        assert error.code in ("model.job-spec", "model.json")
    else:
        assert parse_job_spec(spec.to_json()) == spec


@pytest.mark.parametrize("file", ["minimal", "full", "tree"])
def test_the_schema_accepts_what_we_accept(golden, file):
    spec = orjson.loads((golden / "job_spec" / f"{file}.json").read_bytes())
    jsonschema.Draft202012Validator(JobSpec.json_schema()).validate(spec)


@pytest.mark.parametrize(
    "fields", [{"ranks": 0}, {"rank": 1}, {"tier": "gold"}, {"argv": []}, {"host_memory_bytes": "1EiB"}]
)
def test_the_schema_refuses_what_we_refuse(fields):
    assert not jsonschema.Draft202012Validator(JobSpec.json_schema()).is_valid({**MINIMAL, **fields})


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1KiB", 1024),
        ("3 MiB", 3 << 20),
        ("2GiB", 2 << 30),
        ("1TiB", 1 << 40),
        ("800", 800),
        ("7B", 7),
        *((text, 16 << 30) for text in ("16G", "16g", "16GB", "16Gi", "16 gib", "16  GIB")),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size
    jsonschema.Draft202012Validator(JobSpec.json_schema()).validate({**MINIMAL, "host_memory_bytes": text})


@pytest.mark.parametrize("text", ["", "GiB", "1.5GiB", "-1", "16iB", "16 GiB of it", f"{1 << 53}KiB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="must be"):
        parse_bytes(text)
