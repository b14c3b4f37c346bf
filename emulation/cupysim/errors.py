"""Errors that both ends of the wire know. Names and texts follow CUDA's runtime."""

from __future__ import annotations


class CUDARuntimeError(RuntimeError):
    """A runtime call failed; `status` is CUDA's number for the error."""

    NAMES = {  # noqa: RUF012 - constant
        1: "cudaErrorInvalidValue",
        46: "cudaErrorDevicesUnavailable",
        400: "cudaErrorInvalidResourceHandle",
        600: "cudaErrorNotReady",
        719: "cudaErrorLaunchFailure",
        900: "cudaErrorStreamCaptureUnsupported",
        901: "cudaErrorStreamCaptureInvalidated",
        904: "cudaErrorStreamCaptureUnjoined",
        905: "cudaErrorStreamCaptureIsolation",
    }

    def __init__(self, status: int, detail: str = "") -> None:
        super().__init__(status, detail)
        self.status = status
        self.detail = detail

    def __str__(self) -> str:
        name = self.NAMES.get(self.status, f"cudaError {self.status}")
        return f"{name}: {self.detail}"


INVALID_VALUE = 1
DEVICE_UNAVAILABLE = 46
INVALID_HANDLE = 400
NOT_READY = 600
LAUNCH_FAILURE = 719
CAPTURE_UNSUPPORTED = 900
CAPTURE_INVALIDATED = 901
CAPTURE_UNJOINED = 904
CAPTURE_ISOLATION = 905
