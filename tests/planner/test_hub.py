"""Models by ids of the Hugging Face Hub: of its cache, of a server, and in one line where they are not."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import planner
from costmodels.errors import InputError
from planner.inputs.huggingface.hub import (
    HubModel,
    HubUse,
    NoSuchFileError,
    cache_folder,
    hub_origin,
    parsed_id,
)
from planner.inputs.huggingface.script_names import model_of
from planner.inputs.model import resolve_model
from planner.service.questions import answer
from planner.service.tools import call
from runtime.data import load_tokenizer
from runtime.huggingface.folder_kind import model_folder
from tests.support import ROOT
from tests.support.commands import Command
from tests.support.hub import COMMIT, CONFIG, cache_model, hub_server
from tests.support.ordinary_user import as_ordinary_user, can_be_ordinary

JOB: dict[str, Any] = {"world_size": 2, "device": "h100", "global_batch_size": 8}
WORDS = ("--world-size", "2", "--device", "h100", "--global-batch-size", "8", "--json")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, no network, and a folder of one's own."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_ENDPOINT", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "home" / "hub"


@pytest.fixture
def cached(cache: Path) -> Path:
    """The snapshot of a model that no catalogue has."""
    return cache_model(cache, "org/Model-1B", {"config.json": json.dumps(CONFIG)})


def test_an_id_is_the_model_of_its_cached_config_wherever_it_is_asked(
    cached: Path, planner_command: Command
) -> None:
    spec = resolve_model("org/Model-1B", seq=2048)
    assert (spec.name, spec.layers, spec.kv_heads, spec.seq) == ("Model-1B", 16, 4, 2048)
    assert COMMIT in spec.source
    # The folder of the snapshot is the same model; Hugging Face's own code looks at the same file.
    assert resolve_model(cached, seq=2048) == spec
    from huggingface_hub import try_to_load_from_cache

    assert try_to_load_from_cache("org/Model-1B", "config.json", cache_folder()) == str(
        cached / "config.json"
    )
    question = JOB | {"model": "org/Model-1B"}
    plan = planner.suggest(**question)
    code, out, _ = planner_command("suggest", "--model", "org/Model-1B", *WORDS)
    typed = json.loads(out)
    assert code == 0 and typed["model"]["name"] == "Model-1B"
    assert any("sequence length 4096" in line for line in typed["assumed"])
    layout = plan.layout.model_dump(mode="json")
    for found in (typed, call("suggest", question), answer(question, files=False)):
        assert found["plans"][0]["layout"] == layout
        assert found["assumed"] == typed["assumed"]
    assert model_of("org/Model-1B") == resolve_model("org/Model-1B")


def test_a_branch_a_tag_and_a_commit_are_named_after_an_at(cache: Path) -> None:
    cache_model(cache, "org/m", {"config.json": json.dumps(CONFIG)}, revision="v2")
    for revision in ("v2", COMMIT):
        assert resolve_model(f"org/m@{revision}").name == "m"
    for other in ("org/m", "org/m@v3", f"org/m@{COMMIT[::-1]}"):
        with pytest.raises(InputError, match="no config"):
            resolve_model(other)


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"HF_HUB_CACHE": "/a", "HUGGINGFACE_HUB_CACHE": "/b", "HF_HOME": "/c"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/b", "HF_HOME": "/c"}, "/b"),
        ({"HF_HOME": "/$WHERE/c", "XDG_CACHE_HOME": "/d", "WHERE": "x"}, "/x/c/hub"),
        ({"XDG_CACHE_HOME": "/d", "HOME": "/e"}, "/d/huggingface/hub"),
        ({"HF_HOME": "~/c", "HOME": "/e"}, "/e/c/hub"),
        ({"HOME": "/e"}, "/e/.cache/huggingface/hub"),
    ],
)
def test_the_cache_is_where_hugging_face_keeps_it(
    variables: dict[str, str], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(cache_folder()) == place


def test_files_are_read_from_the_folder_that_one_stands_in(
    cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("config.json").write_text(json.dumps(CONFIG))
    assert resolve_model("config.json", seq=2048).layers == 16
    assert hub_origin(Path("config.json")) is hub_origin(Path("/config.json")) is None
    monkeypatch.chdir(cached)
    assert COMMIT in resolve_model("config.json", seq=2048).source


def test_what_is_at_a_path_is_a_path(cached: Path, tmp_path: Path) -> None:
    Path("org/Model-1B").mkdir(parents=True)
    with pytest.raises(InputError, match=r"^model org/Model-1B: a folder without config\.json$"):
        resolve_model("org/Model-1B")
    Path("org/Model-1B/config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 3}))
    assert resolve_model("org/Model-1B").layers == 3
    # A path that was mistyped asks no server.
    with pytest.raises(InputError, match=r"no such file, and .* a folder org is here, the Hub is not asked"):
        resolve_model("org/Model-2B")


HOSTILE = (
    *("../..", "a/b/c", "a/..", "./a", "/a", "a/", "a/b/", "~/a", "a//b", "a\\b/c", "-a/b", "a/b.", "a--b/c"),
    *("ä/b", "a/b\n", "a/b\0", "a/b c", "a/b?c", "a/b#c", "a/b%2e", "http://a/b", "a/" + "b" * 300, "a/.."),
    *("a/b@../../x", "a/b@/etc", "a/b@", "a/b@" + "c" * 300, "a/b@c\n", "a@b/c", "models--a--b/c", "a/b@-c"),
)


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_id_is_looked_for_nowhere(name: str, cache: Path) -> None:
    assert parsed_id(name) is None
    for ask in (resolve_model, model_of, lambda model: call("suggest", JOB | {"model": model})):
        try:
            assert ask(name) is None
        except InputError as error:
            assert "\n" not in str(error) or "\n" in name


def test_a_damaged_cache_is_one_line(cache: Path) -> None:
    folder = cache / "models--org--m"

    def lacks(message: str) -> None:
        with pytest.raises(InputError, match=message) as caught:
            resolve_model("org/m")
        assert "\n" not in str(caught.value)
        with pytest.raises(InputError):
            call("suggest", JOB | {"model": "org/m"})

    snapshot = cache_model(cache, "org/m", {"config.json": json.dumps(CONFIG)})
    config, ref, blob = snapshot / "config.json", folder / "refs/main", (snapshot / "config.json").resolve()
    for text in ("", "../../..", COMMIT[:-1], f"{COMMIT}\n{COMMIT}", "x" * 2000):
        ref.write_text(text)
        lacks("no config.json of it in")
    ref.unlink()
    ref.mkdir()
    lacks("no config.json of it in")
    ref.rmdir()
    ref.write_text(f"{COMMIT}\n")
    assert resolve_model("org/m").name == "m"
    for text, message in (("", "not valid JSON"), ("[1]", "one JSON object"), ("{}", "model_type")):
        blob.write_text(text)
        lacks(message)
    blob.write_bytes(b"\xff\xfe")
    lacks("not UTF-8")
    with blob.open("wb") as file:
        file.truncate(100 << 20)
    lacks("larger than 16 MiB")
    blob.unlink()
    lacks("no config.json of it in")
    config.unlink()
    config.symlink_to(config)
    lacks("symbolic links")
    config.unlink()
    os.mkfifo(config)
    lacks("no config.json of it in")
    config.unlink()
    snapshot.rmdir()
    snapshot.symlink_to(snapshot)
    lacks("symbolic links")


@pytest.mark.skipif(not can_be_ordinary(), reason="nothing is closed to this user")
def test_a_cache_that_may_not_be_read_is_one_line(cached: Path) -> None:
    def look() -> None:
        with pytest.raises(InputError, match=r"cannot be looked at \(Permission denied\)$"):
            resolve_model("org/Model-1B")

    for folder in (cached.parents[2], cached):
        folder.chmod(0)
        try:
            assert as_ordinary_user(look) == 0
        finally:
            folder.chmod(0o700)


def test_what_helps_is_said_where_the_network_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, cache: Path, planner_command: Command
) -> None:
    code, out, err = planner_command("suggest", "--model", "Qwen/Qwen3-8B", *WORDS)
    assert (code, out) == (2, "") and err.count("\n") == 1
    for part in (
        str(cache),
        "HF_HUB_OFFLINE is set",
        "hf download Qwen/Qwen3-8B config.json",
        "a folder that holds its config.json",
        "the catalogue has qwen3-8b",
    ):
        assert part in err
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # As where it is not installed.
    with pytest.raises(InputError, match=r"pip install 'llm-parallelism-planner\[hub\]'") as caught:
        planner.suggest("org/Model-1B", **JOB)
    assert "hf download org/Model-1B config.json" in str(caught.value)
    with pytest.raises(InputError, match="paste the text of its config"):
        call("suggest", JOB | {"model": "org/Model-1B@v2"})


@pytest.mark.parametrize(
    ("words", "hub"),
    [
        ((), "cached"),
        (("--host", "::1"), "cached"),
        (("--host", "0.0.0.0"), "never"),
        (("--host", "0.0.0.0", "--hub", "cached"), "cached"),
        (("--hub", "fetched"), "fetched"),
        (("--hub", "never"), "never"),
    ],
)
def test_strangers_do_not_learn_what_is_cached_unless_whoever_serves_says_so(
    words: tuple[str, ...],
    hub: HubUse,
    planner_command: Command,
    monkeypatch: pytest.MonkeyPatch,
    cached: Path,
) -> None:
    server = pytest.importorskip("planner.web.server")
    made: list[Any] = []
    monkeypatch.setattr(server, "listening", lambda host, port: socket.socket())
    monkeypatch.setattr(server, "address", lambda opened: "")
    monkeypatch.setattr(server, "question_app", lambda host, workers, hub: made.append(hub))
    monkeypatch.setattr(server, "make_server", lambda app: SimpleNamespace(run=lambda sockets: None))
    assert planner_command("web", *words)[0] == 0
    assert made == [hub]


def test_a_page_follows_an_id_as_far_as_it_may(cached: Path, planner_command: Command) -> None:
    question = JOB | {"model": "org/Model-1B"}
    uses: tuple[HubUse, ...] = ("cached", "fetched")
    for hub in uses:
        assert answer(question, files=False, hub=hub)["model"]["name"] == "Model-1B"
    with pytest.raises(InputError, match="model org/Model-1B: not in the catalogue; paste the text"):
        answer(question, files=False, hub="never")
    cases: tuple[tuple[str, HubUse, str], ...] = (
        ("org/Model-2B", "cached", "not in the Hugging Face cache of this machine; paste the text"),
        ("org/Model-2B", "fetched", "HF_HUB_OFFLINE is set"),
        ("../..", "cached", "neither in the catalogue nor an id"),
    )
    for model, hub, message in cases:
        with pytest.raises(InputError, match=message):
            answer(question | {"model": model}, files=False, hub=hub)
    code, _, err = planner_command("web", "--hub", "all")
    assert code == 2 and "--hub 'all': expected never, cached, fetched" in err


@pytest.mark.slow
def test_a_name_of_the_catalogue_and_a_file_load_no_client(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    code = """
import socket, sys
def refuse(*args, **kwargs):
    raise AssertionError("the network was asked")
socket.socket.connect = socket.getaddrinfo = refuse
from planner.inputs.model import resolve_model
for model in ("llama3-8b", "config.json", ".", "./config.json", sys.argv[1]):
    assert resolve_model(model).layers
try:
    resolve_model("none/such.json")
except ValueError as error:
    print(error)
assert "huggingface_hub" not in sys.modules
"""
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=environment | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("cannot read model config 'none/such.json'")


ASKING = """
import json, sys, time
from costmodels.errors import InputError
from planner.inputs.huggingface import hub
from planner.inputs.model import resolve_model
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = resolve_model(name).name
    except InputError as error:
        found[name] = str(error)
    # The first has as long as it takes to load the client.
    hub.ANSWER_S, hub.FETCH_S = 3.0, 4.0
print(json.dumps(found))
"""
"""Prints what each id is."""

ANSWERS = {
    "org/fine": "fine",
    "org/fine@v2": "fine",
    f"org/fine@{COMMIT}": "fine",
    "org/fine@v3": "the Hub's org/fine has no revision 'v3'",
    "org/gated": "gated; accept its terms at http://127.0.0.1",
    "org/unknown": "the Hub has no such model, or it is private: log in with `hf auth login`, or set HF_TOK",
    "org/private": "the Hub has no such model, or it is private",
    "org/forbidden": "the Hub does not let you read it; log in",
    "org/nothing-there": "the Hub's org/nothing-there has no config.json",
    "org/broken": "the Hub does not answer (",
    "org/mute": "the Hub does not answer (nothing within 3 s). Where there is a network: hf download org",
    "org/stuck": "the Hub does not answer (nothing within 4 s)",
    "org/huge": "its config.json has 1,000,000,000 bytes; expected at most",
    "org/text": "is not valid JSON",
}
"""Names of the models of ids, or a part of the error line for them, with `tests.support.hub`'s server."""


def asked(address: str, *names: str) -> subprocess.CompletedProcess[str]:
    """A process that reads the models of ids from a server of this machine in place of the Hub."""
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    return subprocess.run(
        [sys.executable, "-c", ASKING, *names],
        env=environment | {"HF_ENDPOINT": address, "PYTHONPATH": str(ROOT), "HF_TOKEN": "hf_secret"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_the_hub_is_asked_for_what_the_cache_lacks(cache: Path) -> None:
    pytest.importorskip("huggingface_hub")
    with hub_server() as hub:
        done = asked(hub.address, *ANSWERS, "org/fine")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        for name, answer in ANSWERS.items():
            assert answer in found[name] and "\n" not in found[name] and "secret" not in found[name], found[
                name
            ]
        assert done.stderr == ""
        assert all(path.endswith("/config.json") for _, path in hub.asked if path.startswith("/org/"))
        assert not [path for method, path in hub.asked if method == "GET" and "huge" in path]
    # Fetched files lie in the cache, and are not asked for again.
    fetched = [method for method, path in hub.asked if "/fine/resolve/main/" in path]
    assert fetched.count("GET") == 1 and len(fetched) <= 3
    assert resolve_model("org/fine").layers == CONFIG["num_hidden_layers"]


@pytest.mark.slow
def test_where_nothing_listens_the_answer_comes_at_once() -> None:
    pytest.importorskip("huggingface_hub")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    found = json.loads(asked(f"http://127.0.0.1:{port}", "org/fine").stdout)
    assert "the Hub does not answer (" in found["org/fine"]


def test_tokenizers_and_weights_are_found_by_ids(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tokenizers as hf

    from runtime.data.record import digest, record_of, recorded_tokenizer
    from runtime.huggingface.model_tokenizer import named_tokenizer, tokenizer_of_folder

    model = hf.Tokenizer(hf.models.WordLevel({"a": 0, "b": 1, "<end>": 2}, unk_token="a"))
    files = {
        "config.json": json.dumps(CONFIG),
        "tokenizer.json": model.to_str(),
        "tokenizer_config.json": json.dumps({"eos_token": "<end>"}),
    }
    snapshot = cache_model(cache, "org/Model-1B", files)
    tokenizer = load_tokenizer("HuggingFaceTokenizer", tokenizer_model="org/Model-1B")
    assert (tokenizer.vocab_size, tokenizer.eod) == (3, 2) and tokenizer.name.startswith("Model-1B-")
    for other in (named_tokenizer("org/Model-1B"), tokenizer_of_folder("org/Model-1B")):
        assert digest(other) == digest(tokenizer) and other.name == tokenizer.name
    # The record of data names the files themselves: it holds wherever a job is started.
    monkeypatch.chdir("/")
    monkeypatch.setenv("HF_HOME", "/nowhere")
    assert digest(recorded_tokenizer(record_of(tokenizer))) == digest(tokenizer)
    monkeypatch.setenv("HF_HOME", str(cache.parent))
    assert tokenizer_of_folder("org/Model-2B") is None
    with pytest.raises(InputError, match=r"^model org/Model-2B: no tokenizer\.json of it .* hf download"):
        load_tokenizer("HuggingFaceTokenizer", tokenizer_model="org/Model-2B")
    with pytest.raises(InputError, match=r"no weights of such a model in .*: hf download org/Model-1B$"):
        model_folder("org/Model-1B")
    (snapshot / "model.safetensors").write_bytes(b"")
    assert model_folder("org/Model-1B") == str(snapshot)
    assert model_folder("/no/such") == "/no/such"


def test_a_tokenizer_is_not_taken_without_what_says_how_documents_end(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for: list[str] = []

    def fetched(model: HubModel, file: str) -> Path:
        asked_for.append(file)
        if file == "tokenizer_config.json":
            raise lacking
        return cache / file

    monkeypatch.setattr("runtime.data.tokenizers.hub_file", fetched)
    lacking = InputError("mute")
    with pytest.raises(InputError, match="mute"):
        load_tokenizer("HuggingFaceTokenizer", tokenizer_model="org/Model-1B")
    assert asked_for == ["tokenizer.json", "tokenizer_config.json"]
    # A model that has none is taken at its tokenizer's word; here that file is not there to be read.
    lacking = NoSuchFileError("none")
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        load_tokenizer("HuggingFaceTokenizer", tokenizer_model="org/Model-1B")
