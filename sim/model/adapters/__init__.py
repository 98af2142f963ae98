"""Fine-tuning by branches and bottlenecks beside frozen layers."""
