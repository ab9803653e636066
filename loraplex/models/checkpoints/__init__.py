"""How checkpoints keep their weights in files: each form is its settings, its tensors and one dequantisation."""
