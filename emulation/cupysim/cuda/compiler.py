"""Compilation errors under CuPy's name."""

from __future__ import annotations


class CompileException(Exception):  # noqa: N818 - CuPy's name
    """The compiler refused a source; the text is its own output."""

    def __init__(self, message: str, source: str, name: str, options: tuple[str, ...]) -> None:
        super().__init__(message, source, name, options)
        self._message = message
        self.source = source
        self.name = name
        self.options = options

    def get_message(self) -> str:
        return self._message

    def __str__(self) -> str:
        return self._message
