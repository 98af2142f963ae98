"""Files of Hugging Face's and DeepSpeed's jobs: the Trainer's arguments, accelerate's and DeepSpeed's own, adapters."""
