"""Many streams at once through the whole stack, each exactly what it should be."""

from __future__ import annotations

from typing import Any

from compose.stack import ContainerStack
from tests.e2e.client import run_streams
from tests.e2e.report import Report
from tests.http_client import canary, wait_idle

NUM_STREAMS = 32
NUM_TOKENS = 256  # of one byte each


def say(text: str, **more: Any) -> dict[str, Any]:
    """A request that the scripted model answers with `text`."""
    return {"prompt": f"say:<|sep|>{text}", "temperature": 0, "max_tokens": 4096, **more}


def test_concurrent_streams_are_exact(scripted: ContainerStack, report: Report) -> None:
    texts = [f"{number:03} " * (NUM_TOKENS // 4) for number in range(NUM_STREAMS)]
    run_streams(scripted.url, [say("warm") for _ in texts])
    replies = run_streams(scripted.url, [say(text) for text in texts])
    assert [reply.text for reply in replies] == texts
    assert all(reply.ends == ["stop"] for reply in replies)
    report.measure(replies)


def test_more_requests_than_slots_end_once_each(scripted: ContainerStack) -> None:
    replies = run_streams(scripted.url, [say("x" * 200) for _ in range(200)])
    assert all(len(reply.ends) == 1 for reply in replies)
    assert {reply.ends[0] for reply in replies} <= {"stop", "status 503"}
    assert all(reply.text == "x" * 200 for reply in replies if reply.is_complete)
    wait_idle(scripted.url)
    canary(scripted.url)
