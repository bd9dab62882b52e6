"""The base model of adapters."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Base(BaseModel):
    """The base checkpoint of adapters."""

    model_config = ConfigDict(extra="forbid")

    folder: str
    """The absolute path of the folder of checkpoints."""
    iteration: Annotated[int, Field(ge=0, le=2**62)]
    crc32: str
    """The CRC-32 of the manifest, which identifies all files of the checkpoint."""
