"""The data plane: the C engine, views of tensors, the codec of shared state."""
