"""Readers of files and texts, given mutations of samples, and everything that a fuzzer once found."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.mutate import mutated
from tests.fuzz.readers import READERS
from tests.fuzz.run import CORPUS, stumbles


@pytest.mark.parametrize("name", sorted(READERS))
def test_samples_are_read(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    for sample in READERS[name].samples:
        READERS[name].read(tmp_path_factory.mktemp("sample"), sample)


@pytest.mark.parametrize("name", sorted(READERS))
@given(seed=st.integers(0, 2**63))
def test_mutated_samples_are_read_or_refused(name: str, seed: int) -> None:
    data = mutated(random.Random(seed), READERS[name].samples)
    if (error := stumbles(name, data)) is not None:
        raise AssertionError(data) from error


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*/*")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_was_found_once(path: Path) -> None:
    if (error := stumbles(path.parent.name, path.read_bytes())) is not None:
        raise AssertionError(path) from error
