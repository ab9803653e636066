"""Where adapters' weights are: tiers, room, residency.

arena.py         one flat memory in chunks, lent to KV cache and adapters within floors and ceilings; pages.py: its pages
pinning.py       page-locked host memory, for copies to a GPU
pool.py          LoRAMemoryPool: extents in the adapters' chunks; space.py, holes.py: what lies where, what is free
compaction.py    extents moved out of sparse chunks; moves.py: which, and where to
pressure.py      adapters that leave for the KV cache
retired.py       freed memory on its way back while launched steps may read it
packing.py       tensors to packed blocks, one extent per decoder layer
eviction.py      who goes first
prediction.py    who comes next, and what came of bringing them early
tiers.py         host and device as budgets over extents
stored.py        the records: StoredAdapter by id, StoredWeights by content digest
room.py          who makes way for whom, and what is refused
loading.py       loader threads, sources read again
weight_store.py  what is in which tier, who uses it, how it leaves; transfers.py: how it comes nearer; jobs.py: what is under way
promote.py       host to device; copies.py: beside the steps; arrivals.py, steps.py: steps that wait for layers on their way
weight_reader.py one load: from a compressed copy, the disk tier or the source
disk_cache.py    the disk tier, packed adapters by content; disk_file.py: one file
compression.py   fewer bytes for cold adapters; compressed_copies.py: those that are kept
damage.py        bytes that changed, memory that fails
recovery.py      adapters with wrong results: quarantined until a diagnosis; health.py: that and damage, for the engine
monitor.py       the periodic look, low-memory mode; housekeeping.py: what it does to adapters; system_memory.py: what the machine has left
adapter_records.py  which adapters there are by id
manager.py       LoRAModelManager: references, pins, verbs
integrity.py     what must always be true          stats.py   what is counted
"""
