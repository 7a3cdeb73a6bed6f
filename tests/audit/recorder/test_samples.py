"""Digests of samples do not depend on the division of a batch, and do depend on every value."""

import torch

from meshwright.audit.recorder.samples import digest_elements, digest_rows, tensors_of

BATCH = torch.randint(0, 50, (8, 5), generator=torch.Generator().manual_seed(0))


def test_rows_keep_their_digest_wherever_they_are() -> None:
    order = torch.tensor([3, 1, 7, 0, 2, 6, 4, 5])
    digests = digest_rows(BATCH)
    assert digest_rows(BATCH[order]) == [digests[row] for row in order]
    assert [*digest_rows(BATCH[:3]), *digest_rows(BATCH[3:])] == digests
    changed = BATCH.clone()
    changed[2, 4] += 1
    assert [row for row in range(8) if digest_rows(changed)[row] != digests[row]] == [2]


def test_elements_add_up_however_they_are_divided() -> None:
    halves = sum(int(digest_elements(part)) for part in BATCH.chunk(2, dim=1)) % 2**64
    assert str(halves) == digest_elements(BATCH)
    assert digest_elements(BATCH + 1) != digest_elements(BATCH)


def test_a_cast_to_a_shorter_type_changes_no_digest() -> None:
    images = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(0))
    assert digest_rows(images.to(torch.bfloat16)) == digest_rows(images) == digest_rows(images.double())


def test_tensors_inside_arguments_are_found() -> None:
    found = dict(tensors_of(({"ids": BATCH, "options": [None, BATCH]}, 3)))
    assert set(found) == {"0.ids", "0.options.1"}
