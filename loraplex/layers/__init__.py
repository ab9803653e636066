"""Layers of a decoder: `common` (norm, rotary embedding, attention), `linear` (sharded linears), `lora` (with LoRA)."""
