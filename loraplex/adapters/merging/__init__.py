"""Adapters made of adapters: merges and exports, written as PEFT directories. No source is ever changed."""
