"""Errors in OpenAI's shape: what a client sees of a request that was not served."""

from __future__ import annotations

from typing import Any

RETRY_AFTER_S = 1


class ApiError(Exception):
    """A request's end that the client caused or has to know of.

    status: HTTP status. message: one sentence that says what to do. param: dotted name of the
    offending field, if there is one. code: OpenAI's machine-readable reason, also the label of
    the rejection metric.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.kind = kind

    def body(self) -> dict[str, Any]:
        """The JSON object of a response or of an error event."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers that belong to the status."""
        if self.status == 503:
            return [(b"retry-after", str(RETRY_AFTER_S).encode())]
        return []


def invalid(param: str | None, message: str, code: str | None = "invalid_value") -> ApiError:
    """400: the value of `param` cannot be served."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, message: str) -> ApiError:
    """400: a field that exists in the API but not (yet) here."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


def context_length_exceeded(
    param: str, limit: int, num_prompt_tokens: int, max_tokens: int | None, exact: bool = True
) -> ApiError:
    """400 with both numbers. `exact` is False where the prompt was refused before tokenizing."""
    prompt = f"{'' if exact else 'at least '}{num_prompt_tokens} in the prompt"
    answer = f"{max_tokens or 1} for the completion"
    total = num_prompt_tokens + (max_tokens or 1)
    return ApiError(
        400,
        f"This model's maximum context length is {limit} tokens, but {total} tokens are requested "
        f"({prompt}, {answer}). Shorten the prompt or the completion.",
        param=param,
        code="context_length_exceeded",
    )


def headers_too_large(limit: int) -> ApiError:
    """431: refused before the request was read."""
    return ApiError(
        431, f"The request's headers are larger than {limit} bytes.", code="headers_too_large"
    )


def model_not_found(name: str, served: str) -> ApiError:
    """404: this server serves one model."""
    return ApiError(
        404,
        f"The model {name!r} does not exist here; this server has {served!r}.",
        param="model",
        code="model_not_found",
    )


def overloaded() -> ApiError:
    """503: every slot of the ring is taken."""
    return ApiError(
        503,
        "All request slots are taken; retry shortly.",
        code="ring_full",
        kind="overloaded_error",
    )


def draining() -> ApiError:
    """503: the server got SIGTERM."""
    return ApiError(
        503,
        "The server is shutting down and takes no new requests.",
        code="draining",
        kind="service_unavailable_error",
    )


def engine_lost(reason: str) -> ApiError:
    """503: nothing can be expected of the device."""
    return ApiError(
        503,
        f"The inference engine is lost: {reason}.",
        code="engine_lost",
        kind="service_unavailable_error",
    )
