"""The network room: topologies as templates, collectives as loads on links, rates shared by weighted max-min."""

from sim.network.candidate import Coflow
from sim.network.fair_share import LinkId, fair_share
from sim.network.jitter import expected_maximum, latest, rendezvous_s
from sim.network.network import Network
from sim.network.topology import Topology

__all__ = ["Coflow", "LinkId", "Network", "Topology", "expected_maximum", "fair_share", "latest", "rendezvous_s"]
