"""Shared state: digests, codec, fetching, serving, offers and checkpoints. Decisions are in zpccl.protocol."""
