"""What the LoRA kernels read: the segments of a step, and the table of adapters' addresses.

A plan holds lora slots, never addresses; the table holds addresses, never tensors' shapes (a target gives those). So
promoting, evicting or moving an adapter is a write to the table, and a plan made before stays good.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.core import BASE_SLOT, LoraTarget, ShardKind
from loraplex.distributed import Collectives
from loraplex.kernels.slices import (
    ABSENT,
    DTYPE_CODES,
    Blocks,
    PlacedBlock,
    PlacedProjections,
    ProjectionsLayout,
    SliceLayout,
    SliceView,
    SlotImage,
    facts_of,
    has_shared_input,
)
from loraplex.kernels.tiles import NO_TILES, TILE_FIELDS, TileBuffer, Tiles, cut_tiles, tile_room

# ------------------------------------------------------------------------------------------------ the step's segments


@dataclass(frozen=True, slots=True)
class LoraSegment:
    """Token rows [start, end) go through the adapter in `lora_slot`, times `weight`. Segments may share rows."""

    start: int
    end: int
    lora_slot: int
    weight: float = 1.0


class LoraPlan:
    """The segments of one step, in buffers of a fixed size that every layer reads and the next step rewrites.

    seg_starts, seg_ends, seg_slots: int32 [capacity]; seg_weights: float32 [capacity]. Segments from `num_segments` on
    are empty and have slot -1, so that a captured graph may run over all of them. `segments` is the same on the host.
    Rows in no segment are base rows: no kernel touches them.

    For GPU kernels the same rows are cut into tiles (tiles.py): small_tiles, large_tiles int32 [5, room]. On a CPU they
    are cut when `cut_tiles` is called. All of it is one host tensor and one on the device, with the parts at fixed
    places: `host`, `buffer`. They are replaced by larger ones only when a step has more tiles than segments over
    `max_tokens` rows can have, each row in `overlap` of them (`tile_room`).
    """

    def __init__(
        self, capacity: int, device: torch.device | str = "cpu", max_tokens: int = 0, overlap: int = 1
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity of a LoraPlan must be >= 1, got {capacity}")
        self.capacity = capacity
        self.device = torch.device(device)
        self.num_segments = 0
        self.num_tokens = 0
        self.is_decode = False
        self.segments: tuple[LoraSegment, ...] = ()
        self.scratch: dict[Any, Any] = {}
        """What a backend derives from these segments once for all layers; emptied by `rewrite`."""
        self.tiles: Tiles | None = None
        """The tiles of this step on the host; None: not cut yet."""
        self._room = TileBuffer(*tile_room(capacity, max_tokens, overlap))
        self._allocate()
        self.upload()

    @classmethod
    def build(
        cls,
        segments: Sequence[LoraSegment],
        num_tokens: int,
        capacity: int,
        device: torch.device | str = "cpu",
        is_decode: bool = False,
    ) -> LoraPlan:
        """A plan with new buffers. Raises ValueError as `rewrite` does."""
        plan = cls(capacity, device, num_tokens)
        plan.rewrite(segments, num_tokens, is_decode)
        return plan

    def rewrite(self, segments: Sequence[LoraSegment], num_tokens: int, is_decode: bool = False) -> None:
        """Make this the plan of another step; the buffers stay where they are.

        is_decode: each row is a sequence of its own, so every tile is a small one, and there are at most `num_tokens`
        of them. Raises ValueError, and changes nothing, when a segment is empty, leaves [0, num_tokens), has a negative
        slot or a weight that is not finite, or when there are more segments than `capacity`.
        """
        self.write(segments, num_tokens, is_decode)
        self.upload()

    def write(self, segments: Sequence[LoraSegment], num_tokens: int, is_decode: bool = False) -> None:
        """The host's half of `rewrite`: into `host` and the fields that are Python's."""
        if len(segments) > self.capacity:
            raise ValueError(f"{len(segments)} segments do not fit in a LoraPlan of capacity {self.capacity}")
        for segment in segments:
            _check_segment(segment, num_tokens)
        self.scratch.clear()
        self.segments = tuple(segments)
        self.num_segments, self.num_tokens, self.is_decode = len(segments), num_tokens, is_decode
        ranges = self._host[: 4 * self.capacity].reshape(4, self.capacity)
        ranges[:] = 0
        ranges[2] = BASE_SLOT
        ranges[0, : len(segments)] = [s.start for s in segments]
        ranges[1, : len(segments)] = [s.end for s in segments]
        ranges[2, : len(segments)] = [s.lora_slot for s in segments]
        ranges[3, : len(segments)] = np.array([s.weight for s in segments], np.float32).view(np.int32)
        self.tiles = None
        if self.device.type != "cpu":
            self.cut_tiles()

    def upload(self) -> None:
        """The device's half of `rewrite`: one copy of `host` to `buffer`, which on a CPU are the same memory. No thread
        waits for it."""
        if self.buffer is not self.host:
            # from other than page-locked memory the copy would wait for the step in flight
            self.buffer.copy_(self.host.pin_memory() if self.device.type == "cuda" else self.host, non_blocking=True)

    def cut_tiles(self) -> Tiles:
        """The tiles of this step, which are in `small_tiles` and `large_tiles` (on a device after the upload)."""
        if self.tiles is None:
            tiles = cut_tiles(self.segments, self.is_decode)
            if not self._room.fits(tiles):
                self._room = self._room.grown(tiles)
                self._allocate()
            self._room.write(tiles, self._host[4 * self.capacity :])
            self.tiles = tiles
        return self.tiles

    def _allocate(self) -> None:
        """Buffers with the present segments and no tiles."""
        size, capacity = 4 * self.capacity + self._room.size, self.capacity
        previous = getattr(self, "_host", None)
        self.host = torch.zeros(size, dtype=torch.int32)
        self._host: NDArray[np.int32] = self.host.numpy()
        if previous is None:
            self._host[2 * capacity : 3 * capacity] = BASE_SLOT
        else:
            self._host[: 4 * capacity] = previous[: 4 * capacity]
        self._room.write(NO_TILES, self._host[4 * capacity :])
        self.move_to(self.host if self.device.type == "cpu" else torch.zeros_like(self.host, device=self.device))

    def move_to(self, buffer: torch.Tensor) -> None:
        """Read the device's half from `buffer`, int32 and as large as `host`, from now on; the next upload fills it."""
        assert (buffer.dtype, buffer.shape) == (self.host.dtype, self.host.shape)
        self.buffer, capacity = buffer, self.capacity
        ranges, tiles = buffer[: 4 * capacity].view(4, capacity), buffer[4 * capacity :]
        self.seg_starts, self.seg_ends, self.seg_slots, weights = ranges.unbind()
        self.seg_weights = weights.view(torch.float32)
        border = TILE_FIELDS * self._room.num_small
        self.small_tiles = tiles[:border].view(TILE_FIELDS, -1)
        self.large_tiles = tiles[border:].view(TILE_FIELDS, -1)


def _check_segment(segment: LoraSegment, num_tokens: int) -> None:
    if not 0 <= segment.start < segment.end <= num_tokens:
        raise ValueError(f"{segment} is empty or outside the {num_tokens} token rows of the step")
    if segment.lora_slot < 0:
        raise ValueError(f"{segment}: base rows belong in no segment; a segment's lora_slot is >= 0")
    if not math.isfinite(segment.weight):
        raise ValueError(f"{segment}: weight must be finite")


# ---------------------------------------------------------------------------------------------- an adapter's weights


NOT_OF_KERNELS = frozenset((ShardKind.EMBEDDING, ShardKind.NORM))
"""Kinds of targets that `add_lora` has nothing to do with: the slot table has no addresses of theirs."""


_NUM_ADDRESSES = 6
"""Fields of an entry of the slot table that are addresses; the others are of 32 bits."""

ENTRY_WORDS = 8
"""Of 64 bits: an entry is a cache line."""


class SlotTable:
    """Addresses of every resident adapter's packed blocks: all that a LoRA kernel reads of adapters.

    One row per (target, slice), in the order of `targets`, those of NOT_OF_KERNELS apart: theirs are numbers behind
    the others without addresses. One column per lora_slot. Tensors of shape [rows, capacity]:
    a_addr, b_addr, bias_addr, gain_addr, input_gain_addr, scales_addr int64 (0: no such part), rank int32 (0: no A and
    B), scale float32, dtype int32 (DTYPE_CODES); and on the host whether ranks exchange something between A and B. They
    are allocated once and never move. Address = buffer.data_ptr() + byte offset. Where there are scales, A and B are
    the projections', which other slots may have, too.

    They are views of `entries` [capacity, rows, ENTRY_WORDS]: all fields of an entry are one cache line, in the order
    above, and the entries that the linears of a step read for an adapter lie one behind the other.

    On another device than the host (`is_mirrored`; True for tests) what is written is on the host, and `flush` brings
    it to the tensors, in the order of the kernels: a step in flight sees none of it, the next one all. The table itself
    never calls it: an engine does before each launch (memory/residency/store.py), other users of a table do before
    their kernels.
    """

    def __init__(
        self, targets: Sequence[LoraTarget], capacity: int, buffer: torch.Tensor, *, is_mirrored: bool | None = None
    ) -> None:
        if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
            raise ValueError(f"buffer must be a flat contiguous uint8 tensor, got {buffer.dtype} {tuple(buffer.shape)}")
        if capacity < 1:
            raise ValueError(f"capacity of a SlotTable must be >= 1, got {capacity}")
        self.targets = tuple(targets)
        self.capacity = capacity
        self.buffer = buffer
        self.is_mirrored = buffer.device.type != "cpu" if is_mirrored is None else is_mirrored
        self._base_addr = buffer.data_ptr()
        ordered = sorted(self.targets, key=lambda t: t.kind in NOT_OF_KERNELS)
        self._first_rows = dict(zip((t.name for t in ordered), _row_starts(ordered), strict=True))
        if len(self._first_rows) != len(self.targets):
            raise ValueError("two LoraTargets have the same name")
        self._by_first_row = {self._first_rows[t.name]: t for t in ordered}
        self._rows = tuple((self._first_rows[t.name], i) for t in ordered for i in range(len(t.slices)))
        self.num_rows = sum(len(t.slices) for t in ordered if t.kind not in NOT_OF_KERNELS)
        self._allocate_entries()
        self._placed: tuple[dict[int, PlacedBlock], ...] = tuple({} for _ in range(capacity))
        self._projections: dict[int, PlacedProjections] = {}
        self._taken: set[int] = set()
        self.derived: tuple[dict[int, Any], ...] = tuple({} for _ in range(capacity))
        """Per lora_slot: first row of a target -> what a backend made of that block, until it changes."""
        self.max_rank = 0
        """The largest rank that any block here ever had; it never becomes less."""
        self.block_dtypes: set[torch.dtype] = set()
        """The dtypes that blocks here ever had."""
        self.has_gains = False
        """Whether any block here ever had a gain; it never becomes False again. Likewise `has_input_gains`."""
        self.has_input_gains = False
        self.collectives: Collectives | None = None
        """Of the ranks of the model, for adapters of which these exchange something between A and B."""
        self.scratch: dict[int, Any] = {}
        """First row of a target -> what a backend derives from the place of its rows, which never changes."""
        self.own_layers: set[int] = set()
        """Slots of adapters with norms or linears of their own. shared_input_slots: with gains on shared inputs."""
        self.shared_input_slots: set[int] = set()
        self.embedding_slots: set[int] = set()
        """Slots of adapters that change the embedding. head_slots: the head, or where the vocabulary ends."""
        self.head_slots: set[int] = set()
        self.vocab_sizes: dict[int, int] = {}
        """Slot -> where the adapter's vocabulary ends, if not where the base's does."""
        self.rope_factors: dict[int, float] = {}
        """Slot -> what the adapter's rows divide the rotary frequencies by, if not as the base's do."""

    def _allocate_entries(self) -> None:
        entries = torch.zeros((self.capacity, self.num_rows, ENTRY_WORDS), dtype=torch.int64)
        self._host_entries = entries.numpy()
        addresses, values = self._host_entries.T[:_NUM_ADDRESSES], self._host_entries.view(np.int32).T
        self._host_rank, scale, dtype, is_exchanged = values[2 * _NUM_ADDRESSES :]
        self._host = (*addresses, self._host_rank, scale.view(np.float32), dtype, is_exchanged)
        self.entries = entries.to(self.buffer.device, copy=True) if self.is_mirrored else entries
        fields = self.entries.permute(2, 1, 0)[:_NUM_ADDRESSES]
        self.a_addr, self.b_addr, self.bias_addr, self.gain_addr, self.input_gain_addr, self.scales_addr = fields
        self.rank, scales, self.dtype = self.entries.view(torch.int32).permute(2, 1, 0)[2 * _NUM_ADDRESSES :][:3]
        self.scale = scales.view(torch.float32)
        self._changed: set[int] = set()

    def first_row(self, target_name: str) -> int:
        """Row of the target's first slice; its other slices follow. KeyError when there is no such target."""
        return self._first_rows[target_name]

    def target_at(self, first_row: int) -> LoraTarget:
        """The target whose first slice has this row."""
        return self._by_first_row[first_row]

    def place_of(self, row: int) -> tuple[int, int]:
        """(first row of the target that the slice of this row is of, index of the slice)"""
        return self._rows[row]

    def set_block(
        self, target_name: str, lora_slot: int, block_offset: int, layouts: Sequence[SliceLayout | None]
    ) -> None:
        """The packed block of one target of the adapter in `lora_slot` is at byte `block_offset` of the buffer.

        layouts: one per slice, None for a slice that the adapter lacks. Replaces what this slot had for the target.
        """
        first_row = self._first_rows[target_name]
        num_slices = len(self._by_first_row[first_row].slices)
        if len(layouts) != num_slices:
            raise ValueError(f"{target_name} has {num_slices} slices, got {len(layouts)} layouts")
        last_part = max((max(*x.offsets, x.scales_offset, 0) for x in layouts if x is not None), default=0)
        if block_offset < 0 or block_offset + last_part >= self.buffer.numel():
            raise ValueError(f"a block at {block_offset} is outside the buffer of {self.buffer.numel()} bytes")
        self._check_slot(lora_slot)
        if first_row < self.num_rows:
            for row, layout in enumerate(layouts, first_row):
                self._write(row, lora_slot, self._entry(block_offset, layout, self._projections.get(lora_slot)))
            self.expect(*facts_of(layouts))
            self._mark(lora_slot)
        self._taken.add(lora_slot)
        self._placed[lora_slot][first_row] = PlacedBlock(block_offset, tuple(layouts))
        self._note(lora_slot, first_row, layouts)
        self.derived[lora_slot].pop(first_row, None)
        self.derived[lora_slot].pop(~first_row, None)

    def _note(self, lora_slot: int, first_row: int, layouts: Sequence[SliceLayout | None]) -> None:
        """In the sets of slots, what this block means for a step."""
        kind = self._by_first_row[first_row].kind
        if kind is ShardKind.EMBEDDING:
            self.embedding_slots.add(lora_slot)
        elif kind is ShardKind.HEAD:
            self.head_slots.add(lora_slot)
        elif any(layout is not None and layout.has_weight for layout in layouts):
            self.own_layers.add(lora_slot)
        if has_shared_input(layouts):
            self.shared_input_slots.add(lora_slot)

    def image(
        self,
        blocks: Blocks,
        vocab_size: int | None = None,
        rope_factor: float | None = None,
        projections: ProjectionsLayout | None = None,
    ) -> SlotImage:
        """The image of an adapter with these blocks: (target's name, layouts of slices). KeyError: unknown target."""
        first_rows = tuple(self._first_rows[name] for name, _ in blocks)
        found = [
            (row, index, layout)
            for index, (first_row, (_, layouts)) in enumerate(zip(first_rows, blocks, strict=True))
            for row, layout in enumerate(layouts, first_row)
            if layout is not None and row < self.num_rows
        ]
        parts = [(*layout.offsets, layout.scales_offset) for _, _, layout in found]
        dtypes = [projections.dtype if projections and each.is_shared else each.dtype for _, _, each in found]
        return SlotImage(
            rows=np.array([row for row, _, _ in found], np.int64),
            blocks=np.array([index for _, index, _ in found], np.int64),
            offsets=np.array(parts, np.int64).reshape(-1, _NUM_ADDRESSES).T,
            is_shared=np.array([layout.is_shared for _, _, layout in found], np.bool_),
            values=(
                np.array([layout.rank for _, _, layout in found], np.int32),
                np.array([layout.scale for _, _, layout in found], np.float32),
                np.array([DTYPE_CODES[dtype] for dtype in dtypes], np.int32),
                np.array([layout.is_exchanged for _, _, layout in found], np.int32),
            ),
            first_rows=first_rows,
            layouts=tuple(tuple(layouts) for _, layouts in blocks),
            facts=facts_of(layout for _, _, layout in found),
            special_blocks=tuple(self._special_blocks(first_rows, blocks)),
            vocab_size=vocab_size,
            rope_factor=rope_factor,
            projections=projections,
        )

    def _special_blocks(
        self, first_rows: Sequence[int], blocks: Blocks
    ) -> Iterator[tuple[int, tuple[SliceLayout | None, ...]]]:
        for first_row, (_, layouts) in zip(first_rows, blocks, strict=True):
            is_end = self._by_first_row[first_row].kind in (ShardKind.EMBEDDING, ShardKind.HEAD)
            if is_end or has_shared_input(layouts) or any(each is not None and each.has_weight for each in layouts):
                yield first_row, tuple(layouts)

    def set_image(
        self, lora_slot: int, image: SlotImage, block_offsets: Sequence[int], projections_offset: int = 0
    ) -> None:
        """`set_block` for all blocks of an adapter at once, block i at byte `block_offsets[i]`; the slot was clear."""
        assert self.is_clear(lora_slot), f"lora_slot {lora_slot} holds an adapter"
        starts = np.array(block_offsets, np.int64)[image.blocks]
        if len(starts) and not (starts.min() >= 0 and (starts + image.offsets).max() < self.buffer.numel()):
            raise ValueError(f"a block lies outside the buffer of {self.buffer.numel()} bytes")
        addresses = np.where(image.offsets == ABSENT, 0, self._base_addr + starts + image.offsets)
        if image.projections is not None:
            placed = PlacedProjections(projections_offset, image.projections)
            if not 0 <= placed.offset <= self.buffer.numel() - placed.layout.nbytes:
                raise ValueError(f"projections at {placed.offset} are outside the buffer")
            self._projections[lora_slot] = placed
            for row, offset in enumerate(placed.offsets):
                addresses[row, image.is_shared] = self._base_addr + offset
        for column, values in zip(self._host, (*addresses, *image.values), strict=True):
            column[image.rows, lora_slot] = values
        self.expect(*image.facts)
        self._mark(lora_slot)
        self._taken.add(lora_slot)
        self._placed[lora_slot].update(
            zip(image.first_rows, map(PlacedBlock, block_offsets, image.layouts), strict=True)
        )
        for first_row, layouts in image.special_blocks:
            self._note(lora_slot, first_row, layouts)
        if image.vocab_size is not None:
            self.set_vocab_size(lora_slot, image.vocab_size)
        if image.rope_factor is not None:
            self.rope_factors[lora_slot] = image.rope_factor

    def set_vocab_size(self, lora_slot: int, vocab_size: int) -> None:
        """The vocabulary of the adapter in `lora_slot` ends there, and not where the base's does."""
        self.vocab_sizes[lora_slot] = vocab_size
        self.head_slots.add(lora_slot)

    def clear_slot(self, lora_slot: int) -> None:
        """Forget the adapter in `lora_slot`: every row of the column is zero again."""
        self._check_slot(lora_slot)
        self._host_entries[lora_slot] = 0
        self._mark(lora_slot)
        self._taken.discard(lora_slot)
        self._placed[lora_slot].clear()
        self._projections.pop(lora_slot, None)
        self.derived[lora_slot].clear()
        for slots in (self.own_layers, self.shared_input_slots, self.embedding_slots, self.head_slots):
            slots.discard(lora_slot)
        self.vocab_sizes.pop(lora_slot, None)
        self.rope_factors.pop(lora_slot, None)

    def is_clear(self, lora_slot: int) -> bool:
        """Whether no adapter is there; one may be without any block, where it has nothing that the base has not."""
        self._check_slot(lora_slot)
        return lora_slot not in self._taken

    def largest_rank(self, lora_slots: Sequence[int]) -> int:
        """Of the adapters in these slots; 0 for none."""
        ranks = self._host_rank[:, list(lora_slots)]
        return int(ranks.max()) if ranks.size else 0

    def views(self, row: int, lora_slot: int) -> SliceView | None:
        """The parts of one slice as tensors, in the stock layout; None when the adapter has nothing there."""
        first_row, slice_index = self._rows[row]
        placed = self._placed[lora_slot].get(first_row)
        layout = None if placed is None else placed.layouts[slice_index]
        if placed is None or layout is None:
            return None
        assert layout.dtype.is_floating_point, "a block of eight bits is read by its own kernels alone"
        target = self._by_first_row[first_row]
        in_features, out_features = target.in_features, target.slices[slice_index].out_features
        lora_a = self.part(placed.offset, layout.a_offset, layout.dtype, layout.rank, in_features)
        lora_b = self.part(placed.offset, layout.b_offset, layout.dtype, out_features, layout.rank)
        if layout.is_shared:
            shared = self._projections[lora_slot]
            (a_offset, b_offset), dtype = shared.offsets, shared.layout.dtype
            a_t = self.part(0, a_offset, dtype, in_features, layout.rank)
            lora_a, lora_b = None if a_t is None else a_t.t(), self.part(0, b_offset, dtype, out_features, layout.rank)
        return SliceView(
            lora_a,
            lora_b,
            self.part(placed.offset, layout.bias_offset, layout.dtype, out_features),
            layout.scale,
            self.part(placed.offset, layout.gain_offset, torch.float32, out_features),
            self.part(placed.offset, layout.input_gain_offset, torch.float32, in_features),
            self.part(placed.offset, layout.scales_offset, torch.float32, layout.rank),
            self.part(placed.offset, layout.out_scale_offset, torch.float32, out_features),
        )

    def placed(self, first_row: int, lora_slot: int) -> tuple[int, tuple[SliceLayout | None, ...]] | None:
        """(the byte where the block of one target begins, the layouts of its slices), None for no block."""
        placed = self._placed[lora_slot].get(first_row)
        return None if placed is None else (placed.offset, placed.layouts)

    def part(self, block_offset: int, offset: int, dtype: torch.dtype, *shape: int) -> torch.Tensor | None:
        """A part of a block as a tensor over the arena's memory."""
        if offset == ABSENT:
            return None
        start = block_offset + offset
        return self.buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def _entry(
        self, block_offset: int, layout: SliceLayout | None, shared: PlacedProjections | None = None
    ) -> tuple[int | float, ...]:
        if layout is None:
            return (*(0,) * _NUM_ADDRESSES, 0, 0.0, 0, 0)
        start, dtype = self._base_addr + block_offset, layout.dtype
        offsets = (*layout.offsets, layout.scales_offset)
        addresses = [0 if offset == ABSENT else start + offset for offset in offsets]
        if layout.is_shared:
            assert shared is not None, "scales in a slot without projections"
            addresses[:2], dtype = (self._base_addr + offset for offset in shared.offsets), shared.layout.dtype
        return (*addresses, layout.rank, layout.scale, DTYPE_CODES[dtype], layout.is_exchanged)

    def expect(
        self, max_rank: int, dtypes: Iterable[torch.dtype], has_gains: bool = False, has_input_gains: bool = False
    ) -> None:
        """Such blocks are here, or will be: captured steps are made for them."""
        self.max_rank = max(self.max_rank, max_rank)
        self.block_dtypes.update(dtypes)
        self.has_gains |= has_gains
        self.has_input_gains |= has_input_gains

    def _write(self, row: int, lora_slot: int, entry: tuple[int | float, ...]) -> None:
        for column, value in zip(self._host, entry, strict=True):
            column[row, lora_slot] = value

    @property
    def has_changes(self) -> bool:
        """Whether `flush` has something to do; never where the tensors are the host's own memory."""
        return bool(self._changed)

    def flush(self) -> None:
        """Bring the columns that were written since to the device, on the current stream, by one copy and one kernel.

        For the thread that launches steps, before each; no thread may write meanwhile. Nothing is launched when nothing
        changed.
        """
        if not self._changed:
            return
        slots = sorted(self._changed)
        # The slots and their entries. Torch keeps page-locked memory until its copy is done.
        size, is_pinned = 1 + self.num_rows * ENTRY_WORDS, self.buffer.device.type == "cuda"
        staging = torch.empty(len(slots) * size, dtype=torch.int64, pin_memory=is_pinned)
        staging[: len(slots)] = torch.tensor(slots)
        staging[len(slots) :].numpy().reshape(len(slots), *self._host_entries.shape[1:])[:] = self._host_entries[slots]
        on_device = staging.to(self.buffer.device, non_blocking=True)
        changed = on_device[len(slots) :].view(len(slots), *self.entries.shape[1:])
        self.entries.index_copy_(0, on_device[: len(slots)], changed)
        self._changed.clear()  # now, or they would be lost to a step that is tried again for lack of memory

    def _mark(self, lora_slot: int) -> None:
        if self.is_mirrored:
            self._changed.add(lora_slot)

    def check_integrity(self) -> None:
        """Assert that the device has what the host has, but for columns that wait for `flush`."""
        same = [slot for slot in range(self.capacity) if slot not in self._changed]
        assert (self._host_entries[same] == self.entries[same].cpu().numpy()).all(), "the device has another slot table"

    def addresses(self, row: int, lora_slot: int) -> list[int]:
        """Of the parts of one slice, in the order of `SliceLayout.offsets`, as they were written last; behind them its
        scales, if it has any."""
        if row >= self.num_rows:
            first_row, index = self._rows[row]
            placed = self._placed[lora_slot].get(first_row)
            entry = self._entry(0, None) if placed is None else self._entry(placed.offset, placed.layouts[index])
        else:
            entry = tuple(self._host_entries[lora_slot, row, :_NUM_ADDRESSES])
        *parts, scales = map(int, entry[:_NUM_ADDRESSES])
        return [*parts, scales] if scales else parts

    def _check_slot(self, lora_slot: int) -> None:
        if not 0 <= lora_slot < self.capacity:
            raise ValueError(f"lora_slot {lora_slot} is outside the table of {self.capacity} slots")


def _row_starts(targets: Sequence[LoraTarget]) -> list[int]:
    """indptr[i] := sum(len(t.slices) for t in targets[:i])"""
    starts = [0]
    for target in targets[:-1]:
        starts.append(starts[-1] + len(target.slices))
    return starts[: len(targets)]
