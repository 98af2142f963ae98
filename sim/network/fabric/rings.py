"""NVLink rings: how many edge-disjoint ones fit through a group's GPUs inside a node whose links are a mesh.

A link is two one-way channels, so a ring uses one direction of each of its links and its mirror image the other.
NCCL searches the same (src/graph/search.cc); the count, not the number of GPUs, decides the bandwidth of a DGX-1V.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

Matrix = tuple[tuple[int, ...], ...]

#: Search steps after which the best packing so far is taken: exact for the 8-GPU meshes that exist, bounded for others.
_SEARCH_LIMIT = 20_000


@lru_cache(maxsize=256)
def ring_count(matrix: Matrix, gpus: tuple[int, ...]) -> int:
    """Edge-disjoint one-way NVLink rings through all of `gpus` (local indices); 0 when NVLink cannot join them.

    Args:
        matrix: links between each pair of GPUs of the node, shape (gpus_per_node, gpus_per_node).
        gpus: GPUs of the group, sorted.
    """
    n = len(gpus)
    if n < 2:
        return 0
    links = [[matrix[a][b] for b in gpus] for a in gpus]
    if n == 2:
        return links[0][1]
    degree = min(sum(row) for row in links)
    pairs = {links[i][j] for i in range(n) for j in range(n) if i != j}
    if len(pairs) == 1:
        return degree  # the complete digraph splits into Hamilton cycles (Tillson 1980; n = 4, 6 fractionally)
    cycles = list(_cycles(links))
    if not cycles:
        return 0
    return 2 * _packing(links, cycles, degree // 2)


def _cycles(links: list[list[int]]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Hamilton cycles of the mesh, each undirected one once, as sorted pairs of neighbours."""
    n = len(links)

    def extend(path: list[int], seen: int) -> Iterator[tuple[tuple[int, int], ...]]:
        if len(path) == n:
            if links[path[-1]][0] and path[1] < path[-1]:
                ring = [*path, 0]
                yield tuple((min(a, b), max(a, b)) for a, b in pairwise(ring))
            return
        for after in range(1, n):
            if links[path[-1]][after] and not seen >> after & 1:
                yield from extend([*path, after], seen | 1 << after)

    return extend([0], 1)


def _packing(links: list[list[int]], cycles: list[tuple[tuple[int, int], ...]], bound: int) -> int:
    """Most cycles that fit together without using a link twice, searched depth first up to `bound`."""
    left = {(i, j): links[i][j] for i in range(len(links)) for j in range(i + 1, len(links))}
    best = steps = 0

    def search(first: int, taken: int) -> None:
        nonlocal best, steps
        best = max(best, taken)
        for number in range(first, len(cycles)):
            if best == bound or steps >= _SEARCH_LIMIT:
                return
            cycle = cycles[number]
            if all(left[edge] for edge in cycle):
                steps += 1
                for edge in cycle:
                    left[edge] -= 1
                search(number, taken + 1)
                for edge in cycle:
                    left[edge] += 1

    search(0, 0)
    return best
