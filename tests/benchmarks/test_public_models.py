"""Public models are read with as many parameters as are published, or refused with what is not known."""

import json
from pathlib import Path

import pytest

from benchmarks.public_models import built, models, row

pytest.importorskip("transformers")

MODELS = {entry["name"]: entry for entry in models()}


def test_the_list_is_of_sixty_models_and_more_and_says_where_each_was_read() -> None:
    assert len(MODELS) == len(models()) >= 60
    for entry in MODELS.values():
        repository, place = entry["source"].split("@")
        commit, path = place.split(":", 1)
        assert repository.count("/") == 1 and path
        assert commit.startswith("v") or (len(commit) == 10 and int(commit, 16))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, entry in MODELS.items() if "refused" not in entry])
def test_public_models_have_as_many_parameters_as_are_published(name: str, tmp_path: Path) -> None:
    found = row(MODELS[name], tmp_path)
    assert found.read is not None and found.is_right, found
    # Transformers knows all types that are read, and counts what is beside a language model.
    assert found.built is not None
    published = MODELS[name].get("published", {})
    assert (found.published is None) == (not published)
    if "vision" in published.get("beside", ()):
        counts = built(MODELS[name]["config"])
        assert counts is not None and counts[1] == published["vision"]


@pytest.mark.parametrize("name", [name for name, entry in MODELS.items() if "refused" in entry])
def test_other_public_models_are_refused_with_what_is_not_known(name: str, tmp_path: Path) -> None:
    found = row(MODELS[name], tmp_path)
    assert found.read is None and MODELS[name]["refused"] in found.refusal
    assert "\n" not in found.refusal and str(tmp_path) not in found.refusal


def test_a_count_that_is_off_is_told(tmp_path: Path) -> None:
    entry = json.loads(json.dumps(MODELS["Qwen/Qwen3-8B"]))
    entry["published"]["parameters"] *= 1.002
    found = row(entry, tmp_path)
    assert not found.is_right and found.error(found.published) == pytest.approx(-0.002, abs=1e-4)
