"""One burner process: ``python burner.py LIBRARY FUNCTION SECONDS BYTES``; prints the rounds done.

Run as a file, without the package, so that a burner is small and starts at once.
"""

from __future__ import annotations

import ctypes
import sys

TAKES_BYTES = ("burn_cache", "burn_memory")


def main(words: list[str]) -> int:
    """Burn, then say how many rounds it was."""
    library, name, seconds, num_bytes = words
    function = getattr(ctypes.CDLL(library), name)
    function.restype = ctypes.c_uint64
    print("burning", flush=True)
    arguments = [ctypes.c_uint64(int(float(seconds) * 1e9))]
    if name in TAKES_BYTES:
        arguments.append(ctypes.c_uint64(int(num_bytes)))
    print(function(*arguments), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
