"""The fuzz targets without a fuzzer: their seeds, and inputs of Hypothesis."""

from __future__ import annotations

import importlib
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

TARGETS = ["messages", "handshake", "master"]


def target(name: str) -> Any:
    return importlib.import_module(f"fuzz.fuzz_{name}")


@pytest.mark.parametrize("name", TARGETS)
def test_seeds(name: str) -> None:
    seeds = target(name).seeds()
    assert len(set(seeds)) == len(seeds)
    for seed in seeds:
        target(name).one_input(seed)


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=150)
@given(data=st.data())
def test_anything(name: str, data: st.DataObject) -> None:
    """S1, S3, S7, B1: also changed seeds."""
    seeds = [b"", *target(name).seeds()]
    whole = data.draw(st.sampled_from(seeds)) + data.draw(st.binary(max_size=400))
    begin = data.draw(st.integers(0, len(whole)))
    target(name).one_input(whole[:begin] + data.draw(st.binary(max_size=8)) + whole[begin:])


def test_messages_take_memory_in_proportion() -> None:
    """B1."""
    messages = target("messages")
    tracemalloc.start()
    try:
        for seed in messages.seeds():
            messages.one_input(seed)
            messages.one_input(seed[:-1] + b"\xdd\xff\xff\xff\xff" + seed)
    finally:
        tracemalloc.stop()
