"""Plain values come back as they were, other values are refused with their place, and damaged texts are recognized."""

import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshwright.messages.plain_values import (
    _READERS,
    _TORCH_DTYPES,
    DamagedValueError,
    NotPlainError,
    from_json,
    from_text,
    to_json,
    to_text,
)

TENSOR_DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.complex128, torch.bool, torch.int8, torch.uint8, torch.int64, torch.uint16),
]
NUMPY_DTYPES = ["|b1", "|i1", "|u1", "<i8", ">i4", "<u2", "<f2", "<f4", "<f8", "<c8", "<c16"]


def same(one: Any, other: Any) -> bool:
    """Whether both are of the same type and equal. NaN equals NaN, and the order of keys counts."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and _bytes(one) == _bytes(other)
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        factories = [getattr(value, "default_factory", None) for value in (one, other)]
        return factories[0] is factories[1] and same(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple | deque):
        lengths_equal = len(one) == len(other) and getattr(one, "maxlen", None) == getattr(other, "maxlen", None)
        return lengths_equal and all(map(same, one, other))
    if isinstance(one, float | complex | set | frozenset):
        return _words(one) == _words(other)
    return bool(one == other)


def _words(value: Any) -> str:
    """The value's type and content. It is the same text for sets whose members are the same, NaN included."""
    is_set, is_container = isinstance(value, set | frozenset), isinstance(value, set | frozenset | tuple)
    content = [_words(item) for item in value] if is_container else repr(value)
    return f"{type(value).__name__}({sorted(content) if is_set else content})"


def _bytes(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype, shape = draw(st.sampled_from(TENSOR_DTYPES)), draw(st.lists(st.integers(0, 3), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    data = bytes(byte % 2 for byte in data) if dtype == torch.bool else data
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    dtype, shape = np.dtype(draw(st.sampled_from(NUMPY_DTYPES))), draw(st.lists(st.integers(0, 3), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    return np.frombuffer(draw(st.binary(min_size=size, max_size=size)), dtype).reshape(shape)


NUMBERS = st.integers(-(2**200), 2**200) | st.floats()
KEYS = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
NUMPY_NUMBERS = arrays().filter(lambda array: array.size).map(lambda array: array.flat[0])
SINGLE = st.one_of(
    *(KEYS, st.complex_numbers(), tensors(), arrays(), NUMPY_NUMBERS),
    *(st.sampled_from(TENSOR_DTYPES), st.sampled_from(["cpu", "cuda:1", "meta"]).map(torch.device)),
    *(st.lists(st.integers(0, 9), max_size=3).map(torch.Size), st.text("abc/.", min_size=1).map(Path)),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    items, mapping = st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=4)
    return st.one_of(
        *(items, items.map(tuple), st.sets(KEYS, max_size=4), st.builds(deque, items, st.none() | st.integers(0, 5))),
        *(st.dictionaries(st.text(), inner, max_size=4), mapping, mapping.map(Counter), mapping.map(OrderedDict)),
        st.builds(defaultdict, st.sampled_from([int, float, list, dict, set]), mapping),
    )


VALUES = st.recursive(SINGLE, containers, max_leaves=8)


@given(VALUES)
def test_every_plain_value_comes_back_as_it_was(value: Any) -> None:
    text = to_text(value)
    assert same(from_text(text), value)
    assert same(from_text(text.encode()), value)
    assert same(from_json(json.loads(json.dumps(to_json(value)))), value)


@pytest.mark.parametrize("dtype", [dtype for dtype in _TORCH_DTYPES.values() if "q" not in str(dtype)], ids=str)
def test_tensors_of_every_dtype_that_is_not_quantized(dtype: torch.dtype) -> None:
    tensor = torch.arange(2 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    assert same(from_text(to_text(tensor)), tensor)


def test_views_are_written_in_the_order_of_their_elements() -> None:
    grid = torch.arange(12.0).reshape(3, 4)
    turned = torch.tensor([[1 + 2j, 3 - 4j]]).conj()
    for view in (grid.t(), grid[1:, ::2], grid[:1, 0], torch.ones(1).expand(3), turned, turned.imag, torch.tensor(3)):
        assert torch.equal(from_text(to_text(view)), view)
    assert np.array_equal(from_text(to_text(grid.numpy().T)), grid.numpy().T)


def test_a_parameter_is_read_as_a_tensor_that_can_be_changed() -> None:
    read = from_text(to_text(torch.nn.Parameter(torch.ones(2))))
    assert type(read) is Tensor
    assert not read.requires_grad
    assert torch.equal(read.add_(1), torch.full((2,), 2.0))
    array = from_text(to_text(np.ones(2)))
    array += 1
    assert array.tolist() == [2, 2]


def test_a_set_is_written_in_the_same_order_in_every_process() -> None:
    assert to_text({"b", "a", "c"}) == to_text({"c", "b", "a"}) == '{"set":["a","b","c"]}'


class Colour(enum.IntEnum):
    RED = 1


class Point(NamedTuple):
    x: int


@dataclass
class Settings:
    lr: float


class Scores(dict[str, float]):
    pass


class OtherTensor(Tensor):
    pass


HERE = "tests.messages.test_plain_values"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "it is a builtins.object"),
        ({"a": [1, 2, object()]}, "['a'][2] is a builtins.object"),
        ({1: (0, {"b": Settings(0.1)})}, f"[1][1]['b'] is a {HERE}.Settings"),
        ({Colour.RED: 1}, f"a key of it is a {HERE}.Colour"),
        ({"a": {Point(1): 1}}, f"a key of ['a'] is a {HERE}.Point"),
        ([Colour.RED], f"[0] is a {HERE}.Colour"),
        (Point(1), f"it is a {HERE}.Point"),
        (Scores(a=1.0), f"it is a {HERE}.Scores"),
        (Counter({Colour.RED: 1}), f"a key of it is a {HERE}.Colour"),
        (torch.ones(2).as_subclass(OtherTensor), f"it is a {HERE}.OtherTensor"),
        (torch.nn.Linear(1, 1), "it is a torch.nn.modules.linear.Linear"),
        (len, "it is a builtins.builtin_function_or_method"),
        (int, "it is a builtins.type"),
        (bytearray(b"a"), "it is a builtins.bytearray"),
        ({"f": defaultdict(Scores)}, f"['f'] is a defaultdict of <class '{HERE}.Scores'>"),
        ([np.array([object()])], "[0] is a NumPy array of object"),
        (np.array(["a"]), "it is a NumPy array of <U1"),
        (np.datetime64("2020-01-01"), "it is a NumPy array of datetime64[D]"),
        (np.zeros(2, dtype="i4,f4"), "it is a NumPy array of [('f0', '<i4'), ('f1', '<f4')]"),
        ([torch.ones(2).to_sparse()], "[0] is a tensor that is not dense"),
        (torch.ones(2, 2).to_mkldnn(), "it is a tensor that is not dense"),
        (torch.empty(2, device="meta"), "it is a tensor that is not dense"),
        (10**5000, "it cannot be written: Exceeds the limit"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_what_is_not_plain_is_refused_with_its_place(value: Any, message: str) -> None:
    with pytest.raises(NotPlainError) as error:
        to_text(value)
    assert str(error.value).startswith(message)


def test_a_place_can_begin_with_a_name() -> None:
    with pytest.raises(NotPlainError, match=r"^the optimizer's state\['a'\] is a builtins.object$"):
        to_json({"a": object()}, "the optimizer's state")


def test_values_within_values() -> None:
    value: Any = 1
    for _ in range(50):
        value = {"a": (value, [value])} if isinstance(value, int) else {"a": ([value],)}
    assert from_text(to_text(value)) == value
    for _ in range(100_000):
        value = [value]
    with pytest.raises(NotPlainError, match="it has too many levels, or contains itself"):
        to_text(value)
    itself: list[Any] = []
    itself.append(itself)
    with pytest.raises(NotPlainError, match="contains itself"):
        to_text({"a": itself})


def tensor_text(**changes: Any) -> str:
    return json.dumps({"tensor": {"dtype": "uint8", "shape": [3], "bytes": "AAAA", **changes}})


def array_text(**changes: Any) -> str:
    return json.dumps({"array": {"dtype": "|u1", "shape": [3], "bytes": "AAAA", **changes}})


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "nonsense", "[1", '{"dict":{}', "NaN", "[Infinity]", "-Infinity", "1" * 5000, b"\xff\xfe\x00"),
        *("[" * 100_000, '{"tuple":[' * 100_000, "[" * 5000 + "]" * 5000, '{"tuple":[' * 2000 + "]}" * 2000),
        *("{}", '{"a":1,"b":2}', '{"unknown":1}', '{"__reduce__":[]}', '{"dict":{"a":{"b":{"c":1}}}}'),
        *('{"dict":[]}', '{"dict":1}', '{"pairs":{"ab":1}}', '{"pairs":["ab"]}', '{"pairs":[[1]]}', '{"pairs":1}'),
        *('{"pairs":[[[],1]]}', '{"set":[[]]}', '{"set":"ab"}', '{"frozenset":1}', '{"tuple":{}}', '{"tuple":"ab"}'),
        *('{"counter":[1]}', '{"ordered":"a"}', '{"deque":[]}', '{"deque":[-1,[]]}', '{"deque":["a",[]]}'),
        *('{"defaultdict":["eval",[]]}', '{"defaultdict":[[],[]]}', '{"defaultdict":["int"]}', '{"defaultdict":1}'),
        *('{"float":"1"}', '{"float":[]}', '{"complex":[]}', '{"complex":["a","1"]}', '{"complex":[null,1]}'),
        *('{"bytes":"a"}', '{"bytes":"äöü"}', '{"bytes":"a?=="}', '{"bytes":1}', '{"path":1}', '{"path":null}'),
        *('{"dtype":"nn"}', '{"dtype":"_dynamo"}', '{"dtype":[]}', '{"device":"mars"}', '{"device":-1}'),
        *('{"size":["a"]}', '{"size":1}', '{"size":[99999999999999999999]}', '{"tensor":[]}', '{"tensor":{}}'),
        *(tensor_text(shape=[4]), tensor_text(shape=[-3]), tensor_text(shape=[True] * 3), tensor_text(shape="3")),
        *(tensor_text(shape=[3.0]), tensor_text(shape=[3, 10**30]), tensor_text(shape=[0, 10**30], bytes="")),
        *(tensor_text(dtype="int16"), tensor_text(dtype="Tensor"), tensor_text(dtype=1), tensor_text(bytes=None)),
        *(array_text(shape=[4]), array_text(dtype="|O8"), array_text(dtype="O"), array_text(dtype="<f3")),
        *(array_text(dtype="<M8"), array_text(dtype="i1,i1"), array_text(dtype="(3,)u1"), array_text(dtype=None)),
        *('{"array":1}', '{"numpy_number":{"dtype":"<f8","shape":[],"bytes":"AAAA"}}', '{"numpy_number":1}'),
    ],
    ids=lambda text: repr(text[:40]),
)
def test_damaged_texts_are_recognized(text: str | bytes) -> None:
    with pytest.raises(DamagedValueError) as error:
        from_text(text)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


@given(VALUES, st.integers(min_value=0), st.integers(0, 127), st.sampled_from(["change", "remove", "insert", "cut"]))
def test_a_damaged_text_is_recognized_or_read_as_a_plain_value(
    value: Any, position: int, code: int, damage: str
) -> None:
    text = to_text(value)
    position %= len(text)
    middle = {"change": chr(code), "remove": "", "insert": chr(code) + text[position], "cut": ""}[damage]
    with suppress(DamagedValueError):
        read = from_text(text[:position] + middle + ("" if damage == "cut" else text[position + 1 :]))
        assert same(from_text(to_text(read)), read)


JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS.filter(math.isfinite) | st.text(max_size=5) | st.sampled_from(["cpu", "AAAA"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(sorted(_READERS)), inner, min_size=1, max_size=1)
        | st.fixed_dictionaries({"dtype": st.sampled_from(["int8", "<f4"]) | inner, "shape": inner, "bytes": inner})
    ),
    max_leaves=10,
)


@given(JSON)
def test_any_json_is_refused_or_read_as_a_plain_value(content: Any) -> None:
    with suppress(DamagedValueError):
        read = from_json(content)
        assert same(from_json(to_json(read)), read)
