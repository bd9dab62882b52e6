"""Models of Hugging Face's Hub by their ids: from its cache on this machine, or by `huggingface_hub`."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from costmodels.errors import InputError
from costmodels.files import MIB, read_text, shown_path
from costmodels.paths import exists, expanded, home_folder, is_file, is_folder

HubUse = Literal["never", "cached", "fetched"]
"""The reach of the search for an id: none, the cache on this machine, or the Hub."""

CONFIG_FILE = "config.json"

LARGEST_FETCHED = 64 * MIB
"""Most bytes of a fetched file; weights are never fetched."""

ANSWER_S = 10.0
"""Most seconds until the Hub answers whether it has a file."""

FETCH_S = 30.0
"""Most seconds to fetch a file."""

HTTP_LIBRARIES = ("requests", "urllib3", "httpx", "httpx2")

LONGEST_ID = 96
"""Most characters of an id on the Hub."""

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_ID = re.compile(rf"({_PART})/({_PART})(?:@([A-Za-z0-9_][A-Za-z0-9_./-]*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TRUE = ("1", "on", "yes", "true")


class NoSuchFileError(InputError):
    """Error: the Hub has the model, but not the requested file."""


class HubModel(NamedTuple):
    """A model of the Hub."""

    owner: str
    name: str
    revision: str = "main"
    """A branch, a tag or a commit."""

    @property
    def repo(self) -> str:
        """The id without the revision: `Qwen/Qwen3-8B`."""
        return f"{self.owner}/{self.name}"

    @property
    def folder(self) -> Path:
        """The model's folder in the cache; it may not exist."""
        return cache_folder() / f"models--{self.owner}--{self.name}"

    @property
    def page(self) -> str:
        """The address of the model's page."""
        return f"{os.environ.get('HF_ENDPOINT') or 'https://huggingface.co'}/{self.repo}"

    def __str__(self) -> str:
        return self.repo if self.revision == "main" else f"{self.repo}@{self.revision}"


def parsed_id(text: str) -> HubModel | None:
    """The model with this id; None where the text is not an id.

    Examples:
        >>> parsed_id("Qwen/Qwen3-8B@main")
        HubModel(owner='Qwen', name='Qwen3-8B', revision='main')
    """
    found = _ID.fullmatch(text) if "/" in text else None
    if found is None:
        return None
    owner, name, revision = found.groups(default="main")
    repo = f"{owner}/{name}"
    if max(len(repo), len(revision)) > LONGEST_ID or "--" in repo or ".." in f"{repo}@{revision}":
        return None
    return HubModel(owner, name, revision)


def hub_model(text: str | Path) -> HubModel | None:
    """The model with this id; None where the text is not an id, or is also an existing path."""
    model = parsed_id(str(text))
    return None if model is None or exists(str(text)) else model


def cache_folder() -> Path:
    """The Hub's cache, by the environment variables that `huggingface_hub` reads."""
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if named:
        return expanded(os.path.expandvars(named))
    home = os.environ.get("HF_HOME")
    if home:
        return expanded(os.path.expandvars(home)) / "hub"
    cache = os.environ.get("XDG_CACHE_HOME") or str(home_folder() / ".cache")
    return expanded(cache) / "huggingface" / "hub"


def cached_folder(model: HubModel) -> Path | None:
    """The folder of a model's files in the cache, perhaps incomplete; None where there is none."""
    commit = model.revision if _COMMIT.fullmatch(model.revision) else _commit_of(model)
    folder = None if commit is None else model.folder / "snapshots" / commit
    return folder if folder is not None and is_folder(folder) else None


def cached_file(model: HubModel, file: str = CONFIG_FILE) -> Path | None:
    """A file of a model in the cache; None where it is not there."""
    folder = cached_folder(model)
    return folder / file if folder is not None and is_file(folder / file) else None


def _commit_of(model: HubModel) -> str | None:
    """The commit of a branch or a tag when it was fetched; None where the cache has none."""
    noted = model.folder / "refs" / model.revision
    if not is_file(noted):
        return None
    try:
        text = read_text(noted, 1000).strip()
    except (OSError, UnicodeDecodeError):
        return None
    return text if _COMMIT.fullmatch(text) else None


def hub_file(model: HubModel, file: str = CONFIG_FILE) -> Path:
    """A file of a model, from the cache or else from the Hub.

    Raises `InputError`, with the words to type, where the file is not available; `NoSuchFileError` where the
    model has no such file on the Hub.
    """
    found = cached_file(model, file)
    if found is not None:
        return found
    if is_folder(model.owner):
        raise InputError(
            f"model {model}: no such file, and no {file} of such an id in {shown_path(cache_folder())}; as a "
            f"folder {model.owner} is here, the Hub is not asked"
        )
    return _fetched(model, file)


def _fetched(model: HubModel, file: str) -> Path:
    """A file fetched from the Hub into the cache, with `huggingface_hub`."""
    where = f"no {file} of it in {shown_path(cache_folder())}"
    offline = next((name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if _is_set(name)), None)
    if offline is not None:
        raise _lacking(model, file, f"{where}, and {offline} is set")
    try:
        import huggingface_hub
    except ImportError:
        raise _lacking(
            model,
            file,
            f"{where}; pip install 'llm-parallelism-planner[hub]' lets it be fetched",
        ) from None
    try:
        with _silent():
            return _download(huggingface_hub, model, file)
    except Exception as error:
        # Releases differ in the HTTP library whose errors they let through.
        library = type(error).__module__.partition(".")[0]
        if not isinstance(error, OSError) and library not in ("huggingface_hub", *HTTP_LIBRARIES):
            raise
        raise _refused(model, file, where, error) from None


def _download(library: Any, model: HubModel, file: str) -> Path:
    """Download a file with `huggingface_hub`, with a time limit for each part, as the library itself retries
    without end."""
    url = library.hf_hub_url(model.repo, file, revision=model.revision)
    about = _within(ANSWER_S, lambda: library.get_hf_file_metadata(url, timeout=ANSWER_S))
    if about.size is not None and about.size > LARGEST_FETCHED:
        raise InputError(
            f"model {model}: its {file} has {about.size:,} bytes; expected at most {LARGEST_FETCHED:,}"
        )
    fetch = partial(library.hf_hub_download, model.repo, file, revision=model.revision)
    return Path(_within(FETCH_S, lambda: fetch(cache_dir=cache_folder(), etag_timeout=ANSWER_S)))


@contextmanager
def _silent() -> Iterator[None]:
    """A context in which `huggingface_hub` shows no progress bars and no retries."""
    import huggingface_hub.utils

    bars: Any = huggingface_hub.utils
    drew, level = not bars.are_progress_bars_disabled(), bars.logging.get_verbosity()
    bars.disable_progress_bars()
    bars.logging.set_verbosity_error()
    try:
        yield
    finally:
        bars.logging.set_verbosity(level)
        if drew:
            bars.enable_progress_bars()


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """The result of a call; raises the error of the call, and `TimeoutError` after a number of seconds."""
    given: list[Any] = []
    raised: list[Exception] = []

    def make() -> None:
        try:
            given.append(call())
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    if not given:
        raise TimeoutError(f"nothing within {seconds:g} s")
    return given[0]


def _refused(model: HubModel, file: str, where: str, error: Exception) -> InputError:
    """A line for the user who named a model, from an error of `huggingface_hub`."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return InputError(
            f"model {model}: gated; accept its terms at {model.page} and log in with `hf auth login`, or set "
            "HF_TOKEN"
        )
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, RepositoryNotFoundError) or status == 401:
        return InputError(
            f"model {model}: the Hub has no such model, or it is private: log in with `hf auth login`, or "
            f"set HF_TOKEN{catalogue_hint(model)}"
        )
    if isinstance(error, RevisionNotFoundError):
        return InputError(f"model {model}: the Hub's {model.repo} has no revision {model.revision!r}")
    if isinstance(error, EntryNotFoundError) and status == 404:
        return NoSuchFileError(f"model {model}: the Hub's {model.repo} has no {file}")
    if status == 403:
        return InputError(
            f"model {model}: the Hub does not let you read it; log in with `hf auth login`, or set HF_TOKEN, "
            f"as an account that may see {model.page}"
        )
    if isinstance(error, OSError) and error.filename is not None:
        return InputError(f"model {model}: {error.filename}: {error.strerror}; name another HF_HOME")
    reason = f"status {status}" if status is not None else type(error).__name__
    if type(error) is TimeoutError:
        reason = str(error)
    elif type(error).__name__.endswith("Timeout"):
        # The library's own bound ended the request as soon as the one around it would have.
        reason = f"nothing within {ANSWER_S:g} s"
    return _lacking(model, file, f"{where}, and the Hub does not answer ({reason})")


def _lacking(model: HubModel, file: str, why: str) -> InputError:
    """The error for a model whose file is not available, with everything that helps."""
    revision = "" if model.revision == "main" else f" --revision {model.revision}"
    return InputError(
        f"model {model}: {why}. Where there is a network: hf download {model.repo} {file}{revision}; or give "
        f"a folder that holds its {file}{catalogue_hint(model)}"
    )


def catalogue_hint(model: HubModel) -> str:
    """A hint that names the catalogue's model of the same shape."""
    from planner.inputs.huggingface.catalogued import catalogued

    found = catalogued(model.name)
    return "" if found is None else f"; the catalogue has {found.name}"


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in _TRUE


def hub_origin(file: Path) -> HubModel | None:
    """The model and the commit of a file in a cache; None for a file elsewhere."""
    # A relative path may have too few folders of its own to tell.
    folder, snapshots, commit = ("", "", "", *file.absolute().parts[:-1])[-3:]
    words = folder.split("--")
    if snapshots != "snapshots" or len(words) != 3 or words[0] != "models":
        return None
    return HubModel(words[1], words[2], commit)
