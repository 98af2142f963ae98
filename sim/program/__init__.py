"""The Program and Job: what ranks run, as plain columns (see `columns.py` for the rules of the machine)."""

from sim.program.builder import ProgramBuilder, SectionBuilder, Tables
from sim.program.columns import (
    GOES_ON,
    ON_CPU,
    CollectiveCall,
    Copy,
    Inline,
    InlineCall,
    Kind,
    Label,
    MemoryOp,
    Program,
    Read,
    Section,
    Segment,
)
from sim.program.job import Communicator, Job, RankClass

__all__ = ["GOES_ON", "ON_CPU", "CollectiveCall", "Communicator", "Copy", "Inline", "InlineCall", "Job", "Kind",
           "Label", "MemoryOp", "Program", "ProgramBuilder", "RankClass", "Read", "Section", "SectionBuilder",
           "Segment", "Tables"]
