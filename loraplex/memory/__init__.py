"""Where adapters' weights are: tiers, room, residency.

arena.py         one flat memory in chunks, lent to KV cache and adapters within floors and ceilings; pages.py: its pages
pool.py          LoRAMemoryPool: extents in the adapters' chunks; space.py, holes.py: what lies where, what is free
compaction.py    extents moved out of sparse chunks; moves.py: which, and where to
pressure.py      adapters that leave for the KV cache
retired.py    freed memory on its way back while launched steps may read it
packing.py       tensors to packed blocks, one extent per decoder layer
eviction.py      who goes first
prediction.py    who comes next, and what came of bringing them early
tiers.py         host and device as budgets over extents
stored.py        the records: StoredAdapter by id, StoredWeights by content digest
room.py          who makes way for whom, and what is refused
loading.py       loader threads, sources read again, copies to another device
weight_store.py  how weights move: load, promote, evict, drop
manager.py       LoRAModelManager: references, pins, verbs
integrity.py     what must always be true          stats.py   what is counted
"""
