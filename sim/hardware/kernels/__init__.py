"""How long one kernel takes, class by class, from the figures of its GPU; the GPU at work is `device.py`."""
