"""The scenarios of tools/bench.py, one module each, and code that several of them share."""
