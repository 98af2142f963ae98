"""What a job keeps outside its GPUs: copies over PCIe, disks, the optimizer on the CPU, and host memory.

A technique asks `Offload` at the points where its framework does:

* `fetch` before an all-gather of offloaded parameters (FSDP 1 `_pre_unshard`, FSDP 2 `foreach_all_gather`, DeepSpeed
  `partitioned_param_coordinator.py`): this rank's shard, host to device, on a stream of its own;
* `store` after a reduction: this rank's gradient shard, device to host (FSDP 1 `_post_backward_hook`, FSDP 2
  `foreach_reduce`, DeepSpeed `async_inplace_copy_grad_to_fp32_buffer_from_gpu`), behind the rest of backward;
* `update` for the optimizer step: the host waits for the last gradient, then runs the optimizer itself, then copies
  updated parameters to the device where they live there.

On disks (ZeRO-Infinity, Rajbhandari et al. 2021) every fetch is read first, gradients are added up in host memory and
written once a step, and the optimizer swaps its states in and out, one after the other: DeepSpeed's `pipeline_read` and
`pipeline_write` are off by default.
"""

from __future__ import annotations

from collections.abc import Sequence

from sim.hardware import HostShare, host_share
from sim.model import clip_kernels, optimizer_kernels
from sim.program import ON_CPU, Copy, Label, ProgramBuilder, SectionBuilder
from sim.scenario.fields.schema import Scenario
from sim.software import Stack
from sim.work import DTYPE_BYTES

#: Every technique's stream of kernels (`sim.parallel.step.COMPUTE`).
_COMPUTE = 0
#: Name of saved tensors in host memory.
_SAVED = "saved tensors"
#: Streams an offloading job has beside its technique's.
STREAMS = ("h2d", "d2h", "nvme")
#: DeepSpeed `offload_config.py`: host buffers through which states and parameters on disks pass, and their elements.
SWAP_BUFFERS, PARAMETER_BUFFERS, PARAMETER_BUFFER = 4, 5, 100_000_000
#: DeepSpeed `zero/config.py`, sub_group_size: elements the optimizer swaps in at once.
SUB_GROUP = 1_000_000_000
#: bitsandbytes optim/optimizer.py, get_state_buffer: states of smaller parameters are ordinary tensors.
PAGED_LEAST = 100_000
_DISKS = "nvme"
#: Optimizers of which PyTorch has a fused kernel for the CPU (torch 2.4.0 optim/adam.py, adamw.py, sgd.py).
_FUSED_ON_CPU = ("adam", "adamw", "sgd", "sgd-momentum")


class Offload:
    """Places of a job's states and the tasks they need.

    Attributes:
        parameters, optimizer, activations: none, cpu or nvme (paged memory is no offload of this kind).
    """

    def __init__(self, scenario: Scenario, stack: Stack, builder: ProgramBuilder) -> None:
        places = scenario.parallel.offload
        self.parameters, self.optimizer, self.activations = ("none" if place == "paged" else place for place in (
            places.parameters, places.optimizer, places.activations))
        #: bitsandbytes' paged optimizers: states in unified memory
        self.pages_optimizer = places.optimizer == "paged"
        self._scenario, self._stack, self._builder = scenario, stack, builder

    @property
    def moves_parameters(self) -> bool:
        """Whether parameters live outside the GPU."""
        return self.parameters != "none"

    @property
    def moves_optimizer(self) -> bool:
        """Whether the optimizer and its states live outside the GPU."""
        return self.optimizer != "none"

    @property
    def hybrid(self) -> bool:
        """Whether the optimizer outside takes whole gradients once their norm is known (Megatron's
        HybridDeviceOptimizer); what keeps its parameters outside as well hands gradients over as they come."""
        return self.moves_optimizer and not self.moves_parameters and self._stack.hybrid_offload

    @property
    def moves_activations(self) -> bool:
        """Whether blocks' saved tensors leave the GPU between forward and backward."""
        return self.activations != "none"

    def stays(self, state_bytes: float) -> bool:
        """Whether a paged optimizer's state of that size is an ordinary tensor, because its parameter is small."""
        training = self._scenario.training
        return state_bytes < PAGED_LEAST * (1 if training.optimizer == "adamw-8bit" else
                                            DTYPE_BYTES[training.precision.optimizer])

    def stream(self, name: str) -> int:
        """Number of one of `STREAMS`."""
        return self._builder.streams.index(name)

    @property
    def on_disks(self) -> bool:
        """Whether the optimizer's states are on disks."""
        return self.optimizer == _DISKS

    def outside(self, numel: int) -> int:
        """How many of `numel` parameters have their optimizer outside."""
        if not self.moves_optimizer:
            return 0
        return round(numel * self._scenario.parallel.offload.optimizer_fraction)

    # ------------------------------------------------------------------------------------------- host memory
    def hold(self, name: str, size_bytes: float, category: str, *, pinned: bool = False) -> None:
        """Host memory for the whole step."""
        size = round(size_bytes)
        if size > 0:
            whole = pinned and self._stack.pinned_powers
            self._builder.host_resident.append((name, 1 << (size - 1).bit_length() if whole else size, category))

    def hold_optimizer(self, numel: int, largest: int = 0) -> None:
        """Master copy, optimizer states and fp32 gradients of `numel` local parameters, or the buffers they swap in.

        Args:
            largest: elements of the largest tensor that is swapped at once, default all.
        """
        if self.optimizer == _DISKS:
            chunk = min(largest or numel, SUB_GROUP)
            self.hold("optimizer swap buffers", SWAP_BUFFERS * chunk * 4, "buffers", pinned=True)
            return
        for category, width in self.state_widths().items():
            self.hold(category, numel * width, category, pinned=category == "gradients")

    def hold_saved(self, size_bytes: float) -> None:
        """Host memory for a micro-step's saved tensors, the largest micro-step's: what the rounding of pinned blocks
        adds depends on single tensors and is not counted."""
        if self.activations != "cpu":
            return
        resident = self._builder.host_resident
        before = next((held for held in resident if held[0] == _SAVED), (_SAVED, 0, ""))
        resident[:] = [held for held in resident if held[0] != _SAVED]
        resident.append((_SAVED, max(before[1], round(size_bytes)), "activations"))

    def state_widths(self) -> dict[str, float]:
        """Bytes per parameter of what the optimizer on the CPU reads beside the parameters themselves."""
        training = self._scenario.training
        precision = training.precision
        count = {"adamw": 2, "adam": 2, "lamb": 2, "sgd-momentum": 1}.get(training.optimizer, 0)
        master = 0.0 if precision.master == "none" else DTYPE_BYTES[precision.master]
        return {"master_parameters": master, "optimizer_states": count * DTYPE_BYTES[precision.optimizer],
                "gradients": DTYPE_BYTES[self._gradient_dtype()]}

    def _gradient_dtype(self) -> str:
        """Of the gradients the optimizer reads: the master copy's where that is wider."""
        precision = self._scenario.training.precision
        wide = precision.master if precision.master != "none" else precision.parameters
        return max(precision.gradients, wide, key=lambda dtype: DTYPE_BYTES[dtype])

    # ------------------------------------------------------------------------------------------- copies
    def fetch(self, section: SectionBuilder, size_bytes: float, label: Label, waits: Sequence[int] = (),
              joins: Sequence[int] = (), *, place: str = "", stream: int | None = None) -> int:
        """Host (or disks, through the host) to device.

        Args:
            place: where it lives, default where parameters do.
            stream: default the one for this direction.
        """
        if (place or self.parameters) == _DISKS:
            waits = (self._copy(section, None, "nvme_read", size_bytes, label, waits, joins),)
            joins = ()
        return self._copy(section, stream, "h2d", size_bytes, label, waits, joins)

    def store(self, section: SectionBuilder, size_bytes: float, label: Label, waits: Sequence[int] = (),
              joins: Sequence[int] = (), *, place: str = "", stream: int | None = None) -> int:
        """Device to host (and on to disks); returns the copy that frees the device's tensor.

        Args:
            place: where it goes, default where the optimizer is.
            stream: default the one for this direction.
        """
        task = self._copy(section, stream, "d2h", size_bytes, label, waits, joins)
        if (place or self.optimizer) == _DISKS:
            self._copy(section, None, "nvme_write", size_bytes, label, (task,), ())
        return task

    def _copy(self, section: SectionBuilder, stream: int | None, direction: str, size_bytes: float, label: Label,
              waits: Sequence[int], joins: Sequence[int]) -> int:
        named = Label(label.layer, label.phase, f"{label.name} {direction}")
        if stream is None:
            stream = self.stream(direction.split("_")[0])
        return section.copy(stream, Copy(direction, round(size_bytes)), self._stack.host_forward_s, named,
                            waits, joins)

    # ------------------------------------------------------------------------------------------- optimizer
    def update(self, section: SectionBuilder, numel: int, tensors: int, joins: Sequence[int],
               back_bytes: float = 0.0) -> int:
        """The optimizer on the CPU: blocks the host, which is where it runs.

        Args:
            numel, tensors: local parameters and how many tensors they are.
            joins: the technique's own streams that have to be through.
            back_bytes: bytes per parameter copied to the device afterwards.

        Returns: the last task.
        """
        seconds = self.update_s(numel, tensors)
        label = self._named()
        streams = (*joins, self.stream("d2h"), *((self.stream("nvme"),) if self.optimizer == _DISKS else ()))
        task = section.host(seconds, label, joins=streams)
        task = self._swap(section, numel, task) if self.optimizer == _DISKS else task
        if back_bytes:
            task = self._copy(section, None, "h2d", numel * back_bytes, Label("parameters", "optimizer", "updated"),
                              (), ())
            task = section.host(0.0, Label("parameters", "optimizer", "wait"), waits=(task,))
        return task

    def hand_over(self, section: SectionBuilder, numel: int, joins: Sequence[int]) -> int:
        """Gradients of `numel` parameters to the host, in line with the kernels, as HybridDeviceOptimizer copies them
        unless overlap_cpu_optimizer_d2h_h2d is asked for; returns the copy."""
        label, size = Label("gradients", "optimizer", "to the optimizer"), numel * self.state_widths()["gradients"]
        return self.store(section, size, label, (), joins, place="cpu", stream=_COMPUTE)

    def update_part(self, section: SectionBuilder, numel: int, tensors: int, arrived: int, back_bytes: float) -> int:
        """The optimizer on the CPU once gradients have arrived (HybridDeviceOptimizer.step), then what it updated to
        the device; the host waits for that, since it is cast in memory that is not pinned (ATen copy_kernel_cuda,
        copy_requires_temporaries: recalled). Returns the last task.

        Args:
            numel, tensors: parameters and how many tensors they are.
            arrived: the copy of their gradients.
            back_bytes: bytes per parameter that are copied back.
        """
        task = section.host(self.update_s(numel, tensors, clip=False), self._named(), waits=(arrived,))
        task = self._copy(section, _COMPUTE, "h2d", numel * back_bytes, Label("parameters", "optimizer", "updated"), (),
                          ())
        section.host(0.0, Label("parameters", "optimizer", "wait"), waits=(task,))
        return task

    def _named(self) -> Label:
        return Label("optimizer", "optimizer", f"{self._scenario.training.optimizer} {ON_CPU}")

    def _swap(self, section: SectionBuilder, numel: int, task: int) -> int:
        """States, master copy and gradients read, all but gradients written back; the host waits for both."""
        widths = self.state_widths()
        read = sum(widths.values())
        for way, width in (("nvme_read", read), ("nvme_write", read - widths["gradients"])):
            label = Label("optimizer", "optimizer", "states")
            copied = self._copy(section, None, way, numel * width, label, (), ())
            task = section.host(0.0, Label("optimizer", "optimizer", "swap"), waits=(copied,))
        return task

    def update_s(self, numel: int, tensors: int, clip: bool = True) -> float:
        """Seconds of clipping (unless that was done on the device) and optimizer on `numel` local parameters: bytes
        through host memory."""
        scenario, stack = self._scenario, self._stack
        training = scenario.training
        precision = training.precision.model_copy(update={"gradients": self._gradient_dtype()})
        fuses = stack.cpu_fuses and training.optimizer in _FUSED_ON_CPU
        kind = "fused" if fuses and scenario.software.optimizer_kernel == "fused" else stack.cpu_optimizer
        parts = [(kind, optimizer_kernels(numel, tensors, precision, training.optimizer, kind, clip=False,
                                          on_cpu=True))]
        if clip and stack.clip_gradients and training.optimizer != "none":
            parts.append((stack.cpu_optimizer, clip_kernels(numel, tensors, precision.gradients, stack.cpu_optimizer)))
        share = self._share()
        return sum(sum(k.bytes for k in kernels) / share.optimizer_bps(name, stack.cpu_threads)
                   for name, kernels in parts)

    def add_s(self, numel: int) -> float:
        """Seconds of adding a gradient of `numel` elements to one in host memory."""
        width = DTYPE_BYTES[self._scenario.training.precision.gradients]
        return 3 * width * numel / self._share().optimizer_bps("loop", self._stack.cpu_threads)

    def _share(self) -> HostShare:
        cluster = self._scenario.cluster
        return host_share(cluster.topology.host, cluster.gpus_per_node, cluster.topology.intra.gpus_per_switch or 1)
