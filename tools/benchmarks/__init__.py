"""The scenarios of tools/bench.py, a module each, and what several of them measure."""
