"""cupy.cuda.Graph: captured work that can be launched again, also from the device."""

from __future__ import annotations

from typing import Any

from emulation.cupysim import client as client_module
from emulation.cupysim.cuda.stream import Stream, current_stream_ptr


class Graph:
    """Made by Stream.end_capture. `graphExec` is the handle that a kernel gives to
    cudaGraphLaunch: in the simulator every graph is device-launchable. Memory that the graph
    uses must be kept alive by its arrays."""

    graphExec: int  # noqa: N815 - CuPy's name
    _client: client_module.Client

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("a Graph is made by stream capture, with Stream.end_capture()")

    @classmethod
    def of_handle(cls, handle: int) -> Graph:
        graph = cls.__new__(cls)
        graph.graphExec = handle
        graph._client = client_module.current()
        return graph

    def __del__(self) -> None:
        if getattr(self, "graphExec", 0):
            self._client.discard("graph_destroy", self.graphExec)

    def launch(self, stream: Stream | None = None) -> None:
        ptr = current_stream_ptr() if stream is None else stream.ptr
        self._client.post("graph_launch", ptr, self.graphExec)

    def upload(self, stream: Stream | None = None) -> None:
        """A graph is where it runs from the start; kept for programs that upload ahead."""
