"""Random damages to files and to command lines, as hypothesis draws them."""

from collections.abc import Callable

from hypothesis import strategies as st

BytesDamage = Callable[[bytes], bytes]
WordsDamage = Callable[[list[str]], list[str]]

# Values that nobody means. None of them is a path outside of the working folder, because runs are written to paths.
HOSTILE = (
    *("0", "-1", "1e308", "-1e308", "1e-320", ".inf", "-.inf", ".nan", "10", "2147483648", str(10**18), str(10**40)),
    *("0x" + "f" * 300, "9" * 5000, "1:1:1", "true", "null", "''", "~", "~/x", "x" * 300, "x/" * 2500, "[]", "{}"),
    *("[[[[1]]]]", "{a: {b: {c: 1}}}", "&a [*a]", "[" * 200, "*nothing", "!!binary aGk=", "!!timestamp x", "!!int ''"),
    *("🙂", '"\\0"', '"\\n\\n"', "\x1b[31m", "2026-13-45", "%", "@", "- x", "? y", "a: b: c", "<<: 3", "!x 1", "'"),
    *("[1, 2, 3]", "{call: 3}", "{call: 'os:nothing'}", "{call: x.y.z}", "tests.train.toy:Nett", "auto", "none", "1e3"),
)
HOSTILE_WORDS = (
    *("--nothing", "--jsn", "-x", "--", "-", "", " ", "--set", "--set=", "--set==", "--plan", "--top=0", "--steps=-1"),
    *("--ranks=1000000000", "--top=1000000000000", "--limit=-1", "--record=1e9", "--step=²", "--step=" + "9" * 5000),
    *("--cluster=999999x999999xH100", "--cluster=", "--cluster=🙂", "--cluster=8xH100@0G", "--resume=/dev/null"),
    *("--to=int4", "--output=/dev/null/x", "--plan=/dev/null", "--plan=.", "~nobodyhere", "x" * 300, "x/" * 2500),
    *("--set=train.seed=" + "9" * 41, "--set=a.b.c=[", "--set=plan=3", "--set=" + "a." * 300 + "b=1", "--set=\udcff=1"),
    *("--set=optimizer.groups=[3]", "--set=data=3", "--set=train=[]", "--set=model.call=3", "--set=data.parts=0"),
)


def _at(fraction: float, length: int) -> int:
    return int(fraction * length)


def _flip(where: float, bit: int) -> BytesDamage:
    def damage(content: bytes) -> bytes:
        changed = bytearray(content or b"\0")
        changed[_at(where, len(changed))] ^= 1 << bit
        return bytes(changed)

    return damage


def _delete(where: float, size: int) -> BytesDamage:
    return lambda content: content[: _at(where, len(content))] + content[_at(where, len(content)) + size :]


def _duplicate(where: float, size: int) -> BytesDamage:
    def damage(content: bytes) -> bytes:
        begin = _at(where, len(content))
        return content[: begin + size] + content[begin:]

    return damage


def _truncate(where: float) -> BytesDamage:
    return lambda content: content[: _at(where, len(content))]


def _swap_lines(first: float, second: float) -> BytesDamage:
    def damage(content: bytes) -> bytes:
        lines = content.split(b"\n")
        one, other = _at(first, len(lines)), _at(second, len(lines))
        lines[one], lines[other] = lines[other], lines[one]
        return b"\n".join(lines)

    return damage


def _replace_value(where: float, value: str) -> BytesDamage:
    """Replaces what follows the colon of a line: `seed: 3` becomes `seed: <value>`."""

    def damage(content: bytes) -> bytes:
        lines = content.split(b"\n")
        numbers = [number for number, line in enumerate(lines) if b":" in line] or [0]
        number = numbers[_at(where, len(numbers))]
        lines[number] = lines[number].partition(b":")[0] + b": " + value.encode()
        return b"\n".join(lines)

    return damage


_SHARE = st.floats(0, 1, exclude_max=True)
_SIZE = st.integers(1, 40)
BYTES_DAMAGES = st.one_of(
    st.builds(_flip, _SHARE, st.integers(0, 7)),
    st.builds(_delete, _SHARE, _SIZE),
    st.builds(_duplicate, _SHARE, _SIZE),
    st.builds(_truncate, _SHARE),
)
TEXT_DAMAGES = st.one_of(
    st.builds(_replace_value, _SHARE, st.sampled_from(HOSTILE)),
    st.builds(_replace_value, _SHARE, st.text(st.characters(exclude_categories=["Cs"]), max_size=8)),
    st.builds(_swap_lines, _SHARE, _SHARE),
    BYTES_DAMAGES,
)


def _change_word(where: float, word: str) -> WordsDamage:
    def damage(words: list[str]) -> list[str]:
        position = _at(where, len(words))
        return [*words[:position], word, *words[position + 1 :]]

    return damage


def _insert_word(where: float, word: str) -> WordsDamage:
    return lambda words: [*words[: _at(where, len(words))], word, *words[_at(where, len(words)) :]]


def _delete_word(where: float) -> WordsDamage:
    return lambda words: [word for number, word in enumerate(words) if number != _at(where, len(words))]


def _swap_words(first: float, second: float) -> WordsDamage:
    def damage(words: list[str]) -> list[str]:
        swapped = list(words)
        if not words:
            return words
        one, other = _at(first, len(words)), _at(second, len(words))
        swapped[one], swapped[other] = words[other], words[one]
        return swapped

    return damage


WORDS_DAMAGES = st.one_of(
    st.builds(_change_word, _SHARE, st.sampled_from(HOSTILE_WORDS)),
    st.builds(_insert_word, _SHARE, st.sampled_from(HOSTILE_WORDS)),
    st.builds(_delete_word, _SHARE),
    st.builds(_swap_words, _SHARE, _SHARE),
)
