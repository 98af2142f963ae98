"""Makes the fixtures here of traces that `record.py` wrote: `python trim.py TRACE.json ...`, with `sim` on the path.

Only nodes that the reader looks at stay, with autograd's around them, and of a node what it reads.
"""

import gzip
import json
import sys
from pathlib import Path

from sim.imports.chakra.nodes import telling


def trim(file: str) -> None:
    data = json.loads(Path(file).read_text())
    nodes = []
    for node in data["nodes"]:
        name = node["name"]
        if not telling(name) and "evaluate_function" not in name:
            continue
        if name == "detach" or (name in ("aten::mul_", "aten::add_", "aten::addcdiv_") and node["id"] % 4):
            continue  # one of four tells as much
        kept = {"id": node["id"], "name": name, "ctrl_deps": node["ctrl_deps"]}
        if telling(name):
            kept["inputs"] = {key: node["inputs"][key] for key in ("values", "shapes", "types")}
            kept["outputs"] = {key: node["outputs"][key] for key in ("shapes", "types")}
        kept["attrs"] = [one for one in node["attrs"] if one["name"] == "tid"]
        nodes.append(kept)
    text = json.dumps({**data, "nodes": nodes}, separators=(",", ":"))
    out = Path(__file__).parent / f"{Path(file).name}.gz"
    out.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


for one in sys.argv[1:]:
    trim(one)
