from itertools import pairwise

from meshwright.workloads.text.text_generated import FACTOR, NOISE, SHIFT, WORDS, text, word


def test_words_are_different_and_nearly_always_follow_the_rule() -> None:
    numbers = {word(number): number for number in range(WORDS)}
    assert len(numbers) == WORDS
    made = [numbers[one] for one in text(3, 4000).split()]
    assert len(made) == 4000
    ruled = sum((FACTOR * a + SHIFT) % WORDS == b for a, b in pairwise(made)) / 3999
    assert 1 - 1.3 * NOISE < ruled < 1 - 0.7 * NOISE
    assert text(3, 50) == text(3, 50) != text(4, 50)
