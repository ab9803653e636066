"""Several engine processes behind one front: which there are, which takes a request, one store of adapters for all."""
