"""Whether the device lives, judged by its own heartbeat and by what it delivers."""

from __future__ import annotations

from engine.protocol import EngineState


class Health:
    """Life signs of the device. Times are seconds of one monotonic clock, given by the caller.

    timeout_s: a heartbeat that has not advanced for so long means that the device is lost.
    """

    def __init__(self, timeout_s: float, now_s: float) -> None:
        self._timeout_s = timeout_s
        self._alive_s = now_s
        self._heartbeat: int | None = None
        self._state = EngineState.EMPTY
        self._link_error: str | None = None

    def observe(self, heartbeat: int, state: int, now_s: float) -> None:
        """A snapshot was read."""
        if heartbeat != self._heartbeat:
            self._heartbeat = heartbeat
            self._alive_s = now_s
        if state in EngineState._value2member_map_:
            self._state = EngineState(state)
        self._link_error = None

    def tokens_arrived(self, now_s: float) -> None:
        """Tokens are a life sign too: a device in one long step may beat late."""
        self._alive_s = now_s

    def link_failed(self, error: str) -> None:
        """Reading the window failed; the next successful snapshot takes this back."""
        self._link_error = error

    def age_s(self, now_s: float) -> float:
        """Seconds since the last life sign."""
        return max(0.0, now_s - self._alive_s)

    def lost_reason(self, now_s: float) -> str | None:
        """Why nothing can be expected of the device, or None."""
        if self._link_error is not None:
            return f"the link failed: {self._link_error}"
        if self._state in (EngineState.STOPPED, EngineState.FATAL):
            return f"the device's scheduler is in state {self._state.name}"
        age_s = self.age_s(now_s)
        if age_s > self._timeout_s:
            return f"the device's heartbeat has not advanced for {age_s:.1f} s"
        return None
