"""PyTorch's eager autograd in small: storages, graph, operators as allocations."""
