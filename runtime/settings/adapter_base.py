"""The base model of adapters."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Base(BaseModel):
    """The checkpoint of the model that adapters are added to."""

    model_config = ConfigDict(extra="forbid")

    folder: str
    """The folder of checkpoints, as a whole path."""
    iteration: Annotated[int, Field(ge=0, le=2**62)]
    crc32: str
    """The CRC-32 of the folder's manifest, and so of all its files."""
