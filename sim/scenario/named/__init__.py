"""What a name in a scenario stands for: models, GPUs, clusters, GPUs and tables of layers in files."""
