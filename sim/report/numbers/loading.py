"""What reading the training data asks of a node, and what a step waits for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DataLoading:
    """What reading the training data asks of each node; batches are read ahead, so the slower of reading and training
    sets the pace of a steady step.

    Attributes:
        bytes_per_step: of one node.
        storage_bytes_per_s: what the node reads (`host.storage`).
        work_s: the step without waiting for data.
    """

    bytes_per_step: float
    storage_bytes_per_s: float
    work_s: float

    @property
    def reading_s(self) -> float:
        """Time to read the data of one step."""
        return self.bytes_per_step / self.storage_bytes_per_s

    @property
    def waiting_s(self) -> float:
        """What reading adds to the step."""
        return max(0.0, self.reading_s - self.work_s)

    def to_json(self) -> dict[str, float]:
        """`data_loading` of the result: what training at full speed needs, what there is, what is waited."""
        return {"needed_bytes_per_second": self.bytes_per_step / self.work_s,
                "storage_bytes_per_second": self.storage_bytes_per_s, "waiting_s": self.waiting_s}
