"""The limits of a server; named as those of text-embeddings-inference where it has them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lamina.errors import ConfigError


class Settings(BaseModel):
    """What a server takes, and how much of it at once. Values that cannot be raise ConfigError."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_batch_tokens: int = Field(16384, ge=1)  # of a pass, padding included; one longer text has a pass of its own
    max_concurrent_passes: int = Field(1, ge=1)  # of the model; each takes as many threads as torch has
    max_concurrent_requests: int = Field(512, ge=1)  # accepted and not answered; more are told 429
    max_concurrent_generations: int = Field(4, ge=1)  # texts that are written at once; more are told 429
    max_total_tokens: int = Field(4096, ge=2)  # of a prompt and what is written after it
    max_client_batch_size: int = Field(32, ge=1)  # texts of a request
    payload_limit: int = Field(2_000_000, ge=1)  # bytes of a request's body
    max_depth: int = Field(8, ge=2)  # of the lists and objects in it
    request_timeout: float = Field(60.0, gt=0)  # seconds
    shutdown_timeout: float = Field(30.0, gt=0)  # seconds that a server which is told to end has for what it accepted
    api_key: str | None = Field(None, min_length=1, repr=False)  # asked for as "Authorization: Bearer KEY"
    admin_key: str | None = Field(None, min_length=1, repr=False)  # the same for /readers, which is off without it
    cors_allow_origin: tuple[str, ...] = ()

    @classmethod
    def of(cls, **values: object) -> Settings:
        """Check values, and make settings of them."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            raise ConfigError(f"serve: {name} is {first['input']!r}; {first['msg'].lower()}.") from None
