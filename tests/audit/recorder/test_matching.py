"""Names of one script are found in another one, where one prefix explains them."""

from meshwright.audit.recorder.model.matching import match_names

PLAIN = {"layers.0.weight": (4, 4), "layers.1.weight": (4, 4), "head.weight": (2, 4), "head.bias": (2,)}


def test_the_same_names_are_matched_even_where_shapes_are_divided() -> None:
    divided = {**PLAIN, "head.weight": (1, 4)}
    assert match_names(divided, PLAIN) == {name: name for name in PLAIN}


def test_a_prefix_of_the_candidate_is_removed() -> None:
    lightning = {f"net.{name}": shape for name, shape in PLAIN.items()}
    assert match_names(lightning, PLAIN) == {f"net.{name}": name for name in PLAIN}
    assert match_names(PLAIN, lightning) == {name: f"net.{name}" for name in PLAIN}


def test_names_of_other_shapes_are_not_matched_by_their_end() -> None:
    candidate = {"net.head.weight": (3, 5), "net.head.bias": (2,)}
    assert match_names(candidate, PLAIN) == {"net.head.bias": "head.bias"}


def test_what_has_no_counterpart_is_left_out() -> None:
    assert match_names({"adapter.down": (4, 2)}, PLAIN) == {}
