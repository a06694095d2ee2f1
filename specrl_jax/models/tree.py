"""The tokens of a round as a tree: the newest emitted token is its root, drafts hang below.

A chain of `k` drafts is the tree whose nodes have one child each. Node `i` takes slot
`length + i` of the cache while it is verified and stands at position `length + depth`;
it sees the tokens before the round, its ancestors and itself.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Tree:
    """parents: of node `i + 1`, for every draft. Node 0 is the root; nodes stand in order of depth.

    The children of a node are its candidates, the likeliest first.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(not 0 <= parent <= i for i, parent in enumerate(self.parents)):
            raise ValueError(f"parents {self.parents} do not stand before their children")
        if list(self.depths) != sorted(self.depths):
            raise ValueError(f"the nodes of {self.parents} do not stand in order of depth")

    @staticmethod
    def chain(depth: int) -> "Tree":
        """One draft after the other."""
        return Tree(tuple(range(depth)))

    @staticmethod
    def comb(depth: int, branches: int) -> "Tree":
        """`branches` candidates at every depth, of which only the likeliest has candidates of its own."""
        return Tree(tuple(0 if d == 0 else 1 + (d - 1) * branches for d in range(depth) for _ in range(branches)))

    @staticmethod
    def full(depth: int, branches: int) -> "Tree":
        """`branches` candidates below every node."""
        return Tree(tuple(i // branches for i in range(sum(branches ** (d + 1) for d in range(depth)))))

    @property
    def size(self) -> int:
        """Tokens of the round: the drafts and the root."""
        return len(self.parents) + 1

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Of every node; 0 for the root."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Drafts on the longest path."""
        return max(self.depths)

    @property
    def is_chain(self) -> bool:
        """Whether every node has one child at most."""
        return self.parents == tuple(range(len(self.parents)))

    def children(self, node: int) -> tuple[int, ...]:
        """The candidates below a node."""
        return tuple(i + 1 for i, parent in enumerate(self.parents) if parent == node)

    def inner(self, depth: int) -> tuple[int, ...]:
        """Nodes of a depth that have children."""
        return tuple(i for i, d in enumerate(self.depths) if d == depth and self.children(i))

    def path(self, node: int) -> tuple[int, ...]:
        """From the root to a node, both included."""
        above: tuple[int, ...] = () if node == 0 else self.path(self.parents[node - 1])
        return (*above, node)

    @cached_property
    def leaf_paths(self) -> tuple[tuple[int, ...], ...]:
        """Paths from the root to every leaf."""
        return tuple(self.path(i) for i in range(self.size) if not self.children(i))

    @cached_property
    def sees(self) -> np.ndarray:
        """`sees[i, j]`: whether node `j` is node `i` or an ancestor of it, bool `[size, size]`."""
        mask = np.zeros((self.size, self.size), bool)
        for node in range(self.size):
            mask[node, list(self.path(node))] = True
        return mask

    @cached_property
    def paths(self) -> np.ndarray:
        """The path to every node, filled up with the node itself, int32 `[size, depth + 1]`."""
        table = [self.path(node) for node in range(self.size)]
        return np.array([(*path, *[path[-1]] * (self.depth + 1 - len(path))) for path in table], np.int32)
