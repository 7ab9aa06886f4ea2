"""Fuzz targets: each module has `one_input(data)`, which raises for a bug, and `seeds()`. `make fuzz` runs them."""
