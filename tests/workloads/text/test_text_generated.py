from itertools import pairwise

from meshwright.workloads.text.text_generated import FACTOR, NOISE, SHIFT, WORDS, generated_text, generated_word


def test_words_are_different_and_nearly_always_follow_the_rule() -> None:
    numbers = {generated_word(number): number for number in range(WORDS)}
    assert len(numbers) == WORDS
    text = [numbers[word] for word in generated_text(3, 4000).split()]
    assert len(text) == 4000
    rule_share = sum((FACTOR * a + SHIFT) % WORDS == b for a, b in pairwise(text)) / 3999
    assert 1 - 1.3 * NOISE < rule_share < 1 - 0.7 * NOISE
    assert generated_text(3, 50) == generated_text(3, 50) != generated_text(4, 50)
