"""Blocks of cells, one for each token, that two requests share: one from the left, one from the right."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)
class Block:
    """A block: who uses it from which end, with how many tokens, and whose token is in each cell."""

    cells: list[str | None]
    users: dict[str, str] = field(default_factory=dict)  # by end
    tokens: dict[str, int] = field(default_factory=lambda: {"left": 0, "right": 0})

    def places(self, end: str) -> range:
        """Return the cells of a user's tokens, its first token first."""
        size = len(self.cells)
        return range(self.tokens["left"]) if end == "left" else range(size - 1, size - 1 - self.tokens["right"], -1)

    def missing(self) -> list[int]:
        """Return the cells of the right's tokens that hold nothing or the left's: these tokens are in host memory."""
        return (
            []
            if "right" not in self.users
            else [c for c in self.places("right") if self.cells[c] != self.users["right"]]
        )

    def num_empty(self) -> int:
        """Count the cells without a token."""
        return self.cells.count(None)


class TwoEndedCells:
    """All blocks of an engine."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.blocks = [Block([None] * block_size) for _ in range(num_blocks)]
        self.block_size = block_size

    @property
    def num_free_blocks(self) -> int:
        """The blocks without a user."""
        return sum(not block.users for block in self.blocks)

    def of(self, name: str, end: str) -> list[Block]:
        """Return the blocks that a request uses."""
        return [block for block in self.blocks if block.users.get(end) == name]

    def checkpointed(self, name: str) -> int:
        """Count a request's tokens in host memory."""
        return sum(len(block.missing()) for block in self.of(name, "right"))

    def remove(self, name: str) -> None:
        """Remove a request from all its blocks."""
        for block in self.blocks:
            for end in [end for end, user in block.users.items() if user == name]:
                del block.users[end]
                block.tokens[end] = 0
            block.cells = [None if cell == name else cell for cell in block.cells]

    def room_left(self, name: str) -> int:
        """Return how many tokens fit from the left, over those of the right."""
        blocks = self.of(name, "left") + [block for block in self.blocks if "left" not in block.users]
        return sum(self.block_size - block.tokens["left"] for block in blocks)

    def room_right(self, name: str) -> int:
        """Return how many tokens fit from the right, into empty cells only."""
        blocks = self.of(name, "right") + [block for block in self.blocks if "right" not in block.users]
        return sum(block.num_empty() for block in blocks)

    def place_left(self, name: str, count: int) -> int:
        """Place tokens one by one; return how many of others were overwritten, each of which is copied."""
        copied = 0
        for _ in range(count):
            own = [block for block in self.of(name, "left") if block.tokens["left"] < self.block_size]
            block = own[0] if own else self._emptiest("left")
            block.users["left"] = name
            cell = block.tokens["left"]
            copied += block.cells[cell] is not None
            block.cells[cell] = name
            block.tokens["left"] += 1
        return copied

    def take_back_left(self, name: str) -> None:
        """Remove a token, from the block that is not full if there is one."""
        own = self.of(name, "left")
        block = ([one for one in own if one.tokens["left"] < self.block_size] or own[:1])[-1]
        block.tokens["left"] -= 1
        block.cells[block.tokens["left"]] = None
        if block.tokens["left"] == 0:
            del block.users["left"]

    def place_right(self, name: str, count: int) -> int:
        """Place new tokens, and those in host memory; return how many were copied back."""
        copied = self.checkpointed(name)
        for block in self.of(name, "right"):
            for cell in block.missing():
                if block.cells[cell] is None:
                    block.cells[cell] = name
            lost = len(block.missing())
            count += lost
            kept = block.tokens["right"] - lost
            block.cells = [None if cell == name else cell for cell in block.cells]
            block.tokens["right"] = 0
            for _ in range(kept):
                self._put_right(block, name)
            if kept == 0:
                del block.users["right"]
        for _ in range(count):
            own = [block for block in self.of(name, "right") if block.num_empty()]
            self._put_right(own[0] if own else self._emptiest("right"), name)
        return copied

    def _put_right(self, block: Block, name: str) -> None:
        block.users["right"] = name
        block.tokens["right"] += 1
        block.cells[self.block_size - block.tokens["right"]] = name

    def _emptiest(self, end: str) -> Block:
        return max((block for block in self.blocks if end not in block.users), key=Block.num_empty)
