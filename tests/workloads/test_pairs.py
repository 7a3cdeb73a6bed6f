import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from meshwright.errors import InputError
from meshwright.workloads.pairs import pairs
from meshwright.workloads.text.json_lines import hash_word
from meshwright.workloads.towers import TwoTowers
from tests.workloads.text.shares import assert_independent_of_ranks


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # more would wait for each other
    yield
    torch.set_num_threads(before)


def write_pairs(folder: Path, *lines: object) -> str:
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


def test_pairs_hold_texts_or_token_numbers(tmp_path: Path) -> None:
    root = write_pairs(tmp_path, {"query": "red", "document": [3, 4, 5]}, {"query": [7], "document": "a red b"})
    dataset = pairs(root=root, vocabulary=100, query_length=2, document_length=2)
    query, document, number = dataset[1]
    assert (query.tolist(), document.tolist(), number) == ([7, 0], [hash_word("a", 100), hash_word("red", 100)], 1)
    assert dataset[0][0].tolist() == [hash_word("red", 100), 0]
    assert dataset[0][1].tolist() == [3, 4]
    assert len(pairs(root=root, limit=1)) == 1


def test_a_damaged_line_is_an_error_or_skipped_with_a_warning(tmp_path: Path) -> None:
    good = {"query": [1], "document": [150]}
    root = write_pairs(tmp_path, good, {"query": [1]}, {"query": [150], "document": [1]}, good)
    vocabularies: dict[str, Any] = {"vocabulary": 100, "document_vocabulary": 200}
    with pytest.raises(InputError, match=r"train\.jsonl, line 2: 'document' is neither"):
        pairs(root=root, **vocabularies)
    with pytest.warns(UserWarning, match=r"line 2: .* \(and 1 more\)"):
        assert len(pairs(root=root, **vocabularies, damaged="skip")) == 2


def test_generated_pairs_are_read_by_the_same_loader_and_can_be_learned() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocabulary": 1000, "query_length": 4, "document_length": 12}
    dataset, unseen = pairs(synthetic=True, **sizes), pairs("val", synthetic=True, **sizes)
    assert torch.equal(pairs(root=str(dataset.lines.path.parent), **sizes)[5][1], dataset[5][1])
    model = TwoTowers(1000, 32, (64,), 32)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for query, document, _ in islice(DataLoader(dataset, 100), 30):
        queries, documents = model(query, document)
        optimizer.zero_grad()
        F.cross_entropy(queries @ documents.T / 0.05, torch.arange(100)).backward()
        optimizer.step()
    query, document, _ = next(iter(DataLoader(unseen, 50)))
    queries, documents = model(query, document)
    assert ((queries @ documents.T).argmax(1) == torch.arange(50)).float().mean() > 0.5


def test_pairs_are_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    root = write_pairs(tmp_path, *({"query": [n], "document": [n, n]} for n in range(1, 31)))
    assert_independent_of_ranks(pairs(root=root, vocabulary=100))


def test_the_error_for_missing_data_names_both_remedies() -> None:
    with pytest.raises(InputError, match=r"val\.jsonl.*data\.root=FOLDER.*data\.synthetic=true"):
        pairs("val")


@pytest.mark.parametrize("vocabulary", [1, 0, -3, 2.5])
def test_a_vocabulary_without_words_is_refused(vocabulary: Any) -> None:
    with pytest.raises(InputError, match=r"the vocabulary of a query is .*at least 2"):
        pairs(synthetic=True, vocabulary=vocabulary)
