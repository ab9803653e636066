"""How adapters fare: what a profile of a running engine records, and its report. Standard library only."""
