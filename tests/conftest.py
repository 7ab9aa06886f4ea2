"""Settings of all tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hypothesis import settings

# Tools that tests use too; Python itself finds them for the tools beside them.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

# What the user's shell sets must not reach the code under test, nor the processes that tests start.
for _name in [name for name in os.environ if name.startswith("ZPCCL_")]:
    del os.environ[_name]

# A deadline would fail on a busy machine. The blob replays a failure: paste it as @reproduce_failure.
settings.register_profile("zpccl", deadline=None, print_blob=True, derandomize="CI" in os.environ)
settings.load_profile("zpccl")
