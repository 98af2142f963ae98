"""The network room: topologies as templates, collectives as loads on links, rates shared by weighted max-min.

`network.py` is its front door, over `nccl/` (how a call is served, and what that costs), over `fabric/` (links, where
they lead and how they are shared). Measured figures are the catalogues beside them, read through `figures.py`.
"""

from sim.network.fabric.fair_share import LinkId, fair_share
from sim.network.fabric.topology import Topology
from sim.network.jitter import expected_maximum, latest, rendezvous_s
from sim.network.nccl.candidate import Coflow
from sim.network.nccl.site import Pushing
from sim.network.network import Network

__all__ = ["Coflow", "LinkId", "Network", "Pushing", "Topology", "expected_maximum", "fair_share", "latest",
           "rendezvous_s"]
