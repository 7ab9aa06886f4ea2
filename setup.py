"""Declares the C extension. Everything else is in setup.cfg, which ignores `cffi_modules` without a word."""

from setuptools import setup

setup(cffi_modules=["native/build_native.py:ffibuilder"])
