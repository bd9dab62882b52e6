"""Writing of a checkpoint's tensors through torch.distributed.checkpoint, with checksums."""

from __future__ import annotations

import errno
import io
import os
import threading
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from costmodels.errors import InputError
from runtime.checkpoint.folders import clear_folder, partial_folder, prune_checkpoints, publish
from runtime.checkpoint.manifest import FileRecord, checksum_text
from runtime.checkpoint.owner import check_ownership
from runtime.parallel.accelerator import device_module, is_accelerator

Result = TypeVar("Result")

ALIGNMENT = 64
"""Alignment of copies in host memory, in bytes."""

BUFFER_BYTES = 1 << 20
"""Bytes of the buffer that collects small writes, such as headers of tensors."""


class SaveFailed(Exception):
    """Error: the files could not be written; every rank raises it with the same line."""


class _SummedFile(io.BufferedWriter):
    """A new file that computes the checksum of the written bytes, and is flushed to disk when it is
    closed."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"), BUFFER_BYTES)
        self.crc = self.size = 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
        except OSError as error:
            self.failure = error
            raise
        self.crc = zlib.crc32(data, self.crc)
        self.size += written
        return written

    def close(self) -> None:
        try:
            if not self.closed:
                self.flush()
                os.fsync(self.fileno())
        finally:
            super().close()


class _SummingFileSystem(FileSystem):
    """PyTorch's file system with a record of each written file."""

    def __init__(self) -> None:
        self.files: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        file = _SummedFile(Path(path))
        try:
            with file:
                yield file
        except Exception as error:
            # torch's own errors hide what the disk said.
            cause = file.failure or error
            if isinstance(cause, OSError):
                raise OSError(cause.errno, cause.strerror, str(path)) from None
            raise
        self.files[Path(path).name] = FileRecord(bytes=file.size, crc32=checksum_text(file.crc))

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)


class HostCopies:
    """Host memory for copies of a rank's share of the state, reused by each save.

    It is one buffer of the size of the rank's written bytes. With a GPU it is page-locked, so that copies
    reach the speed of the host link.
    """

    def __init__(self) -> None:
        self.memory: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies of `tensors`, complete on return; those of the call before are overwritten."""
        ends = np.cumsum([-(-t.nbytes // ALIGNMENT) * ALIGNMENT for t in tensors], dtype=np.int64)
        on_gpu = any(t.is_cuda for t in tensors)
        self._reserve(int(ends[-1]) if tensors else 0, on_gpu)
        copies = []
        for tensor, end in zip(tensors, ends.tolist(), strict=True):
            start = end - -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
            # Each has a storage of its own: torch.save would write the whole of a shared one.
            part = torch.from_numpy(self.memory[start : start + tensor.nbytes])
            copies.append(part.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True))
        for device in {tensor.device for tensor in tensors if is_accelerator(tensor.device)}:
            device_module(device).current_stream(device).synchronize()
        return copies

    def _reserve(self, size: int, page_locked: bool) -> None:
        if self.memory.nbytes >= size:
            return
        if page_locked and self.memory.nbytes:
            _runtime().cudaHostUnregister(self.memory.ctypes.data)
        try:
            self.memory = np.empty(size, np.uint8)
        except MemoryError:
            what = f"no room for {size / 1e9:.1f} GB of copies: save without --async-save"
            raise OSError(errno.ENOMEM, what, "host memory") from None
        if page_locked and int(_runtime().cudaHostRegister(self.memory.ctypes.data, size, 0)):
            # Copies are slower and no less right. The next kernel reports the error, whatever it is.
            with suppress(RuntimeError):
                torch.ones((), device="cuda")


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class StagedPlanner(DefaultSavePlanner):
    """A planner that copies this rank's tensors as soon as the ranks have agreed on the division of
    writing."""

    def __init__(self, copies: HostCopies) -> None:
        super().__init__()
        self.host = copies
        self.taken = threading.Event()
        """An event that is set when training may go on."""
        self.parts: dict[Any, Tensor] = {}

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        parts = [cast(Tensor, super(StagedPlanner, self).resolve_data(item)).detach() for item in plan.items]
        copies = self.host.take(parts)
        self.parts = {item.index: copy for item, copy in zip(plan.items, copies, strict=True)}
        self.taken.set()
        return plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.parts[write_item.index]


def write(
    folder: Path,
    iteration: int,
    tensors: Mapping[str, Tensor],
    run: Mapping[str, Any],
    *,
    group: dist.ProcessGroup | None = None,
    planner: DefaultSavePlanner | None = None,
    keep_last: int | None = None,
) -> Path:
    """Write a checkpoint on all ranks of `group`, or of the world if None. Returns its folder.

    Raises:
        SaveFailed: for example, the disk is full. Earlier checkpoints are unchanged.
        InputError: another job has taken the folder; see `runtime.checkpoint.owner`.
    """
    partial = partial_folder(folder, iteration)
    _on_first(lambda: _begin(folder), group)
    writer = FileSystemWriter(partial, sync_files=False)
    writer.fs = files = _SummingFileSystem()
    try:
        try:
            save_tensors(
                dict(tensors),
                storage_writer=writer,
                planner=planner or DefaultSavePlanner(),
                process_group=group,
            )
        except CheckpointException as error:
            causes = [cause for cause, _ in error.failures.values()]
            if not all(isinstance(cause, OSError) for cause in causes):
                raise
            raise SaveFailed(_words(cast(OSError, causes[0]))) from None
        records: list[dict[str, FileRecord]] = [{}] * dist.get_world_size(group)
        dist.all_gather_object(records, files.files, group=group)
        every = {name: record for one in records for name, record in one.items()}
        target = _on_first(lambda: _finish(folder, iteration, run, every), group)
    except SaveFailed:
        if dist.get_rank(group) == 0:
            _discard(folder)
        raise
    if keep_last is not None and dist.get_rank(group) == 0:
        prune_checkpoints(folder, iteration, keep_last)
    return target


def _begin(folder: Path) -> None:
    check_ownership(folder)
    clear_folder(folder)


def _finish(folder: Path, iteration: int, run: Mapping[str, Any], files: Mapping[str, FileRecord]) -> Path:
    check_ownership(folder)
    return publish(folder, iteration, run, files)


def _discard(folder: Path) -> None:
    """Delete the remains of a failed save, if the disk allows it and this job still owns the folder."""
    with suppress(OSError, InputError):
        check_ownership(folder)
        clear_folder(folder)


def _on_first(work: Callable[[], Result], group: dist.ProcessGroup | None) -> Result:
    """Do file work on the first rank; if the system refuses it, all ranks raise `SaveFailed`.

    Its `InputError` is raised on all ranks too.
    """
    answer: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            answer[0] = work()
        except Exception as error:
            # Whatever it is, the others must not wait for this rank.
            if isinstance(error, InputError):
                answer[1] = error
            elif isinstance(error, OSError):
                answer[1] = SaveFailed(_words(error))
            else:
                answer[1] = RuntimeError(f"{type(error).__name__}: {error}")
    dist.broadcast_object_list(answer, src=0, group=group)
    if answer[1] is not None:
        raise answer[1]
    return cast(Result, answer[0])


def _words(error: OSError) -> str:
    return f"{error.filename or 'a file'}: {error.strerror}"
