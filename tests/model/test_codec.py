from dataclasses import dataclass

import pytest

from model.codec import from_json, from_value, one_of, show
from model.errors import Fault, ModelError
from model.ids import NodeId
from model.shape import Shape


@dataclass(frozen=True, slots=True)
class Inner(Shape):
    size: int

    def __post_init__(self):
        if self.size < 0:
            raise ModelError.of_faults("Inner", [Fault("size", "is negative", "Turn it.")], code="model.inner")


@dataclass(frozen=True, slots=True)
class Outer(Shape):
    node: NodeId
    inner: tuple[Inner, ...] = ()


def message(value):
    with pytest.raises(ModelError) as caught:
        from_value(Outer, value)
    assert caught.value.code == "model.invalid"
    return str(caught.value)


def test_a_shape_from_json():
    assert from_json(Outer, b'{"node": "n@1", "inner": [{"size": 1}]}') == Outer(NodeId("n", 1), (Inner(1),))


def test_a_fault_deep_inside_has_its_path():
    assert message({"node": "n@1", "inner": [{"size": 1}, {"size": -1}]}) == (
        "Outer: `inner[1].size` is negative. Turn it."
    )


def test_several_faults_are_a_list():
    text = message({"nod": "n@1", "inner": [{"size": "1"}, {}]})
    assert text.splitlines() == [
        "Outer has 4 faults:",
        "- `node` is missing. Add it.",
        "- `inner[0].size` is '1', but must be an integer. Write an integer.",
        "- `inner[1].size` is missing. Add it.",
        "- `nod` is not a known field. Did you mean `node`?",
    ]


def test_an_id_says_what_it_wants():
    assert message({"node": "n"}) == (
        "Outer: `node` is refused: 'n' is not the id of a node. Use name@incarnation, e.g. node-7@1."
    )


@pytest.mark.parametrize("value", [[], 1, None, "x"])
def test_something_else_altogether(value):
    assert "must be a mapping of fields" in message(value)


@pytest.mark.parametrize("value", [{"node": {1, 2}}, {"node": 2**70}, {"node": object()}])
def test_values_that_json_does_not_have(value):
    with pytest.raises(ModelError, match="JSON does not have") as caught:
        from_value(Outer, value)
    assert caught.value.code == "model.json"


def test_bad_json_is_located():
    with pytest.raises(ModelError, match="line 2, column 3 is not JSON"):
        from_json(Outer, b'{\n  node: "n@1"}')


def test_long_values_are_cut():
    assert len(show("x" * 1000)) == 60


def test_choices_in_words():
    assert one_of(["a"]) == "a"
    assert one_of(["a", "b", "c"]) == "a, b or c"
