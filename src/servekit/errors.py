"""Every error servekit raises on purpose.

Each class carries what the two outer layers need, so that neither keeps a table of its own: the HTTP status, OpenAI
`type` and `code` for the server, and the exit code for the command line.

    ServekitError
    ├── InputError                   400  exit 2   a request or a value that cannot be honoured
    │   ├── ContextLengthError       400           prompt longer than the model's context
    │   ├── InputLengthError         400           a text longer than an embedding model reads
    │   ├── KvCapacityError          400           request larger than the whole KV pool
    │   └── UnsupportedError         400           understood, but not offered here
    ├── NotFoundError                404  exit 2   a model or route that is not served
    ├── ConfigError                  500  exit 2   flags, environment or config file
    ├── ModelError                   500  exit 2   model files that cannot be loaded
    ├── OverloadedError              429  exit 1   the waiting line is full
    ├── UnavailableError             503  exit 1   loading, draining or dead
    ├── NegativeResult               200  exit 1   the answer is no (does not fit, regressed, differs)
    ├── InvalidMeasurement           500  exit 3   a measurement that must not be trusted
    └── EngineError                  500  exit 70  our own fault
"""

from typing import ClassVar


class ServekitError(Exception):
    """What went wrong and why in `message`; what to do about it in `hint`; the offending field in `param`."""

    http_status: ClassVar[int] = 500
    error_type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None
    exit_code: ClassVar[int] = 70

    def __init__(self, message: str, *, hint: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.param = param


class InputError(ServekitError):
    """A request or value that cannot be honoured as given."""

    http_status = 400
    error_type = "invalid_request_error"
    code = "invalid_value"
    exit_code = 2


class ContextLengthError(InputError):
    """The prompt does not fit the context. Both numbers are reported; `at_least` marks a bound that was not counted."""

    code = "context_length_exceeded"

    def __init__(
        self, num_prompt_tokens: int, max_model_len: int, *, param: str = "messages", at_least: bool = False
    ) -> None:
        counted = f"at least {num_prompt_tokens}" if at_least else str(num_prompt_tokens)
        super().__init__(
            f"the prompt has {counted} tokens, but at most {max_model_len - 1} fit: the context is {max_model_len} "
            "tokens and at least one must be left for the answer",
            hint="shorten the prompt, or start the server with a larger --max-model-len",
            param=param,
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len


class InputLengthError(InputError):
    """A text to embed or to score is longer than the model reads. `index` is its place among the inputs."""

    code = "context_length_exceeded"

    def __init__(self, index: int, num_tokens: int, max_tokens: int, *, param: str = "input") -> None:
        super().__init__(
            f"{param}[{index}] has {num_tokens} tokens, but the model reads at most {max_tokens}",
            hint="shorten it, or send truncate: true to have it cut",
            param=param,
        )
        self.index = index
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens


class KvCapacityError(InputError):
    """The request could never run, however idle the server: it needs more KV blocks than the pool has."""

    code = "kv_capacity_exceeded"

    def __init__(self, num_blocks_needed: int, num_blocks_total: int, *, param: str = "messages") -> None:
        super().__init__(
            f"the request needs {num_blocks_needed} KV blocks, but the whole pool has {num_blocks_total}",
            hint="shorten the prompt, or start the server with a larger --kv-memory",
            param=param,
        )
        self.num_blocks_needed = num_blocks_needed
        self.num_blocks_total = num_blocks_total


class UnsupportedError(InputError):
    """Understood, but not offered by this server or this model."""

    code = "unsupported_value"


class NotFoundError(ServekitError):
    """A model or route that this server does not have."""

    http_status = 404
    error_type = "not_found_error"
    code = "not_found"
    exit_code = 2


class ConfigError(ServekitError):
    """A flag, environment variable or config-file value that cannot be used."""

    code = "config_error"
    exit_code = 2


class ModelError(ServekitError):
    """Model files that are missing, incomplete, unsafe or of an unknown kind."""

    code = "model_error"
    exit_code = 2


class OverloadedError(ServekitError):
    """The waiting line is full; the client may retry after `retry_after_s` seconds."""

    http_status = 429
    error_type = "overloaded_error"
    code = "overloaded"
    exit_code = 1

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(ServekitError):
    """The server is loading its model, draining, or its engine has died."""

    http_status = 503
    error_type = "unavailable_error"
    code = "unavailable"
    exit_code = 1


class NegativeResult(ServekitError):
    """A question was answered, and the answer is no."""

    http_status = 200
    code = "negative_result"
    exit_code = 1


class InvalidMeasurement(ServekitError):
    """A measurement that fails its own audit."""

    code = "invalid_measurement"
    exit_code = 3


class EngineError(ServekitError):
    """Our own fault."""

    code = "internal_error"
