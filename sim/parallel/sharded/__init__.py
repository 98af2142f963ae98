"""Techniques that shard parameters: FSDP 1, FSDP 2, DeepSpeed ZeRO-3."""
