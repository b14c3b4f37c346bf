"""Bytes to text and stop strings: independent of how the text is cut into tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.smartnic.detokenizer import Detokenizer, StopSet

BYTE_TABLE = [bytes([value]) for value in range(256)]
small_text = st.text(alphabet="abcé€😀", max_size=30)
stop_strings = st.lists(st.text(alphabet="abc€", min_size=1, max_size=5), min_size=1, max_size=4)


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    """`data` cut at the given places."""
    places = sorted({cut % (len(data) + 1) for cut in cuts})
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


def run(
    pieces: list[bytes], stops: list[str] | None, include_stop: bool = False, min_tokens: int = 0
) -> tuple[list[str], bool]:
    """The text that each piece released, the flush last; and whether a stop ended it."""
    stop_set = StopSet(stops) if stops else None
    detokenizer = Detokenizer(pieces, stop_set, include_stop, min_tokens)
    texts = []
    for token in range(len(pieces)):
        text, stopped = detokenizer.push(token)
        texts.append(text)
        if stopped:
            return texts, True
    text, stopped = detokenizer.flush()
    return [*texts, text], stopped


def expected(text: str, stops: list[str], include_stop: bool) -> tuple[str, bool]:
    """The stop that is complete first wins, the longest of those that end together."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(map(len, ending))
            return text[: end if include_stop else end - longest], True
    return text, False


@given(st.binary(max_size=60), st.lists(st.integers(0, 100), max_size=20))
def test_any_bytes_in_any_pieces_read_as_the_whole(data: bytes, cuts: list[int]) -> None:
    texts, _ = run(pieces_of(data, cuts), None)
    assert "".join(texts) == data.decode("utf-8", "replace")


@given(small_text, st.lists(st.integers(0, 200), max_size=20))
def test_a_divided_character_is_never_shown_in_part(text: str, cuts: list[int]) -> None:
    texts, _ = run(pieces_of(text.encode(), cuts), None)
    assert "".join(texts) == text
    assert not any("\ufffd" in piece for piece in texts)


@given(small_text, stop_strings, st.lists(st.integers(0, 200), max_size=20), st.booleans())
def test_the_stop_does_not_depend_on_the_pieces(
    text: str, stops: list[str], cuts: list[int], include_stop: bool
) -> None:
    texts, stopped = run(pieces_of(text.encode(), cuts), stops, include_stop)
    assert ("".join(texts), stopped) == expected(text, stops, include_stop)


@given(small_text, stop_strings)
def test_no_more_is_held_back_than_may_become_a_stop(text: str, stops: list[str]) -> None:
    stop_set = StopSet(stops)
    detokenizer = Detokenizer([text.encode()], stop_set)
    shown, stopped = detokenizer.push(0)
    if not stopped:
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_a_stop_over_four_tokens_leaks_nothing() -> None:
    texts, stopped = run([b"DEF", b"G", b"HI", b"J", b"K"], ["DEFGHIJ"])
    assert stopped
    assert "".join(texts) == ""
    assert len(texts) == 4


def test_a_failed_match_releases_what_was_held() -> None:
    assert run([b"DEF", b"X"], ["DEFG"]) == (["", "DEFX", ""], False)


def test_a_stop_that_is_a_prefix_of_another_ends_first() -> None:
    assert run([b"xABCD"], ["ABCD", "AB"]) == (["x"], True)


def test_the_first_tokens_may_contain_a_stop_under_min_tokens() -> None:
    assert run([b"AB", b"AB", b"c", b"AB"], ["AB"], min_tokens=2) == (["AB", "AB", "c", ""], True)


def test_a_token_outside_the_table_adds_nothing() -> None:
    detokenizer = Detokenizer(BYTE_TABLE)
    assert detokenizer.push(-1) == ("", False)
    assert detokenizer.push(10**9) == ("", False)
