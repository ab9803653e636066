"""Operators on tensors: what every layer of a step runs. Nothing here knows of adapters' files or of their life.

plan.py       what a LoRA or attention kernel reads: LoraPlan, SlotTable, AttentionPlan
tiles.py      the rows of a step cut into tiles, for GPU kernels
protocols.py  KernelBackend = LayerOps + AdapterPacking + SamplingOps + StepCapture
ops.py        get_backend, the only dispatch point
fallbacks.py  what stock torch runs for a kernel, counted; speedup.py times both
reference.py  the specification of every operator, in plain torch
torch_ops.py  the same operators in few calls of stock torch, on any device; torch_attention.py is its paged attention
checksum.py   of packed bytes, the same number wherever they are summed
"""
