"""From token ids to text that may be shown: whole UTF-8 characters, no stop strings.

All three classes are incremental and independent of how the text is cut into tokens: feeding the
same bytes in other pieces gives the same text and the same stop.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections import deque
from collections.abc import Sequence


class Utf8Decoder:
    """Bytes in, whole characters out; an incomplete character waits for its rest.

    Invalid bytes become U+FFFD exactly as in ``bytes.decode("utf-8", "replace")`` of the whole.
    """

    __slots__ = ("_pending",)

    def __init__(self) -> None:
        self._pending = b""

    def push(self, data: bytes) -> str:
        if self._pending:
            data = self._pending + data
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    @property
    def is_incomplete(self) -> bool:
        """A character has begun that is not whole yet."""
        return bool(self._pending)

    def flush(self) -> str:
        """The end of the stream: what is incomplete now stays so."""
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text


class StopSet:
    """The stop strings of a request as an Aho-Corasick automaton; immutable, shared by choices.

    Nodes are numbers, 0 is the root. `depth[node]` is the length of the longest head of any stop
    string that the text read so far ends with; `match[node]` is the length of the longest stop
    string that it ends with, 0 if none; `fail[node]` is the node of its longest proper suffix.
    """

    __slots__ = ("depth", "fail", "match", "next")

    def __init__(self, stops: Sequence[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.match = [0]
        for stop in stops:
            self._insert(stop)
        self.fail = [0] * len(self.next)
        self._link()

    def _insert(self, stop: str) -> None:
        node = 0
        for char in stop:
            child = self.next[node].get(char)
            if child is None:
                child = len(self.next)
                self.next[node][char] = child
                self.next.append({})
                self.depth.append(self.depth[node] + 1)
                self.match.append(0)
            node = child
        self.match[node] = len(stop)

    def _link(self) -> None:
        queue = deque(self.next[0].values())
        while queue:
            node = queue.popleft()
            self.match[node] = self.match[node] or self.match[self.fail[node]]
            for char, child in self.next[node].items():
                self.fail[child] = self.step(self.fail[node], char)
                queue.append(child)

    def step(self, node: int, char: str) -> int:
        """The node after one more character."""
        following = self.next
        while True:
            child = following[node].get(char)
            if child is not None:
                return child
            if node == 0:
                return 0
            node = self.fail[node]


class StopMatcher:
    """Finds the stop string that is complete first; of those that end together the longest.

    Text that may be the head of a stop string is held back until the match fails.
    """

    __slots__ = ("_held", "_include", "_node", "_stops")

    def __init__(self, stops: StopSet, include_stop: bool = False) -> None:
        self._stops = stops
        self._include = include_stop
        self._node = 0
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Text that is certain now, and whether a stop string is complete: then all is over."""
        stops, node = self._stops, self._node
        step, match = stops.step, stops.match
        for position, char in enumerate(text):
            node = step(node, char)
            if match[node]:
                seen = self._held + text[: position + 1]
                self._held, self._node = "", 0
                return seen if self._include else seen[: len(seen) - match[node]], True
        self._node = node
        seen = self._held + text
        certain = len(seen) - stops.depth[node]
        self._held = seen[certain:]
        return seen[:certain], False

    def flush(self) -> str:
        """The end of the sequence: what was held back was no stop string."""
        held, self._held, self._node = self._held, "", 0
        return held


class Detokenizer:
    """The text of one sequence.

    table: bytes of every token id. stops: stop strings, or None. min_tokens: the text of
    this many first tokens is not searched for stop strings.
    """

    __slots__ = ("_decoder", "_free_tokens", "_matcher", "_table")

    def __init__(
        self,
        table: Sequence[bytes],
        stops: StopSet | None = None,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._table = table
        self._decoder = Utf8Decoder()
        self._matcher = StopMatcher(stops, include_stop) if stops is not None else None
        self._free_tokens = min_tokens

    def push(self, token: int) -> tuple[str, bool]:
        """Text that is certain now, and whether a stop string ended the sequence."""
        data = self._table[token] if 0 <= token < len(self._table) else b""
        text = self._decoder.push(data)
        if self._matcher is None:
            return text, False
        if self._free_tokens > 0:
            self._free_tokens -= 1
            return text, False
        return self._matcher.push(text)

    def flush(self) -> tuple[str, bool]:
        """The text still held back at the end of the sequence, and whether a stop completed."""
        text = self._decoder.flush()
        if self._matcher is None:
            return text, False
        certain, stopped = self._matcher.push(text)
        return (certain, True) if stopped else (certain + self._matcher.flush(), False)
