"""An answer as a list of blocks, texts and calls in turn: what two other APIs have in common. It must not know them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from servekit.engine.output import Chunk
from servekit.server.call_text import ArgumentsDelta, CallParser, CallStart, ContentDelta, Delta
from servekit.server.tool_deltas import call_id


@dataclass(slots=True)
class Block:
    """A text (`name` None) or a call, whose `text` is then the JSON of its arguments."""

    name: str | None = None
    text: str = ""
    id: str = field(default_factory=call_id)


@dataclass(frozen=True, slots=True)
class BlockStart:
    """Block `index` begins."""

    index: int
    block: Block


@dataclass(frozen=True, slots=True)
class BlockText:
    """Block `index` goes on."""

    index: int
    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class BlockEnd:
    """Block `index` is complete."""

    index: int
    block: Block


BlockEvent = BlockStart | BlockText | BlockEnd


class BlockReader:
    """One answer's blocks as they grow. Without a parser all text is one block; an empty answer has an empty one."""

    def __init__(self, parser: CallParser | None) -> None:
        self._parser = parser
        self.blocks: list[Block] = []

    @property
    def num_calls(self) -> int:
        """How many of the blocks are calls."""
        return sum(block.name is not None for block in self.blocks)

    def push(self, chunk: Chunk) -> list[BlockEvent]:
        """What a chunk adds; the last one ends the last block."""
        return self.read(chunk.text, is_last=chunk.finish_reason is not None)

    def read(self, text: str, *, is_last: bool) -> list[BlockEvent]:
        """As `push`, from the text alone."""
        events: list[BlockEvent] = []
        for delta in self._deltas(text, is_last=is_last):
            if isinstance(delta, CallStart):
                events += self._open(Block(delta.name))
            elif isinstance(delta, ContentDelta) and (not self.blocks or self.blocks[-1].name is not None):
                events += self._open(Block())
            if isinstance(delta, ContentDelta | ArgumentsDelta):
                block = self.blocks[-1]
                block.text += delta.text
                events.append(BlockText(len(self.blocks) - 1, block, delta.text))
        if is_last:
            if not self.blocks:
                events += self._open(Block())
            events.append(BlockEnd(len(self.blocks) - 1, self.blocks[-1]))
        return events

    def _open(self, block: Block) -> list[BlockEvent]:
        events: list[BlockEvent] = []
        if self.blocks:
            events.append(BlockEnd(len(self.blocks) - 1, self.blocks[-1]))
        self.blocks.append(block)
        events.append(BlockStart(len(self.blocks) - 1, block))
        return events

    def _deltas(self, text: str, *, is_last: bool) -> Sequence[Delta]:
        if self._parser is None:
            return [ContentDelta(text)] if text else []
        return self._parser.push(text) + (self._parser.finish() if is_last else [])
