"""Readers of execution traces: PyTorch's JSON and MLCommons Chakra's protobuf."""
