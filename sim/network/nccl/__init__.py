"""How a call is served: NCCL's search and judgement, its ways and their costs, and kernels that stand in for NCCL's."""
