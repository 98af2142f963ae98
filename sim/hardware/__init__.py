"""GPUs and how long their kernels take: `gpu(name)`, `Device(gpu).times(kernels, sms_taken, hbm_taken_bps)`.

`device.py` is a GPU at work, over `kernels/` (what one kernel takes alone); figures are the catalogues beside them.
"""

from sim.hardware.device import Device
from sim.hardware.gpu import Gpu, NVLink, canonical_gpu, gpu, gpu_names
from sim.hardware.host import HostShare, host_share, pageable_bps
from sim.hardware.kernels.attention import gradient_parts
from sim.hardware.kernels.rates import parted_sms

__all__ = ["Device", "Gpu", "HostShare", "NVLink", "canonical_gpu", "gpu", "gpu_names", "gradient_parts",
           "host_share", "pageable_bps", "parted_sms"]
