"""The field's names over Loraplex's own parts, for code that was written against vLLM, Punica or SGLang.

    punica_ops.py  sgmv_* and bgmv_* as free functions on the kernels
    vllm.py        what vLLM and SGLang call in a batch, a worker and a layer
    deltas.py      compute_delta_weight and optimize of an adapter's weights

Nothing in the product imports this package (tests/test_architecture.py): it adds names, never behaviour. docs/names.md
is the map.
"""
