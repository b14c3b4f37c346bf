"""The agent in a guest: starts programs, passes on what they say, and moves small files, over one
virtio-serial port. Works with the network cut. Messages are JSON, one a line.

From the host: {"id", "op", ...}; every one is answered by {"id", "ok", ...} or {"id", "error"}.
  start: argv, env, cwd -> pid          signal: pid, signal       input: pid, data (text; "" closes)
  put: path, data (base64), mode        get: path -> data         facts -> what the guest is
Unasked: {"event": "output", "pid", "text"} and {"event": "exit", "pid", "status"}.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import subprocess
import time
from pathlib import Path
from typing import Any

READ_BYTES = 65536
NOBODY_S = 0.02  # between two looks while the host's end is closed
DAX_SIZE = Path("/sys/bus/dax/devices/dax0.0/size")
REGION_SIZE = Path("/sys/bus/nd/devices/region0/size")
LINK_STATE = Path("/sys/class/infiniband/rxe0/ports/1/state")

Message = dict[str, Any]


class Agent:
    """Serves one host at a time over `port`, a file descriptor that does not block."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.poller = select.poll()
        self.poller.register(port, select.POLLIN)
        self.pending = b""
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.outputs: dict[int, int] = {}  # fd of a pipe -> pid

    def send(self, message: Message) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            try:
                data = data[os.write(self.port, data) :]
            except BlockingIOError:
                time.sleep(NOBODY_S)

    def run(self) -> None:
        while True:
            for fd, events in self.poller.poll(200 if self.outputs else 1000):
                if fd == self.port:
                    self.read_port(events)
                else:
                    self.read_output(fd)
            self.reap()

    def read_port(self, events: int) -> None:
        try:
            data = os.read(self.port, READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            if events & select.POLLHUP:
                time.sleep(NOBODY_S)
            return
        self.pending += data
        *lines, self.pending = self.pending.split(b"\n")
        for line in lines:
            self.handle(line)

    def handle(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            return  # the rest of a line from before the host's end was opened
        try:
            answer = getattr(self, "op_" + message["op"])(message) or {}
            self.send({"id": message["id"], "ok": True, **answer})
        except Exception as error:
            self.send({"id": message.get("id"), "error": f"{type(error).__name__}: {error}"})

    def read_output(self, fd: int) -> None:
        data = os.read(fd, READ_BYTES)
        pid = self.outputs[fd]
        if data:
            self.send({"event": "output", "pid": pid, "text": data.decode(errors="replace")})
            return
        self.poller.unregister(fd)
        del self.outputs[fd]
        os.close(fd)

    def reap(self) -> None:
        for pid, process in list(self.processes.items()):
            # All that it said goes first; a pipe that a grandchild keeps open is not waited for.
            if process.poll() is None:
                continue
            for fd in [fd for fd, owner in self.outputs.items() if owner == pid]:
                while fd in self.outputs and select.select([fd], [], [], 0)[0]:
                    self.read_output(fd)
                if fd in self.outputs:
                    self.poller.unregister(fd)
                    del self.outputs[fd]
                    os.close(fd)
            del self.processes[pid]
            self.send({"event": "exit", "pid": pid, "status": process.returncode})

    def op_start(self, message: Message) -> Message:
        reading, writing = os.pipe()
        try:
            process = subprocess.Popen(
                message["argv"],
                stdin=subprocess.PIPE,
                stdout=writing,
                stderr=writing,
                env={**os.environ, **message.get("env", {})},
                cwd=message.get("cwd", "/root"),
                start_new_session=True,
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self.processes[process.pid] = process
        self.outputs[reading] = process.pid
        self.poller.register(reading, select.POLLIN)
        return {"pid": process.pid}

    def op_signal(self, message: Message) -> None:
        if message["pid"] in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(message["pid"], message["signal"])

    def op_input(self, message: Message) -> None:
        stream = self.processes[message["pid"]].stdin
        assert stream is not None
        if message["data"]:
            stream.write(message["data"].encode())
            stream.flush()
        else:
            stream.close()

    def op_put(self, message: Message) -> None:
        path = Path(message["path"])
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab" if message.get("append") else "wb") as file:
            file.write(base64.b64decode(message["data"]))
        path.chmod(message.get("mode", 0o644))

    def op_get(self, message: Message) -> Message:
        return {"data": base64.b64encode(Path(message["path"]).read_bytes()).decode()}

    def op_facts(self, message: Message) -> Message:
        facts: Message = {
            "uptime_s": float(Path("/proc/uptime").read_text().split()[0]),
            "kernel": os.uname().release,
        }
        if DAX_SIZE.exists():
            size = int(DAX_SIZE.read_text())
            facts["window_bytes"] = size
            facts["window_offset"] = int(REGION_SIZE.read_text()) - size
        if LINK_STATE.exists():
            facts["link_state"] = LINK_STATE.read_text().strip()
        return facts


def open_port() -> int:
    """The one virtio-serial port; its driver may still be at work."""
    while True:
        for path in Path("/dev").glob("vport*p1"):
            return os.open(path, os.O_RDWR | os.O_NONBLOCK)
        time.sleep(NOBODY_S)


if __name__ == "__main__":
    Agent(open_port()).run()
